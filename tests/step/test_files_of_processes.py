"""Sets of checkpoint files that real processes write: a kill in the middle of a save, a rank's file lost."""

from pathlib import Path

import pytest
import torch

from processes import launch

FEEDBACK = "ErrorFeedback(TopK(0.1))"


def test_a_kill_in_the_middle_of_a_save_leaves_the_set_before(tmp_path):
    with pytest.raises(AssertionError, match=r"exit code -9"):
        launch(2, "ddp_cases:killed_while_saving", spelling=FEEDBACK, folder=str(tmp_path))
    left = sorted(path.name[:13] + path.suffix for path in tmp_path.iterdir() if path.is_dir())
    assert left == ["step-00000003", "step-00000005.part"]
    ranks = launch(2, "ddp_cases:load_without", spelling=FEEDBACK, folder=str(tmp_path))
    assert [step for step, _ in ranks] == [3, 3]
    assert not list(tmp_path.glob("*.part"))  # the save that followed has cleaned up


@pytest.mark.parametrize("spelling", [FEEDBACK, "RankDAD(2)"])
def test_a_lost_file_takes_only_what_it_held(spelling, tmp_path):
    launch(3, "ddp_cases:save_after", spelling=spelling, folder=str(tmp_path))
    [file] = tmp_path.glob("step-*/thinwire-00001-of-00003.pt")
    whole = [_unsent(file.with_name(f"thinwire-0000{rank}-of-00003.pt"), spelling) for rank in (0, 2)]
    file.unlink()
    ranks = launch(3, "ddp_cases:load_without", spelling=spelling, folder=str(tmp_path))
    assert [step for step, _ in ranks] == [5] * 3
    if spelling == FEEDBACK:
        left = sum(float(unsent.sum()) for _, unsent in ranks)
        assert left == pytest.approx(sum(whole), rel=1e-4, abs=1e-5)
        assert not ranks[1][1].any()


def _unsent(file: Path, spelling: str) -> float:
    if spelling != FEEDBACK:
        return 0.0
    groups = torch.load(file, weights_only=True)["groups"]
    return sum(float(part.sum()) for group in groups for part in group["state"]["residual"].values())
