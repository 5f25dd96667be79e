"""DEFT: whole layers are dealt out to the workers, and each picks the largest of its own.

Yoon and Oh, DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient Sparsification,
ICPP 2023. The rules were read in the authors' code. A step:

1. tensors are layers; one that is larger than a fair share is cut into as many pieces as there are workers;
2. every worker gives each layer a budget in proportion to its norm there, the largest norm first;
3. one worker, another at each step, deals the layers into as many bins as there are workers, by the cost of
   selecting in them; a layer that it would send whole is common to all;
4. worker r takes bin (t + r) mod n, and in each layer of it its own budget of largest entries;
5. all average their values at all picks.

What differs from the code that was read: layers are dealt a step ahead, so that the deal goes with the picks of the
step before and a step is two collectives; only the first is dealt by a message of its own.

Bins are disjoint, so choices never overlap. The budgets are rounded down and are at least 1, so the number of
picks is near k, not k. Norms of whole layers need whole layers: use grain "model".
"""

import heapq
import math
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.comm.codec import as_bytes
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer, check_density, count
from thinwire.exchange import MessageRoom
from thinwire.exchange import bytes as wire

COMMON = -1  # the bin of layers that all workers send whole


@dataclass
class DEFTState:
    sizes: list[int] = memory.derived()  # of the tensors
    step: int = memory.alike(0)
    room: MessageRoom = field(default_factory=MessageRoom)
    picks: list[int] = memory.per_world(list)  # what each worker chose at the last step
    bins: list[int] = memory.per_world(list)  # of the layers, as they were dealt for the next step; empty: not yet


@dataclass(frozen=True)
class DEFT(Reducer[Tensor, DEFTState]):
    """About a share `density` of the entries: the largest of each layer, and more of a layer with a larger norm."""

    density: float

    def __post_init__(self) -> None:
        check_density(self.density)

    def init(self, layout: Layout, /) -> DEFTState:
        return DEFTState([size for size in layout.sizes if size])

    def reduce(self, x: Tensor, state: DEFTState, comm: Comm, out: Tensor, /) -> None:
        step, state.step = state.step, state.step + 1
        sizes = cut(state.sizes, comm.world)
        k = count(self.density, x.numel())
        if k == x.numel():
            return exchange.fall_back(x, comm, out)
        layers = x.split(sizes)
        norms = [float(torch.linalg.vector_norm(layer, dtype=torch.float64)) for layer in layers]  # room for any square
        budgets = share_out(k, norms, sizes)
        dealt = torch.tensor(deal(budgets, sizes, comm.world), dtype=torch.int16, device=x.device)
        bins = state.bins or comm.broadcast(dealt.clone(), step % comm.world).tolist()

        own = (step + comm.rank) % comm.world
        starts = [0, *accumulate(sizes)]
        mine, common = [], []
        for layer, start, budget, bin_ in zip(layers, starts, budgets, bins):
            if bin_ == own:
                mine.append(kernels.top_k(layer, budget).long() + start)
            elif bin_ == COMMON:
                common.append(torch.arange(start, start + layer.numel(), device=x.device))
        index = _joined(mine, x)
        message = torch.cat([as_bytes(dealt), wire.encode_index(index, x.numel())])
        messages = exchange.gather_bytes(message, comm, state.room, limit=exchange.dense_bytes(x, comm))
        if messages is None:
            state.picks = state.bins = []
            return exchange.fall_back(x, comm, out)
        deals = 2 * len(sizes)  # bytes
        state.bins = messages[(step + 1) % comm.world][:deals].clone().view(torch.int16).tolist()
        chosen = [wire.decode_index(message[deals:], x.numel()) for message in messages]
        state.picks = [index.numel() for index in chosen]
        union = torch.cat([*chosen, _joined(common, x)]).sort().values
        exchange.mean_at(x, union, comm, out)

    def metrics(self, state: DEFTState, /) -> dict[str, float]:
        sent = sum(state.picks)
        return {"imbalance": len(state.picks) * max(state.picks) / sent} if sent else {}

    @property
    def needs_memory(self) -> bool:
        return True


def _joined(parts: list[Tensor], x: Tensor) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64, device=x.device), *parts]).to(kernels.index_dtype(x.numel()))


def cut(sizes: list[int], workers: int) -> list[int]:
    """The sizes of the layers: tensors, or near-equal pieces of those larger than a fair share."""
    fair = sum(sizes) / workers
    layers = []
    for size in sizes:
        pieces = min(workers, size) if size > fair else 1
        layers += [size // pieces + (piece < size % pieces) for piece in range(pieces)]
    return layers


def share_out(k: int, norms: list[float], sizes: list[int]) -> list[int]:
    """How many entries each layer may send: in proportion to its norm, at least 1, at most all."""
    budgets = [0] * len(sizes)
    left_k, left_norm = k, sum(norms)
    for layer in sorted(range(len(sizes)), key=lambda layer: -norms[layer]):
        wanted = math.floor(left_k * norms[layer] / left_norm) if left_norm > 0 else 0
        budgets[layer] = min(max(wanted, 1), sizes[layer])
        left_k, left_norm = max(left_k - budgets[layer], 0), left_norm - norms[layer]
    return budgets


def deal(budgets: list[int], sizes: list[int], workers: int) -> list[int]:
    """The bin of each layer: the costliest first, each into the bin that has cost least so far."""
    bins = [COMMON] * len(sizes)
    costs = [size * math.log2(k) if k > 1 else size for k, size in zip(budgets, sizes)]
    heap = [(0.0, bin_) for bin_ in range(workers)]
    for layer in sorted(range(len(sizes)), key=lambda layer: -costs[layer]):
        if budgets[layer] < sizes[layer]:
            cost, bins[layer] = heapq.heappop(heap)
            heapq.heappush(heap, (cost + costs[layer], bins[layer]))
    return bins
