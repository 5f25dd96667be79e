"""Embeddings: rows that are looked up."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function

from thinwire.capture.layers.operations.entry import operation
from thinwire.capture.layers.operations.sink import PLAIN, AsFactors, Collector, Sink, not_a_view, wide
from thinwire.capture.layers.operations.weighted import differentiated_once
from thinwire.core.factors import Form
from thinwire.core.products import LOOKUP


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

    def factors(self) -> AsFactors:
        deltas = self.deltas
        if self.padding >= 0:
            deltas = deltas.masked_fill((self.ids == self.padding).unsqueeze(-1), 0)
        return LOOKUP, self.ids.flatten().int(), deltas.flatten(0, 1)

    def _keys(self, ids: Tensor) -> Tensor:
        return ids + self.height * torch.arange(len(ids), device=ids.device).unsqueeze(-1)


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, to_weight: Collector) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.height, ctx.padding, ctx.to_weight = len(weight), padding, to_weight
        out = not_a_view(F.embedding(ids, weight))
        rows = ids.numel()
        to_weight.used(LOOKUP, Form((rows,), (rows, out.shape[-1]), torch.int32, out.dtype), raw=True)
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        ids = ids.reshape(len(ids) if ids.dim() else 1, math.prod(ids.shape[1:]))
        parts = Tokens(ids, dy.reshape(*ids.shape, dy.shape[-1]), ctx.height, ctx.padding)
        return None, ctx.to_weight.gradient(parts), None, None


def _does_more(layer: nn.Embedding) -> bool:
    return layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse


@operation(nn.Embedding, products=lambda layer: {"weight": LOOKUP}, refuses=_does_more)
def embedding_layer(layer: nn.Embedding, sink: Sink, input: Tensor) -> Tensor:
    to_weight = sink.collector(layer.weight)
    if to_weight is PLAIN:
        return F.embedding(input, layer.weight, layer.padding_idx)
    return _Embedding.apply(input, layer.weight, -1 if layer.padding_idx is None else layer.padding_idx, to_weight)
