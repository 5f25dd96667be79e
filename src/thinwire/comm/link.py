"""How long a collective takes on a link: the one formula by which ways are chosen and steps are predicted.

    trips x round trip + bytes on the busiest link / rate

A trip takes a whole round trip and not half of one: gloo's sender begins when the receiver has said that it is ready.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.comm.table import TABLE, Algorithm

# Bytes on the wire beside a message's own: gloo's handshake, headers of TCP and IP, acknowledgements. Measured on
# interfaces, with 2 and 4 workers: 730 to 870 for every message from 16 bytes to 100 kB, and 0.2 % above that.
FRAMING = 800
FAR = 0.003  # seconds of a round trip from which on sums are made directly, in the order of ranks
LONG = 1 << 18  # bytes above which workers that are near do not all send to all at once: that fills queues


@dataclass(frozen=True)
class Link:
    """What joins the workers: bits a second that each of them can send, seconds for a message there and back."""

    rate: float = 1e10  # as loopback and fast networks are, where nothing was measured
    rtt: float = 1e-4

    @property
    def far(self) -> bool:
        """Whether trips cost so much that sums go directly. Their last bits depend on it, so it is settled once."""
        return self.rtt >= FAR

    def seconds(self, op: str, size: float, world: int, way: str | None = None) -> float:
        """How long one collective takes into which every worker puts `size` bytes."""
        cost = TABLE[op][way or self.way(op, size, world)]
        return self.carries(cost.longest(world) * size + FRAMING * cost.messages(world), cost.trips(world))

    def carries(self, wire_bytes: float, trips: float) -> float:
        """How long so many bytes take, frames included, if their messages wait for one another so often."""
        return trips * self.rtt + 8 * wire_bytes / self.rate

    def rides(self, size: float, world: int) -> bool:
        """Whether a mean is there sooner when everybody's numbers go to all inside a message that goes anyway."""
        return self.seconds("riding", size, world) <= min(self.seconds("all_mean", size, world, w) for w in _MEANS)

    def way(self, op: str, size: float, world: int, far: bool | None = None) -> str:
        """The algorithm of the table by which a message of this size is there first.

        The mean of workers that are far is always added up in the order of ranks, and that of the others by the
        backend: another choice would have other last bits.
        """
        row, far = TABLE[op], self.far if far is None else far
        ways: Iterable[str] = row
        own = next(iter(row))
        if op == "all_mean":
            ways = [way for way in row if way != own] if far else [own]
        elif not far and (op == "broadcast" or size > LONG):
            ways = [own]
        return min(ways, key=lambda way: (self.seconds(op, size, world, way), _trips(row[way], world)))


_MEANS = ("two phases", "gather")


def _trips(cost: Algorithm, world: int) -> float:
    return cost.trips(world)
