"""Workers that are processes, through torch.distributed."""

import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.direct import Direct
from thinwire.comm.gauge import Gauge
from thinwire.comm.groups import Members, own_group
from thinwire.comm.link import Link
from thinwire.comm.protocol import Comm, PeerFailed
from thinwire.comm.table import algorithm

PATIENCE = 2.0  # seconds in which workers that are alive say so, after an exchange has broken


class Processes:
    """The backend's own collectives, and on gloo direct ones where they are faster.

    Over `group`; or over a group of thinwire's own, made of the ranks of `parent`, which can be made again.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, parent: dist.ProcessGroup | None = None):
        group = group if parent is None else own_group(parent)
        self.parent, self.members = parent, Members(group)
        self._name = "" if group is None else group.group_name
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.direct = Direct(self.members) if self.world > 1 and _is_gloo(group) else None
        self.gauge = Gauge(self.direct) if self.direct else None
        self.far = self.gauge is not None and self.gauge.link.far

    @property
    def link(self) -> Link | None:
        return self.gauge.link if self.gauge else None

    # ── when an exchange fails ─────────────────────────────────────────────────────────────────────────────────────

    def abandon(self, reason: str) -> None:
        if self.parent is None or self.members.left:
            return  # the group is somebody else's
        with suppress(RuntimeError):  # a store that is gone has nobody to tell
            self._store.set(f"{self._key}/reason/{self.rank}", reason)
        self.members.leave()

    def renew(self) -> None:
        if self.parent is not None and self.members.left:
            group = own_group(self.parent)
            self._name = group.group_name
            if self.direct is not None:
                self.direct.count = 0
            self.members.meet_in(group)

    def blame(self, error: BaseException) -> str | None:
        if not isinstance(error, RuntimeError) or self.parent is None or "gloo" not in str(error).lower():
            return None
        return f"the exchange broke: {self._culprits()} ({str(error).splitlines()[0]})"

    def _culprits(self) -> str:
        """Who has failed, in its own words, or does not answer any more."""
        here = [f"{self._key}/here/{rank}" for rank in range(self.world)]
        reasons = [f"{self._key}/reason/{rank}" for rank in range(self.world)]
        try:
            self._store.set(here[self.rank], "")
            until = time.monotonic() + PATIENCE
            while True:
                for rank, key in enumerate(reasons):
                    reason = self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""
                    if reason and PeerFailed.__name__ not in reason:  # who was only told of it explains less
                        return f"rank {rank} failed in {reason}"
                missing = [rank for rank, key in enumerate(here) if not self._store.check([key])]
                if time.monotonic() > until or not missing:
                    break
                time.sleep(0.02)
        except RuntimeError:
            missing = [0]  # it holds the store
        if not missing:
            return "a connection was lost, though all ranks are alive"
        return f"rank {', '.join(map(str, missing))} does not answer: did it end, or is it much slower than the others?"

    @property
    def _store(self) -> dist.Store:
        return dist.distributed_c10d._get_default_store()

    @property
    def _key(self) -> str:
        return f"thinwire/{self._name}"

    def close(self) -> None:
        if self.parent is not None and not self.members.left and dist.is_initialized():
            with suppress(ValueError, RuntimeError):  # it went with all others, should these be groups of a later start
                self.members.leave()

    # ── the collectives ────────────────────────────────────────────────────────────────────────────────────────────

    def way(self, op: str, size: int) -> str | None:
        return self.gauge.link.way(op, size, self.world, self.far) if self.gauge else None

    def took(self, op: str, size: int, riding: int, seconds: float) -> None:
        if self.gauge:
            cost = algorithm(op, self.way(op, size))
            sent = cost.longest(self.world) * size + (self.world - 1) * riding
            self.gauge.note(sent, cost.trips(self.world), seconds)

    def _straight(self, op: str, x: Tensor) -> Direct | None:
        """Who sends this directly, if that is the way for it."""
        size = x.numel() * x.element_size()
        return self.direct if x.device.type == "cpu" and self.way(op, size) == "direct" else None

    def all_mean(self, x: Tensor) -> None:
        x.mul_(1 / self.world)  # before the sum, as DDP does: the same bits, and no overflow in half precision
        dist.all_reduce(x, group=self.members.group)

    def all_gather(self, raw: Tensor) -> Tensor:
        direct = self._straight("all_gather", raw)
        if direct:
            return direct.all_gather(raw)
        out = raw.new_empty(self.world, raw.numel())
        dist.all_gather(list(out), raw, group=self.members.group)
        return out

    def two_phases(self, pieces: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        if self.direct and self.far and pieces[0].device.type == "cpu":
            return self.direct.two_phases(pieces, reduce)
        return [self.all_gather(reduce(self.all_to_all(piece))) for piece in pieces]

    def broadcast(self, raw: Tensor, source: int) -> None:
        direct = self._straight("broadcast", raw)
        if direct:
            return direct.broadcast(raw, source)
        dist.broadcast(raw, group=self.members.group, group_src=source)

    def broadcast_with(self, head: Tensor, raw: Tensor, source: int) -> Tensor:
        direct = self._straight("broadcast", raw)
        if direct:
            return direct.broadcast_with(head, raw, source)
        self.broadcast(raw, source)
        return self.all_gather(head)

    def all_to_all(self, parts: Tensor) -> Tensor:
        if self.direct and self.far and parts.device.type == "cpu":
            return self.direct.all_to_all(parts)
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.members.group)
        return received

    def all_to_all_uneven(self, sent: Tensor, sizes: list[int], coming: list[int]) -> Tensor:
        received = sent.new_empty(sum(coming))
        dist.all_to_all_single(received, sent, coming, sizes, group=self.members.group)
        return received

    def shift(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        if to == source == self.rank:
            return x.clone()
        calls = []
        received = None if source is None else torch.empty_like(x)
        if to is not None:
            calls.append(dist.P2POp(dist.isend, x, group=self.members.group, group_peer=to))
        if received is not None:
            calls.append(dist.P2POp(dist.irecv, received, group=self.members.group, group_peer=source))
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        return received


def _is_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether this group moves what is on the CPU by gloo."""
    try:
        backend = (group or dist.distributed_c10d._get_default_group())._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return backend.name() == "gloo"


class TorchComm(Comm):
    """All workers of a group call this together: when they join, they look at what joins them."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, parent: dist.ProcessGroup | None = None):
        super().__init__(Processes(group, parent))

    @classmethod
    def own(cls, parent: dist.ProcessGroup) -> "TorchComm":
        """Over a process group for thinwire alone, so that nobody's collectives interleave with its own."""
        return cls(parent=parent)
