"""Parameters that no worker uses in a step: DDP leaves them alone, and nothing that waits for them is lost."""

import pytest
import torch

from processes import launch


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "spelling", ["ErrorFeedback(TopK(0.2))", "ErrorFeedback(ExDyna(0.2))", "ErrorFeedback(LowBit(2))"]
)
def test_what_waits_for_a_parameter_outlasts_the_steps_that_do_not_use_it(spelling: str, overlap: bool) -> None:
    for ended, expected in launch(2, "unused_cases:by_turns", spelling=spelling, overlap=overlap):
        assert float(expected.abs().max()) > 0.1
        assert torch.allclose(ended, expected, atol=1e-4), float((ended - expected).abs().max())
