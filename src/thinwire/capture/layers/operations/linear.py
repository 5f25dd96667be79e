"""Linear layers, with any leading dimensions."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from thinwire.capture.layers.operations.entry import operation
from thinwire.capture.layers.operations.sink import (
    PLAIN,
    AsFactors,
    Sink,
    Sums,
    autocast,
    autocast_as,
    rows_of,
    sequences_of,
    wide,
)
from thinwire.capture.layers.operations.weighted import Gradients, WeightedFunction
from thinwire.core.factors import Form
from thinwire.core.products import PRODUCT, GradientProduct


@dataclass
class Products:
    """Outer products of deltas and inputs, summed over the sequence."""

    inputs: Tensor  # [samples, sequence, in]
    deltas: Tensor  # [samples, sequence, out]

    @property
    def samples(self) -> int:
        return self.inputs.shape[0]

    def at_once(self) -> int:
        return 2**15 // max(1, self.inputs.shape[-1] * self.deltas.shape[-1])

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

    def factors(self) -> AsFactors:
        return PRODUCT, self.inputs.flatten(0, 1), self.deltas.flatten(0, 1)


@dataclass(frozen=True)
class _Linear:
    """`across`: the weight is [in, out], and so its gradient is the product with the two sides exchanged."""

    across: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix = autocast_as(x, weight)
        return F.linear(x, matrix.T if self.across else matrix, autocast_as(x, bias))

    def factors(self, x: Tensor, out: Tensor) -> tuple[GradientProduct, Form]:
        sides = (rows_of(out), rows_of(x)) if self.across else (rows_of(x), rows_of(out))
        return PRODUCT, Form.like(*sides)

    def gradients(self, x: Tensor, weight: Tensor, dy: Tensor) -> Gradients:
        inputs, deltas, matrix = sequences_of(x), sequences_of(dy), weight.T if self.across else weight
        return Gradients(
            input=lambda: dy @ matrix.to(dy.dtype),
            weight=lambda: Products(deltas, inputs) if self.across else Products(inputs, deltas),
            bias=lambda: Sums(deltas, (1,), deltas.shape[2:]),
        )


def linear(sink: Sink, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, across: bool = False) -> Tensor:
    """`F.linear`, or with the weight `across` x @ weight + bias."""
    to_weight, to_bias = sink.collector(weight), sink.collector(bias)
    if to_weight is PLAIN and to_bias is PLAIN:
        return F.linear(x, weight.T if across else weight, bias)
    return WeightedFunction.apply(autocast(x), weight, bias, _Linear(across), to_weight, to_bias)


def _read_by_others(layer: nn.Linear) -> bool:
    return isinstance(layer, NonDynamicallyQuantizableLinear)  # MultiheadAttention's, which never calls it


@operation(nn.Linear, products=lambda layer: {"weight": PRODUCT}, refuses=_read_by_others)
def linear_layer(layer: nn.Linear, sink: Sink, input: Tensor) -> Tensor:
    return linear(sink, input, layer.weight, layer.bias)


@operation("transformers.pytorch_utils.Conv1D", products=lambda layer: {"weight": PRODUCT})
def transformers_conv1d(layer: Any, sink: Sink, x: Tensor) -> Tensor:
    """Hugging Face's GPT-2 and its kin: a Linear with its weight the other way round."""
    return linear(sink, x, layer.weight, layer.bias, across=True)
