"""Beside each gradient, the sum of its squared per-sample parts.

Variance-based compression (Tsuzuku et al. 2018) asks, entry by entry, whether the samples of a batch agree. What
it needs is q = sum over samples of part^2, where the parts of all samples add up to the gradient: part = g / B
under a loss that averages over the batch, part = g under one that sums. No assumption about the loss is made
here: q is in units of the squared gradient it stands beside, which is all that the method's test depends on.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.capture.layers.operations import PLAIN, Collector, Parts, operation_of, release, take_over
from thinwire.capture.layers.operations.linear import Products
from thinwire.capture.layers.operations.sink import wide
from thinwire.core.factors import Form
from thinwire.core.products import GradientProduct
from thinwire.step.hooks import ModuleHook

TOLERANCE = 0.01  # how far parts may be from adding up to a gradient: sums in half precision are that rough


class SecondMoments:
    """Collects the squares of all parameters of `model` during its backward passes.

    Each layer of a known kind is taken over; `detach` gives it back. A parameter of no such layer, or whose parts
    do not add up to its gradient, gets the micro-batch estimate instead: the squared gradient of each backward
    pass. It is named in `estimated`, with the reason.

    chunk: of how many samples the parts are formed at once; the fastest number unless told.
    """

    def __init__(self, model: nn.Module, chunk: int | None = None):
        self.chunk = chunk
        self.estimated: dict[str, str] = {}
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names: dict[Tensor, str] = {p: name for name, p in self._parameters.items()}
        self._squares: dict[str, Tensor] = {}
        self._flat: dict[tuple[str, ...], Tensor] = {}  # vectors that squares lie in
        self._stale: set[str] = set()  # squares of a step that is over: the next are written over them
        self._now = Pass()
        self._open: list[Pass] = []  # in which a parameter waits for its other uses
        self._without_parts: set[str] = set()
        self._trusted: set[str] = set()  # parameters whose parts were seen to add up to the gradient
        self._explained: dict[str, Tensor | None] = {}  # sum of parts since the gradient last arrived

        self._layers: list[nn.Module] = []
        for layer in model.modules():
            own = [self.names[p] for p in layer.parameters(recurse=False) if p in self.names]
            if own and (operation := operation_of(layer)):
                take_over(layer, operation, self)
                self._layers.append(layer)
            else:
                for name in own:
                    self._give_up(name, f"{type(layer).__name__} has no rule")
        self._hooks = [model.register_forward_pre_hook(ModuleHook(self._begin), with_kwargs=True, prepend=True)]
        self._hooks += [p.register_hook(self._arrival_of(name)) for p, name in self.names.items()]

    def squares(self, name: str) -> Tensor:
        """q of this parameter since the last `clear`, in float32 at least; zeros if it was not used."""
        for one in list(self._open):
            self._add_together(name, one)
        return self._store(name)

    def side_by_side(self, names: tuple[str, ...]) -> Tensor:
        """The squares of some parameters as one vector, in which they are collected from then on."""
        apart = [self.squares(name) for name in names]
        flat = self._flat.get(names)
        if flat is None or not _lie_in(flat, apart):
            flat = self._flat[names] = torch.cat([squares.flatten() for squares in apart])
            views = flat.split([squares.numel() for squares in apart])
            self._squares |= {name: view.view_as(s) for name, view, s in zip(names, views, apart, strict=True)}
        return flat

    def clear(self) -> None:
        """Begin anew, after a step."""
        self._stale = set(self._squares)
        self._open.clear()
        self._explained.clear()

    def metrics(self) -> dict[str, float]:
        """The parameters whose squares are estimates, by name."""
        return {f"estimated.{name}": 1.0 for name in self.estimated}

    def detach(self) -> None:
        """Give the layers their own forward back."""
        for layer in self._layers:
            release(layer)
        for hook in self._hooks:
            hook.remove()
        self._layers, self._hooks = [], []

    give_back = detach

    # ── the forward pass ───────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not in_backward():
            tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim())
            self._now = Pass(samples=next(map(len, tensors), None))

    def collector(self, parameter: Tensor | None) -> Collector:
        name = None if parameter is None else self.names.get(parameter)
        return PLAIN if name is None else _Squares(self, self._now, name)

    # ── the backward pass ──────────────────────────────────────────────────────────────────────────────────────

    def gradient(self, one: "Pass", name: str, parts: Parts) -> Tensor:
        """The sum of `parts`; their squares are collected once all uses of the parameter are there."""
        if name in self._without_parts:
            return parts.total()
        if one.samples not in (None, parts.samples):
            reason = f"a batch of {one.samples} reached it as {parts.samples} rows, each counted as a sample"
            self.estimated.setdefault(name, reason)
        if one.uses[name] < 2:
            total = self._add(name, parts)
        else:
            total = parts.total()
            one.waiting[name].append(parts)
            if len(one.waiting[name]) == one.uses[name]:
                self._add_together(name, one)
            elif one not in self._open:
                self._open.append(one)
        if name in self._trusted:
            self._explained[name] = None
        else:
            before = self._explained.get(name)
            self._explained[name] = total if before is None else before + total
        return total

    def _add(self, name: str, parts: Parts) -> Tensor:
        if name in self._stale:
            self._stale.discard(name)
            return add_squares(self._squares[name], parts, self.chunk, keep=0)
        return add_squares(self._store(name), parts, self.chunk)

    def _add_together(self, name: str, one: "Pass") -> None:
        by_samples: defaultdict[int, list[Parts]] = defaultdict(list)
        for parts in one.waiting.pop(name, []):
            by_samples[parts.samples].append(parts)
        if len(by_samples) > 1:
            reason = f"used with batches of {' and '.join(map(str, by_samples))}, whose samples cannot be paired"
            self.estimated.setdefault(name, reason)
        for uses in by_samples.values():
            add_squares_of_sums(self._store(name), uses, self.chunk)

    def _arrival_of(self, name: str) -> Callable[[Tensor], None]:
        """Runs when the gradient of one backward pass is whole, before it is added to `.grad`."""

        def arrival(gradient: Tensor) -> None:
            seen = name in self._explained
            explained = self._explained.pop(name, None)
            if name not in self._without_parts:
                if not seen and bool(gradient.any()):
                    self._give_up(name, "used outside the layer that owns it")
                elif explained is not None and not adds_up(explained, gradient):
                    self._give_up(name, "its layer explains only a part of its gradient: used elsewhere too")
                elif explained is not None and bool(explained.isfinite().all()):
                    self._trusted.add(name)
            if name in self._without_parts:
                self._store(name).add_(wide(gradient).square())

        return arrival

    def _give_up(self, name: str, reason: str) -> None:
        self.estimated[name] = reason
        self._without_parts.add(name)
        self._squares.pop(name, None)

    def _store(self, name: str) -> Tensor:
        if name not in self._squares:
            self._squares[name] = torch.zeros_like(wide(self._parameters[name].detach()))
        if name in self._stale:
            self._squares[name].zero_()
            self._stale.discard(name)
        return self._squares[name]


@dataclass(eq=False)
class Pass:
    """One call of the model. A sample has one part of each parameter in it: uses are summed, then squared."""

    samples: int | None = None
    uses: Counter[str] = field(default_factory=Counter)  # in the forward pass
    waiting: defaultdict[str, list[Parts]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class _Squares:
    """Collects one parameter in one pass."""

    moments: SecondMoments
    now: Pass
    name: str

    def used(self, product: GradientProduct | None = None, form: Form | None = None, *, raw: bool = False) -> None:
        if not in_backward():  # where a checkpointed layer is only computed once more
            self.now.uses[self.name] += 1

    def gradient(self, parts: Parts) -> Tensor:
        return self.moments.gradient(self.now, self.name, parts)

    def below(self, delta: Tensor) -> Tensor:
        return delta


def _lie_in(flat: Tensor, parts: list[Tensor]) -> bool:
    places = flat.split([part.numel() for part in parts])
    return all(part.data_ptr() == place.data_ptr() for part, place in zip(parts, places, strict=True))


def add_squares(squares: Tensor, parts: Parts, chunk: int | None, keep: int = 1) -> Tensor:
    """squares = keep * squares + the sum over the samples of their squared parts; returns the sum of the parts."""
    if parts.add_squares(squares, keep):
        return parts.total()
    total = None
    for some in chunks([parts], chunk):
        formed = wide(parts.form(some))
        _add_squared(squares, formed, keep)
        part = formed[0] if formed.shape[0] == 1 else formed.sum(0)
        total, keep = part if total is None else total.add_(part), 1
    if total is None:  # a batch without samples
        if not keep:
            squares.zero_()
        return torch.zeros_like(squares)
    return total


def add_squares_of_sums(squares: Tensor, uses: list[Parts], chunk: int | None) -> None:
    """Add the sum over the samples of the square of their parts' sum over the uses."""
    products = [use for use in uses if isinstance(use, Products)]
    if len(products) > 1:  # a recurrent cell: its steps are a sequence
        inputs, deltas = zip(*((use.inputs, use.deltas) for use in products), strict=True)
        others = [use for use in uses if not isinstance(use, Products)]
        uses = [Products(torch.cat(inputs, 1), torch.cat(deltas, 1)), *others]
    for some in chunks(uses, chunk):
        formed = wide(uses[0].form(some))
        for use in uses[1:]:
            formed = formed + use.form(some)
        _add_squared(squares, formed)


def _add_squared(squares: Tensor, formed: Tensor, keep: int = 1) -> None:
    """One sample at a time, the usual case in large layers, takes one pass."""
    if formed.shape[0] > 1:
        total = formed.square().sum(0)
        squares.add_(total) if keep else squares.copy_(total)
    elif keep:
        squares.addcmul_(formed[0], formed[0])
    else:
        torch.mul(formed[0], formed[0], out=squares)


def chunks(uses: list[Parts], chunk: int | None) -> list[slice]:
    at_once = chunk or max(1, min(parts.at_once() for parts in uses))
    return [slice(start, start + at_once) for start in range(0, uses[0].samples, at_once)]


def adds_up(explained: Tensor, gradient: Tensor) -> bool:
    """Whether the two are alike; one that is not finite cannot tell."""
    error = torch.linalg.vector_norm(wide(explained) - wide(gradient))
    return not bool(error > TOLERANCE * torch.linalg.vector_norm(wide(gradient)))


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


MomentWatch = SecondMoments  # its name in 0.1
