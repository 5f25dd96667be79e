"""Dense first steps, or denser ones."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer, check_density, inner_reducers
from thinwire.methods.dense import Dense
from thinwire.wrappers.cast import Cast
from thinwire.wrappers.feedback import check_takes_gradients


@dataclass
class WarmupState:
    step: int = memory.alike(0)
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
