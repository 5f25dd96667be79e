"""Where trips cost much: messages go to everybody at once, means keep their bits, and a head goes with the first."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from comm_cases import everything, own, ridden
from processes import launch
from thinwire.comm.cast import CastComm
from thinwire.comm.link import FAR, Link
from thinwire.comm.protocol import Comm
from thinwire.comm.threads import in_threads

SITES = Link(1e8, 0.04)
PROCESSES = [2, 3, 5] if os.environ.get("THINWIRE_TEST_ALL") else [2, 3]
KINDS = ("all_mean", "long mean", "all_gather", "all_to_all", "scatter_mean", "broadcast", "shift", "nothing")


@pytest.mark.parametrize("wire", ["plain", "bfloat16", "float16", "bytes"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ways_differ_in_trips_and_not_in_bits(world: int, wire: str) -> None:
    """Gathered or by owners: a mean is the same sum in the same order."""
    slow, fast = Link(1e3, 0.04), Link(1e12, 0.04)
    assert slow.way("all_mean", 4000, 5) == "two phases" and fast.way("all_mean", 4000, 5) == "gather"
    one, other = (in_threads(world, lambda comm: everything(comm, wire), link=link) for link in (slow, fast))
    for mine, theirs in zip(one, other):
        for name, (value, _) in mine.items():
            pairs = zip(value, theirs[name][0]) if isinstance(value, list) else [(value, theirs[name][0])]
            assert all(a is None or torch.equal(a, b) for a, b in pairs), name


def test_what_is_far_takes_few_trips() -> None:
    def trips(comm: Comm) -> list[int]:
        told, before = [], 0
        for n in (10, 1_000_000):
            for call in (comm.all_mean, comm.all_gather):
                call(torch.zeros(n))
                told.append(comm.ledger.trips - before)
                before = comm.ledger.trips
        return told

    assert in_threads(8, trips, link=SITES)[0] == [1, 1, 2, 1]
    assert in_threads(8, trips)[0] == [14, 7, 14, 7]


@pytest.mark.parametrize("world", PROCESSES)
def test_processes_that_are_far_have_the_bits_of_threads_that_are(world: int) -> None:
    wires = ("plain", "float16")
    by_rank = launch(world, "comm_cases:everything_among_processes", wires=wires, far=True)
    for wire, told in zip(wires, zip(*by_rank, strict=True), strict=True):
        threads = in_threads(world, lambda comm: everything(comm, wire), link=SITES)  # noqa: B023
        for mine, theirs in zip(told, threads):
            for name, (value, _) in mine.items():
                pairs = zip(value, theirs[name][0]) if isinstance(value, list) else [(value, theirs[name][0])]
                assert all(a is None or torch.equal(a, b) for a, b in pairs), name


@pytest.mark.parametrize("world", PROCESSES)
def test_a_thousand_messages_of_changing_lengths_are_never_taken_for_another(world: int) -> None:
    assert launch(world, "comm_cases:random_messages", count=1000 if world == 3 else 100) == [[]] * world


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("far", [False, True])
def test_a_head_reaches_everybody_before_any_result(kind: str, far: bool) -> None:
    fine = in_threads(3, lambda comm: ridden(comm, kind, None), link=SITES if far else None)
    bad = in_threads(3, lambda comm: ridden(comm, kind, 1), link=SITES if far else None)
    alone = in_threads(3, lambda comm: ridden(comm, "nothing", None), link=SITES if far else None)
    assert all(heard == [[10, 11, 12]] for heard, _, _ in fine + bad)
    assert all(result == "rank 1 is not finite" for _, _, result in bad)
    if far and kind not in ("shift", "nothing"):  # nothing is dearer for having taken it along
        assert fine[0][1] == {"long mean": 2}.get(kind, 1)
    elif kind != "nothing":
        assert fine[0][1] > alone[0][1]


def test_a_head_goes_with_the_messages_of_processes() -> None:
    for told in launch(3, "comm_cases:heads", kinds=("all_gather", "long mean"), far=True, bad=2):
        for heard, trips, result in told:
            assert heard == [[10, 11, 12]] and trips <= 2 and result == "rank 2 is not finite"


def test_a_head_goes_whoever_sends_it() -> None:
    """A comm that casts speaks for the same worker."""

    def work(comm: Comm) -> Any:
        heard: list[Tensor] = []
        comm.ride(torch.tensor([comm.rank]), heard.append)
        mean = CastComm(comm, torch.bfloat16).all_mean(own(comm.rank, 10))
        return heard[0].view(torch.int64).flatten().tolist(), mean

    for heard, mean in in_threads(2, work, link=SITES):
        assert heard == [0, 1] and torch.equal(mean, CastMean)


CastMean = ((own(0, 10) + own(1, 10)) / 2).bfloat16().float()


def test_one_formula_chooses_and_predicts() -> None:
    for link in (Link(1e7, 0.1), SITES, Link(1e9, 0.01), Link(1e9, FAR / 2), Link()):
        for size in (8, 10_000, 10_000_000):
            ways = {way: link.seconds("all_gather", size, 8, way) for way in ("ring", "direct")}
            assert link.seconds("all_gather", size, 8) <= ways["ring"]
            mean = link.way("all_mean", size, 8)
            assert (mean == "ring") == (not link.far)
            if link.far:
                others = [link.seconds("all_mean", size, 8, way) for way in ("two phases", "gather")]
                assert link.seconds("all_mean", size, 8) == min(others)
    assert SITES.seconds("all_gather", 1000, 4) == pytest.approx(0.04, rel=0.02)
    assert SITES.seconds("all_mean", 1000, 4, "ring") == pytest.approx(0.24, rel=0.02)
