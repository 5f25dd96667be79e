"""What every transport must do, as functions of a Comm: each returns what this worker got."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Codec, Comm
from thinwire.comm.cast import CastComm
from thinwire.comm.torch import TorchComm

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Bytes(Codec):
    """Multiples of a quarter, in a byte each: a codec that no network can add up."""

    dtype = torch.int8

    def nbytes(self, n: int) -> int:
        return n

    def encode(self, values: Tensor) -> Tensor:
        return (values * 4).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)

    def decode(self, stored: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        return stored.view(torch.int8).to(dtype) / 4


def own(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What worker `rank` holds, in multiples of a quarter below 16: every wire carries them as they are."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randint(-63, 64, shape, generator=draw) / 4).to(dtype)


def dressed(comm: Comm, wire: str) -> Comm:
    wires: dict[str, Any] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "bytes": Bytes()}
    return comm if wire == "plain" else CastComm(comm, wires[wire])


def everything(comm: Comm, wire: str = "plain") -> dict[str, Any]:
    """One of each collective, on vectors of many lengths; and what the ledger says of each."""
    told: dict[str, Any] = {}
    comm = dressed(comm, wire)
    rank, world = comm.rank, comm.world

    def note(name: str, value: Any) -> None:
        told[name] = (value, list(comm.ledger.entries))
        comm.ledger.clear()

    for n in (1, 7, 1000, 70_000):
        note(f"all_mean {n}", comm.all_mean(own(rank, n, seed=n)))
        note(f"all_gather {n}", comm.all_gather(own(rank, n, 2, seed=n)))
        note(f"broadcast {n}", [comm.broadcast(own(rank, n, seed=n), source) for source in range(world)])
        note(f"scatter_mean {n}", comm.scatter_mean(own(rank, world * n, seed=n)))
        note(f"all_to_all {n}", comm.all_to_all(own(rank, world, n, seed=n)))
        parts = [own(rank, n * (rank + 2 * to), seed=n + to) for to in range(world)]
        note(f"uneven {n}", comm.all_to_all(parts))
        to, source = (rank + 1) % world, (rank - 1) % world
        note(f"shift {n}", comm.shift(own(rank, n, seed=n), to, source))
    note("a column", comm.all_mean(own(rank, 5, 3).T))
    note("integers", comm.all_gather(torch.arange(4) + rank))
    note("nothing", comm.all_gather(torch.empty(0, 3)))
    note("silence", comm.shift(own(rank, 3), None, None))
    return told


@cache  # the same on every wire
def expected(world: int, rank: int) -> dict[str, Any]:
    """What `everything` gives, by plain sums."""
    told: dict[str, Any] = {}

    def all_of(*shape: int, seed: int) -> Tensor:
        return torch.stack([own(r, *shape, seed=seed) for r in range(world)])

    for n in (1, 7, 1000, 70_000):
        told[f"all_mean {n}"] = all_of(n, seed=n).mean(0)
        told[f"all_gather {n}"] = all_of(n, 2, seed=n)
        told[f"broadcast {n}"] = list(all_of(n, seed=n))
        told[f"scatter_mean {n}"] = all_of(world * n, seed=n).mean(0).view(world, n)[rank]
        told[f"all_to_all {n}"] = all_of(world, n, seed=n)[:, rank]
        told[f"uneven {n}"] = [own(r, n * (r + 2 * rank), seed=n + rank) for r in range(world)]
        told[f"shift {n}"] = own((rank - 1) % world, n, seed=n)
    told["a column"] = all_of(5, 3, seed=0).mean(0).T
    told["integers"] = torch.stack([torch.arange(4) + r for r in range(world)])
    told["nothing"] = torch.empty(world, 0, 3)
    told["silence"] = None
    return told


def everything_among_processes(wires: tuple[str, ...], far: bool = False) -> list[dict[str, Any]]:
    comm = TorchComm()
    assert not comm.far  # one machine
    comm.far = far
    return [everything(comm, wire) for wire in wires]


def random_messages(count: int) -> list[Any]:
    """Collectives of changing kinds and lengths, one after another, directly; what went wrong, and open files."""
    comm, wrong, draw = TorchComm(), [], torch.Generator().manual_seed(7)
    comm.far = True
    rank, world = comm.rank, comm.world
    for turn in range(count):
        kind, n = torch.randint(4, (), generator=draw).item(), int(10 ** (5 * torch.rand((), generator=draw)))
        source = int(torch.randint(world, (), generator=draw))
        everyone = torch.stack([own(r, n, seed=turn) for r in range(world)])
        if kind == 0:
            right = torch.equal(comm.all_gather(own(rank, n, seed=turn)), everyone)
        elif kind == 1:
            right = torch.allclose(comm.all_mean(own(rank, n, seed=turn)), everyone.mean(0), rtol=0, atol=1e-5)
        elif kind == 2:
            right = torch.equal(comm.broadcast(own(rank, n, seed=turn), source), everyone[source])
        else:
            right = torch.equal(comm.all_to_all(own(rank, 1, n, seed=turn).expand(world, n)), everyone)
        if not right:
            wrong.append((turn, kind, n))
    return wrong


def heads(kinds: tuple[str, ...], far: bool, bad: int | None) -> list[tuple[list[Any], int, Any]]:
    told = []
    for kind in kinds:
        comm = TorchComm()
        comm.far = far
        told.append(ridden(comm, kind, bad))
    return told


def ridden(comm: Comm, kind: str, bad: int | None) -> tuple[list[Any], int, Any]:
    """A head that goes with one collective: what was heard, how many trips were made, what came of it."""
    heard: list[Any] = []

    def judge(heads: Tensor) -> None:
        heard.append(heads.view(torch.int64).flatten().tolist())
        if bad is not None:
            raise ArithmeticError(f"rank {bad} is not finite")

    comm.ride(torch.tensor([comm.rank + 10]), judge)
    x = own(comm.rank, 50)
    calls = {
        "all_mean": lambda: comm.all_mean(x),
        "long mean": lambda: comm.all_mean(own(comm.rank, 200_001)),
        "all_gather": lambda: comm.all_gather(x),
        "all_to_all": lambda: comm.all_to_all(x.expand(comm.world, 50)),
        "scatter_mean": lambda: comm.scatter_mean(x.repeat(comm.world)),
        "broadcast": lambda: comm.broadcast(x, 0),
        "shift": lambda: comm.shift(x, (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world),
        "nothing": lambda: comm.settle(),
    }
    try:
        result: Any = calls[kind]()
    except ArithmeticError as error:
        result = str(error)
    comm.settle()
    return heard, comm.ledger.trips, result
