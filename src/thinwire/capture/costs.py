"""What one exchange costs: bytes off the ledger, seconds by phase."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from thinwire.comm.base import Ledger


@dataclass
class Costs:
    """Opened when an exchange begins; `told` once it is over."""

    before: Ledger
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("capture", "select", "apply"), 0.0))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def told(self, ledger: Ledger, numel: int) -> dict[str, float]:
        """The figures of an exchange that served `numel` entries."""
        before = self.before
        exchange = ledger.seconds - before.seconds
        return {
            "payload_bytes": ledger.payload - before.payload,
            "wire_bytes": ledger.wire - before.wire,
            "collectives": ledger.collectives - before.collectives,
            "density": (ledger.picked - before.picked) / numel,
            "fallbacks": ledger.fallbacks - before.fallbacks,
            "capture_s": self.seconds["capture"],
            "select_s": max(0.0, self.seconds["select"] - exchange),
            "exchange_s": exchange,
            "apply_s": self.seconds["apply"],
        }


def opened(ledger: Ledger) -> Ledger:
    """The ledger as it stands, for `Costs.before`; its list of entries begins anew."""
    ledger.clear()
    return copy.copy(ledger)
