"""Training loops as people write them: thinwire gives DDP's parameters and buffers after every step, or says why not.

All methods here send everything, so nothing but rounding may differ from DDP.
"""

from functools import cache

import pytest

from examples_of_methods import EXAMPLES, REPRESENTATIVES
from loop_cases import TABLE, Outcome, ways
from processes import launch

LOOPS = list(TABLE)
AT_ONCE = 23  # loops that one set of processes runs


@cache
def told(part: int) -> list[dict[tuple[str, str], Outcome]]:
    """What came of some loops in each way, by rank."""
    return launch(2, "loop_cases:table", names=LOOPS[part * AT_ONCE : (part + 1) * AT_ONCE], timeout=280)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_ends_each_step_where_ddp_does_or_is_refused(name):
    case = TABLE[name]
    for rank, found in enumerate(told(LOOPS.index(name) // AT_ONCE)):
        for way in ways(name):
            outcome, where = found[name, way], f"{name}, {way}, rank {rank}"
            if way in case.refused:
                assert case.refused[way] in outcome.error, f"{where}: {outcome.error or 'no error'}"
                continue
            assert not outcome.error, f"{where}:\n{outcome.traceback}"
            assert outcome.moved > 1e-3, f"{where}: DDP itself did not train"
            assert outcome.apart < case.rounding, f"{where}: {outcome.apart:.1e} of the way away from DDP"
            assert outcome.buffers < case.rounding, f"{where}: {outcome.buffers:.1e} from DDP's buffers"


def test_a_model_may_be_wrapped_anew_with_another_method_and_the_old_wrap_says_so():
    for outcome, told in launch(2, "loop_cases:from_one_method_to_another"):
        assert outcome.moved > 1e-3 and outcome.apart < 1e-4, outcome
        assert "the model in here was wrapped anew" in told


def test_a_grad_scaler_changes_no_bit():
    """Scales are powers of two, so whatever is in gradient units can follow them exactly."""
    factors = [spelling for spelling in EXAMPLES if "DAD" in spelling]
    control = "ErrorFeedback(ExDyna(0.05, topology='official', control='official'))"
    for found in launch(
        2, "loop_cases:under_a_scaler", spellings=[*REPRESENTATIVES, *factors, control, "DeMo(4, chunk=8)"]
    ):
        assert {spelling: apart for spelling, apart in found.items() if apart} == {}
