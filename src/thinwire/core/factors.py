"""Gradients that are not multiplied out yet.

A layer's weight gradient is a product of what went in and what came back: for a Linear, deltas.T @ inputs. `rules` says
how each kind of layer makes that product, and how the product is applied to a thin matrix without being formed.
`Factors` are the uses of some weights in one step; `gather` brings the uses of all workers together.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.core.products import PRODUCT, GradientProduct

# What travels; the order lets `max` pick the one that loses nothing when workers differ.
DTYPES = (torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64)

Side = tuple[Tensor, tuple[int, ...], torch.dtype]  # a tensor, and the size and dtype that all workers send it in


@dataclass(frozen=True)
class Form:
    """The sizes and dtypes in which every worker sends one use: what is smaller is padded with zeros, exactly."""

    inputs: tuple[int, ...]
    deltas: tuple[int, ...]
    input_dtype: torch.dtype
    delta_dtype: torch.dtype

    @classmethod
    def like(cls, inputs: Tensor, deltas: Tensor) -> "Form":
        return cls(tuple(inputs.shape), tuple(deltas.shape), inputs.dtype, deltas.dtype)

    @property
    def rows(self) -> int:
        return self.inputs[0]

    def nbytes(self, comm: Comm) -> int:
        sides = ((self.inputs, self.input_dtype), (self.deltas, self.delta_dtype))
        return sum(torch.Size(shape).numel() * comm.wire_dtype(dtype).itemsize for shape, dtype in sides)

    def numbers(self) -> list[int]:
        """As integers, to be compared: the largest of each, over the workers, has room for all."""
        return [DTYPES.index(self.input_dtype), DTYPES.index(self.delta_dtype), *self.inputs, *self.deltas]

    @classmethod
    def of(cls, numbers: list[int], rule: GradientProduct) -> "Form":
        first, second, *sizes = numbers
        split = rule.dims[0]
        return cls(tuple(sizes[:split]), tuple(sizes[split:]), DTYPES[first], DTYPES[second])


@dataclass
class Use:
    """Where a weight of the layout was used, and with what."""

    weight: int
    rule: GradientProduct
    inputs: Tensor
    deltas: Tensor

    def form(self) -> Form:
        return Form.like(self.inputs, self.deltas)


@dataclass
class Chain:
    """What lies between the layers of a chain: layer i's output goes through between[i] into layer i + 1."""

    weights: list[Tensor]
    biases: list[Tensor | None]
    between: list[Callable[[Tensor], Tensor]]


@dataclass
class Factors:
    """The gradients of a layout's weights in one step, each the sum over its uses, not multiplied out.

    `formed` holds gradients that exist as such: a weight used outside its layer, or more rows than the product has
    entries. None there means that another worker has one. The list of uses is the same on every worker, be they empty.
    `forms`, once agreed, are the sizes that every worker pads to.
    """

    shapes: tuple[torch.Size, ...]
    uses: list[Use]
    formed: dict[int, Tensor | None] = field(default_factory=dict)
    forms: list[Form] | None = None
    chain: Chain | None = None

    @classmethod
    def linear(cls, inputs: Tensor, deltas: Tensor) -> "Factors":
        """One Linear layer's: inputs [rows, in] and deltas [rows, out]."""
        return cls((torch.Size((deltas.shape[1], inputs.shape[1])),), [Use(0, PRODUCT, inputs, deltas)])

    def of(self, weight: int) -> list[int]:
        """Which uses are this weight's."""
        return [i for i, use in enumerate(self.uses) if use.weight == weight]

    def rows(self, weight: int) -> int:
        """How many rows every worker sends for this weight."""
        assert self.forms is not None
        return sum(self.forms[i].rows for i in self.of(weight))

    def nbytes(self, weight: int, comm: Comm) -> int:
        """How many bytes every worker puts into the exchange of this weight's factors."""
        assert self.forms is not None
        return sum(self.forms[i].nbytes(comm) for i in self.of(weight))

    def right(self, weight: int, p: Tensor) -> Tensor:
        """G @ p for this worker's gradient of one weight, which is not formed."""
        shape, formed = self.shapes[weight], self.formed.get(weight)
        total = p.new_zeros(shape[0], p.shape[1]) if formed is None else formed.reshape(shape[0], -1).to(p.dtype) @ p
        for use in self._filled(weight):
            total += use.rule.right(values(use.inputs, p), use.deltas.to(p.dtype), p, shape)
        return total

    def left(self, weight: int, q: Tensor) -> Tensor:
        """G.T @ q, likewise."""
        shape, formed = self.shapes[weight], self.formed.get(weight)
        width = shape.numel() // shape[0]
        total = q.new_zeros(width, q.shape[1]) if formed is None else formed.reshape(shape[0], -1).to(q.dtype).T @ q
        for use in self._filled(weight):
            total += use.rule.left(values(use.inputs, q), use.deltas.to(q.dtype), q, shape)
        return total

    def multiply(self, weight: int, out: Tensor, scale: float = 1.0) -> None:
        """out = scale * G, in the weight's shape."""
        out.zero_()
        self.add(weight, out, scale)

    def add(self, weight: int, out: Tensor, scale: float = 1.0) -> None:
        """out += scale * G."""
        formed = self.formed.get(weight)
        if formed is not None:
            out.add_(formed, alpha=scale)
        for use in self._filled(weight):
            use.rule.add_gradient(out, values(use.inputs, out), use.deltas.to(out.dtype), scale)

    def _filled(self, weight: int) -> list[Use]:
        return [use for use in self.uses if use.weight == weight and use.inputs.numel()]


def values(inputs: Tensor, like: Tensor) -> Tensor:
    """Inputs in the dtype that `like` is computed in; indices stay indices."""
    return inputs.to(like.dtype) if inputs.is_floating_point() else inputs


def largest(tallies: Iterable[list[int]]) -> list[int]:
    return [max(column) for column in zip(*tallies, strict=True)]


def padded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x` in the corner of a tensor of zeros, where it is smaller."""
    if tuple(x.shape) == shape:
        return x
    if any(have > room for have, room in zip(x.shape, shape, strict=True)):
        raise ValueError(f"a worker has factors of shape {tuple(x.shape)}, more than the {shape} that were agreed")
    room = x.new_zeros(shape)
    room[tuple(slice(0, size) for size in x.shape)] = x
    return room


def stack(uses: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Several uses of one rule as one: their rows under each other."""
    if len(uses) == 1:
        return uses[0]
    sides = []
    for tensors in zip(*uses, strict=True):
        widest = largest([list(t.shape[1:]) for t in tensors]) if tensors[0].dim() > 1 else []
        sides.append(torch.cat([padded(t, (len(t), *widest)) for t in tensors]))
    return sides[0], sides[1]
