"""A group: the parameters that one call of a reducer serves, with its state and the way back to the state before.

DDP's buckets come and go: their number, order and contents change after the first steps, and again when a run is
resumed. A group does not: its layout is settled once and goes into the checkpoint.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from thinwire.core import memory
from thinwire.core.reducer import Layout


@dataclass
class Group:
    layout: Layout
    state: Any
    scratch: Tensor | None = field(default=None, repr=False)  # a vector of the layout's own, where one is needed
    before: Any = field(default=None, repr=False)  # the state before the last step
    origin: Any = field(default=None, repr=False)  # before the first one whose gradients still wait

    def remember(self, adds_up: bool = False) -> None:
        """Note the state as it is, so that a step can be undone; the same memory serves every step.

        adds_up: the gradients of earlier steps wait for this one's, and may be thrown away with them.
        """
        if not adds_up:
            self.origin = None
        elif self.origin is None:
            self.origin, self.before = self.before, None
        self.before = memory.snapshot(self.state, self.before)

    def undo(self) -> None:
        memory.restore(self.state, self.before)

    def undo_waiting(self) -> None:
        """As before the steps whose gradients nobody has used."""
        kept = self.before if self.origin is None else self.origin
        if kept is not None:
            memory.restore(self.state, kept)

    def rescale(self, ratio: float) -> None:
        for state in (self.state, self.before, self.origin):
            memory.rescale(state, ratio)


def layout_of(names: list[str], parameters: dict[str, nn.Parameter]) -> Layout:
    """The layout of a group whose order a checkpoint has kept."""
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise ValueError(
            f"the checkpoint has the parameter {unknown[0]}, the model has not: load it into the one it was made with"
        )
    first = parameters[names[0]]
    return Layout(tuple(names), tuple(parameters[n].shape for n in names), first.dtype, first.device)
