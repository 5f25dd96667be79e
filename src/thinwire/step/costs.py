"""What one exchange costs: bytes off the ledger, seconds by phase."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.comm.ledger import Ledger

PHASES = ("capture", "select", "apply")


class Costs:
    """Opened when an exchange begins; `figures` once it is over."""

    def __init__(self, ledger: Ledger):
        ledger.clear()  # its list of entries begins anew
        self.ledger, self.before = ledger, copy.copy(ledger)
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def figures(self, numel: int) -> dict[str, float]:
        """The figures of an exchange that served `numel` entries."""
        ledger, before = self.ledger, self.before
        exchange = ledger.seconds - before.seconds
        return {
            "payload_bytes": ledger.payload - before.payload,
            "wire_bytes": ledger.wire - before.wire,
            "collectives": ledger.collectives - before.collectives,
            "density": (ledger.picked - before.picked) / max(1, numel),
            "fallbacks": ledger.fallbacks - before.fallbacks,
            "capture_s": self.seconds["capture"],
            "select_s": max(0.0, self.seconds["select"] - exchange),
            "exchange_s": exchange,
            "apply_s": self.seconds["apply"],
        }
