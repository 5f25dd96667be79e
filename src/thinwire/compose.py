"""Reducers made of reducers: dense first steps, dense small tensors, fewer bits on the wire."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire import kernels, memory
from thinwire.comm import Comm
from thinwire.comm.cast import CastComm
from thinwire.feedback import check_takes_gradients
from thinwire.methods.dense import Dense
from thinwire.reducer import Layout, Reducer, check_density, inner_reducers


@dataclass
class WarmupState:
    step: int = memory.shared(0)
    inner: Any = None


@dataclass(frozen=True)
class Warmup(Reducer[Tensor, WarmupState]):
    """The first `steps` steps dense, or at `densities`, each for an equal part of them; then as `inner` says.

    Momentum and the like work from the first step on; residuals are empty as long as everything is sent.
    """

    inner: Reducer[Tensor, Any]
    steps: int
    densities: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_takes_gradients(self.inner, "Warmup")
        if self.steps < 1:
            raise ValueError(f"steps must be 1 or more, not {self.steps}")
        for density in self.densities:
            check_density(density)
        if self.densities and not any(_has_density(part) for part in inner_reducers(self.inner)):
            raise ValueError(f"{self.inner!r} has no density to warm up: leave out densities, to begin dense")
        if len(self.densities) > self.steps:
            raise ValueError(f"{len(self.densities)} densities need at least as many steps, not {self.steps}")
        _dense(self.inner, self.inner.init(Layout(("probe",), (torch.Size([1]),))))  # refuses what cannot be dense

    def init(self, layout: Layout, /) -> WarmupState:
        return WarmupState(inner=self.inner.init(layout))

    def reduce(self, x: Tensor, state: WarmupState, comm: Comm, out: Tensor, /) -> None:
        density, state.step = self.density_at(state.step), state.step + 1
        method = self.inner
        if density == 1:
            method = _dense(self.inner, state.inner)
        elif density is not None:
            method = _at_density(self.inner, density)
        method.reduce(x, state.inner, comm, out)

    def density_at(self, step: int) -> float | None:
        """The density at a step, 1 for dense; None once the method is left to itself."""
        if step >= self.steps:
            return None
        return self.densities[step * len(self.densities) // self.steps] if self.densities else 1.0

    def metrics(self, state: WarmupState, /) -> dict[str, float]:
        return self.inner.metrics(state.inner)

    @property
    def conserves(self) -> bool:
        return self.inner.conserves


@dataclass
class RouteState:
    small: Tensor = memory.derived()  # the positions of vectors and small tensors
    matrices: Any = None
    rest: Any = None


@dataclass(frozen=True)
class Route(Reducer[Tensor, RouteState]):
    """Tensors of two or more dimensions and `smallest` or more entries one way, all others another.

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


@dataclass(frozen=True)
class Cast(Reducer[Tensor, Any]):
    """The same method with values sent in half the bits.

    What a worker loses by rounding its own values stays behind and is not lost. Where the network itself adds
    up, in fewer bits too, that error is nobody's: mass is conserved to the precision of the wire only.
    """

    inner: Reducer[Tensor, Any]
    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        check_takes_gradients(self.inner, "Cast")
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype must be 'bfloat16' or 'float16', not {self.dtype!r}")

    def init(self, layout: Layout, /) -> Any:
        return self.inner.init(layout)

    def reduce(self, x: Tensor, state: Any, comm: Comm, out: Tensor, /) -> None:
        carries = torch.bfloat16 if self.dtype == "bfloat16" else torch.float16
        self.inner.reduce(x, state, CastComm(comm, carries), out)

    def metrics(self, state: Any, /) -> dict[str, float]:
        return self.inner.metrics(state)

    @property
    def conserves(self) -> bool:
        return False


def _has_density(reducer: Reducer[Any, Any]) -> bool:
    return any(f.name == "density" for f in fields(reducer)) and reducer.density is not None  # type: ignore


def _parts(reducer: Reducer[Any, Any]) -> dict[str, Reducer[Any, Any]]:
    return {name: part for name, part in vars(reducer).items() if isinstance(part, Reducer)}


def _at_density(reducer: Reducer[Any, Any], density: float) -> Reducer[Any, Any]:
    """The same reducer, wherever it has a density, at another one. It fits the same state."""
    changed: dict[str, Any] = {name: _at_density(part, density) for name, part in _parts(reducer).items()}
    if _has_density(reducer):
        changed["density"] = density
    return replace(reducer, **changed)  # type: ignore[type-var]


def _dense(reducer: Reducer[Any, Any], state: Any) -> Reducer[Any, Any]:
    """The same memories around a method that sends everything. It fits the same state."""
    if isinstance(reducer, Cast):
        return replace(reducer, inner=_dense(reducer.inner, state))
    if parts := _parts(reducer):
        return replace(reducer, **{n: _dense(part, getattr(state, n)) for n, part in parts.items()})  # type: ignore
    if not memory.entry_tensors(state):
        return Dense()
    if not _has_density(reducer):
        raise ValueError(f"{reducer!r} keeps its own memory and has no density: it cannot begin dense")
    return _at_density(reducer, 1.0)  # its memory must see every gradient
