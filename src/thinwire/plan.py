"""What a method will cost on a network, from a dry run of the method itself."""

import re
from dataclasses import dataclass

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g|t)?bit(?:/s|ps)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", re.IGNORECASE)


@dataclass(frozen=True)
class Network:
    """`workers` machines, each on a full-duplex link of `rate` bits a second; `rtt` seconds both ways."""

    rate: float
    workers: int
    rtt: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"a link carries more than 0 bits a second, not {self.rate}")
        if self.workers < 1:
            raise ValueError(f"there is at least 1 worker, not {self.workers}")
        if not self.rtt >= 0:
            raise ValueError(f"a round trip takes 0 seconds or more, not {self.rtt}")


def parse_rate(text: str) -> float:
    """Bits a second: '100mbit', '1gbit', '2.5 Gbit/s'."""
    found = _RATE.fullmatch(text.strip())
    if not found or float(found[1]) == 0:
        raise ValueError(f"{text!r} is no link rate: write 10mbit, 100mbit, 1gbit, ...")
    return (
        float(found[1]) * {None: 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[found[2] and found[2].lower()]
    )


def parse_seconds(text: str) -> float:
    """Seconds: '200us', '1ms', '0.04s'."""
    found = _TIME.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no time: write 200us, 1ms, 0.04s, ...")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2].lower()]


def spell_rate(rate: float) -> str:
    """The rate as a person writes it: 1e8 is '100mbit'."""
    for size, unit in ((1e9, "gbit"), (1e6, "mbit"), (1e3, "kbit")):
        if rate >= size:
            return f"{rate / size:.4g}{unit}"
    return f"{rate:.4g}bit"
