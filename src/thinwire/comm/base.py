"""How workers talk, and the ledger on which every byte is entered."""

from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor

# Bytes that leave one worker's link for each byte it puts into a collective, with the algorithms that gloo
# and NCCL use for large messages: rings for the two reductions, direct sends for the rest.
WIRE = {
    "all_mean": lambda world: 2 * (world - 1) / world,
    "all_gather": lambda world: world - 1,
    "broadcast": lambda world: (world - 1) / world,
    "all_to_all": lambda world: (world - 1) / world,
    "shift": lambda world: 1 if world > 1 else 0,
}

# Messages that one worker sends one after another in a collective, each waiting for the one before.
MESSAGES = {
    "all_mean": lambda world: 2 * (world - 1),
    "all_gather": lambda world: world - 1,
    "broadcast": lambda world: (world - 1).bit_length(),
    "all_to_all": lambda world: world - 1,
    "shift": lambda world: 1 if world > 1 else 0,
}


@dataclass
class Ledger:
    """What this worker sent: payload (put into collectives) and wire (carried by its link), told apart."""

    world: int = 1
    payload: int = 0
    wire: float = 0.0
    collectives: int = 0
    messages: int = 0
    seconds: float = 0.0  # spent inside collectives, waiting for others included
    picked: int = 0  # gradient entries whose values were put on the wire, indices chosen or not
    fallbacks: int = 0  # exchanges that went dense because that was cheaper
    entries: list[tuple[str, int]] = field(default_factory=list)  # since the last `clear`

    def enter(self, op: str, x: Tensor) -> None:
        self.enter_bytes(op, x.numel() * x.element_size())

    def enter_bytes(self, op: str, size: int) -> None:
        self.payload += size
        self.wire += WIRE[op](self.world) * size
        self.collectives += 1
        self.messages += MESSAGES[op](self.world)
        self.entries.append((op, size))

    def __add__(self, other: "Ledger") -> "Ledger":
        """What was sent by two exchanges of one worker."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "world"}
        return Ledger(self.world, **sums)

    def clear(self) -> None:
        """Forget the list of entries, which would grow for ever; the totals stay."""
        self.entries.clear()


class Comm(Protocol):
    """The collectives under the verbs of `exchange`. Every byte is entered on the ledger here, never by hand."""

    rank: int
    world: int
    ledger: Ledger
    carries: torch.dtype | None  # what floating-point values are sent as; None: as they are

    def all_mean(self, x: Tensor) -> Tensor:
        """Average `x` over the workers, in place; the same bits everywhere."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Every worker's `x`, all of one shape: [world, *x.shape]."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite `x` with that of the worker `source`."""

    def all_to_all(self, parts: list[Tensor]) -> list[Tensor]:
        """Send parts[i] to worker i; what each worker sent here. Flat parts of one dtype, any lengths."""

    def shift(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """Send `x` to one worker and receive a tensor like it from another; None stays silent."""
