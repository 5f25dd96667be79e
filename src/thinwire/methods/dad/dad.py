"""dAD, distributed auto-differentiation: workers exchange a layer's factors, not their product.

Baker, Khanal, Calhoun, Pearlmutter and Plis, arXiv 2102.09631 (abstracts read; the rest from the authors' public code).
A weight's gradient is deltas.T @ inputs, so stacking the workers' rows and multiplying once gives the sum of all
their gradients, exactly; the mean follows by the number of workers, as in DDP. Sharing the factors of a layer is
Sufficient Factor Broadcasting (Xie et al., arXiv 1511.08486). Two things to know before using it: the first
layer's inputs are the raw batch, and they go over the wire; and it pays only while the rows of all workers
together stay below the harmonic mean of the layer's two sizes (`AutoDAD` looks).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire import exchange
from thinwire.comm import Comm
from thinwire.core.factor_reducer import FactorReducer, LayerPlan, check_options, dense_plan, factor_plan
from thinwire.core.factors import Factors
from thinwire.core.reducer import Layout, Reducer
from thinwire.exchange import factors


@dataclass(frozen=True)
class DAD(FactorReducer[None]):
    """The exact mean gradient, from all workers' inputs and deltas.

    `unroll` runs RNN, GRU and LSTM as cells. `rest` is the method for all that is not such a product: biases, norms,
    layers that are not known; without one it is averaged. `inputs` of layers that are given raw data may be "sent", or
    "kept", and then those layers' gradients go in their place; unless said, they are sent, with a warning. `bits` of a
    value: factors rounded to 16, 8 or 4, and no longer exact. `skip_zeros` leaves out rows of zeros (ignored targets,
    padding), for one small message more.
    """

    unroll: bool = False
    rest: Reducer[Any, Any] | None = None
    inputs: Literal["sent", "kept"] | None = None
    bits: Literal[16, 8, 4] | None = None
    skip_zeros: bool = False

    def __post_init__(self) -> None:
        check_options(self.rest, self.inputs, self.bits)

    def init(self, layout: Layout, /) -> None:
        return None

    def reduce(self, local: Factors, state: None, comm: Comm, out: Tensor, /) -> None:
        given = factors.agreed(local, comm)
        if self.skip_zeros:
            given = factors.without_zeros(given, comm)
        pooled = exact(given, local.formed, comm, out, self.bits)
        if self.bits is None:
            empty(local)
        else:
            leave_what_rounding_took(local, given, pooled, comm)

    def ways(self, local: Factors, state: None, comm: Comm, working: torch.dtype, /) -> list[LayerPlan]:
        return [
            dense_plan(local, weight, comm, working)
            if weight in local.formed
            else factor_plan(local, weight, factors.in_bits(comm, self.bits))
            for weight in range(len(local.shapes))
        ]


def exact(local: Factors, averaged: Collection[int], comm: Comm, out: Tensor, bits: int | None = None) -> Factors:
    """The mean gradient of every weight: the `averaged` ones are multiplied out first, the others' factors gathered.

    With `bits` the factors are rounded, and the mean is that of the rounded ones. Returns the factors of all workers.
    """
    views = split(out, local.shapes)
    others = [i for i, use in enumerate(local.uses) if use.weight not in averaged]
    coming = factors.gather_later(local, others, factors.in_bits(comm, bits))
    for weight in averaged:
        local.multiply(weight, views[weight])
    if len(averaged) == len(views):
        exchange.dense(out, comm, out)
    else:
        chosen = [views[weight] for weight in sorted(averaged)]
        comm.ledger.picked += sum(view.numel() for view in chosen)
        for view, mean in zip(chosen, exchange.mean_of(chosen, comm), strict=True):
            view.copy_(mean)
    pooled = coming()
    for weight, view in enumerate(views):
        if weight not in averaged:
            pooled.multiply(weight, view, 1 / comm.world)
    return pooled


def leave_what_rounding_took(local: Factors, given: Factors, pooled: Factors, comm: Comm) -> None:
    """In `local`: its factors, less what arrived of them."""
    own = [use for use in given.uses if use.weight not in given.formed]
    arrived = []
    for use in pooled.uses:
        rows = len(use.deltas) // comm.world
        here = slice(comm.rank * rows, (comm.rank + 1) * rows)
        arrived.append(replace(use, inputs=use.inputs[here], deltas=-use.deltas[here]))
    local.uses[:] = [*own, *arrived]
    local.formed.clear()


def split(flat: Tensor, shapes: tuple[torch.Size, ...]) -> list[Tensor]:
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def empty(local: Factors) -> None:
    """Everything was sent."""
    local.uses.clear()
    local.formed.clear()
