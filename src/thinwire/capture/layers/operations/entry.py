"""The table of layer kinds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from thinwire.core.products import GradientProduct

Forward = Callable[..., Any]  # (layer, sink, *what the layer's forward takes) -> what it returns
Products = dict[str, GradientProduct]  # by attribute


@dataclass(frozen=True)
class Operation:
    """One kind of layer.

    forward: its forward pass, which tells a sink of each use of a parameter. products: which of a layer's weights have
    gradients that are products, and which. refuses: whether this very layer does what its kind does not. unrolls: its
    forward runs step by step what torch runs at once, so it is used only when asked for.
    """

    forward: Forward
    products: Callable[[Any], Products]
    refuses: Callable[[Any], bool]
    unrolls: bool


OPERATIONS: dict[type[nn.Module] | str, Operation] = {}  # a class, or its full name where it may not be installed


def operation(
    *kinds: type[nn.Module] | str,
    products: Callable[[Any], Products] = lambda layer: {},
    refuses: Callable[[Any], bool] = lambda layer: False,
    unrolls: bool = False,
) -> Callable[[Forward], Forward]:
    """Enter a forward pass for these kinds of layers."""

    def enter(forward: Forward) -> Forward:
        OPERATIONS.update(dict.fromkeys(kinds, Operation(forward, products, refuses, unrolls)))
        return forward

    return enter


def operation_of(layer: nn.Module, *, unroll: bool = False) -> Operation | None:
    """The entry for this very layer; None where it has none, or does what the entry does not."""
    if "forward" in vars(layer):
        return None
    kinds: Any = type(layer).__mro__
    for base in kinds:
        for name in _names(base):
            entry = OPERATIONS.get(name)
            # A subclass with a forward of its own is another kind of layer.
            if entry is not None and type(layer).forward is base.forward:
                return None if entry.refuses(layer) or (entry.unrolls and not unroll) else entry
    return None


def _names(kind: Any) -> Iterator[Any]:
    yield kind
    yield f"{kind.__module__}.{kind.__qualname__}"
