"""Between sites: a method that is slower there than torch's own fp16 hook makes way, with a word, unless it is kept."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from processes import launch
from thinwire import Cast, Dense, ErrorFeedback, MethodWarning, TopK
from thinwire.comm.link import Link
from thinwire.comm.protocol import Comm
from thinwire.comm.threads import in_threads
from thinwire.doors.far import Chosen, WhenFar, choose

NET = nn.Linear(300, 300)
FAR = Link(1e7, 0.04)


def chosen(method: Any, link: Link, when_far: WhenFar = "fall_back", workers: int = 2) -> tuple[Chosen, list[str]]:
    def work(comm: Comm) -> Chosen:
        return choose(NET, method, comm, when_far)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = in_threads(workers, work, link=link)
    assert all(one.category is MethodWarning for one in said)
    assert len({repr(one) for one in found}) == 1  # on all workers alike
    return found[0], [str(one.message) for one in said]


def test_few_trips_are_worth_no_word() -> None:
    found, said = chosen(ErrorFeedback(TopK(0.01)), FAR, workers=4)
    assert found.reducer == ErrorFeedback(TopK(0.01)) and not said
    assert found.times_fp16 is not None and 0 < found.times_fp16 < 1 and found.metrics()["fell_back"] == 0


class Slow(Dense):
    """Ten trips in a row."""

    def reduce(self, x: Any, state: Any, comm: Comm, out: Any, /) -> None:
        for _ in range(10):
            comm.all_gather(torch.zeros(1))
        super().reduce(x, state, comm, out)


@pytest.mark.parametrize("rtt", [0.04, 0.1])
def test_a_slow_method_makes_way_with_figures_and_says_how_to_insist(rtt: float) -> None:
    found, said = chosen(Slow(), Link(1e9, rtt))
    assert found.fell_back and found.reducer == Cast(Dense()) and found.metrics()["fell_back"] == 1
    assert found.times_fp16 is not None and found.times_fp16 > 1
    for word in (f"{1e3 * rtt:.0f} ms round trip", "fp16 hook", "exchange less often", "when_far='keep' insists"):
        assert word in said[0]


def test_it_is_kept_where_the_user_insists() -> None:
    found, said = chosen(Slow(), FAR, "keep")
    assert found.reducer == Slow() and not found.fell_back and "It is kept" in said[0]
    with pytest.raises(ValueError, match="'fall_back' or 'keep'"):
        chosen(Slow(), FAR, "never")  # type: ignore[arg-type]


def test_what_falls_back_on_is_not_slower_itself() -> None:
    for workers in (2, 4, 8):
        for rate in (1e7, 1e8, 1e9):
            _, said = chosen(Cast(Dense()), Link(rate, 0.04), workers=workers)
            assert not said


def test_near_workers_hear_nothing() -> None:
    found, said = chosen(Slow(), Link(1e9, 1e-4))
    assert found == Chosen(Slow()) and not said and not found.metrics()


def test_wrap_trains_with_what_was_chosen_and_the_metrics_say_so() -> None:
    for told in launch(2, "far_cases:wrapped"):
        assert told["fall_back"] == ("Cast(Dense())", 1.0, True) and told["keep"] == ("TopK(0.1)", 0.0, True)
