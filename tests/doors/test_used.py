"""What becomes of an exchange depends on who uses its gradients: a part of the optimizers, nobody, or nobody yet."""

import pytest
import torch

from processes import launch

FEEDBACK = "ErrorFeedback(TopK(0.02))"


@pytest.mark.parametrize("spelling", [FEEDBACK, "DGC(0.02)", "RankDAD(2)"])
def test_gradients_of_one_part_that_nobody_used_do_not_come_back(spelling: str) -> None:
    assert launch(2, "used_cases:one_part_thrown_away", spelling=spelling) == [0.0, 0.0]


@pytest.mark.parametrize("thrown", [False, True])
def test_gradients_of_one_part_may_add_up_while_another_learns(thrown: bool) -> None:
    for ended, expected in launch(2, "used_cases:one_part_adds_up", spelling="ErrorFeedback(TopK(0.2))", thrown=thrown):
        assert float(expected.abs().max()) > 0.1
        assert torch.allclose(ended, expected, atol=1e-5), float((ended - expected).abs().max())


@pytest.mark.parametrize("spelling", ["Dense()", "ErrorFeedback(TopK(1.0))", "DAD(inputs='sent')"])
def test_layers_may_be_frozen_by_turns(spelling: str) -> None:
    (plain, _), ours = (launch(2, "used_cases:frozen_by_turns", spelling=one) for one in (None, spelling))
    assert all(torch.allclose(plain, one, atol=1e-6) for one in ours)


@pytest.mark.parametrize("spelling", ["ErrorFeedback(TopK(0.001))", "ErrorFeedback(Threshold(0.05))"])
def test_steps_that_are_written_into_data_are_steps(spelling: str) -> None:
    for usual, by_hand in launch(2, "used_cases:written_into_data", spelling=spelling):
        assert torch.allclose(usual, by_hand, atol=1e-6)


@pytest.mark.parametrize("spelling", [FEEDBACK, "RankDAD(2)"])
def test_a_save_does_not_hold_what_nobody_has_used(spelling: str, tmp_path) -> None:
    for whole, resumed in launch(
        2, "used_cases:saved_before_they_were_thrown_away", spelling=spelling, folder=str(tmp_path)
    ):
        assert torch.equal(whole, resumed)


@pytest.mark.parametrize("spelling", [FEEDBACK, "RankDAD(2)"])
def test_a_run_may_go_on_without_the_scaler(spelling: str, tmp_path) -> None:
    for saved, later in launch(2, "used_cases:unscaled_after_scaled", spelling=spelling, folder=str(tmp_path)):
        assert saved > 0 and later < 3 * saved


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    "spelling", [*(f"Cast(Dense(), bits={bits})" for bits in (1, 4, 8)), "DAD(inputs='sent', bits=8)"]
)
def test_an_overflow_is_seen_by_all_in_however_few_bits(spelling: str, value: float) -> None:
    for fine in launch(2, "used_cases:overflows", spelling=spelling, value=value):
        assert fine == [True, True, False, True]


def test_a_model_that_is_a_layer_itself() -> None:
    for mean, found in launch(2, "used_cases:one_layer_alone", spelling="DAD(inputs='sent')"):
        assert torch.allclose(mean, found, atol=1e-6)
