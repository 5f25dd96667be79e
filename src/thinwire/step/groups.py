"""A group: the parameters that one call of a reducer serves, with its state and the way back to the state before.

DDP's buckets come and go: their number, order and contents change after the first steps, and again when a run is
resumed. A group does not: its layout is settled once and goes into the checkpoint.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from thinwire.core import memory, put_back
from thinwire.core.reducer import Layout


@dataclass
class Group:
    layout: Layout
    state: Any
    scratch: Tensor | None = field(default=None, repr=False)  # a vector of the layout's own, where one is needed
    before: Any = field(default=None, repr=False)  # the state before the last step
    origin: Any = field(default=None, repr=False)  # before the first one whose gradients still wait
    waiting: set[str] = field(default_factory=set)  # the parameters whose gradients have waited since `origin`

    def remember(self, waiting: Collection[str] = ()) -> None:
        """Note the state as it is, so that a step can be undone; the same memory serves every step.

        waiting: parameters whose gradients of earlier steps wait for this one's, and may be thrown away with them.
        """
        still = set(waiting) & set(self.layout.names)
        if self.origin is None and still:
            self.origin, self.before, self.waiting = self.before, None, still
        else:
            self.waiting &= still
        if not self.waiting:
            self.origin = None
        self.before = memory.snapshot(self.state, self.before)

    def undo(self) -> None:
        memory.restore(self.state, self.before)

    def undo_unused(self, names: Collection[str], rank: int, world: int) -> None:
        """For these parameters, whose gradients nobody has used, as before the steps that gave them."""
        self._put_back(self.state, set(names) & set(self.layout.names), rank, world)

    def without(self, names: Collection[str], rank: int, world: int) -> Any:
        """The state as `undo_unused` would leave it."""
        mine = set(names) & set(self.layout.names)
        if not mine or self.before is None:
            return self.state
        copied = memory.snapshot(self.state)
        self._put_back(copied, mine, rank, world)
        return copied

    def _put_back(self, state: Any, names: set[str], rank: int, world: int) -> None:
        if self.before is None or not names:
            return
        waited = set() if self.origin is None else names & self.waiting
        if len(names) == len(self.layout.names):  # thresholds and the like too
            memory.restore(state, self.origin if len(waited) == len(names) else self.before)
        else:
            put_back.restore_entries(state, self.before, self.layout, names, rank, world)
        if 0 < len(waited) < len(self.layout.names):
            put_back.restore_entries(state, self.origin, self.layout, waited, rank, world)

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
