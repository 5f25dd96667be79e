"""Ok-Topk: near-optimal traffic, by giving each worker a region of the gradient to add up.

Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022. The rules were read in the
authors' code for VGG; its first 512 steps are dense, which is `Warmup(..., steps=512)`. A step:

1. each worker picks what reaches its own threshold, near its k-th largest magnitude;
2. it sends the picks of each region to the worker that owns it, which adds them up;
3. the owner keeps the sums that reach a global threshold, near the k-th largest of all sums, and tells all.

A link carries less than 6 k numbers, however many workers there are. A pick that was not kept stays with those who
sent it. Thresholds are exact every `refresh` steps, and scaled by what they let through in between; regions are cut
so that picks are split evenly, every other refresh.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer, check_density, count
from thinwire.exchange import MessageRoom
from thinwire.exchange import bytes as wire


@dataclass
class OkTopkState:
    step: int = memory.per_world(int)
    own: float = memory.own(0.0, degree=1)  # this worker's threshold for its picks
    common: float = memory.alike(0.0, degree=1)  # all workers' threshold for sums
    edges: list[int] = memory.per_world(list)  # where regions begin, after the first
    sums: MessageRoom = field(default_factory=MessageRoom)
    kept: MessageRoom = field(default_factory=MessageRoom)


@dataclass(frozen=True)
class OkTopk(Reducer[Tensor, OkTopkState]):
    """About the `density` largest entries of the sum of what the workers picked."""

    density: float
    refresh: int = 32

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.refresh < 1:
            raise ValueError(f"refresh must be 1 step or more, not {self.refresh}")

    def init(self, layout: Layout, /) -> OkTopkState:
        return OkTopkState()

    def reduce(self, x: Tensor, state: OkTopkState, comm: Comm, out: Tensor, /) -> None:
        n, k, step = x.numel(), count(self.density, x.numel()), state.step
        if 6 * k >= 2 * n:
            return exchange.fall_back(x, comm, out)
        state.step += 1
        exact = step % self.refresh == 0
        picks = self._pick(x, state, k, exact)
        if step % (2 * self.refresh) == 0:
            state.edges = _cut_evenly(picks, n, comm)

        low, sums, sent = self._add_up(x, picks, state.edges, comm)
        if exact:
            state.common = _kth_of_all(sums, k, comm, state.sums)
        kept = kernels.select(sums, max(state.common, torch.finfo(x.dtype).tiny))
        means = sums[kept] / comm.world
        told = exchange.rounded(means, comm)
        message = wire.encode((kept + low).to(kernels.index_dtype(n)), told, n, comm.wire_dtype(x.dtype))
        messages = exchange.gather_bytes(message, comm, state.kept, limit=exchange.dense_bytes(x, comm))
        if messages is None:
            return exchange.fall_back(x, comm, out)
        pairs = [wire.decode(message, n) for message in messages]

        everywhere = torch.cat([index for index, _ in pairs])
        came = torch.isin(picks, everywhere)
        comm.ledger.picked += int(came.sum())
        kernels.scatter_add(x, picks[came], sent[came], -1.0)
        if comm.carries is not None:  # who rounds a sum keeps the error
            kernels.scatter_add(x, kept + low, means - told, float(comm.world))
        kernels.fill_sparse(out, pairs)
        state.common = _scaled(state.common, everywhere.numel(), 2 / 3 * k, 4 / 3 * k, 1.008)

    def _pick(self, x: Tensor, state: OkTopkState, k: int, exact: bool) -> Tensor:
        if exact:
            state.own = kernels.kth_magnitude(x, k)
        lowest = torch.finfo(x.dtype).tiny  # zeros are not worth sending
        picks = kernels.select(x, max(state.own, lowest))
        for _ in range(5):
            if picks.numel() <= 4 / 3 * k:
                break
            state.own *= 1.03
            picks = kernels.select(x, max(state.own, lowest))
        state.own = _scaled(state.own, picks.numel(), 2 / 3 * k, 5 / 4 * k, 1.012)
        return picks

    def _add_up(self, x: Tensor, picks: Tensor, edges: list[int], comm: Comm) -> tuple[int, Tensor, Tensor]:
        """Where this worker's region begins, the sums of all picks in it, and what this worker sent of its own."""
        splits = torch.searchsorted(picks, torch.tensor(edges, dtype=picks.dtype, device=x.device)).tolist()
        parts = picks.tensor_split(splits)
        dtype = comm.wire_dtype(x.dtype)
        sent = [exchange.rounded(x[part], comm) for part in parts]
        messages = [wire.encode(part, values, x.numel(), dtype) for part, values in zip(parts, sent, strict=True)]
        bounds = [0, *edges, x.numel()]
        low, high = bounds[comm.rank], bounds[comm.rank + 1]
        sums = x.new_zeros(high - low)
        for message in comm.all_to_all(messages):
            index, values = wire.decode(message, x.numel())
            kernels.scatter_add(sums, index - low, values.to(x.dtype))
        return low, sums, torch.cat(sent)

    @property
    def needs_memory(self) -> bool:
        return True


def _scaled(threshold: float, found: int, low: float, high: float, factor: float) -> float:
    if found < low:
        return threshold / factor
    return threshold * factor if found > high else threshold


def _cut_evenly(picks: Tensor, n: int, comm: Comm) -> list[int]:
    """The mean over the workers of where each would cut, so that its picks were split evenly."""
    world = comm.world
    if picks.numel():
        places = torch.arange(1, world, device=picks.device) * picks.numel() // world
        mine = picks[places].long()
    else:
        mine = torch.arange(1, world, device=picks.device) * n // world
    return (comm.all_gather(mine).sum(0) // world).tolist()


def _kth_of_all(sums: Tensor, k: int, comm: Comm, room: MessageRoom) -> float:
    """The k-th largest magnitude among the sums of all regions, or 0 if there are not so many."""
    found = sums[sums != 0]
    messages = exchange.gather_bytes(found.view(torch.uint8), comm, room)
    assert messages is not None  # there was no limit to exceed
    everything = torch.cat([message.clone().view(sums.dtype) for message in messages])
    return kernels.kth_magnitude(everything, k) if everything.numel() >= k else 0.0
