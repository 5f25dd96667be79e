"""The one idea: every method here is an approximate all-reduce.

A worker knows something local: its gradient, or more. A reducer estimates the mean over all workers of
what each of them knows, and leaves behind what it did not send. `Dense` is the exact one.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.core.factors import Factors as Factors
from thinwire.core.spelled import Spelled

Local = TypeVar("Local")  # what one worker knows: a Tensor, Moments or Factors
State = TypeVar("State")  # what a method remembers between steps, for one layout


class MethodWarning(UserWarning):
    """A method is used in a way that its users usually regret."""


@dataclass(frozen=True)
class Layout:
    """Which parameters lie, in which order, in one flat tensor."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype = torch.float32  # of the model's gradients; methods work in `working`
    device: torch.device = torch.device("cpu")

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def working(self) -> torch.dtype:
        """Sums over many steps need float32: in bfloat16, e + g stops growing once e is 256 times g."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    def zeros(self) -> Tensor:
        return torch.zeros(self.numel, dtype=self.working, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes), self.shapes, strict=True)]


@dataclass
class Moments:
    """A gradient and, entry by entry, the sum over the batch of its squared per-sample parts."""

    mean: Tensor
    square: Tensor


class Reducer(Spelled, ABC, Generic[Local, State]):
    """Estimates the mean over all workers of what each of them knows.

    Agreement: every worker writes the same `out`, to the bit.
    Conservation: what is sent leaves `local`, what is not sent stays, so that
    mean(local before) == out + mean(local after), over the workers.

    `out` belongs to the caller, because a fresh dense tensor each step would cost a page-faulted pass over
    the whole gradient. It may be the very storage of `local` (nobody wants the rest then), so a reducer
    finishes reading `local` before it writes `out`. Vectors are float32 or float64, and finite: the
    integration has seen to that on all workers together before it calls.

    A reducer is a frozen dataclass of hyper-parameters, and its `repr` is its spelling. Its memory is a plain
    dataclass made by `init`, owned by the integration and mutated in place (`memory` says what its fields mean to a
    checkpoint).
    """

    wants: ClassVar[type] = Tensor

    @abstractmethod
    def init(self, layout: Layout, /) -> State:
        """The memory of a method that has seen nothing yet."""

    @abstractmethod
    def reduce(self, local: Local, state: State, comm: Comm, out: Tensor, /) -> None:
        """Write the mean over the workers into `out`; leave in `local` what was not sent."""

    def metrics(self, state: State, /) -> dict[str, float]:
        """What this method has to say about its last step; free to ask for."""
        return {}

    @property
    def conserves(self) -> bool:
        """Whether the second law holds as it stands; a method that drops something on purpose says no."""
        return True

    @property
    def needs_memory(self) -> bool:
        """Whether the mean is biased unless error feedback returns what was not sent."""
        return False


def inner_reducers(reducer: Reducer[Any, Any]) -> list[Reducer[Any, Any]]:
    """The reducers that a reducer is made of, outermost first."""
    found = [reducer]
    for value in vars(reducer).values():
        if isinstance(value, Reducer):
            found += inner_reducers(value)
    return found


def check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(f"density must lie above 0 and at most at 1, not {density}: 0.01 sends one entry in a hundred")


def count(density: float, numel: int) -> int:
    """How many of `numel` entries make up `density`; at least one, if there are any."""
    return min(numel, max(1, math.floor(density * numel + 1e-9)))
