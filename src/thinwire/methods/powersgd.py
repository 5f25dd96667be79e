"""PowerSGD: each gradient matrix as a product of two thin ones, by one step of power iteration.

Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
NeurIPS 2019 (recalled, and its authors' code read). Per matrix M, and Q from the step before:

    P = mean(M Q); orthonormalise P; Q = mean(M^T P); the result is P Q^T, and M - P (M^T P)^T stays behind

so what stays is this worker's own error, not its distance from the mean. Vectors, and matrices for which two
thin ones would be no smaller, travel whole in the first of the two messages.

All workers share the space that P spans, and it follows their mean: where a worker differs from the others for
good, outside that space, its residual grows, and cancels against theirs. Measured with constant gradients; so
no worker's residual may be dropped by itself.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import exchange
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.draws import group_key, mix64
from thinwire.core.reducer import Layout, Reducer


class Run(NamedTuple):
    """Matrices of one shape at equal distances in the gradient: a batch without a copy."""

    start: int
    distance: int
    length: int


class Batch(NamedTuple):
    """All matrices of one shape. Their thin factors are stacked; they themselves are looked at in runs."""

    rows: int
    columns: int
    runs: list[Run]

    def matrices(self, x: Tensor) -> list[Tensor]:
        size, base = (self.rows, self.columns), x.storage_offset()
        return [x.as_strided((r.length, *size), (r.distance, size[1], 1), base + r.start) for r in self.runs]

    def split(self, factors: Tensor) -> tuple[Tensor, ...]:
        return factors.split([run.length for run in self.runs])


@dataclass
class PowerSGDState:
    batches: list[Batch] = memory.derived()
    whole: Tensor = memory.derived()  # the positions of all that is in no batch
    right: list[Tensor] = memory.alike()  # Q of each batch: where the next step begins


@dataclass(frozen=True)
class PowerSGD(Reducer[Tensor, PowerSGDState]):
    """Matrices as products of `rank` columns and rows; vectors whole."""

    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be 1 or more, not {self.rank}: 4 is a common choice")

    def init(self, layout: Layout, /) -> PowerSGDState:
        starts: dict[tuple[int, int], list[int]] = {}
        whole = [torch.empty(0, dtype=torch.int64)]
        start = 0
        for shape, size in zip(layout.shapes, layout.sizes, strict=True):
            rows = shape[0] if len(shape) > 1 else 1
            columns = size // max(1, rows)
            if (rows + columns) * self.rank < size:  # and so rank < rows and rank < columns
                starts.setdefault((rows, columns), []).append(start)
            else:
                whole.append(torch.arange(start, start + size))
            start += size
        batches = [Batch(*shape, _runs(places)) for shape, places in starts.items()]
        right = [self._first_right(batch, layout) for batch in batches]
        return PowerSGDState(batches, torch.cat(whole).to(layout.device), right)

    def _first_right(self, batch: Batch, layout: Layout) -> Tensor:
        key = mix64(self.seed, group_key(layout), batch.rows, batch.columns)
        count = sum(run.length for run in batch.runs)
        generator = torch.Generator().manual_seed(key >> 1)
        random = torch.randn(count, batch.columns, self.rank, generator=generator, dtype=torch.float64)
        return random.to(layout.device, layout.working)

    def reduce(self, x: Tensor, state: PowerSGDState, comm: Comm, out: Tensor, /) -> None:
        whole = exchange.take(x, state.whole, comm)
        left = [_times(b, b.matrices(x), _scaled(q)) for b, q in zip(state.batches, state.right, strict=True)]
        *left, whole = exchange.mean_of([*left, whole], comm)
        # QR and not Gram-Schmidt: it is exact to rounding, and finds orthonormal columns where P is zero.
        left = [torch.linalg.qr(p).Q for p in left]

        right = []
        for batch, p in zip(state.batches, left, strict=True):
            matrices = batch.matrices(x)
            q = exchange.rounded(_times(batch, [m.mT for m in matrices], p), comm)
            _add_products(batch, matrices, p, q, keep=1, sign=-1)
            right.append(q)
        comm.ledger.picked += sum(factor.numel() for factor in [*left, *right])
        state.right = exchange.mean_of(right, comm)

        out[state.whole] = whole
        for batch, p, q in zip(state.batches, left, state.right, strict=True):
            _add_products(batch, batch.matrices(out), p, q, keep=0, sign=1)

    @property
    def needs_memory(self) -> bool:
        return True


def _runs(starts: list[int]) -> list[Run]:
    runs = [Run(starts[0], 0, 1)]
    for here in starts[1:]:
        start, distance, length = runs[-1]
        if length == 1 or here - start == length * distance:
            runs[-1] = Run(start, distance if length > 1 else here - start, length + 1)
        else:
            runs.append(Run(here, 0, 1))
    return runs


def _times(batch: Batch, matrices: list[Tensor], thin: Tensor) -> Tensor:
    # As (thin^T M^T)^T: with the thin factor first, this is several times as fast on CPUs.
    return torch.cat([torch.bmm(t.mT, m.mT) for m, t in zip(matrices, batch.split(thin), strict=True)]).mT


def _add_products(batch: Batch, into: list[Tensor], p: Tensor, q: Tensor, keep: int, sign: int) -> None:
    """into = keep * into + sign * P Q^T."""
    for m, left, right in zip(into, batch.split(p), batch.split(q), strict=True):
        m.baddbmm_(left, right.mT, beta=keep, alpha=sign)


def _scaled(q: Tensor) -> Tensor:
    """The same directions at a size near 1: of a product of two gradients, float32 may not hold the size."""
    return q / q.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
