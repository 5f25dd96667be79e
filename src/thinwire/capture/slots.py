"""What a backward pass has brought for each weight, until it is exchanged."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from thinwire import factors
from thinwire.factors import Chain, Factors, Form, Use
from thinwire.reducer import Layout
from thinwire.rules import Rule

if TYPE_CHECKING:
    from thinwire.capture.engine import Engine


class Pass:
    """One forward pass of the wrapped model: which weights it used, and with how many rows."""

    def __init__(self, exchanged: bool):
        self.exchanged = exchanged  # False inside no_sync
        self.round = -1  # the number of the backward pass that it took part in
        self.uses: dict[Slot, int] = {}
        self.tallies: dict[tuple[Slot, Rule], list[int]] = {}


class Slot:
    """One weight that travels as factors, and what has arrived for it since the last exchange."""

    def __init__(self, names: list[str], weight: nn.Parameter, rules: list[Rule], engine: "Engine"):
        self.names, self.weight, self.rules, self.engine = names, weight, rules, engine
        self.group = 0  # its group's number
        self.strayed = False  # used outside its layer on this worker
        self.outside = False  # the same on any worker: there may be a formed gradient in every step
        self.hook = weight.register_hook(lambda gradient: engine.found(self, gradient))
        self.forget()

    def forget(self) -> None:
        self.uses: dict[Rule, list[tuple[Tensor, Tensor]]] = {rule: [] for rule in self.rules}
        self.formed: Tensor | None = None
        self.forms: dict[Rule, Form] = {}
        self.averaged = False  # some worker has a formed gradient in this step
        self.expected = self.arrived = 0
        self.accumulated = False  # autograd has passed the weight
        self.sent = False

    @property
    def ready(self) -> bool:
        return self.arrived >= self.expected and (self.accumulated or not self.outside)

    def count(self, rule: Rule, form: Form) -> None:
        """Note a use in the forward pass; what will come back has the output's shape and dtype."""
        now = self.engine.passing
        if now is None:
            return  # a pass outside the wrapped model, or the second run of a checkpointed part
        now.uses[self] = now.uses.get(self, 0) + 1
        key, tally = (self, rule), form.numbers()
        now.tallies[key] = add_tallies(now.tallies[key], tally, rule) if key in now.tallies else tally

    def push(self, rule: Rule, inputs: Tensor, deltas: Tensor) -> None:
        """Take a use from the backward pass."""
        if self.engine.paused:
            return
        if self.sent:
            self.too_many()
        self.uses[rule].append((inputs.detach(), deltas.detach()))
        self.arrived += 1
        if not self.engine.exchanging:
            self._fold()
        self.engine.advance(self)

    def too_many(self) -> NoReturn:
        raise RuntimeError(
            f"{self.names[0]} took part in the backward pass more often than in forward passes of the wrapped model: "
            "call the module that wrap() returned, not the model inside it"
        )

    def boundary(self, down: Tensor | None) -> Tensor | None:
        """What goes on to the layers below, which the user may replace."""
        replaced = self.engine.boundary
        return down if down is None or replaced is None else replaced(self.names[0], down)

    def form(self, gradient: Tensor) -> None:
        """Take a gradient that exists as such."""
        gradient = gradient.detach().to(working(self.weight.dtype))
        self.formed = gradient.clone() if self.formed is None else self.formed + gradient

    def _fold(self) -> None:
        """While gradients accumulate: multiply out once the rows take more room than their product."""
        held = sum(a.numel() + d.numel() for uses in self.uses.values() for a, d in uses)
        if held >= self.weight.numel():
            local = Factors((self.weight.shape,), [Use(0, r, *factors.stack(u)) for r, u in self.uses.items() if u])
            product = torch.empty(self.weight.shape, dtype=working(self.weight.dtype), device=self.weight.device)
            local.multiply(0, product)
            self.form(product)
            self.uses = {rule: [] for rule in self.rules}


@dataclass
class FactorGroup:
    """The weights that one call of the reducer serves."""

    slots: list[Slot]
    layout: Layout
    state: Any
    chain: Chain | None = None
    seen: Factors | None = None  # the last exchange's forms, without what was in them

    def ready(self) -> bool:
        return all(slot.ready for slot in self.slots)


def working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def add_tallies(one: list[int], other: list[int], rule: Rule) -> list[int]:
    """Two uses by one worker: their rows come under each other, in the rest there must be room for both."""
    both = factors.largest([one, other])
    for rows in (2, 2 + rule.dims[0]):
        both[rows] = one[rows] + other[rows]
    return both
