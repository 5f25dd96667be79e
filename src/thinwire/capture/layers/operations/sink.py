"""Where what a layer brings goes: a sink has a collector for each parameter that it wants to know about."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, overload

import torch
from torch import Tensor

from thinwire.core.factors import Form
from thinwire.core.products import GradientProduct

AsFactors = tuple[GradientProduct, Tensor, Tensor]  # how the gradient is made of inputs and deltas, and those


class Parts(Protocol):
    """One use of one parameter: what its gradient is made of, and how the samples' parts of it are formed.

    Parts never lie there all at once unless they are small: they are formed for some samples at a time. The samples
    of a batch lie along the first dimension of what a layer is given.
    """

    @property
    def samples(self) -> int: ...

    def at_once(self) -> int:
        """Of how many samples the parts are best formed together: few enough for them to stay in the cache."""

    def form(self, some: slice) -> Tensor:
        """The parts of some samples: [len(some), *parameter.shape]."""

    def total(self) -> Tensor:
        """The sum of all parts, the plain way: the gradient."""

    def add_squares(self, to: Tensor, keep: int) -> bool:
        """to = keep * to + the sum of their squares, where that takes no forming of parts; whether it does.

        A `keep` of 0 ignores what `to` holds, be it NaN.
        """

    def factors(self) -> AsFactors | None:
        """The gradient as a product that is not multiplied out; None where it is none."""


class Collector(Protocol):
    """Collects the uses of one parameter."""

    def used(self, product: GradientProduct | None = None, form: Form | None = None, *, raw: bool = False) -> None:
        """In the forward pass. A product's factors will have this form; `raw` inputs come from nothing trainable."""

    def gradient(self, parts: Parts) -> Tensor | None:
        """In the backward pass: what goes on to the parameter, None for nothing."""

    def below(self, delta: Tensor) -> Tensor:
        """What goes on to the layers below."""


class Sink(Protocol):
    def collector(self, parameter: Tensor | None) -> Collector:
        """Whoever collects this parameter in the pass under way; PLAIN if nobody does."""

    def give_back(self) -> None:
        """Leave the layers alone: somebody else wants them."""


class _Plain:
    """Nobody asks: the gradient is formed, as ever."""

    def used(self, product: GradientProduct | None = None, form: Form | None = None, *, raw: bool = False) -> None:
        pass

    def gradient(self, parts: Parts) -> Tensor | None:
        return parts.total()

    def below(self, delta: Tensor) -> Tensor:
        return delta


PLAIN = _Plain()


@dataclass
class Sums:
    """Deltas summed within each sample, small enough to lie there: biases, and the scales of normalisations."""

    deltas: Tensor  # [samples, ...]
    within: tuple[int, ...]  # the dimensions to sum over
    shape: torch.Size  # of the parameter

    @cached_property
    def rows(self) -> Tensor:
        # Where there is nothing to sum over, torch's sum would take long to find out.
        alone = all(self.deltas.shape[i] == 1 for i in self.within)
        summed = wide(self.deltas) if alone else self.deltas.sum(self.within, dtype=wide_dtype(self.deltas.dtype))
        return summed.reshape(self.samples, *self.shape)

    @property
    def samples(self) -> int:
        return self.deltas.shape[0]

    def at_once(self) -> int:
        return self.samples

    def form(self, some: slice) -> Tensor:
        return self.rows[some]

    def total(self) -> Tensor:
        return self.rows.sum(0)

    def add_squares(self, to: Tensor, keep: int) -> bool:
        squares = self.rows.square().sum(0)
        to.add_(squares) if keep else to.copy_(squares)
        return True

    def factors(self) -> None:
        return None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Squares and long sums of half-precision numbers leave their range: float32 at least."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


def rows_of(x: Tensor) -> Tensor:
    """[rows, width], also where the width is 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def sequences_of(x: Tensor) -> Tensor:
    """[samples, sequence, width], whatever came."""
    samples = 1 if x.dim() < 2 else len(x)
    return x.reshape(samples, math.prod(x.shape[1:-1]), x.shape[-1])


def autocast(x: Tensor) -> Tensor:
    """What torch's own function would be given: a Function of ours is beyond autocast's reach."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


@overload
def autocast_as(x: Tensor, parameter: Tensor) -> Tensor: ...
@overload
def autocast_as(x: Tensor, parameter: Tensor | None) -> Tensor | None: ...
def autocast_as(x: Tensor, parameter: Tensor | None) -> Tensor | None:
    """A parameter in the dtype of an input that went through `autocast`."""
    if parameter is None or not torch.is_autocast_enabled(x.device.type):
        return parameter
    return parameter.to(x.dtype)


def not_a_view(out: Tensor) -> Tensor:
    """The same memory under a new name: autograd lets nobody change a view in place that a Function returns.

    Some kernels return a view of what they made. What it is a view of is seen by nobody, so there is no harm in it.
    """
    return out.new_empty(0).set_(out) if out._is_view() else out  # type: ignore[call-overload]
