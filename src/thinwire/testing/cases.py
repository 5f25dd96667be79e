"""What the laws are tried on: how many workers reduce what."""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from thinwire.core.draws import mix64
from thinwire.core.factors import PRODUCT, Factors, Use
from thinwire.core.reducer import Layout, Moments, Reducer
from thinwire.spelling import spell

STEPS = 5
PATIENCE = 20  # seconds until a worker that issues no more collectives is missed
WORLDS = (1, 2, 3, 4, 5)
DTYPES = (torch.float32, torch.float64)
SHAPES: tuple[dict[str, tuple[int, ...]], ...] = (
    {"scalar": ()},
    {"vector": (7,)},
    {"nothing": (0,), "vector": (33,)},
    {"weight": (6, 5), "bias": (6,)},
    {"first": (8, 9), "bias": (1,), "second": (8, 9), "kernel": (4, 3, 3, 2), "scale": ()},
    {"wide": (3, 400), "tall": (250, 4), "odd": (17, 23)},
)
MATRICES: tuple[dict[str, tuple[int, ...]], ...] = (
    {"weight": (1, 1)},
    {"weight": (3, 5)},
    {"first": (20, 30), "second": (8, 20)},
)


@dataclass(frozen=True)
class Case:
    """How many workers reduce what."""

    world: int
    layout: Layout

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(s)}" for name, s in zip(self.layout.names, self.layout.shapes))
        kind = str(self.layout.dtype).removeprefix("torch.")
        return f"{self.world} worker{'s' * (self.world > 1)}, {shapes}, {kind}"


def layout_of(named: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Layout:
    return Layout(tuple(named), tuple(torch.Size(shape) for shape in named.values()), dtype)


def made_up(wants: type, layout: Layout, step: int, rank: int) -> Any:
    """Something for a worker to know, the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(mix64(step, rank, layout.numel) >> 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(layout.working)

    if wants is Moments:
        samples = (normal(1, layout.numel) + normal(6, layout.numel)) / 6
        return Moments(samples.sum(0), samples.square().sum(0))
    if wants is Factors:
        rows, shapes = 2 + rank, layout.shapes
        uses = [Use(i, PRODUCT, normal(rows, shape[1]), normal(rows, shape[0])) for i, shape in enumerate(shapes)]
        return Factors(shapes, uses)
    return normal(layout.numel)


def gradient(local: Any, layout: Layout) -> Tensor:
    """A copy of the gradient that a worker knows."""
    if not isinstance(local, Factors):
        return (local.mean if isinstance(local, Moments) else local).clone()
    gradient = layout.zeros()
    for weight, view in enumerate(layout.views(gradient)):
        local.multiply(weight, view)
    return gradient


def fail(law: str, reducer: Reducer[Any, Any], case: Case, detail: str, cause: Exception | None = None) -> NoReturn:
    raise AssertionError(f"{law} does not hold for {spell(reducer)}: {detail} [{case}]") from cause
