"""What carries messages between workers."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from thinwire.comm.link import Link


class Transport(Protocol):
    """Raw calls, which move bytes or add up numbers, and count nothing. `Comm` is what methods talk to."""

    rank: int
    world: int
    far: bool  # whether means are added up in the order of ranks, because trips cost much

    @property
    def link(self) -> Link | None:
        """What joins the workers, as all of them agree; None: nothing was measured."""

    def way(self, op: str, size: int) -> str | None:
        """The algorithm of the table that such a message will take; None: the first of its row."""

    def took(self, op: str, size: int, riding: int, seconds: float) -> None:
        """Told after each collective, by all workers alike; `riding`: bytes that went along to everybody."""

    def all_mean(self, x: Tensor) -> None:
        """Average `x`, contiguous, in place, by the backend's own algorithm; the same bits everywhere."""

    def all_gather(self, raw: Tensor) -> Tensor:
        """[world, n] of everybody's n bytes."""

    def two_phases(self, pieces: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Of each piece, bytes [world, n], row i to worker i; what `reduce` makes of the rows there, [world, m]."""

    def broadcast(self, raw: Tensor, source: int) -> None:
        """Overwrite these bytes with those of `source`."""

    def broadcast_with(self, head: Tensor, raw: Tensor, source: int) -> Tensor:
        """The same, and everybody's head: [world, n]."""

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Row i of the bytes [world, n] goes to worker i; what came from each."""

    def all_to_all_uneven(self, sent: Tensor, sizes: list[int], coming: list[int]) -> Tensor:
        """The same with rows of other lengths, laid end to end."""

    def shift(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """Send bytes to one worker and receive as many from another; None stays silent."""

    def abandon(self, reason: str) -> None:
        """This worker cannot go on with what is under way: nobody may wait for it."""

    def renew(self) -> None:
        """Meet again after `abandon`, if this worker had to."""

    def blame(self, error: BaseException) -> str | None:
        """Which worker is behind an error, and why; None if this one is."""

    def close(self) -> None:
        """Give back what is held."""
