"""How each kind of layer makes its weight's gradient out of what went in and what came back."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class GradientProduct(ABC):
    """How one kind of layer makes its weight's gradient G out of inputs and deltas.

    G is seen as a matrix: the weight's first dimension by all others.
    """

    @property
    @abstractmethod
    def dims(self) -> tuple[int, int]:
        """How many dimensions inputs and deltas have; the first is the one uses are stacked along."""

    @abstractmethod
    def add_gradient(self, out: Tensor, inputs: Tensor, deltas: Tensor, scale: float) -> None:
        """out += scale * G, in the weight's shape."""

    @abstractmethod
    def right(self, inputs: Tensor, deltas: Tensor, p: Tensor, shape: torch.Size) -> Tensor:
        """G @ p."""

    @abstractmethod
    def left(self, inputs: Tensor, deltas: Tensor, q: Tensor, shape: torch.Size) -> Tensor:
        """G.T @ q."""


@dataclass(frozen=True)
class Product(GradientProduct):
    """Linear: inputs [rows, in] and deltas [rows, out]."""

    dims = (2, 2)

    def add_gradient(self, out: Tensor, inputs: Tensor, deltas: Tensor, scale: float) -> None:
        out.view(len(out), -1).addmm_(deltas.T, inputs, alpha=scale)

    def right(self, inputs: Tensor, deltas: Tensor, p: Tensor, shape: torch.Size) -> Tensor:
        return deltas.T @ (inputs @ p)

    def left(self, inputs: Tensor, deltas: Tensor, q: Tensor, shape: torch.Size) -> Tensor:
        return inputs.T @ (deltas @ q)


PRODUCT = Product()


@dataclass(frozen=True)
class Convolution(GradientProduct):
    """Conv1d, 2d, 3d: raw inputs [images, channels, ...] and deltas [images, out, ...].

    The patches under the kernel, k times the inputs, are never sent and never laid out: a convolution with the columns
    of `p` as kernels applies them, and the weight gradient of a convolution applies their transpose.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def dims(self) -> tuple[int, int]:
        return len(self.stride) + 2, len(self.stride) + 2

    def backward(self, deltas: Tensor, inputs: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Any, ...]:
        """PyTorch's own gradient of a convolution: of its inputs, its weight, its bias, as `mask` asks."""
        where = (list(self.stride), list(self.padding), list(self.dilation), False, [0] * len(self.stride))
        bias = [weight.shape[0]] if mask[2] else None
        return torch.ops.aten.convolution_backward(deltas, inputs, weight, bias, *where, self.groups, mask)

    def add_gradient(self, out: Tensor, inputs: Tensor, deltas: Tensor, scale: float) -> None:
        if len(inputs):
            out.add_(self._weight_gradient(inputs, deltas, out.shape), alpha=scale)

    def right(self, inputs: Tensor, deltas: Tensor, p: Tensor, shape: torch.Size) -> Tensor:
        groups, rank = self.groups, p.shape[1]
        kernels = p.T.reshape(rank, *shape[1:]).repeat(groups, *(1 for _ in shape[1:]))
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]
        seen = convolve(inputs, kernels, None, self.stride, self.padding, self.dilation, groups)
        seen = seen.reshape(len(inputs), groups, rank, -1)
        deltas = deltas.reshape(len(deltas), groups, shape[0] // groups, -1)
        return torch.einsum("ngol,ngrl->gor", deltas, seen).reshape(shape[0], rank)

    def left(self, inputs: Tensor, deltas: Tensor, q: Tensor, shape: torch.Size) -> Tensor:
        groups, rank = self.groups, q.shape[1]
        split = deltas.reshape(len(deltas), groups, shape[0] // groups, -1)
        mixed = torch.einsum("ngol,gor->ngrl", split, q.view(groups, -1, rank))
        mixed = mixed.reshape(len(deltas), groups * rank, *deltas.shape[2:])
        gradient = self._weight_gradient(inputs, mixed, torch.Size((groups * rank, *shape[1:])))
        return gradient.reshape(groups, rank, -1).sum(0).T

    def _weight_gradient(self, inputs: Tensor, deltas: Tensor, shape: torch.Size) -> Tensor:
        return self.backward(deltas, inputs, inputs.new_empty(1).expand(shape), [False, True, False])[1]


@dataclass(frozen=True)
class Lookup(GradientProduct):
    """Embedding: indices [rows] and deltas [rows, width]; the indices stand for one-hot rows."""

    dims = (1, 2)

    def add_gradient(self, out: Tensor, inputs: Tensor, deltas: Tensor, scale: float) -> None:
        out.index_add_(0, inputs, deltas, alpha=scale)

    def right(self, inputs: Tensor, deltas: Tensor, p: Tensor, shape: torch.Size) -> Tensor:
        return p.new_zeros(shape[0], p.shape[1]).index_add_(0, inputs, deltas @ p)

    def left(self, inputs: Tensor, deltas: Tensor, q: Tensor, shape: torch.Size) -> Tensor:
        return deltas.T @ q[inputs.long()]


LOOKUP = Lookup()
