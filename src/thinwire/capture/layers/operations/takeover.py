"""Taking over a layer: its class is exchanged for one whose forward tells a sink.

Parameters, buffers, state_dict keys and `isinstance` stay what they are. Copies and pickles are of the class that was
there before, and know nothing of thinwire. Everything a backward pass needs is kept by autograd itself, so that
checkpointing (either kind) and saved-tensor hooks work as they always do.
"""

import copyreg
from functools import cache, wraps
from typing import Any, ClassVar

import torch
from torch import nn

from thinwire.capture.layers.operations.entry import Operation
from thinwire.capture.layers.operations.sink import Sink


class Captured(nn.Module):
    """A layer that tells a sink what goes through it."""

    plain: ClassVar[type[nn.Module]]  # the class that was there before
    captured_by: Sink  # in the instance's __dict__, and not in copies of it

    def __reduce_ex__(self, protocol: Any) -> Any:
        state: Any = super().__reduce_ex__(protocol)[2]
        kept = {key: value for key, value in state.items() if key != "captured_by"}
        return copyreg._reconstructor, (self.plain, object, None), kept  # type: ignore[attr-defined]


def take_over(layer: nn.Module, operation: Operation, sink: Sink) -> None:
    kind: Any = type(layer)
    layer.__class__ = _captured(kind, operation)
    vars(layer)["captured_by"] = sink


def release(layer: nn.Module) -> None:
    """Give a layer its own class back."""
    if isinstance(layer, Captured):
        del vars(layer)["captured_by"]
        layer.__class__ = layer.plain  # type: ignore[assignment]


def give_back(model: nn.Module) -> None:
    """Take the layers of `model` from whoever has them: it is wrapped anew."""
    for layer in model.modules():
        if isinstance(layer, Captured):
            layer.captured_by.give_back()
            release(layer)


@cache
def _captured(kind: type[nn.Module], operation: Operation) -> type[Captured]:
    @torch.compiler.disable  # a sink keeps count on the side, which a compiled graph would leave out
    @wraps(kind.forward)
    def forward(self: Captured, *args: Any, **kwargs: Any) -> Any:
        return operation.forward(self, self.captured_by, *args, **kwargs)

    body = {"forward": forward, "plain": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (Captured, kind), body)
