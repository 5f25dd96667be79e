"""Between sites: how many trips a step of each method takes, and that all workers agree there too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from examples_of_methods import EXAMPLES
from thinwire import Reducer, parse
from thinwire.comm.link import Link
from thinwire.comm.protocol import Comm
from thinwire.comm.threads import in_threads
from thinwire.core.reducer import Factors, Layout
from thinwire.exchange.price import price
from thinwire.plan import Network
from thinwire.testing.cases import made_up

SITES = Link(1e8, 0.04)
LAYOUT = Layout(("a", "b", "c", "d"), tuple(map(torch.Size, ((60, 50), (60,), (40, 60), (40,)))))
MATRICES = Layout(LAYOUT.names[::2], LAYOUT.shapes[::2])
STEPS = 5

# With the roll call, once a method is under way.
TRIPS = {
    "Dense()": 1,  # of a small model; a large one's mean takes two
    "ErrorFeedback(TopK(0.02))": 1,
    "Threshold(3.0)": 1,
    "ErrorFeedback(SIDCo(0.02))": 1,
    "DGC(0.02)": 1,
    "Variance(1.0)": 1,
    "Strom(3.0)": 1,
    "QSGD(4)": 1,
    "ErrorFeedback(SignSGD())": 1,
    "ErrorFeedback(RandomBlock(0.1))": 1,
    "ErrorFeedback(ExDyna(0.02))": 2,
    "ErrorFeedback(MiCRO(0.02))": 2,
    "ErrorFeedback(DEFT(0.02))": 2,
    "CLTK(0.02)": 2,
    "ErrorFeedback(PowerSGD(4))": 2,
    "ErrorFeedback(LowBit(2))": 2,
    "RankDAD(4)": 1,
    "DAD()": 1,
    "EDAD()": 1,
    "AutoDAD()": 1,
    "AutoDAD(exact=False)": 1,
}


def steps(reducer: Reducer[Any, Any], trips: list[int] | None = None) -> Callable[[Comm], Tensor]:
    """Some steps, each with a roll call that rides with its first message, as a capture does it."""

    def work(comm: Comm) -> Tensor:
        layout = MATRICES if reducer.wants is Factors else LAYOUT
        state, outs = reducer.init(layout), []
        for step in range(STEPS):
            out, before, heard = layout.zeros(), comm.ledger.trips, list[Tensor]()
            comm.ride(torch.tensor([comm.rank, step]), heard.append)
            reducer.reduce(made_up(reducer.wants, layout, step, comm.rank), state, comm, out)
            comm.settle()
            assert heard[0].view(torch.int64).view(-1, 2).tolist() == [[rank, step] for rank in range(comm.world)]
            if trips is not None and comm.rank == 0:
                trips.append(comm.ledger.trips - before)
            outs.append(out)
        return torch.stack(outs)

    return work


@pytest.mark.parametrize("method", EXAMPLES)
def test_workers_that_are_far_agree(method: str) -> None:
    first, *others = in_threads(3, steps(EXAMPLES[method]), link=SITES)
    assert first.isfinite().all() and all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("method", [name for name in TRIPS if "DAD" not in name])
def test_a_step_takes_so_many_trips(method: str) -> None:
    found: list[int] = []
    in_threads(4, steps(parse(method), found), link=SITES)
    assert min(found[1:]) == TRIPS[method]  # a message that outgrew its room takes one more


@pytest.mark.parametrize("method", TRIPS)
def test_a_plan_knows(method: str) -> None:
    cost = price(parse(method), LAYOUT, 4, link=SITES)
    assert cost.trips(Network(SITES.rate, 4, SITES.rtt)) == TRIPS[method]


def test_what_goes_along_has_the_bits_of_a_message_of_its_own() -> None:
    """And costs no trip; asked for before there was a message, it goes by itself."""

    def work(comm: Comm, numel: int, message: bool) -> tuple[Tensor, int]:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
        later = comm.all_mean_later(x.clone())
        if message:
            comm.all_gather(torch.zeros(3))
        mean = later()
        assert torch.equal(mean, comm.all_mean(x))
        return mean, comm.ledger.trips

    for numel in (1, 700):
        assert {trips for _, trips in in_threads(3, lambda comm: work(comm, numel, True), link=SITES)} == {2}  # noqa: B023
        assert {trips for _, trips in in_threads(3, lambda comm: work(comm, numel, False), link=SITES)} == {2}  # noqa: B023
    # What is long takes more time inside another message than by itself.
    assert in_threads(3, lambda comm: work(comm, 400_000, True), link=SITES)[0][1] == 5


def test_an_error_leaves_nothing_to_go_along() -> None:
    def work(comm: Comm) -> int:
        comm.all_mean_later(torch.zeros(5))
        comm.abandon("a test")
        comm.renew()
        return int(comm.all_gather(torch.tensor([comm.rank])).sum())

    assert in_threads(3, work, link=SITES) == [3, 3, 3]
