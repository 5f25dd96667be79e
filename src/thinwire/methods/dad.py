"""dAD, distributed auto-differentiation: workers exchange a layer's factors, not their product.

Baker, Khanal, Calhoun, Pearlmutter and Plis, arXiv 2102.09631 (abstracts read; the rest from the authors' public code).
A weight's gradient is deltas.T @ inputs, so stacking the workers' rows and multiplying once gives the sum of all
their gradients, exactly; the mean follows by the number of workers, as in DDP. Sharing the factors of a layer is
Sufficient Factor Broadcasting (Xie et al., arXiv 1511.08486). Two things to know before using it: the first
layer's inputs are the raw batch, and they go over the wire; and it pays only while the rows of all workers
together stay below the harmonic mean of the layer's two sizes (`AutoDAD` looks).
"""

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple

import torch
from torch import Tensor

from thinwire import exchange, factors
from thinwire.comm import Comm
from thinwire.comm.base import WIRE
from thinwire.factors import Factors
from thinwire.reducer import Layout, Reducer, State


class Way(NamedTuple):
    """How one weight goes: densely, as factors or as few columns, and the bytes this puts on every worker's link."""

    mode: str
    wire: float


class FactorReducer(Reducer[Factors, State], Generic[State]):
    """A method that wants a layer's factors; the weights of a layout are its layers."""

    wants: ClassVar[type] = Factors

    @abstractmethod
    def ways(self, local: Factors, state: State, comm: Comm, working: torch.dtype, /) -> list[Way]:
        """How each weight goes when the workers' factors have the forms of `local`; the same on all workers."""


@dataclass(frozen=True)
class DAD(FactorReducer[None]):
    """The exact mean gradient, from all workers' inputs and deltas. `unroll` runs RNN, GRU and LSTM as cells."""

    unroll: bool = False

    def init(self, layout: Layout, /) -> None:
        return None

    def reduce(self, local: Factors, state: None, comm: Comm, out: Tensor, /) -> None:
        exact(factors.agreed(local, comm), local.formed, comm, out)
        empty(local)

    def ways(self, local: Factors, state: None, comm: Comm, working: torch.dtype, /) -> list[Way]:
        return [
            dense_way(local, weight, comm, working) if weight in local.formed else factor_way(local, weight, comm)
            for weight in range(len(local.shapes))
        ]


def exact(local: Factors, averaged: Collection[int], comm: Comm, out: Tensor) -> Factors:
    """The mean gradient of every weight: the `averaged` ones are multiplied out first, the others' factors gathered.

    Returns the factors of all workers.
    """
    views = split(out, local.shapes)
    others = [i for i, use in enumerate(local.uses) if use.weight not in averaged]
    pooled = factors.gather(local, others, comm)
    for weight, view in enumerate(views):
        if weight in averaged:
            local.multiply(weight, view)
        else:
            pooled.multiply(weight, view, 1 / comm.world)
    if len(averaged) == len(views):
        exchange.dense(out, comm, out)
    else:
        chosen = [views[weight] for weight in sorted(averaged)]
        comm.ledger.picked += sum(view.numel() for view in chosen)
        for view, mean in zip(chosen, exchange.mean_of(chosen, comm), strict=True):
            view.copy_(mean)
    return pooled


def split(flat: Tensor, shapes: tuple[torch.Size, ...]) -> list[Tensor]:
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def empty(local: Factors) -> None:
    """Everything was sent."""
    local.uses.clear()
    local.formed.clear()


def factor_way(local: Factors, weight: int, comm: Comm) -> Way:
    return Way("factors", WIRE["all_gather"](comm.world) * local.nbytes(weight, comm.carries))


def dense_way(local: Factors, weight: int, comm: Comm, working: torch.dtype) -> Way:
    size = local.shapes[weight].numel() * factors.carried(working, comm.carries).itemsize
    return Way("dense", WIRE["all_mean"](comm.world) * size)


def crossover(local: Factors, weight: int, comm: Comm, working: torch.dtype) -> float:
    """The rows of all workers together at which factors cost as much as the gradient; no rows, no crossover."""
    rows = local.rows(weight)
    size = local.shapes[weight].numel() * factors.carried(working, comm.carries).itemsize
    return 2 * size * rows / local.nbytes(weight, comm.carries) if rows else float("inf")
