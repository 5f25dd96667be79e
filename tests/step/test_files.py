"""Sets of checkpoint files: whole or not at all, the newest whole one, never a mixture."""

import errno
import hashlib
import json
import random
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from local_cases import adamw, batches, flat, net, step, unsent
from thinwire import CheckpointError, LocalHandle
from thinwire.comm import Comm
from thinwire.comm.protocol import PeerFailed
from thinwire.comm.threads import in_threads
from thinwire.step import sets

METHOD = "ErrorFeedback(TopK(0.1))"


def start(
    comm: Comm, optimizer: Callable[..., Any] = adamw, **options: Any
) -> tuple[LocalHandle, Callable[[int], None]]:
    model = net()
    trained = optimizer(model)
    handle = thinwire.local(model, trained, thinwire.parse(METHOD), 1, comm=comm, **options)

    def train(steps: int) -> None:
        for batch in batches(steps, comm.rank):
            step(model, trained, batch)

    return handle, train


def saved(world: int, folder: Path, steps: int = 3, load: bool = False, **options: Any) -> list[Path]:
    def work(comm: Comm) -> Path:
        handle, train = start(comm)
        if load:
            handle.load(folder)
        train(steps)
        return handle.save(folder, **options)

    return in_threads(world, work)


def loaded(world: int, folder: Path, **options: Any) -> list[tuple[int, Tensor, Path]]:
    """The steps taken, what is unsent, and the set, on each rank."""

    def work(comm: Comm) -> tuple[int, Tensor, Path]:
        handle, _ = start(comm)
        place = handle.load(folder, **options)
        return handle.steps, unsent(handle), place

    return in_threads(world, work)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_a_save_is_one_folder_with_a_manifest(tmp_path):
    files = saved(2, tmp_path)
    assert [path.name for path in files] == ["thinwire-00000-of-00002.pt", "thinwire-00001-of-00002.pt"]
    place = files[0].parent
    assert names(tmp_path) == [place.name] and place.name.startswith("step-00000003-")
    assert (tmp_path / "latest").read_text() == place.name
    told = json.loads((place / "manifest.json").read_text())
    assert (told["world"], told["step"]) == (2, 3) and told["run"] in place.name
    assert [entry["size"] for entry in told["files"]] == [path.stat().st_size for path in files]


def test_going_to_fewer_workers_and_back_takes_the_newest_set(tmp_path):
    """The folder of a run with 4, then 2, then 4 workers."""
    saved(4, tmp_path)
    saved(2, tmp_path, load=True)
    saved(4, tmp_path, load=True)
    assert {steps for steps, _, _ in loaded(4, tmp_path)} == {9}
    assert len({json.loads((tmp_path / n / "manifest.json").read_text())["run"] for n in names(tmp_path)}) == 1


def test_a_file_of_another_step_is_no_part_of_a_set(tmp_path):
    old = saved(2, tmp_path / "a")
    new = saved(2, tmp_path / "b", steps=5)
    shutil.copy(old[1], new[1])
    with pytest.raises(CheckpointError, match=r"step-00000005.*rank 1 is damaged.*missing='drop'.*norm"):
        loaded(1, tmp_path / "b")


def test_old_sets_and_what_kills_left_are_removed(tmp_path):
    def work(comm: Comm) -> None:
        handle, train = start(comm)
        for _ in range(5):
            train(1)
            place = handle.save(tmp_path, keep=2).parent
            if comm.rank == 0:
                sets.part_of(place.with_name(place.name + "-9")).mkdir()
        handle.save(tmp_path, keep=2)
        handle.save(tmp_path, keep=2)

    in_threads(2, work)
    assert [name[:13] for name in names(tmp_path)] == ["step-00000004", "step-00000005"]
    links = list(tmp_path.glob("thinwire-*"))
    assert len(links) == 2 and all(path.is_symlink() and path.exists() for path in links)


def test_another_runs_sets_stay_and_are_not_taken(tmp_path):
    def work(comm: Comm) -> tuple[int, int]:
        mine, train = start(comm)
        train(2)
        mine.save(tmp_path, keep=1)
        other, train_other = start(comm)
        train_other(4)
        other.save(tmp_path, keep=1)
        mine.load(tmp_path)
        fresh, _ = start(comm)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fresh.load(tmp_path)
        said = [str(one.message) for one in caught]
        assert comm.rank or any("other runs too" in text for text in said)
        return mine.steps, fresh.steps

    assert in_threads(1, work) == [(2, 4)]
    assert len(names(tmp_path)) == 2


def test_two_runs_that_save_into_one_folder_at_once_do_not_mix(tmp_path):
    with ThreadPoolExecutor(2) as both:
        jobs = [both.submit(saved, 2, tmp_path, steps) for steps in (2, 3)]
        places = [{path.parent for path in job.result()} for job in jobs]
    assert [len(place) for place in places] == [1, 1] and len(names(tmp_path)) == 2
    for [place], steps in zip(places, (2, 3), strict=True):
        assert {taken for taken, _, _ in loaded(2, place)} == {steps}


def test_a_save_that_one_rank_does_not_join_leaves_nothing_that_counts(tmp_path):
    def work(comm: Comm) -> None:
        handle, train = start(comm)
        train(2)
        if comm.rank == 0:
            handle.save(tmp_path)

    with pytest.raises(PeerFailed):
        in_threads(2, work, timeout=1)
    with pytest.raises(CheckpointError, match="did not come to their end"):
        loaded(2, tmp_path)


@pytest.mark.parametrize("what", ["flip", "cut", "no manifest", "bad manifest", "gone"])
def test_a_newer_set_that_is_not_whole_is_passed_over_with_a_word(what, tmp_path):
    saved(2, tmp_path)
    file = saved(2, tmp_path, load=True)[1]
    if what == "flip":
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    elif what == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif what == "gone":
        file.unlink()
    elif what == "no manifest":
        (file.parent / "manifest.json").unlink()
    else:
        (file.parent / "manifest.json").write_text('{"format": 1, "files": 3')
    for world in (1, 2):
        with pytest.warns(thinwire.MethodWarning, match="step-00000006.*(not whole|manifest)"):
            assert {steps for steps, _, _ in loaded(world, tmp_path)} == {3}


def test_every_flipped_bit_is_found(tmp_path):
    [file] = saved(1, tmp_path)
    good, rng = file.read_bytes(), random.Random(1)

    def work(comm: Comm) -> None:
        handle, train = start(comm)
        train(1)
        before = handle.state_dict()["local"]["parameters"]
        for _ in range(60):
            raw = bytearray(good)
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            file.write_bytes(raw)
            with pytest.raises(CheckpointError):
                handle.load(tmp_path)
        after = handle.state_dict()["local"]["parameters"]
        assert all(torch.equal(before[name], after[name]) for name in before)

    in_threads(1, work)


@pytest.mark.parametrize("size", ["Infinity", "NaN", "1e400", '"many"', "null", "{}"])
def test_a_manifest_whose_digest_is_right_and_whose_numbers_are_none_is_refused(tmp_path, size):
    [file] = saved(1, tmp_path)
    manifest = file.with_name("manifest.json")
    told = json.loads(manifest.read_text())
    del told["sha256"]
    told["files"][0]["size"] = json.loads(size)
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps(told | {"sha256": digest}))
    with pytest.raises(CheckpointError, match="damaged manifest"):
        loaded(1, tmp_path)


def test_every_flipped_bit_of_a_manifest_is_found_or_of_no_account(tmp_path):
    [file] = saved(1, tmp_path)
    manifest = file.with_name("manifest.json")
    good, rng, refused = manifest.read_bytes(), random.Random(1), 0

    def work(comm: Comm) -> Tensor:
        handle, _ = start(comm)
        handle.load(tmp_path)
        return unsent(handle)

    [right] = in_threads(1, work)
    for _ in range(60):
        raw = bytearray(good)
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        manifest.write_bytes(raw)
        try:
            assert torch.equal(in_threads(1, work)[0], right)
        except CheckpointError:
            refused += 1
    assert refused > 40


def test_a_lost_file_is_dropped_where_that_is_asked_for(tmp_path):
    files = saved(3, tmp_path)
    whole = torch.stack([left for _, left, _ in loaded(3, tmp_path)])
    assert whole.any(1).all()
    files[1].unlink()
    with pytest.raises(CheckpointError, match="rank 1 is missing"):
        loaded(3, tmp_path)
    for world in (1, 2, 3):
        with pytest.warns(thinwire.MethodWarning, match=r"rank 1 is missing.*dropped: norm"):
            left = torch.stack([left for _, left, _ in loaded(world, tmp_path, missing="drop")])
        torch.testing.assert_close(left.sum(0), whole[0] + whole[2], rtol=0, atol=1e-6)


def test_a_full_disk_is_an_error_on_every_rank_and_the_old_set_stays(tmp_path, monkeypatch):
    saved(2, tmp_path)
    write = sets.write_state

    def full(state: dict[str, Any], path: Path) -> Any:
        if state["rank"] == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(state, path)

    def work(comm: Comm) -> str:
        handle, train = start(comm)
        handle.load(tmp_path)
        train(1)
        monkeypatch.setattr(sets, "write_state", full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            handle.save(tmp_path)
        monkeypatch.setattr(sets, "write_state", write)
        train(1)  # and training goes on
        return str(caught.value)

    for said in in_threads(2, work):
        assert "rank 1 could not write" in said and "make room" in said
    assert len(names(tmp_path)) == 1
    assert {steps for steps, _, _ in loaded(2, tmp_path)} == {3}


def test_ranks_that_save_on_disks_of_their_own(tmp_path):
    def work(comm: Comm) -> tuple[int, bool]:
        handle, train = start(comm)
        train(3)
        left = handle.save(tmp_path / str(comm.rank)).parent
        again, _ = start(comm)
        assert again.load(tmp_path / str(comm.rank)) == left
        return again.steps, torch.equal(unsent(handle), unsent(again))

    assert in_threads(2, work) == [(3, True)] * 2


def test_files_of_0_1(tmp_path):
    """One file a rank in the folder itself, without a manifest."""
    for rank, file in enumerate(saved(2, tmp_path / "new")):
        (tmp_path / "old").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "old" / f"thinwire-0000{rank}-of-00002.pt")
    assert {steps for steps, _, _ in loaded(2, tmp_path / "old")} == {3}
    assert {steps for steps, _, _ in loaded(1, tmp_path / "old")} == {3}
    later = saved(2, tmp_path / "later", steps=5)
    shutil.copy(later[1], tmp_path / "old")
    for world in (1, 2):
        with pytest.raises(CheckpointError, match="2 of 2 files, of steps 3, 5"):
            loaded(world, tmp_path / "old")
    shutil.copy(saved(1, tmp_path / "one")[0], tmp_path / "old")
    with pytest.raises(CheckpointError, match="different numbers of workers"):
        loaded(2, tmp_path / "old")


def test_an_empty_folder_and_stray_files_are_refused(tmp_path):
    (tmp_path / "thinwire-xx-of-yy.pt").touch()
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match="holds no thinwire state"):
            loaded(2, folder)
    (tmp_path / "step-00000003-abc.part").mkdir()
    with pytest.raises(CheckpointError, match=r"did not come to their end: step-00000003-abc.part"):
        loaded(2, tmp_path)


def test_an_optimizer_of_another_kind_changes_nothing(tmp_path):
    saved(2, tmp_path)
    for other in (torch.optim.Adam, torch.optim.SGD):

        def work(comm: Comm, other: Any = other) -> None:
            handle, train = start(comm, lambda model: other(model.parameters(), lr=0.01))
            train(1)
            before = flat(handle.changes.model)
            with pytest.raises(CheckpointError, match=f"AdamW.*{other.__name__}"):
                handle.load(tmp_path)
            assert torch.equal(flat(handle.changes.model), before)

        in_threads(2, work)


def test_a_state_that_does_not_fit_one_rank_is_loaded_by_none(tmp_path):
    saved(2, tmp_path)

    def work(comm: Comm) -> None:
        handle, train = start(comm)
        train(1)
        before, left = flat(handle.changes.model), unsent(handle)
        if comm.rank == 1:
            handle.changes.optimizers[0].param_groups[0]["odd"] = 1
        with pytest.raises(CheckpointError, match="odd"):
            handle.load(tmp_path)
        assert torch.equal(flat(handle.changes.model), before) and torch.equal(unsent(handle), left)

    in_threads(2, work)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_gathered_state_is_one_that_any_rank_may_load(world, tmp_path):
    def before(comm: Comm) -> tuple[dict[str, Any], Tensor]:
        handle, train = start(comm)
        train(3)
        return handle.gathered().state_dict(), unsent(handle)

    written = in_threads(2, before)
    assert written[0][0] == written[1][0]
    torch.save(written[0][0], tmp_path / "state.pt")

    def after(comm: Comm) -> Tensor:
        handle, _ = start(comm)
        handle.gathered().load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert handle.steps == 3
        return unsent(handle)

    left = torch.stack(in_threads(world, after))
    torch.testing.assert_close(left.sum(0), sum(left for _, left in written), rtol=0, atol=1e-6)
    damaged = dict(written[0][0])
    damaged["thinwire"] = damaged["thinwire"][:-1] + b"x"
    for wrong in (damaged, {"weights": 1}):
        with pytest.raises(CheckpointError):
            in_threads(1, lambda comm, wrong=wrong: start(comm)[0].gathered().load_state_dict(wrong))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_distributed_checkpoint_takes_a_gathered_state(tmp_path):
    from torch.distributed import checkpoint

    def work(comm: Comm) -> None:
        handle, train = start(comm)
        train(3)
        checkpoint.save({"method": handle.gathered()}, checkpoint_id=tmp_path)
        again, _ = start(comm)
        checkpoint.load({"method": again.gathered()}, checkpoint_id=tmp_path)
        assert again.steps == 3 and torch.equal(unsent(again), unsent(handle))

    in_threads(1, work)


@pytest.mark.parametrize("wrong", [{"run": 1e308}, {"run": None}, {"step": "x"}, {"exchanges": -1}, {"saved": 1e999}])
def test_a_manifest_with_a_field_that_cannot_be_is_damaged(tmp_path, wrong):
    """Found by benchmarks/fuzz.py: its digest is right, and still nobody may stumble over it."""
    old, new = saved(2, tmp_path)[0].parent, saved(2, tmp_path, steps=5)[0].parent
    told = json.loads((new / "manifest.json").read_text()) | wrong
    del told["sha256"]
    (new / "manifest.json").write_text(json.dumps(told | {"sha256": sets._digest(told)}))
    with pytest.warns(thinwire.MethodWarning, match="has a damaged manifest"):
        assert {place for _, _, place in loaded(2, tmp_path)} == {old}


@pytest.mark.parametrize("junk", ["x", None, {0: "x"}])
def test_a_damaged_state_of_an_optimizer_is_refused_before_anything_is_touched(junk):
    """Found by benchmarks/fuzz.py: an AttributeError of torch's, after the method's state was loaded."""

    def work(comm: Comm) -> None:
        handle, train = start(comm)
        train(3)
        state = handle.state_dict()
        state["local"]["optimizers"][0]["state"] = junk
        other, _ = start(comm)
        with pytest.raises(CheckpointError, match="state for AdamW is damaged"):
            other.load_state_dict(state)
        assert other.steps == 0

    in_threads(1, work)
