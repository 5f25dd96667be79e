"""Workers that are processes, through torch.distributed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.base import Ledger


class TorchComm:
    carries: torch.dtype | None = None

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.ledger = Ledger(self.world)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.ledger.seconds += time.perf_counter() - start

    def all_mean(self, x: Tensor) -> Tensor:
        self.ledger.enter("all_mean", x)
        with self._timed():
            x.mul_(1 / self.world)  # before the sum, as DDP does: the same bits, and no overflow in half precision
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self.ledger.enter("all_gather", x)
        out = x.new_empty(self.world, *x.shape)
        with self._timed():
            if x.numel():
                dist.all_gather([_bytes(row) for row in out], _bytes(x), group=self.group)
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self.ledger.enter("broadcast", x)
        raw = _bytes(x)
        with self._timed():
            dist.broadcast(raw, group=self.group, group_src=source)
        return x if raw.data_ptr() == x.data_ptr() else x.copy_(raw.view(x.dtype).view(x.shape))

    def all_to_all(self, parts: list[Tensor]) -> list[Tensor]:
        sizes = torch.tensor([p.numel() for p in parts], dtype=torch.int64, device=parts[0].device)
        incoming = torch.empty_like(sizes)
        sent = torch.cat(parts)
        self.ledger.enter("all_to_all", sizes)
        self.ledger.enter("all_to_all", sent)
        with self._timed():
            dist.all_to_all_single(incoming, sizes, group=self.group)
            counts = incoming.tolist()
            received = sent.new_empty(sum(counts))
            dist.all_to_all_single(received, sent, counts, sizes.tolist(), group=self.group)
        return list(received.split(counts))

    def shift(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        calls = []
        received = None if source is None else torch.empty_like(x)
        if to is not None:
            self.ledger.enter("shift", x)
            calls.append(dist.P2POp(dist.isend, x.contiguous(), group=self.group, group_peer=to))
        if received is not None:
            calls.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        with self._timed():
            for work in dist.batch_isend_irecv(calls) if calls else ():
                work.wait()
        return received


def _bytes(x: Tensor) -> Tensor:
    """What is only moved goes as bytes: backends differ in the dtypes that they know."""
    return x.contiguous().view(-1).view(torch.uint8)
