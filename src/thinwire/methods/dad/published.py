"""rank-dAD as the authors' public code has it: one column after the other, by power iteration with deflation.

Kept to be compared with `RankDAD`, and not to be trained with. Measured properties that are reproduced on purpose: with
few iterations the columns are not orthogonal, so the leading direction is counted several times and the error can
exceed that of sending nothing; the stop test compares directions, not singular values; one column fewer is delivered
than was asked for. Not reproduced: the sum over workers in place of the mean, and biases from reduced deltas.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.comm.table import wire_bytes
from thinwire.core import memory
from thinwire.core.draws import group_key, mix64
from thinwire.core.factor_reducer import FactorReducer, LayerPlan
from thinwire.core.factors import Factors, Form, Use
from thinwire.core.products import PRODUCT
from thinwire.core.reducer import Layout
from thinwire.exchange import factors
from thinwire.methods.dad.dad import empty, split


@dataclass
class PublishedState:
    key: int = memory.derived()
    step: int = memory.alike(0)


@dataclass(frozen=True)
class PublishedRankDAD(FactorReducer[PublishedState]):
    """The sequential iteration of the public code: `rank` - 1 columns of each worker's gradient."""

    rank: int = 10
    iterations: int = 1
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if self.rank < 2:
            raise ValueError(f"rank must be at least 2, not {self.rank}: the last column found is always dropped")

    @property
    def conserves(self) -> bool:
        return False

    def init(self, layout: Layout, /) -> PublishedState:
        return PublishedState(group_key(layout))

    def reduce(self, local: Factors, state: PublishedState, comm: Comm, out: Tensor, /) -> None:
        uses = []
        for weight in range(len(local.shapes)):
            generator = torch.Generator().manual_seed(mix64(state.key, weight, state.step, comm.rank) >> 1)
            left, right = self.columns(local, weight, generator, out)
            uses.append(Use(weight, PRODUCT, right.T, left.T))
        sent = Factors(local.shapes, uses, forms=[Form.like(use.inputs, use.deltas) for use in uses])
        pooled = factors.gather(sent, list(range(len(uses))), comm)
        for weight, view in enumerate(split(out, local.shapes)):
            pooled.multiply(weight, view, 1 / comm.world)
        state.step += 1
        empty(local)

    def columns(self, local: Factors, weight: int, generator: torch.Generator, like: Tensor) -> tuple[Tensor, Tensor]:
        """Left columns scaled by their singular values, and right columns; those not found are zero."""
        shape = local.shapes[weight]
        rows, width = shape[0], shape.numel() // shape[0]
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        while len(found) < self.rank:
            v = torch.rand(rows, 1, generator=generator, dtype=like.dtype).to(like.device)
            for _ in range(self.iterations):
                deflated = local.right(weight, local.left(weight, v))
                for sigma, b, _ in found:
                    deflated -= sigma**2 * b * (b * v).sum()
                v = deflated / torch.linalg.vector_norm(deflated)
            c = local.left(weight, v)
            sigma = torch.linalg.vector_norm(c)
            if not sigma > 0:
                break
            if len(found) >= 2:
                last = found[-1][1]
                if torch.linalg.vector_norm(v - last) < self.tolerance * torch.linalg.vector_norm(last):
                    sigma, b, c = found[-1]
                    found[-1] = (torch.zeros_like(sigma), torch.zeros_like(b), torch.zeros_like(c))
                    break
            found.append((sigma, v, c / sigma))
        left, right = like.new_zeros(rows, self.rank - 1), like.new_zeros(width, self.rank - 1)
        for column, (sigma, b, c) in enumerate(found[:-1]):
            left[:, column], right[:, column] = (sigma * b).flatten(), c.flatten()
        return left, right

    def ways(self, local: Factors, state: PublishedState, comm: Comm, working: torch.dtype, /) -> list[LayerPlan]:
        sizes = [comm.value_bytes((self.rank - 1) * (s[0] + s.numel() // s[0]), working) for s in local.shapes]
        return [LayerPlan(f"rank {self.rank - 1}", wire_bytes("all_gather", size, comm.world)) for size in sizes]
