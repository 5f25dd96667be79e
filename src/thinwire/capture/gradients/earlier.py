"""What became of the gradients of earlier exchanges, as far as one can see from the parameters.

Two things DDP's users do need a look back. They add up micro-batches without `no_sync`: then `.grad` holds means that
were exchanged already, which all ranks hold alike, and only the rest is this worker's own. And they throw gradients
away (a skipped spike, a generator's step through the discriminator): then the exchange must be as if it had not been,
or what it left in a residual would be sent later.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire.core.reducer import Layout
from thinwire.step import agreement

_SAMPLES = 64  # entries of a parameter that are looked at for edits which its version does not show


class Earlier:
    """The gradients and parameters of one module between two exchanges."""

    def __init__(self, parameters: dict[str, nn.Parameter]):
        self.parameters = parameters
        self._found: dict[str, Tensor] = {}  # what .grad held when the forward pass began, if anything
        self._versions: dict[str, int] = {}
        self._cleared: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self._exchanged = False  # since the last forward pass
        self._applied: tuple[list[int], Tensor] | None = None  # the parameters, right after the last exchange

    # ── before and during a backward pass ──────────────────────────────────────────────────────────────────────────

    def note_gradients(self) -> None:
        """At the start of a forward pass: keep what the last exchange, if there was one, left in `.grad`."""
        while self._hooks:
            self._hooks.pop().remove()
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if not any(bool(gradient.any()) for gradient in gradients.values()):
            self._found, self._cleared = {}, set()
        elif self._exchanged:
            self._found = {name: gradient.detach().clone().flatten() for name, gradient in gradients.items()}
            self._cleared = set()
        self._exchanged = False
        for name in self._found:
            if name not in gradients:
                self._cleared.add(name)
                continue
            self._versions[name] = gradients[name]._version
            # They may still be cleared between here and the moment in which new ones are added.
            self._hooks.append(self.parameters[name].register_hook(partial(self._look, name)))

    def _look(self, name: str, arriving: Tensor) -> None:
        gradient = self.parameters[name].grad
        if gradient is None or gradient._version != self._versions[name]:
            self._cleared.add(name)
        self._versions[name] = -1  # seen: what follows is the backward pass itself

    def mark(self) -> int:
        """A checksum of what was there before and still is; 0 for nothing. Ranks that hold the same have the same."""
        for name in self._found:
            if self._versions.get(name, -1) != -1:  # no gradient came for it
                self._look(name, self._found[name])
        return 0 if not self._found or self._cleared else agreement.checksum(self._found.values())

    def base(self, layout: Layout) -> Tensor:
        """What `mark` speaks of, as one vector."""
        base = layout.zeros()
        for part, name in zip(base.split(layout.sizes), layout.names, strict=True):
            if name in self._found:
                part.copy_(self._found[name])
        return base

    # ── after an exchange ──────────────────────────────────────────────────────────────────────────────────────────

    def note_parameters(self) -> None:
        """Right after an exchange: the next optimizer step will change them. `.grad` will hold what came out of it."""
        self._applied, self._exchanged = self._look_at_parameters(), True

    def thrown_away(self) -> bool:
        """Whether the last exchange's gradients are gone, and no parameter has changed since."""
        if self._applied is None or (self._found and not self._cleared):
            return False
        versions, samples = self._look_at_parameters()
        return versions == self._applied[0] and torch.equal(samples, self._applied[1])

    @torch.no_grad()
    def _look_at_parameters(self) -> tuple[list[int], Tensor]:
        versions = [p._version for p in self.parameters.values()]
        picked = []
        for p in self.parameters.values():
            flat = p.detach().reshape(-1) if p.is_contiguous() else p.detach().flatten()
            picked.append(flat[:: max(1, flat.numel() // _SAMPLES)].double())
        return versions, torch.cat(picked).cpu().view(torch.int64)  # as bits, in which NaN equals itself
