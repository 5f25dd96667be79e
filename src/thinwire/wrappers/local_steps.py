"""When to exchange, as a part of a recipe: after every step, or after many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.core.reducer import Reducer
from thinwire.core.spelled import Spelled
from thinwire.wrappers.anchored import Ahead, Anchored, Outer

Every = int | Sequence[tuple[int, int]] | Callable[[int], int]


@dataclass(frozen=True)
class LocalSteps(Spelled):
    """Every worker takes steps on its own; then the workers exchange, through `inner`, what these have changed.

    every: optimizer steps between exchanges, or a schedule, ((0, 1), (500, 10)): after each of the first 500 steps,
    then after every 10. outer: how the common parameters follow the mean change. ahead: let each worker go on from the
    common parameters plus the share of its own unsent change that it expects all to have, or plus "all" of it.
    fragments: cut the model in as many parts, exchanged one after another. delay: steps that pass beside an exchange
    before its result is applied.

    `thinwire.local(model, optimizer, LocalSteps(...))` does it.
    """

    inner: Reducer[Any, Any]
    every: int | tuple[tuple[int, int], ...]
    outer: Outer = Outer()
    ahead: Ahead = False
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        check_takes_changes(self.inner)
        if callable(self.every):
            raise TypeError("a function has no spelling: hand it to thinwire.local(..., every=function) itself")
        if not isinstance(self.every, int):
            object.__setattr__(self, "every", tuple((start, steps) for start, steps in self.every))
        interval(self.every, 0)
        if self.fragments < 1:
            raise ValueError(f"fragments must be 1 or more, not {self.fragments}")
        if self.delay < 0:
            raise ValueError(f"delay must be a number of steps, 0 or more, not {self.delay}")
        Anchored(self.inner, self.outer, self.ahead)  # refuses what cannot go ahead


def check_takes_changes(reducer: Reducer[Any, Any]) -> None:
    if reducer.wants is not Tensor:
        raise TypeError(
            f"{type(reducer).__name__} needs to see the backward pass, and a change comes from many of them"
        )


def interval(every: Every, step: int) -> int:
    """How many steps after `step` all of the model has been exchanged."""
    if callable(every):
        width = every(step)
    elif isinstance(every, int):
        width = every
    else:
        starts = [start for start, _ in every]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"a schedule is ((0, steps), (start, steps), ...) with growing starts, not {every!r}")
        if min(steps for _, steps in every) < 1:
            raise ValueError(f"there must be 1 step or more between exchanges, in all of {every!r}")
        width = [steps for start, steps in every if start <= step][-1]
    if width < 1:
        raise ValueError(f"there must be 1 step or more between exchanges, not {width}")
    return width
