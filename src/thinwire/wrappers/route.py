"""Matrices one way, vectors and small tensors another."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer
from thinwire.methods.dense import Dense
from thinwire.wrappers.feedback import check_takes_gradients


@dataclass
class RouteState:
    small: Tensor = memory.derived()  # the positions of vectors and small tensors
    matrices: Any = None
    rest: Any = None


@dataclass(frozen=True)
class Route(Reducer[Tensor, RouteState]):
    """`matrices` for tensors of two or more dimensions and `smallest` or more entries, `rest` for all others.

    Biases and norms are few, and suffer most from what is left out: sending them whole costs next to nothing.
    """

    matrices: Reducer[Tensor, Any]
    rest: Reducer[Tensor, Any] = Dense()
    smallest: int = 1024

    def __post_init__(self) -> None:
        for part in (self.matrices, self.rest):
            check_takes_gradients(part, "Route")
        if self.smallest < 0:
            raise ValueError(f"smallest must be a number of entries, not {self.smallest}")
        probe = Layout(("probe",), (torch.Size([1]),))
        if memory.entry_tensors(self.rest.init(probe)):
            raise ValueError(f"rest must not remember anything, as {self.rest!r} does: put it around the Route")

    def init(self, layout: Layout, /) -> RouteState:
        parameters = list(zip(layout.names, layout.shapes, layout.sizes, strict=True))
        names, shapes, positions, start = [], [], [torch.empty(0, dtype=torch.int64)], 0
        for name, shape, size in parameters:
            if len(shape) < 2 or size < self.smallest:
                names.append(name)
                shapes.append(shape)
                positions.append(torch.arange(start, start + size))
            start += size
        rest = Layout(tuple(names), tuple(shapes), layout.dtype, layout.device)
        small = torch.cat(positions).to(layout.device)
        return RouteState(small, self.matrices.init(layout), self.rest.init(rest))

    def reduce(self, x: Tensor, state: RouteState, comm: Comm, out: Tensor, /) -> None:
        small = kernels.take(x, state.small)
        mean = torch.empty_like(small)
        if small.numel():
            self.rest.reduce(small, state.rest, comm, mean)
        if small.numel() < x.numel():
            self.matrices.reduce(x, state.matrices, comm, out)
        else:
            out.zero_()
        if out.data_ptr() != x.data_ptr():
            kernels.scatter_add(x, state.small, small)
        kernels.scatter_add(out, state.small, mean)

    def metrics(self, state: RouteState, /) -> dict[str, float]:
        return self.rest.metrics(state.rest) | self.matrices.metrics(state.matrices)

    @property
    def conserves(self) -> bool:
        return self.matrices.conserves and self.rest.conserves
