"""Layers whose weight gradient is never formed: their backward pass hands out inputs and deltas instead.

A module's class is exchanged for one of these, so parameters, buffers and state_dict keys stay what they are. Copies
and pickles are of the class that was there before. Everything a backward pass needs is kept by autograd itself,
so that checkpointing (either kind) and saved-tensor hooks work as they always do.
"""

import copyreg
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F

from thinwire.capture.slots import Slot
from thinwire.factors import Form
from thinwire.rules import LOOKUP, PRODUCT, Convolution


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, slot: Slot) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.slot, ctx.bias = slot, None if bias is None else bias.dtype
        out = _not_a_view(F.linear(inputs, weight, bias))
        slot.count(PRODUCT, Form.like(_rows(inputs), _rows(out)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        ctx.slot.push(PRODUCT, _rows(inputs), _rows(deltas))
        down = deltas @ weight.to(deltas.dtype) if ctx.needs_input_grad[0] else None
        bias = _rows(deltas).sum(0, dtype=ctx.bias) if ctx.needs_input_grad[2] else None
        return ctx.slot.boundary(down), None, bias, None


class _Conv(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, rule: Convolution, slot: Slot) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.slot, ctx.rule = slot, rule
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(rule.stride) - 1]
        out = _not_a_view(convolve(inputs, weight, bias, rule.stride, rule.padding, rule.dilation, rule.groups))
        slot.count(rule, Form.like(inputs, out))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, deltas: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        ctx.slot.push(ctx.rule, inputs, deltas)
        mask = [ctx.needs_input_grad[0], False, ctx.needs_input_grad[2]]
        down, _, bias = ctx.rule.backward(deltas, inputs, weight.to(deltas.dtype), mask) if any(mask) else (None,) * 3
        return ctx.slot.boundary(down), None, bias, None, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int | None, slot: Slot) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.slot, ctx.padding = slot, padding
        out = _not_a_view(F.embedding(indices, weight, padding))
        rows, width = indices.numel(), out.shape[-1]
        slot.count(LOOKUP, Form((rows,), (rows, width), torch.int32, out.dtype))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, deltas: Tensor) -> tuple[None, ...]:
        (indices,) = ctx.saved_tensors
        if ctx.padding is not None:
            deltas = deltas.masked_fill((indices == ctx.padding).unsqueeze(-1), 0)
        ctx.slot.push(LOOKUP, indices.flatten().int(), deltas.reshape(-1, deltas.shape[-1]))
        return None, None, None, None


@torch.compiler.disable
def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, slot: Slot | None) -> Tensor:
    """`F.linear`, with the weight's gradient left to `slot`."""
    if slot is None or not weight.requires_grad:
        return F.linear(inputs, weight, bias)
    return _Linear.apply(_as_autocast_would(inputs), weight, bias, slot)


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of torch.nn that an exchanged one stands for."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("torch.nn"))


class Factored(nn.Module):
    """What the exchanged classes have in common."""

    factored_slots: dict[str, Slot]  # by attribute; in the instance's __dict__, and not in copies of it

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle is of the class that was there before, and knows nothing of thinwire."""
        state: Any = super().__reduce_ex__(protocol)[2]
        kept = {key: value for key, value in state.items() if key != "factored_slots"}
        return copyreg._reconstructor, (plain_class(type(self)), object, None), kept  # type: ignore[attr-defined]


class FactoredLinear(Factored, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.factored_slots["weight"])


class _FactoredConv(Factored):
    weight: Tensor
    bias: Tensor | None

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        slot, rule = self.factored_slots["weight"], convolution_of(self)
        single = input.dim() == len(rule.stride) + 1
        inputs = _as_autocast_would(input.unsqueeze(0) if single else input)
        if _pads_by_hand(self):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            inputs = F.pad(inputs, self._reversed_padding_repeated_twice, mode)  # type: ignore[arg-type]
        if not self.weight.requires_grad:
            convolve = (F.conv1d, F.conv2d, F.conv3d)[len(rule.stride) - 1]
            out = convolve(inputs, self.weight, self.bias, rule.stride, rule.padding, rule.dilation, rule.groups)
        else:
            out = _Conv.apply(inputs, self.weight, self.bias, rule, slot)
        return out.squeeze(0) if single else out


class FactoredConv1d(_FactoredConv, nn.Conv1d):
    pass


class FactoredConv2d(_FactoredConv, nn.Conv2d):
    pass


class FactoredConv3d(_FactoredConv, nn.Conv3d):
    pass


class FactoredEmbedding(Factored, nn.Embedding):
    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        if not self.weight.requires_grad:
            return F.embedding(input, self.weight, self.padding_idx)
        slot = self.factored_slots["weight"]
        return _Embedding.apply(input, self.weight, self.padding_idx, slot)


def convolution_of(layer: Any) -> Convolution:
    """A convolution's rule; padding that the rule cannot say (reflected, uneven) is laid on before."""
    padding = (0,) * len(layer.stride) if _pads_by_hand(layer) else layer.padding
    return Convolution(tuple(layer.stride), tuple(padding), tuple(layer.dilation), layer.groups)


def _pads_by_hand(layer: Any) -> bool:
    return layer.padding_mode != "zeros" or isinstance(layer.padding, str)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _not_a_view(out: Tensor) -> Tensor:
    """The same memory under a new name: autograd lets nobody change a view in place that a Function returns.

    Some kernels return a view of what they made. What it is a view of is seen by nobody, so there is no harm in it.
    """
    return out.new_empty(0).set_(out) if out._is_view() else out  # type: ignore[call-overload]


def _as_autocast_would(x: Tensor) -> Tensor:
    """What autocast makes of an input, so that it is saved, and sent, in half precision too."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
