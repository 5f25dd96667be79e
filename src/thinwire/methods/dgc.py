"""Deep gradient compression: the largest entries of an accumulated velocity.

Lin, Han, Mao, Wang and Dally, Deep Gradient Compression, ICLR 2018 (recalled; the authors' code read through a
description of it). Per step, on each worker:

    clip g; u = mu u + g; v = v + u; send the largest of v; zero v and u where it was sent

so the optimizer that applies the result has no momentum of its own. Vectors (biases, norms) are sent whole,
with momentum. The threshold comes from a sample, and is lowered until it lets nearly enough through. The
density of the first epochs is for `Warmup(DGC(...), densities=(0.25, 0.0625, 0.0156, 0.004))`.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer, check_density, count
from thinwire.exchange import MessageRoom


@dataclass
class DGCState:
    velocity: Tensor = memory.averaged()  # u
    residual: Tensor = memory.unsent()  # v: velocities added up and not sent yet
    vectors: Tensor = memory.derived()  # the positions of parameters with one dimension or none
    unit: float = memory.alike(1.0, degree=1)  # what 1 in gradient units is now, under a loss scale
    room: MessageRoom = field(default_factory=MessageRoom)


@dataclass(frozen=True)
class DGC(Reducer[Tensor, DGCState]):
    """Momentum on each worker; a share `density` of the accumulated velocities is sent, the largest, and set to zero.

    `clip` bounds the norm of the mean gradient, each worker keeping to clip / sqrt(workers): of the whole model
    at grain "model". `sample` is the part of the entries from which the threshold is estimated. Sum of all
    velocities = sum of results + residual; the gradients themselves are not conserved.
    """

    density: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    clip: float | None = None
    sample: float = 0.01
    agree: bool = False

    def __post_init__(self) -> None:
        check_density(self.density)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie between 0 and 1, not {self.momentum}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be a norm above 0, not {self.clip}: None does not clip")
        if not 0 < self.sample <= 1:
            raise ValueError(f"sample must lie above 0 and at most at 1, not {self.sample}")

    def init(self, layout: Layout, /) -> DGCState:
        starts = torch.tensor(layout.sizes, dtype=torch.int64).cumsum(0) - torch.tensor(layout.sizes)
        spans = zip(layout.shapes, starts.tolist(), layout.sizes, strict=True)
        vectors = [torch.arange(start, start + size) for shape, start, size in spans if len(shape) < 2]
        positions = torch.cat([torch.empty(0, dtype=torch.int64), *vectors]).to(layout.device)
        return DGCState(layout.zeros(), layout.zeros(), positions)

    def reduce(self, x: Tensor, state: DGCState, comm: Comm, out: Tensor, /) -> None:
        u, v = state.velocity, state.residual
        if self.clip is not None:
            x.mul_(min(1.0, self.clip * state.unit / math.sqrt(comm.world) / max(float(x.norm()), 1e-30)))
        if self.nesterov:
            u.add_(x).mul_(self.momentum)
            v.add_(u).add_(x)
        else:
            u.mul_(self.momentum).add_(x)
            v.add_(u)
        exchange.empty(x, out)

        matrices = v.numel() - state.vectors.numel()
        k = count(self.density, matrices)
        if k == matrices:  # nothing waits, so no velocity is stale
            return exchange.dense(v, comm, out)
        vectors = comm.all_mean_later(exchange.take(v, state.vectors, comm))
        picks = self._largest(v, k)
        if self.agree:
            chosen = exchange.gather_union(v, picks, comm, out, state.room)
            picks = torch.cat(chosen) if chosen is not None else picks
        else:
            exchange.gather_pairs(v, picks, comm, out, state.room)
        u[picks] = 0
        kernels.scatter_add(out, state.vectors, vectors())

    def _largest(self, v: Tensor, k: int) -> Tensor:
        """At most k positions, and seldom fewer than four fifths of k."""
        samples = max(math.ceil(self.sample * v.numel()), math.ceil(2 / self.density))
        lowest = torch.finfo(v.dtype).tiny  # zeros are not worth sending
        threshold = max(kernels.quantile(v, k / v.numel(), samples), lowest)
        picks = kernels.select(v, threshold)
        for _ in range(10):
            if picks.numel() >= 0.8 * k or threshold == lowest:
                break
            threshold = max(0.8 * threshold, lowest)
            picks = kernels.select(v, threshold)
        return picks if picks.numel() <= k else picks[kernels.top_k(v[picks], k).long()]

    @property
    def conserves(self) -> bool:
        return False
