"""Checkpoints of a run of the lab: the sets of `handle.save`, so they are whole or are not taken."""

from pathlib import Path

from processes import launch

CASE = "saved_cases:save_or_load"


def test_the_newest_set_is_gone_on_from_and_no_other_is_kept(tmp_path: Path) -> None:
    first = launch(2, CASE, folder=str(tmp_path), steps=[10, 20], load=True)
    assert first == [(20, 10.0, [20.0, 20.0])] * 2
    assert [p.name for p in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000020-run"]


def test_a_folder_without_checkpoints_begins_at_the_first_step(tmp_path: Path) -> None:
    told = launch(2, CASE, folder=str(tmp_path), steps=[], load=True)
    assert all(one[:2] == (0, 0.0) for one in told)


def test_a_damaged_set_and_one_of_other_workers_are_refused_on_every_rank(tmp_path: Path) -> None:
    launch(2, CASE, folder=str(tmp_path), steps=[10], load=False)
    others = launch(3, CASE, folder=str(tmp_path), steps=[], load=True)
    assert all("--workers 2" in said for said in others)
    file = next((tmp_path / "checkpoints").glob("step-*/thinwire-00001-of-*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    told = launch(2, CASE, folder=str(tmp_path), steps=[], load=True)
    assert all("rank 1 is damaged" in said and "begin anew" in said for said in told)
