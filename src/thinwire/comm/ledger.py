"""The ledger on which every byte is entered."""

from dataclasses import dataclass, field, fields

from torch import Tensor

from thinwire.comm.table import algorithm


@dataclass
class Ledger:
    """What this worker sent: payload (put into collectives) and wire (carried by its link), told apart."""

    world: int = 1
    payload: int = 0
    wire: float = 0.0
    collectives: int = 0
    messages: int = 0
    trips: int = 0  # messages that had to wait for one another, each a round trip
    seconds: float = 0.0  # spent inside collectives, waiting for others included
    picked: int = 0  # gradient entries whose values were put on the wire, indices chosen or not
    fallbacks: int = 0  # exchanges that went dense because that was cheaper
    entries: list[tuple[str, int]] = field(default_factory=list)  # since the last `clear`

    def enter(self, op: str, x: Tensor, way: str | None = None) -> None:
        self.enter_bytes(op, x.numel() * x.element_size(), way)

    def enter_bytes(self, op: str, size: int, way: str | None = None) -> None:
        cost = algorithm(op, way)
        self.payload += size
        self.wire += cost.wire(self.world) * size
        self.collectives += op != "riding"  # which is part of one
        self.messages += int(cost.messages(self.world))
        self.trips += int(cost.trips(self.world))
        self.entries.append((op, size))

    def __add__(self, other: "Ledger") -> "Ledger":
        """What was sent by two exchanges of one worker that are under way at the same time, and so are their trips."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "world"}
        return Ledger(self.world, **sums | {"trips": max(self.trips, other.trips)})

    def clear(self) -> None:
        """Forget the list of entries, which would grow for ever; the totals stay."""
        self.entries.clear()
