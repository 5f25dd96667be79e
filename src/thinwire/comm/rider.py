"""A few bytes of every worker that go with the next message, and who hears them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Hears = Callable[[Tensor], None]


@dataclass
class Rider:
    """What waits for a message to go with, in order; shared by all that speak for one worker."""

    waiting: list[tuple[Tensor, Hears]] = field(default_factory=list)

    @property
    def head(self) -> Tensor | None:
        """The bytes that the next message has to take along."""
        return torch.cat([part for part, _ in self.waiting]) if self.waiting else None

    def take(self, part: Tensor, hears: Hears) -> None:
        self.waiting.append((part, hears))

    def heard(self, heads: Tensor) -> None:
        """Everybody's, [world, n]; what is raised by who hears them is raised on every worker alike."""
        waiting, self.waiting = self.waiting, []
        for (_, hears), rows in zip(waiting, heads.split([part.numel() for part, _ in waiting], 1), strict=True):
            hears(rows.contiguous())
