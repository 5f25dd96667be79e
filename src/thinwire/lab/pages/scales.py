"""From numbers to places on a chart: ranges, ticks that people would choose, and how a number is written there."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Spell = Callable[[float], str]


def plain(value: float) -> str:
    """A number in few characters: 0.025, 12, 3 000, 2e+07."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{float(f'{value:.4g}'):g}"


def percent(value: float) -> str:
    return f"{float(f'{100 * value:.4g}'):g} %"


def in_bytes(value: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} B"


@dataclass(frozen=True)
class Axis:
    """What an axis says. `low` and `high` bound it; what lies outside is cut off at the edge of the plot."""

    title: str = ""
    log: bool = False
    spell: Spell = plain
    low: float | None = None
    high: float | None = None
    at: tuple[float, ...] = ()  # where there are ticks, if not where they look best


@dataclass(frozen=True)
class Scale:
    """An axis with its range, laid over the pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @staticmethod
    def over(values: Iterable[float | None], axis: Axis, start: float, end: float) -> "Scale":
        """A range that holds all values, a little wider than they are; an axis may fix either end."""
        known = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not axis.log)]
        low = axis.low if axis.low is not None else min(known, default=1.0)
        high = axis.high if axis.high is not None else max(known, default=low)
        low, high = min(low, high), max(low, high)
        if axis.log:
            slack = (high / low) ** 0.04 if high > low else 2.0
            wide = low / slack, high * slack
        else:
            slack = 0.05 * (high - low) if high > low else 0.1 * abs(high) or 1.0
            wide = low - slack, high + slack
            if low >= 0 > wide[0]:
                wide = 0.0, wide[1]  # a count or a share is never below nothing
        low = wide[0] if axis.low is None or low == high else low
        high = wide[1] if axis.high is None or low == high else high
        return Scale(low, high, start, end, axis.log)

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(8.0, max(-8.0, share)) * (self.end - self.start)

    def holds(self, value: float) -> bool:
        slack = 1e-9 * (self.high - self.low)
        return self.low - slack <= value <= self.high + slack

    def ticks(self, most: int) -> list[float]:
        found = _log_ticks(self.low, self.high, most) if self.log else _even_ticks(self.low, self.high, most)
        return [tick for tick in found if self.holds(tick)]


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / max(1, most)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * nice for nice in (1, 2, 5, 10) if unit * nice >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{step * i:.10g}") for i in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Decades; 2 and 5 between them if there is room; even ones where there is hardly a decade to show."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = range(first, last + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{f * 10.0**d:.6g}") for d in decades for f in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            return ticks if len(ticks) > 1 else _even_ticks(low, high, most)
    return ticks[:: math.ceil(len(ticks) / most)]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, `gap` apart and inside [low, high] as long as there is room for all."""
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [0.0] * len(wanted)
    least = low
    for i in order:
        places[i] = least = max(wanted[i], least)
        least += gap
    most = high
    for i in reversed(order):
        places[i] = most = min(places[i], most)
        most -= gap
    return places
