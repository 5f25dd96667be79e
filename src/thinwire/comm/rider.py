"""A few bytes of every worker that go with the next message, and who hears them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Rider:
    """What waits for a message to go with; shared by all that speak for one worker."""

    head: Tensor | None = None
    judge: Callable[[Tensor], None] | None = None

    def heard(self, heads: Tensor) -> None:
        """Everybody's, [world, n]; what the judge raises is raised on every worker alike."""
        judge, self.head, self.judge = self.judge, None, None
        if judge is not None:
            judge(heads)
