"""What became of the gradients of earlier exchanges, as far as one can see from the parameters.

Two things DDP's users do need a look back. They add up micro-batches without `no_sync`: then `.grad` holds means that
were exchanged already, which all ranks hold alike, and only the rest is this worker's own. And they throw gradients
away (a skipped spike, a generator's step through the discriminator): then the exchange must be as if it had not been,
or what it left in a residual would be sent later.
"""

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire.core.reducer import Layout
from thinwire.step import agreement
from thinwire.step.unused import Unused


class Earlier:
    """The gradients and parameters of one module between two exchanges."""

    def __init__(self, parameters: dict[str, nn.Parameter]):
        self.parameters = parameters
        self._found: dict[str, Tensor] = {}  # what .grad held when the forward pass began, if anything
        self._versions: dict[str, int] = {}
        self._left: dict[str, int] = {}  # versions of what the last exchange has left in .grad
        self._cleared: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self._exchanged = False  # since the last forward pass
        self._unused = Unused(parameters)

    # ── before and during a backward pass ──────────────────────────────────────────────────────────────────────────

    def note_gradients(self) -> None:
        """At the start of a forward pass: keep what the last exchange, if there was one, left in `.grad`."""
        while self._hooks:
            self._hooks.pop().remove()
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        gradients = {name: gradient for name, gradient in gradients.items() if not self._zeroed(name, gradient)}
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
            if self.parameters[name].requires_grad:  # else nothing comes
                self._hooks.append(self.parameters[name].register_hook(partial(self._look, name)))

    def _zeroed(self, name: str, gradient: Tensor) -> bool:
        """Whether it was set to zero since the exchange, whose own result may be zero too; views share versions."""
        edited = gradient._base is None and gradient._version != self._left.get(name, gradient._version)
        return edited and not bool(gradient.any())

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

    def note_exchange(self, gradients: Mapping[str, Tensor]) -> None:
        """Right after an exchange: the optimizer will use what came out of it, these, which `.grad` will hold."""
        self._unused.note(gradients)
        self._exchanged = True

    def note_gradients_left(self) -> None:
        """Once DDP has put them into `.grad`."""
        self._left = {name: p.grad._version for name, p in self.parameters.items() if p.grad is not None}

    def unused(self) -> set[str]:
        """The parameters whose last gradients nobody has used yet."""
        return self._unused.names()

    def thrown_away(self) -> set[str]:
        """The parameters whose last gradients are gone, and that nothing has changed since."""
        return {name for name in self.unused() if not self._still_there(name)}

    def waiting(self) -> set[str]:
        """The parameters whose last gradients are still there, and that nothing has changed since."""
        return {name for name in self.unused() if self._still_there(name)}

    def _still_there(self, name: str) -> bool:
        return name in self._found and name not in self._cleared
