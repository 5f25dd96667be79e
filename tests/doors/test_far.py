"""Between sites: what is said when a method will be slower there than torch's own fp16 hook."""

import warnings

import pytest
from torch import nn

from thinwire import DEFT, ErrorFeedback, MethodWarning, TopK
from thinwire.comm.dry import DryComm
from thinwire.comm.link import Link
from thinwire.comm.protocol import Comm
from thinwire.doors.far import warn_if_slower

NET = nn.Linear(300, 300)


def told(method: object, rtt: float, workers: int = 4) -> list[str]:
    comm: Comm = DryComm(workers, link=Link(1e9, rtt))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_if_slower(NET, method, comm, stacklevel=1)  # type: ignore[arg-type]
    assert all(one.category is MethodWarning for one in said)
    return [str(one.message) for one in said]


def test_few_trips_are_worth_no_word() -> None:
    assert told(ErrorFeedback(TopK(0.01)), rtt=0.04) == []


@pytest.mark.parametrize("rtt", [0.04, 0.1])
def test_many_trips_are_told_with_figures_and_what_to_do(rtt: float) -> None:
    # Two workers' ring takes two trips, and DEFT three.
    (said,) = told(ErrorFeedback(DEFT(0.01)), rtt=rtt, workers=2)
    assert f"{1e3 * rtt:.0f} ms round trip" in said and "fp16 hook" in said and "exchange less often" in said


def test_near_workers_hear_nothing() -> None:
    assert told(ErrorFeedback(DEFT(0.01)), rtt=1e-4) == []
