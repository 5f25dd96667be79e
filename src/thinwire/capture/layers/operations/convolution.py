"""Convolutions of one to three dimensions: groups, strides, dilation, any padding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from thinwire.capture.layers.operations.entry import Products, operation
from thinwire.capture.layers.operations.sink import PLAIN, AsFactors, Sink, Sums, autocast, autocast_as, wide
from thinwire.capture.layers.operations.weighted import Gradients, WeightedFunction
from thinwire.core.factors import Form
from thinwire.core.products import Convolution, GradientProduct

CONVOLVE: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
INPUT_ONLY, WEIGHT_ONLY = [True, False, False], [False, True, False]


@dataclass
class Patches:
    """The weight of a convolution."""

    inputs: Tensor  # [samples, channels, *space]
    deltas: Tensor
    weight: Tensor
    geometry: Convolution

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
            geometry = Convolution(geometry.stride, geometry.padding, geometry.dilation, n * geometry.groups)
        return geometry.backward(deltas, inputs, weight, WEIGHT_ONLY)[1].view(n, *self.weight.shape)

    def total(self) -> Tensor:
        gradient: Tensor = self.geometry.backward(self.deltas, self.inputs, self.weight, WEIGHT_ONLY)[1]
        return gradient

    def add_squares(self, to: Tensor, keep: int) -> bool:
        return False

    def factors(self) -> AsFactors:
        return self.geometry, self.inputs, self.deltas


@dataclass
class Columns(Patches):
    """The same as a product of deltas and columns of input: for very many weights at few positions, in one group."""

    def at_once(self) -> int:
        return 2**15 // self.weight.numel()

    def form(self, some: slice) -> Tensor:
        parts = torch.bmm(self.deltas[some].flatten(2), self._columns(some).mT)
        return parts.view(-1, *self.weight.shape)

    def add_squares(self, to: Tensor, keep: int) -> bool:
        if self.deltas[0, 0].numel() != 1:
            return False
        deltas, columns = self.deltas.flatten(1), self._columns(slice(None)).flatten(1)
        to.view(len(to), -1).addmm_(wide(deltas).square().T, wide(columns).square(), beta=keep)
        return True

    def _columns(self, some: slice) -> Tensor:
        places = (self.geometry.dilation, self.geometry.padding, self.geometry.stride)
        return F.unfold(self.inputs[some], tuple(self.weight.shape[2:]), *places)


def convolution_parts(inputs: Tensor, deltas: Tensor, weight: Tensor, geometry: Convolution) -> Patches:
    """Whichever is faster, as measured on a CPU; columns are only known for planes and one group."""
    positions = deltas[0, 0].numel() if len(deltas) else 0
    few = positions == 1 or (positions < 64 and weight.numel() >= 2**20)
    kind = Columns if few and weight.dim() == 4 and geometry.groups == 1 else Patches
    return kind(inputs, deltas, weight, geometry)


@dataclass(frozen=True)
class _Convolution:
    geometry: Convolution

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _convolved(x, autocast_as(x, weight), autocast_as(x, bias), self.geometry)

    def factors(self, x: Tensor, out: Tensor) -> tuple[GradientProduct, Form]:
        return self.geometry, Form.like(x, out)

    def gradients(self, x: Tensor, weight: Tensor, dy: Tensor) -> Gradients:
        kernel, deltas = weight.to(dy.dtype), dy.contiguous()
        return Gradients(
            input=lambda: self.geometry.backward(deltas, x, kernel, INPUT_ONLY)[0],
            weight=lambda: convolution_parts(x, deltas, kernel, self.geometry),
            bias=lambda: Sums(deltas.flatten(2), (2,), deltas.shape[1:2]),
        )


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Convolution) -> Tensor:
    where = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    return CONVOLVE[len(geometry.stride) - 1](x, weight, bias, *where)


def convolution(sink: Sink, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Convolution) -> Tensor:
    to_weight, to_bias = sink.collector(weight), sink.collector(bias)
    if to_weight is PLAIN and to_bias is PLAIN:
        return _convolved(x, weight, bias, geometry)
    return WeightedFunction.apply(autocast(x), weight, bias, _Convolution(geometry), to_weight, to_bias)


def _product(layer: _ConvNd) -> Products:
    return {"weight": geometry_of(layer)}


@operation(nn.Conv1d, nn.Conv2d, nn.Conv3d, products=_product)
def convolution_layer(layer: _ConvNd, sink: Sink, input: Tensor) -> Tensor:
    space = len(layer.kernel_size)
    if input.dim() == space + 1:  # a sample without a batch
        return convolution_layer(layer, sink, input.unsqueeze(0)).squeeze(0)
    if _pads_apart(layer):
        # F.pad wants the last dimension first, and "constant" for zeros.
        both = _both_sides(layer)
        sides = [side for i in reversed(range(space)) for side in both[2 * i : 2 * i + 2]]
        input = F.pad(input, sides, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    return convolution(sink, input, layer.weight, layer.bias, geometry_of(layer))


def geometry_of(layer: Any) -> Convolution:
    """What a layer's convolution looks like; padding that it cannot say (reflected, uneven) is laid on before."""
    padding = (0,) * len(layer.stride) if _pads_apart(layer) else tuple(_both_sides(layer)[::2])
    return Convolution(tuple(layer.stride), padding, tuple(layer.dilation), layer.groups)


def _pads_apart(layer: _ConvNd) -> bool:
    both = _both_sides(layer)
    return layer.padding_mode != "zeros" or both[::2] != both[1::2]


def _both_sides(layer: _ConvNd) -> list[int]:
    """How much is padded before and after, dimension by dimension."""
    if layer.padding == "same":
        whole = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [side for w in whole for side in (w // 2, w - w // 2)]
    if layer.padding == "valid":
        return [0] * (2 * len(layer.kernel_size))
    return [int(side) for p in layer.padding for side in (p, p)]
