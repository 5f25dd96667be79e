"""Which parameters the backward pass has reached, on any worker.

With `find_unused_parameters` DDP leaves the `.grad` of a parameter alone that no worker has used in a step. So nothing
may be sent for it either: what a residual gave for it would be lost.
"""

import weakref
from collections.abc import Mapping, Sequence

from torch import nn

WORD = 62  # parameters that a word of the roll call tells of


class Reached:
    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self._here: set[str] = set()
        self._asked: list[str] = []
        this = weakref.proxy(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: this._here.add(name))
            for name, parameter in parameters.items()
        ]

    def words(self, names: Sequence[str]) -> dict[str, int]:
        """For the roll call: a bit for each of these parameters."""
        self._asked = list(names)
        parts = [names[at : at + WORD] for at in range(0, len(names), WORD)]
        return {
            f"reached {i}": sum((name in self._here) << bit for bit, name in enumerate(part))
            for i, part in enumerate(parts)
        }

    def by_nobody(self, answers: Mapping[str, Sequence[int]]) -> set[str]:
        """Of those that the roll was called for, the parameters that no worker has reached."""
        return {
            name
            for place, name in enumerate(self._asked)
            if not any(said >> place % WORD & 1 for said in answers[f"reached {place // WORD}"])
        }

    def clear(self) -> None:
        """The exchange is over."""
        self._here.clear()

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
