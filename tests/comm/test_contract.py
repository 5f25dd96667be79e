"""Comm's contract: the same collectives, on the same ledger, over threads, real processes and a dry run."""

import os
from functools import cache
from typing import Any

import pytest
import torch

from comm_cases import everything, expected
from processes import launch
from thinwire.comm.dry import DryComm
from thinwire.comm.table import TABLE
from thinwire.comm.threads import in_threads

WIRES = ("plain", "bfloat16", "float16", "bytes")


def check(told: list[dict[str, Any]], wire: str) -> None:
    """Every worker has what plain sums give, to rounding where the wire or the order of a sum rounds."""
    world = len(told)
    for rank, mine in enumerate(told):
        for name, wanted in expected(world, rank).items():
            got = mine[name][0]
            tolerance = 0.0
            if "mean" in name or name == "a column":
                tolerance = {"plain": 1e-5, "bytes": 0.126}.get(wire, 0.2)
            for g, w in zip(got, wanted, strict=True) if isinstance(wanted, list) else [(got, wanted)]:
                assert (g is None) == (w is None), name
                if w is not None:
                    assert g.shape == w.shape and g.dtype == w.dtype, (name, g.shape, g.dtype)
                    assert torch.allclose(g, w, rtol=0, atol=tolerance), (name, rank, wire)
    for name in told[0]:
        if "all_mean" in name or "gather" in name:
            assert all(torch.equal(mine[name][0], told[0][name][0]) for mine in told), f"{name}: other bits"


def entries(told: dict[str, Any]) -> dict[str, list[tuple[str, int]]]:
    return {name: noted for name, (_, noted) in told.items()}


@cache
def of_threads(world: int, wire: str) -> list[dict[str, Any]]:
    return in_threads(world, lambda comm: everything(comm, wire))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("wire", WIRES)
def test_threads(world: int, wire: str) -> None:
    check(of_threads(world, wire), wire)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_dry_run_enters_what_threads_enter(world: int) -> None:
    for wire in WIRES:
        for rank, real in enumerate(of_threads(world, wire)):
            dry = entries(everything(DryComm(world, rank), wire))
            assert dry == entries(real)


@pytest.mark.parametrize("world", [1, 2, 3, 5] if os.environ.get("THINWIRE_TEST_ALL") else [1, 2, 3])
def test_processes_do_and_enter_what_threads_do(world: int) -> None:
    by_rank = launch(world, "comm_cases:everything_among_processes", wires=WIRES)
    for wire, told in zip(WIRES, zip(*by_rank, strict=True), strict=True):
        check(list(told), wire)
        assert [entries(t) for t in told] == [entries(t) for t in of_threads(world, wire)]


def test_every_collective_has_a_row_and_a_worker_alone_sends_nothing() -> None:
    comm = DryComm(1)
    everything(comm)
    assert comm.ledger.wire == comm.ledger.messages == comm.ledger.trips == 0 and comm.ledger.payload > 0
    for op, ways in TABLE.items():
        for way in ways.values():
            assert way.wire(1) == way.messages(1) == way.trips(1) == 0, op
            assert way.wire(8) > 0 and way.trips(8) >= (op != "riding"), op


def test_a_float16_wire_saturates_and_its_mean_stays_finite() -> None:
    """Shares of the largest number, each rounded up, must not add up to infinity."""
    from thinwire.comm.cast import CastComm

    for world in (2, 3, 7, 32):
        for x in in_threads(
            world, lambda comm: CastComm(comm, torch.float16).all_mean(torch.tensor([1e6, -7e4, 65504.0, 1]))
        ):
            assert x.isfinite().all() and (x[:3].abs() > 63_000).all() and x[3] == pytest.approx(1, rel=0.02)
    infinite = in_threads(2, lambda comm: CastComm(comm, torch.float16).all_mean(torch.tensor([torch.inf, torch.nan])))
    assert infinite[0][0] == torch.inf and infinite[0][1].isnan()


def test_parts_must_be_equal() -> None:
    with pytest.raises(ValueError, match="equal parts"):
        DryComm(3).scatter_mean(torch.zeros(4))
