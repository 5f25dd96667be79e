"""One use of a layer's weight and bias, as autograd sees it: the same for every kind of layer that has the two.

What a kind does (`Weighted`) stands beside its like; who is told of it, and in which order, stands here once.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from thinwire.capture.layers.operations.sink import Collector, Parts, not_a_view
from thinwire.core.factors import Form
from thinwire.core.products import GradientProduct


class Gradients(NamedTuple):
    """How each gradient of a use is made, by whoever wants it."""

    input: Callable[[], Tensor]
    weight: Callable[[], Parts]
    bias: Callable[[], Parts]


class Weighted(Protocol):
    """What a kind of layer does with its input, its weight and its bias."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def factors(self, x: Tensor, out: Tensor) -> tuple[GradientProduct | None, Form | None]:
        """The product that the weight's gradient is, and the form of its factors; None where it is none."""

    def gradients(self, x: Tensor, weight: Tensor, dy: Tensor) -> Gradients: ...


def differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For backward passes that hand gradients on as parts: what became of them cannot be differentiated again."""
    once: Callable[..., Any] = once_differentiable(backward)

    @wraps(backward)
    def checked(ctx: Any, *deltas: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a gradient was asked for with create_graph=True (a gradient penalty, a second derivative), and this "
                "method takes the gradients of layers apart, which works once: wrap this model with a method for whole "
                "gradients, as ErrorFeedback(TopK(0.01)), or leave the second derivative out"
            )
        return once(ctx, *deltas)

    return checked


class WeightedFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: Weighted,
        to_weight: Collector,
        to_bias: Collector,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kind, ctx.to_weight, ctx.to_bias = kind, to_weight, to_bias
        out = not_a_view(kind.forward(x, weight, bias))
        to_weight.used(*kind.factors(x, out), raw=not ctx.needs_input_grad[0])
        to_bias.used()
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        made = ctx.kind.gradients(x, weight, dy)
        dx = dw = db = None
        if ctx.needs_input_grad[1]:  # first, so that its exchange runs beside the rest
            dw = ctx.to_weight.gradient(made.weight())
        if ctx.needs_input_grad[0]:
            dx = ctx.to_weight.below(made.input())
        if ctx.needs_input_grad[2]:
            db = ctx.to_bias.gradient(made.bias())
        return dx, dw, db, None, None, None
