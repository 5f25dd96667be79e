"""Normalisations: a scale and a bias for each entry of what they normalise."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.capture.layers.operations.entry import operation
from thinwire.capture.layers.operations.sink import Sink, Sums
from thinwire.capture.layers.operations.weighted import Gradients, WeightedFunction

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Affine:
    shape: Shape  # in which weight and bias are laid over the last dimensions

    def forward(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = h * weight.view(self.shape)
        return (y if bias is None else y.add_(bias.view(self.shape))).to(h.dtype)

    def factors(self, h: Tensor, out: Tensor) -> tuple[None, None]:
        return None, None

    def gradients(self, h: Tensor, weight: Tensor, dy: Tensor) -> Gradients:
        aligned = (1,) * (h.dim() - len(self.shape)) + self.shape
        within = tuple(i for i in range(1, h.dim()) if aligned[i] == 1)  # summed over inside one sample
        return Gradients(
            input=lambda: (dy * weight.view(self.shape)).to(h.dtype),
            weight=lambda: Sums(dy * h, within, weight.shape),
            bias=lambda: Sums(dy, within, weight.shape),
        )


def affine(sink: Sink, h: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Shape) -> Tensor:
    """`h * weight + bias` with both viewed as `shape`, which is aligned with the last dimensions of `h`."""
    if weight is None:
        return h
    if h.dim() == len(shape):  # a sample without a batch
        return affine(sink, h.unsqueeze(0), weight, bias, shape).squeeze(0)
    return WeightedFunction.apply(h, weight, bias, _Affine(shape), sink.collector(weight), sink.collector(bias))


@operation(nn.LayerNorm)
def layer_norm(layer: nn.LayerNorm, sink: Sink, input: Tensor) -> Tensor:
    h = F.layer_norm(input, layer.normalized_shape, None, None, layer.eps)
    return affine(sink, h, layer.weight, layer.bias, layer.normalized_shape)


@operation(nn.RMSNorm)
def rms_norm(layer: nn.RMSNorm, sink: Sink, input: Tensor) -> Tensor:
    h = F.rms_norm(input, layer.normalized_shape, None, layer.eps)
    return affine(sink, h, layer.weight, None, layer.normalized_shape)


@operation(nn.GroupNorm)
def group_norm(layer: nn.GroupNorm, sink: Sink, input: Tensor) -> Tensor:
    h = F.group_norm(input, layer.num_groups, None, None, layer.eps)
    return affine(sink, h, layer.weight, layer.bias, (-1,) + (1,) * (input.dim() - 2))


@operation(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(layer: _BatchNorm, sink: Sink, input: Tensor) -> Tensor:
    """A heuristic: batch statistics couple the samples, so no part belongs to one sample alone.

    The parts taken here, delta times normalised input, still add up to the gradient.
    """
    layer._check_input_dim(input)
    momentum = layer.momentum
    if layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if momentum is None:  # a plain average over all batches
            momentum = 1.0 / float(layer.num_batches_tracked)
    now = layer.training or layer.running_mean is None
    running = (layer.running_mean, layer.running_var) if layer.track_running_stats or not now else (None, None)
    h = F.batch_norm(input, *running, None, None, now, momentum or 0.0, layer.eps)
    return affine(sink, h, layer.weight, layer.bias, (-1,) + (1,) * (input.dim() - 2))
