"""What a layer's inputs and deltas say about its samples: how the gradient splits into parts, one a sample.

`Parts` of a parameter never lie there all at once unless they are small: they are formed for some samples at a time.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Geometry = tuple[list[int], list[int], list[int], int]  # stride, padding, dilation, groups


class Parts(Protocol):
    """One use of one parameter: how the samples' parts of its gradient are formed."""

    @property
    def samples(self) -> int: ...

    def at_once(self) -> int:
        """Of how many samples the parts are best formed together: few enough for them to stay in the cache."""

    def form(self, some: slice) -> Tensor:
        """The parts of some samples: [len(some), *parameter.shape]."""

    def total(self) -> Tensor:
        """The sum of all parts, the plain way."""

    def add_squares(self, to: Tensor, keep: int) -> bool:
        """to = keep * to + the sum of their squares, where that takes no forming of parts; whether it does.

        A `keep` of 0 ignores what `to` holds, be it NaN.
        """


def wide(x: Tensor) -> Tensor:
    """Squares of half-precision numbers leave their range: float32 at least."""
    return x if x.dtype is torch.float64 else x.float()


@dataclass
class Products:
    """Outer products of deltas and inputs, summed over the sequence: the weight of a linear layer."""

    inputs: Tensor  # [samples, sequence, in]
    deltas: Tensor  # [samples, sequence, out]

    @property
    def samples(self) -> int:
        return self.inputs.shape[0]

    def at_once(self) -> int:
        return 2**15 // (self.inputs.shape[-1] * self.deltas.shape[-1])

    def form(self, some: slice) -> Tensor:
        return torch.bmm(self.deltas[some].mT, self.inputs[some])

    def total(self) -> Tensor:
        return self.deltas.flatten(0, 1).T @ self.inputs.flatten(0, 1)

    def add_squares(self, to: Tensor, keep: int) -> bool:
        if self.inputs.shape[1] != 1:
            return False
        # (y x)^2 = y^2 x^2: without a sequence to sum over first, one more matrix product does.
        to.addmm_(wide(self.deltas[:, 0]).square().T, wide(self.inputs[:, 0]).square(), beta=keep)
        return True


@dataclass
class Patches:
    """The weight of a convolution."""

    inputs: Tensor  # [samples, channels, *space]
    deltas: Tensor
    weight: Tensor
    geometry: Geometry

    @property
    def samples(self) -> int:
        return self.inputs.shape[0]

    def at_once(self) -> int:
        # Calls for small weights take longer to begin than to run; those for large ones are best made apart.
        together = 2**18 // self.weight.numel()
        return together if together >= 4 else 1

    def form(self, some: slice) -> Tensor:
        inputs, deltas, weight, geometry = self.inputs[some], self.deltas[some], self.weight, self.geometry
        n = inputs.shape[0]
        if n > 1:
            # Samples side by side as groups of one convolution: its weight gradient is theirs, apart.
            inputs, deltas = inputs.flatten(0, 1).unsqueeze(0), deltas.flatten(0, 1).unsqueeze(0)
            weight = weight.expand(n, *weight.shape).flatten(0, 1)
            geometry = *geometry[:3], n * geometry[3]
        return convolution_backward(deltas, inputs, weight, geometry, (False, True))[1].view(n, *self.weight.shape)

    def total(self) -> Tensor:
        wanted = (False, True)
        return convolution_backward(self.deltas, self.inputs, self.weight, self.geometry, wanted)[1]

    def add_squares(self, to: Tensor, keep: int) -> bool:
        return False


@dataclass
class Columns:
    """The same as a product of deltas and columns of input: for very many weights at few positions."""

    inputs: Tensor  # [samples, channels, height, width]
    deltas: Tensor
    weight: Tensor
    geometry: Geometry  # of one group

    @property
    def samples(self) -> int:
        return self.inputs.shape[0]

    def at_once(self) -> int:
        return 2**15 // self.weight.numel()

    def form(self, some: slice) -> Tensor:
        parts = torch.bmm(self.deltas[some].flatten(2), self._columns(some).mT)
        return parts.view(-1, *self.weight.shape)

    def total(self) -> Tensor:
        wanted = (False, True)
        return convolution_backward(self.deltas, self.inputs, self.weight, self.geometry, wanted)[1]

    def add_squares(self, to: Tensor, keep: int) -> bool:
        if self.deltas[0, 0].numel() != 1:
            return False
        deltas, columns = self.deltas.flatten(1), self._columns(slice(None)).flatten(1)
        to.view(len(to), -1).addmm_(wide(deltas).square().T, wide(columns).square(), beta=keep)
        return True

    def _columns(self, some: slice) -> Tensor:
        stride, padding, dilation, _ = self.geometry
        places = (tuple(dilation), tuple(padding), tuple(stride))
        return F.unfold(self.inputs[some], tuple(self.weight.shape[2:]), *places)


def convolution_parts(inputs: Tensor, deltas: Tensor, weight: Tensor, geometry: Geometry) -> Patches | Columns:
    """Whichever is faster, as measured on a CPU; columns are only known for planes and one group."""
    positions = deltas[0, 0].numel()
    few = positions == 1 or (positions < 64 and weight.numel() >= 2**20)
    if few and weight.dim() == 4 and geometry[3] == 1:
        return Columns(inputs, deltas, weight, geometry)
    return Patches(inputs, deltas, weight, geometry)


@dataclass
class Rows:
    """Parts that are small enough to lie there formed: biases, and the scales of normalisations."""

    rows: Tensor  # [samples, *parameter.shape]

    @property
    def samples(self) -> int:
        return self.rows.shape[0]

    def at_once(self) -> int:
        return self.samples

    def form(self, some: slice) -> Tensor:
        return self.rows[some]

    def total(self) -> Tensor:
        return self.rows.sum(0)

    def add_squares(self, to: Tensor, keep: int) -> bool:
        squares = wide(self.rows).square().sum(0)
        to.add_(squares) if keep else to.copy_(squares)
        return True


@dataclass
class Tokens:
    """The rows of an embedding that a sample looked up, each as often as it did."""

    ids: Tensor  # [samples, sequence]
    deltas: Tensor  # [samples, sequence, width]
    height: int
    padding: int  # the row that learns nothing; -1 for none

    @property
    def samples(self) -> int:
        return self.ids.shape[0]

    def at_once(self) -> int:
        return 2**15 // (self.height * self.deltas.shape[-1])

    def form(self, some: slice) -> Tensor:
        ids, deltas = self.ids[some], self.deltas[some] * (self.ids[some] != self.padding).unsqueeze(-1)
        parts = deltas.new_zeros(len(ids) * self.height, deltas.shape[-1])
        parts.index_add_(0, self._keys(ids).flatten(), deltas.flatten(0, 1))
        return parts.view(len(ids), self.height, -1)

    def total(self) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(self.deltas, self.ids, self.height, self.padding, False)

    def add_squares(self, to: Tensor, keep: int) -> bool:
        learns = self.ids != self.padding
        deltas = wide(self.deltas[learns])
        # A token that one sample holds twice is one key: its deltas are summed before they are squared.
        keys, place = self._keys(self.ids)[learns].unique(return_inverse=True)
        sums = deltas.new_zeros(len(keys), deltas.shape[-1]).index_add_(0, place, deltas)
        if not keep:
            to.zero_()
        to.index_add_(0, keys % self.height, sums.square_())
        return True

    def _keys(self, ids: Tensor) -> Tensor:
        return ids + self.height * torch.arange(len(ids), device=ids.device).unsqueeze(-1)


def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """The gradients of the input and of the weight, as far as wanted."""
    stride, padding, dilation, groups = geometry
    return torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, [*wanted, False]
    )[:2]
