"""What the link between the workers is like, as all of them agree.

Measured by a few small messages when they join, and then by the messages that are sent anyway. What each worker has
seen is compared at the same exchanges on all of them, after 8, 64, 512, ... of them, so no worker ever decides alone.
"""

import hashlib
import os
import time
from pathlib import Path

import torch

from thinwire.comm.direct import Direct
from thinwire.comm.link import FAR, Link

PINGS = 4
SAMPLE = 1 << 15  # bytes of the message that first tells the rate


class Gauge:
    def __init__(self, direct: Direct):
        self.direct, self.world = direct, direct.world
        self.seen = 0  # exchanges
        self.best = 0.0  # the highest rate that this worker has seen
        self.link = self._join()

    def _join(self) -> Link:
        if len(set(self._told(torch.tensor([_place()], dtype=torch.float64)))) == 1:
            return Link()  # one machine, one network: loopback
        pings = []
        for _ in range(PINGS):
            start = time.perf_counter()
            self._told(torch.zeros(1, dtype=torch.float64))
            pings.append(time.perf_counter() - start)
        rtt = max(self._told(torch.tensor([min(pings)], dtype=torch.float64)))
        if rtt < FAR:
            return Link(rtt=rtt)
        start = time.perf_counter()
        self.direct.all_gather(torch.zeros(SAMPLE, dtype=torch.uint8))
        self.link = Link(rtt=rtt)
        self._note((self.world - 1) * SAMPLE, 1, time.perf_counter() - start)
        return self._agreed()

    def note(self, sent: float, trips: float, seconds: float) -> None:
        """An exchange of all workers took so long: `sent` bytes left this worker's link, in `trips`."""
        if not self.link.far:
            return
        self.seen += 1
        self._note(sent, trips, seconds)
        if self.seen >= 8 and self.seen & (self.seen - 1) == 0 and (self.seen.bit_length() - 1) % 3 == 0:
            self.link = self._agreed()

    def _note(self, sent: float, trips: float, seconds: float) -> None:
        # What a message takes beyond its trips tells the rate, if that is more than jitter.
        beyond = seconds - trips * self.link.rtt
        if beyond > 0.2 * self.link.rtt:
            self.best = max(self.best, 8 * sent / beyond)

    def _agreed(self) -> Link:
        rates = [rate for rate in self._told(torch.tensor([self.best], dtype=torch.float64)) if rate > 0]
        return Link(min(rates), self.link.rtt) if rates else self.link

    def _told(self, number: torch.Tensor) -> list[float]:
        """Every worker's number."""
        rows = self.direct.all_gather(number.view(torch.uint8))
        return rows.view(torch.float64).flatten().tolist()


def _place() -> int:
    """A number that two workers share if they are on one machine and in one network; float64 holds it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return int.from_bytes(os.urandom(6), "little")  # not known: look at the link
    return int.from_bytes(hashlib.blake2b(f"{boot} {network}".encode(), digest_size=6).digest(), "little")
