"""The collectives: one row each, with the algorithms it can go by and what each of them costs a link.

A new collective is a row here, a method of `Comm`, and a raw call in each transport.
"""

from collections.abc import Callable
from dataclasses import dataclass

Count = Callable[[int], float]  # of the number of workers


@dataclass(frozen=True)
class Algorithm:
    """What a collective costs when it goes this way, for so many workers."""

    wire: Count  # bytes that leave a worker's link for each byte it puts in; the mean over the workers
    messages: Count  # that one worker sends, each with headers of its own
    trips: Count  # messages that wait for one another: each takes a round trip, since a sender is told when to begin
    busiest: Count | None = None  # bytes that leave the busiest link for each byte put in, where links differ

    def longest(self, world: int) -> float:
        """Bytes on the link that all wait for."""
        return (self.busiest or self.wire)(world)


def _others(world: int) -> int:
    return world - 1


def _share(world: int) -> float:
    return (world - 1) / world


def _once(world: int) -> int:
    return 1 if world > 1 else 0


def _halvings(world: int) -> int:
    return (world - 1).bit_length()


# The first algorithm of a row is the backend's own for long messages: rings for the reductions and for gathering. The
# others send to everybody at once: "gather" what each worker has (all then add up alike), or in "two phases" the
# parts to their owners and the owners' means to all.
TABLE: dict[str, dict[str, Algorithm]] = {
    "all_mean": {
        "ring": Algorithm(lambda w: 2 * _share(w), lambda w: 2 * _others(w), lambda w: 2 * _others(w)),
        "two phases": Algorithm(lambda w: 2 * _share(w), lambda w: 2 * _others(w), lambda w: 2 * _once(w)),
        "gather": Algorithm(_others, _others, _once),
    },
    "scatter_mean": {"direct": Algorithm(_share, _others, _once)},
    "all_gather": {"ring": Algorithm(_others, _others, _others), "direct": Algorithm(_others, _others, _once)},
    "broadcast": {
        "tree": Algorithm(_share, _halvings, _halvings, busiest=_halvings),
        "direct": Algorithm(_share, _once, _once, busiest=_others),
    },
    "all_to_all": {"direct": Algorithm(_share, _others, _once)},
    "shift": {"direct": Algorithm(_once, _once, _once)},
    # What every worker has to tell all, inside a message that goes anyway.
    "riding": {"riding": Algorithm(_others, lambda w: 0, lambda w: 0)},
}


def algorithm(op: str, name: str | None = None) -> Algorithm:
    """How a collective goes; the backend's own way unless another is named."""
    row = TABLE[op]
    return row[name] if name else next(iter(row.values()))


def wire_bytes(op: str, size: int, world: int) -> float:
    """The price of a message: bytes that leave a worker's link when it puts `size` into a collective."""
    return algorithm(op).wire(world) * size


WIRE = {op: algorithm(op).wire for op in TABLE}
MESSAGES = {op: algorithm(op).messages for op in TABLE}
