"""Workers that are threads of this process: for tests, notebooks and simulations of many workers."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.comm.base import Ledger

Result = TypeVar("Result")


class CrewComm:
    carries: torch.dtype | None = None

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier):
        self.rank, self.world = rank, len(table)
        self.ledger = Ledger(self.world)
        self.table, self.barrier = table, barrier

    def _everyone(self, item: Any) -> list[Any]:
        self.table[self.rank] = item
        self.barrier.wait()
        everyone = list(self.table)
        self.barrier.wait()  # nobody may write the table again before all have read it
        return everyone

    def all_mean(self, x: Tensor) -> Tensor:
        self.ledger.enter("all_mean", x)
        parts = self._everyone(x * (1 / self.world))
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        self.ledger.enter("all_gather", x)
        return torch.stack(self._everyone(x.clone()))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self.ledger.enter("broadcast", x)
        return x.copy_(self._everyone(x.clone())[source])

    def all_to_all(self, parts: list[Tensor]) -> list[Tensor]:
        self.ledger.enter("all_to_all", torch.empty(self.world, dtype=torch.int64))
        self.ledger.enter_bytes("all_to_all", sum(p.numel() * p.element_size() for p in parts))
        return [sent[self.rank] for sent in self._everyone([p.clone() for p in parts])]

    def shift(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        if to is not None:
            self.ledger.enter("shift", x)
        everyone = self._everyone(x.clone())
        return None if source is None else everyone[source]


class Crew:
    """`world` workers, each a thread, that do one thing together after another."""

    def __init__(self, world: int, timeout: float = 60):
        table: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=timeout)
        self.comms = [CrewComm(rank, table, self.barrier) for rank in range(world)]
        self.pool = ThreadPoolExecutor(world)

    def run(self, work: Callable[[CrewComm], Result]) -> list[Result]:
        """What each of them returned, by rank. A worker that fails ends the others' waiting, and the crew."""
        jobs = [self.pool.submit(self._member, work, comm) for comm in self.comms]
        errors = [job.exception() for job in jobs]
        # A worker that failed by itself explains more than those whose barrier broke because of it.
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [job.result() for job in jobs]

    def _member(self, work: Callable[[CrewComm], Result], comm: CrewComm) -> Result:
        try:
            return work(comm)
        except BaseException:
            self.barrier.abort()  # or the others would wait for ever
            raise

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()


def crew(world: int, work: Callable[[CrewComm], Result], timeout: float = 60) -> list[Result]:
    """Run `work` on `world` workers at once; what each returned, by rank."""
    with Crew(world, timeout) as everyone:
        return everyone.run(work)
