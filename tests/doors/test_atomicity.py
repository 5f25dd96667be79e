"""The third law in real processes: a step that fails, on one rank or on all, is as if it had not been."""

import pytest
import torch

from ddp_cases import Failed
from processes import launch

GRADIENTS = (
    "ErrorFeedback(TopK(0.1))",
    "ErrorFeedback(ExDyna(0.1))",
    "ErrorFeedback(LowBit(2))",
    "Variance()",
    "RankDAD(2)",
)


def run(function: str, cases: list[dict]) -> list:
    everyone = launch(2, "atomic_cases:many", calls=[(function, case) for case in cases])
    failed = [one for rank in everyone for one in rank if isinstance(one, Failed)]
    assert not failed, failed
    return list(zip(*everyone, strict=True))


@pytest.mark.parametrize("alone", [True, False])
def test_a_step_through_ddp_that_fails_is_tried_again(alone):
    cases = [{"spelling": spelling, "at": at, "alone": alone} for spelling in GRADIENTS for at in (0, 1)]
    cases += [{"spelling": GRADIENTS[0], "at": 1, "alone": alone, "overlap": True}]
    cases += [{"spelling": GRADIENTS[0], "at": 1, "alone": alone, "overlap": o, "blocks": True} for o in (False, True)]
    for case, ranks in zip(cases, run("through_ddp", cases), strict=True):
        for rank, (broken, whole, told) in enumerate(ranks):
            wanted = "Breaks: " if rank == 0 or not alone else "PeerFailed: "
            assert told[0].startswith(wanted), (case, told)
            assert torch.equal(broken, whole), case


@pytest.mark.parametrize("alone", [True, False])
def test_an_exchange_of_changes_that_fails_goes_with_the_next(alone):
    cases = [{"spelling": "Dense()", "at": at, "alone": alone} for at in (0, 1)]
    for case, ranks in zip(cases, run("through_local_steps", cases), strict=True):
        for rank, (broken, _, told) in enumerate(ranks):
            wanted = "Breaks: " if rank == 0 or not alone else "PeerFailed: "
            assert told[0].startswith(wanted), (case, told)
            assert torch.equal(broken, ranks[0][0]), case


def test_gradients_that_nobody_used_are_taken_back():
    spellings = ("ErrorFeedback(TopK(0.05))", "ErrorFeedback(ExDyna(0.05))", "Variance()", "RankDAD(2)")
    cases = [{"spelling": s, "passes": passes, "fails": False} for s in spellings for passes in (1, 2)]
    cases += [{"spelling": s, "passes": 1, "fails": True} for s in spellings]
    for case, ranks in zip(cases, run("throws_away", cases), strict=True):
        for spiked, plain in ranks:
            assert torch.equal(spiked, plain), case


def test_a_backward_pass_that_a_user_breaks_off_ends_the_others_too():
    first, second = launch(2, "atomic_cases:broken_off", spelling="RankDAD(2)")
    assert "rank 1 failed in step 3" in first[0][3] and first[0][3].startswith("PeerFailed")
    assert second[0][3] == "ValueError: the user's own"
    assert [said for told in (first[0], second[0]) for said in told[:3] + told[4:]] == [""] * 12
    assert torch.equal(first[1], second[1])
