"""What a backward pass has brought for each weight, until it is exchanged."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from thinwire.capture.layers.operations import PLAIN, Collector, Parts
from thinwire.core import factors
from thinwire.core.factors import Chain, Factors, Form, Use
from thinwire.core.products import GradientProduct
from thinwire.step.groups import Group

if TYPE_CHECKING:
    from thinwire.capture.layers.factors.backward import BackwardExchange


class Pass:
    """One forward pass of the wrapped model: which weights it used, and with how many rows."""

    def __init__(self, exchanged: bool):
        self.exchanged = exchanged  # False inside no_sync
        self.round = -1  # the number of the backward pass that it took part in
        self.uses: dict[Slot, int] = {}
        self.tallies: dict[tuple[Slot, GradientProduct], list[int]] = {}


class Slot:
    """One weight that travels as factors, and what has arrived for it since the last exchange."""

    def __init__(
        self, names: list[str], weight: nn.Parameter, rules: list[GradientProduct], exchange: "BackwardExchange"
    ):
        self.names, self.weight, self.rules, self.exchange = names, weight, rules, exchange
        self.group = 0  # its group's number
        self.strayed = False  # used outside its layer on this worker
        self.outside = False  # the same on any worker: there may be a formed gradient in every step
        self.kept = False  # what goes into it is raw data, and stays here: its gradient is formed
        self.hook = weight.register_hook(lambda gradient: exchange.found(self, gradient))
        self.forget()

    def forget(self) -> None:
        self.uses: dict[GradientProduct, list[tuple[Tensor, Tensor]]] = {rule: [] for rule in self.rules}
        self.formed: Tensor | None = None
        self.forms: dict[GradientProduct, Form] = {}
        self.averaged = False  # some worker has a formed gradient in this step
        self.expected = self.arrived = 0
        self.accumulated = False  # autograd has passed the weight
        self.sent = False

    @property
    def ready(self) -> bool:
        return self.arrived >= self.expected and (self.accumulated or not self.outside)

    def used(self, product: GradientProduct | None = None, form: Form | None = None, *, raw: bool = False) -> None:
        """Note a use in the forward pass; what will come back has the output's shape and dtype."""
        now = self.exchange.passing
        if now is None or product is None or form is None:
            return  # a pass outside the wrapped model, or the second run of a checkpointed part
        now.uses[self] = now.uses.get(self, 0) + 1
        if self.exchange.keeps(self, raw):
            self.kept = True
            return
        key, tally = (self, product), form.numbers()
        now.tallies[key] = add_tallies(now.tallies[key], tally, product) if key in now.tallies else tally

    def gradient(self, parts: Parts) -> None:
        """Take a use from the backward pass; nothing goes on to the weight."""
        found = parts.factors()
        if self.exchange.paused or found is None:
            return
        if self.sent:
            return self.exchange.refuse(self.too_many())
        product, inputs, deltas = found
        self.uses[product].append((inputs.detach(), deltas.detach()))
        self.arrived += 1
        if self.kept:
            self._form_uses()
        elif not self.exchange.exchanging:
            self._fold()
        self.exchange.advance(self)

    def check_unwatched(self) -> None:
        """Refuse hooks that were put on the weight since: its gradient is not there before the pass is over."""
        if len(self.weight._backward_hooks or ()) > 1 or getattr(self.weight, "_post_accumulate_grad_hooks", None):
            raise RuntimeError(
                f"a hook was registered on {self.names[0]} after wrap(), and would not see its gradient, which is "
                "exchanged as factors: register it before wrap(), and this weight will be left to DDP"
            )

    def too_many(self) -> RuntimeError:
        return RuntimeError(
            f"{self.names[0]} took part in the backward pass more often than in forward passes of the wrapped model: "
            "call the module that wrap() returned, not the model inside it"
        )

    def below(self, delta: Tensor) -> Tensor:
        """What goes on to the layers below, which the user may replace."""
        replaced = self.exchange.boundary
        return delta if replaced is None else replaced(self.names[0], delta)

    def form(self, gradient: Tensor) -> None:
        """Take a gradient that exists as such."""
        gradient = gradient.detach().to(working(self.weight.dtype))
        self.formed = gradient.clone() if self.formed is None else self.formed + gradient

    def _fold(self) -> None:
        """While gradients accumulate: multiply out once the rows take more room than their product."""
        held = sum(a.numel() + d.numel() for uses in self.uses.values() for a, d in uses)
        if held >= self.weight.numel():
            self._form_uses()

    def _form_uses(self) -> None:
        local = Factors((self.weight.shape,), [Use(0, r, *factors.stack(u)) for r, u in self.uses.items() if u])
        product = torch.empty(self.weight.shape, dtype=working(self.weight.dtype), device=self.weight.device)
        local.multiply(0, product)
        self.form(product)
        self.uses = {rule: [] for rule in self.rules}


class FactorSink(dict[Tensor, Slot]):
    """The weights of one model that travel as factors, by parameter."""

    def __init__(self, give_back: Callable[[], None]):
        super().__init__()
        self.give_back = give_back

    def collector(self, parameter: Tensor | None) -> Collector:
        """Parameters that are not here, or frozen by now, are nobody's business."""
        if parameter is None or not parameter.requires_grad:
            return PLAIN
        return self.get(parameter, PLAIN)


@dataclass
class FactorGroup(Group):
    """The weights that one call of the reducer serves."""

    slots: list[Slot] = field(default_factory=list)
    chain: Chain | None = None
    seen: Factors | None = None  # the last exchange's forms, without what was in them

    def ready(self) -> bool:
        return all(slot.ready for slot in self.slots)

    def local(self, *, fits: bool, held: bool) -> tuple[Factors, list[bool]]:
        """What has arrived, and which of the weights nobody used.

        It is taken out of its slots, unless it may have to be sent again (`held`). What does not fit the agreed sizes
        stays here until all know.
        """
        uses, forms, formed, absent = [], [], {}, []
        for weight, slot in enumerate(self.slots):
            if slot.averaged:
                formed[weight] = slot.formed
            for rule, arrived in slot.uses.items():
                form = slot.forms[rule]
                if form.rows:
                    here = bool(arrived) and fits
                    inputs, deltas = factors.stack(arrived) if here else _nothing(form, slot.weight.device)
                    if len(inputs) > form.rows:
                        raise slot.too_many()
                    uses.append(Use(weight, rule, inputs, deltas))
                    forms.append(form)
            absent.append(not slot.averaged and not any(form.rows for form in slot.forms.values()))
            if not held:
                slot.uses, slot.formed, slot.sent = {rule: [] for rule in slot.rules}, None, True
        chain = self.chain if not formed and len(uses) == len(self.slots) else None
        return Factors(self.layout.shapes, uses, formed, forms, chain), absent


def _nothing(form: Form, device: torch.device) -> tuple[Tensor, Tensor]:
    empty = [
        torch.empty((0, *shape[1:]), dtype=dtype, device=device)
        for shape, dtype in ((form.inputs, form.input_dtype), (form.deltas, form.delta_dtype))
    ]
    return empty[0], empty[1]


def working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def add_tallies(one: list[int], other: list[int], rule: GradientProduct) -> list[int]:
    """Two uses by one worker: their rows come under each other, in the rest there must be room for both."""
    both = factors.largest([one, other])
    for rows in (2, 2 + rule.dims[0]):
        both[rows] = one[rows] + other[rows]
    return both


def holds(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def accumulate(weight: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.to(weight.dtype)
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient
