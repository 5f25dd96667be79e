"""Workers that are threads of this process: for tests, notebooks and simulations of many workers."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.comm.link import Link
from thinwire.comm.protocol import Comm, PeerFailed

Result = TypeVar("Result")


class Meeting:
    """Where threads wait for each other, time after time.

    Unlike threading.Barrier it can be broken off without a word to those who have met and are only slow to leave.
    """

    def __init__(self, world: int, timeout: float):
        self.world, self.timeout = world, timeout
        self.changed = threading.Condition()
        self.arrived = self.turn = 0
        self.broken = False

    def wait(self) -> None:
        with self.changed:
            mine = self.turn
            self.arrived += 1
            if self.arrived == self.world and not self.broken:
                self.arrived, self.turn = 0, self.turn + 1
                self.changed.notify_all()
            elif not self.changed.wait_for(lambda: self.turn > mine or self.broken, self.timeout):
                self.broken = True  # nobody may go on with a meeting that somebody has left
                self.changed.notify_all()
            if self.turn == mine:
                raise threading.BrokenBarrierError

    def abort(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()

    def reset(self) -> None:
        with self.changed:
            self.arrived, self.broken = 0, False


class Threads:
    """One of the threads: they lay what they send on a table, and read it when all have."""

    def __init__(self, rank: int, table: list[Any], barrier: Meeting, again: Meeting, link: Link | None = None):
        self.rank, self.world, self.link = rank, len(table), link
        self.far = link is not None and link.far
        self.table, self.barrier, self.again = table, barrier, again
        self.abandoned = False

    def abandon(self, reason: str) -> None:
        self.abandoned = True
        self.barrier.abort()

    def renew(self) -> None:
        if self.abandoned:  # each for itself: who has not failed yet will, in its next collective
            self.again.wait()
            if self.rank == 0:
                self.barrier.reset()
            self.again.wait()
            self.abandoned = False

    def blame(self, error: BaseException) -> str | None:
        if isinstance(error, threading.BrokenBarrierError):
            return "another worker failed, or issues fewer collectives than this one"
        return None

    def close(self) -> None:
        pass

    def _everyone(self, item: Any) -> list[Any]:
        self.table[self.rank] = item
        self.barrier.wait()
        everyone = list(self.table)
        self.barrier.wait()  # nobody may write the table again before all have read it
        if isinstance(item, Tensor) and len({getattr(one, "shape", None) for one in everyone}) > 1:
            raise threading.BrokenBarrierError("workers issue different collectives, or messages of different lengths")
        return everyone

    def way(self, op: str, size: int) -> str | None:
        return self.link.way(op, size, self.world, self.far) if self.link else None

    def took(self, op: str, size: int, riding: int, seconds: float) -> None:
        return None

    def all_mean(self, x: Tensor) -> None:
        parts = self._everyone(x * (1 / self.world))
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def all_gather(self, raw: Tensor) -> Tensor:
        return torch.stack(self._everyone(raw.clone()))

    def two_phases(self, pieces: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [self.all_gather(reduce(self.all_to_all(piece))) for piece in pieces]

    def broadcast(self, raw: Tensor, source: int) -> None:
        raw.copy_(self._everyone(raw.clone())[source])

    def broadcast_with(self, head: Tensor, raw: Tensor, source: int) -> Tensor:
        self.broadcast(raw, source)
        return self.all_gather(head)

    def all_to_all(self, parts: Tensor) -> Tensor:
        return torch.stack([sent[self.rank] for sent in self._everyone(parts.clone())])

    def all_to_all_uneven(self, sent: Tensor, sizes: list[int], coming: list[int]) -> Tensor:
        return torch.cat([theirs[self.rank] for theirs in self._everyone(sent.clone().split(sizes))])

    def shift(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        everyone = self._everyone(x.clone())
        return None if source is None else everyone[source]


class ThreadComm(Comm):
    def __init__(self, rank: int, table: list[Any], barrier: Meeting, again: Meeting, link: Link | None = None):
        super().__init__(Threads(rank, table, barrier, again, link))


class ThreadWorkers:
    """`world` workers, each a thread, that do one thing together after another; `link`: as if that joined them."""

    def __init__(self, world: int, timeout: float = 60, link: Link | None = None):
        table: list[Any] = [None] * world
        self.barrier = Meeting(world, timeout)
        again = Meeting(world, timeout)  # where they meet after the first has broken
        self.comms = [ThreadComm(rank, table, self.barrier, again, link) for rank in range(world)]
        self.pool = ThreadPoolExecutor(world)

    def run(self, work: Callable[[ThreadComm], Result]) -> list[Result]:
        """What each of them returned, by rank. A worker that fails ends the others' waiting."""
        jobs = [self.pool.submit(self._member, work, comm) for comm in self.comms]
        errors = [job.exception() for job in jobs]
        # A worker that failed by itself explains more than those whose barrier broke because of it.
        others = (threading.BrokenBarrierError, PeerFailed)
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, others)):
            raise error
        return [job.result() for job in jobs]

    def _member(self, work: Callable[[ThreadComm], Result], comm: ThreadComm) -> Result:
        try:
            return work(comm)
        except BaseException:
            self.barrier.abort()  # or the others would wait for ever
            raise

    def __enter__(self) -> "ThreadWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()


def in_threads(
    world: int, work: Callable[[ThreadComm], Result], timeout: float = 60, link: Link | None = None
) -> list[Result]:
    """Run `work` on `world` workers at once; what each returned, by rank."""
    with ThreadWorkers(world, timeout, link) as everyone:
        return everyone.run(work)
