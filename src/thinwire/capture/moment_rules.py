"""How each layer type splits the gradient of its parameters into the parts of the samples.

A rule is a layer's forward pass, written with four functions: `linear`, `convolution`, `embedding` and
`affine`. Each is an autograd Function that computes the same output as torch's own and, on the way back,
hands the layer's input and the gradient of its output to a `Call`, as `Parts`. Being a Function matters
three times: its backward runs before the gradient reaches the parameter, so the squares are complete when
DDP looks at it; what it saves is saved for backward, so checkpointing neither keeps activations alive nor
counts them twice; and the per-sample products, formed once, give the gradient and its squares.

The samples of a batch lie along the first dimension of what a layer is given.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from thinwire.capture.moment_parts import (
    Geometry,
    Parts,
    Products,
    Rows,
    Tokens,
    convolution_backward,
    convolution_parts,
)

Names = tuple[str | None, ...]
Shape = tuple[int, ...]
Context = Any  # what autograd hands a Function


class Call(Protocol):
    """One call of a layer, seen by whoever collects the squares."""

    def names(self, *parameters: Tensor | None) -> Names:
        """The names of parameters used here, None for one that is not watched; notes the use."""

    def gradient(self, name: str | None, parts: Parts) -> Tensor:
        """Collect the squares of `parts` for the parameter `name`, and return their sum."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, call: Call, names: Names, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.call, ctx.names = call, names
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        to_input, to_weight, to_bias = ctx.needs_input_grad[2:]
        dx = dy @ weight if to_input else None
        inputs, deltas = _sequences(x), _sequences(dy)
        dw = ctx.call.gradient(ctx.names[0], Products(inputs, deltas)) if to_weight else None
        db = ctx.call.gradient(ctx.names[1], Rows(_summed(deltas))) if to_bias else None
        return None, None, dx, dw, db


def _summed(deltas: Tensor) -> Tensor:
    """Over the sequence; where there is none, torch's sum would take long to find out."""
    return deltas[:, 0] if deltas.shape[1] == 1 else deltas.sum(1)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, call: Call, names: Names, geometry: Geometry, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.call, ctx.names, ctx.geometry = call, names, geometry
        ctx.save_for_backward(x, weight)
        stride, padding, dilation, groups = geometry
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        to_input, to_weight, to_bias = ctx.needs_input_grad[3:]
        dx = convolution_backward(dy, x, weight, ctx.geometry, (True, False))[0] if to_input else None
        parts = convolution_parts(x, dy.contiguous(), weight, ctx.geometry)
        dw = ctx.call.gradient(ctx.names[0], parts) if to_weight else None
        db = ctx.call.gradient(ctx.names[1], Rows(dy.flatten(2).sum(2))) if to_bias else None
        return None, None, None, dx, dw, db


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, call: Call, names: Names, ids: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.call, ctx.names, ctx.height, ctx.padding = call, names, len(weight), padding
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Any, ...]:
        (ids,) = ctx.saved_tensors
        ids = ids.reshape(len(ids), -1) if ids.dim() else ids.reshape(1, 1)
        parts = Tokens(ids, dy.reshape(*ids.shape, dy.shape[-1]), ctx.height, ctx.padding)
        return None, None, None, ctx.call.gradient(ctx.names[0], parts), None


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, call: Call, names: Names, shape: Shape, h: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.call, ctx.names, ctx.shape = call, names, shape
        ctx.save_for_backward(h, weight)
        y = h * weight.view(shape)
        return (y if bias is None else y.add_(bias.view(shape))).to(h.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Any, ...]:
        h, weight = ctx.saved_tensors
        to_input, to_weight, to_bias = ctx.needs_input_grad[3:]
        dh = (dy * weight.view(ctx.shape)).to(h.dtype) if to_input else None

        aligned = (1,) * (h.dim() - len(ctx.shape)) + ctx.shape
        within = [i for i in range(1, h.dim()) if aligned[i] == 1]  # summed over inside one sample

        def rows(x: Tensor) -> Rows:
            return Rows((x.sum(within) if within else x).reshape(len(x), *weight.shape))

        dw = ctx.call.gradient(ctx.names[0], rows(dy * h)) if to_weight else None
        db = ctx.call.gradient(ctx.names[1], rows(dy)) if to_bias else None
        return None, None, None, dh, dw, db


def linear(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Linear.apply(call, call.names(weight, bias), *_autocast(x, weight, bias))


def convolution(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    return _Convolution.apply(call, call.names(weight, bias), geometry, *_autocast(x, weight, bias))


def embedding(call: Call, ids: Tensor, weight: Tensor, padding: int = -1) -> Tensor:
    return _Embedding.apply(call, call.names(weight), ids, weight, padding)


def affine(call: Call, h: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Shape) -> Tensor:
    """`h * weight + bias` with both viewed as `shape`, which is aligned with the last dimensions of `h`."""
    if weight is None:
        return h
    if h.dim() == len(shape):  # a sample without a batch
        return affine(call, h.unsqueeze(0), weight, bias, shape).squeeze(0)
    return _Affine.apply(call, call.names(weight, bias), shape, h, weight, bias)


def _sequences(x: Tensor) -> Tensor:
    """[samples, sequence, width], whatever came."""
    if x.dim() < 3:
        return x.reshape(-1, 1, x.shape[-1])
    return x.reshape(len(x), -1, x.shape[-1])


def _autocast(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """What torch's own linear and convolution would be given: a Function is beyond autocast's reach."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype is torch.float64:
        return x, *parameters
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), *(None if p is None else p.to(dtype) for p in parameters)


def linear_layer(layer: nn.Linear, call: Call, input: Tensor) -> Tensor:
    return linear(call, input, layer.weight, layer.bias)


def convolution_layer(layer: _ConvNd, call: Call, input: Tensor) -> Tensor:
    space = len(layer.kernel_size)
    if input.dim() == space + 1:  # a sample without a batch
        return convolution_layer(layer, call, input.unsqueeze(0)).squeeze(0)
    both = _both_sides(layer)
    padding = both[::2]
    if layer.padding_mode != "zeros" or padding != both[1::2]:
        # F.pad wants the last dimension first, and "constant" for zeros.
        sides = [side for i in reversed(range(space)) for side in both[2 * i : 2 * i + 2]]
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        input, padding = F.pad(input, sides, mode=mode), [0] * space
    geometry = list(layer.stride), padding, list(layer.dilation), layer.groups
    return convolution(call, input, layer.weight, layer.bias, geometry)


def _both_sides(layer: _ConvNd) -> list[int]:
    """How much is padded before and after, dimension by dimension."""
    if layer.padding == "same":
        whole = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [side for w in whole for side in (w // 2, w - w // 2)]
    if layer.padding == "valid":
        return [0] * (2 * len(layer.kernel_size))
    return [int(side) for p in layer.padding for side in (p, p)]


def embedding_layer(layer: nn.Embedding, call: Call, input: Tensor) -> Tensor:
    padding = -1 if layer.padding_idx is None else layer.padding_idx
    return embedding(call, input, layer.weight, padding)


def layer_norm(layer: nn.LayerNorm, call: Call, input: Tensor) -> Tensor:
    h = F.layer_norm(input, layer.normalized_shape, None, None, layer.eps)
    return affine(call, h, layer.weight, layer.bias, layer.normalized_shape)


def rms_norm(layer: nn.RMSNorm, call: Call, input: Tensor) -> Tensor:
    h = F.rms_norm(input, layer.normalized_shape, None, layer.eps)
    return affine(call, h, layer.weight, None, layer.normalized_shape)


def group_norm(layer: nn.GroupNorm, call: Call, input: Tensor) -> Tensor:
    h = F.group_norm(input, layer.num_groups, None, None, layer.eps)
    return affine(call, h, layer.weight, layer.bias, (-1,) + (1,) * (input.dim() - 2))


def batch_norm(layer: _BatchNorm, call: Call, input: Tensor) -> Tensor:
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
    return affine(call, h, layer.weight, layer.bias, (-1,) + (1,) * (input.dim() - 2))


def _gates(layer: nn.RNNCellBase, call: Call, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return (
        linear(call, x, layer.weight_ih, layer.bias_ih),
        linear(call, h, layer.weight_hh, layer.bias_hh),
    )


def rnn_cell(layer: nn.RNNCell, call: Call, input: Tensor, hx: Tensor | None = None) -> Tensor:
    from_x, from_h = _gates(layer, call, input, _start(layer, input) if hx is None else hx)
    return torch.tanh(from_x + from_h) if layer.nonlinearity == "tanh" else torch.relu(from_x + from_h)


def lstm_cell(
    layer: nn.LSTMCell, call: Call, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    h, c = (_start(layer, input), _start(layer, input)) if hx is None else hx
    from_x, from_h = _gates(layer, call, input, h)
    entry, keep, new, show = (from_x + from_h).chunk(4, -1)
    c = keep.sigmoid() * c + entry.sigmoid() * new.tanh()
    return show.sigmoid() * c.tanh(), c


def gru_cell(layer: nn.GRUCell, call: Call, input: Tensor, hx: Tensor | None = None) -> Tensor:
    h = _start(layer, input) if hx is None else hx
    from_x, from_h = _gates(layer, call, input, h)
    reset_x, update_x, new_x = from_x.chunk(3, -1)
    reset_h, update_h, new_h = from_h.chunk(3, -1)
    update = (update_x + update_h).sigmoid()
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return new + update * (h - new)


def _start(layer: nn.RNNCellBase, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], layer.hidden_size)


Rule = Callable[..., Any]  # (layer, call, *what the layer's forward takes) -> what it returns

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear_layer,
    nn.Conv1d: convolution_layer,
    nn.Conv2d: convolution_layer,
    nn.Conv3d: convolution_layer,
    nn.Embedding: embedding_layer,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
    nn.RNNCell: rnn_cell,
    nn.LSTMCell: lstm_cell,
    nn.GRUCell: gru_cell,
}


def rule_of(layer: nn.Module) -> Rule | None:
    """The rule for this very layer; None where it does what the rule of its type does not."""
    if isinstance(layer, nn.Embedding) and (layer.max_norm or layer.scale_grad_by_freq or layer.sparse):
        return None
    for kind, rule in RULES.items():
        # A subclass or a layer with a forward of its own is another kind of layer.
        if isinstance(layer, kind) and type(layer).forward is kind.forward and "forward" not in vars(layer):
            return rule
    return None
