"""A link as it is written on the command line, kept in records and shown in reports.

    100mbit                                                  the same rate up and down
    100mbit, 40ms, 0.1% loss                                 round trip, packets lost
    20mbit up 100mbit down, 30ms +- 5ms                      unequal, with jitter
    100mbit, 40ms; worker 3: 5mbit up, 400ms                 one worker apart
    1gbit, then 100mbit after 60s                            another rate later on
    100mbit, then down after 30s, then up after 50s          a link that fails and comes back

Between two workers the longer of their two round trips counts, and the higher of their two losses. Times after
`after` are counted from the first packet that passes. A change holds for what it names; the rest stays.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from thinwire.lab import LabError
from thinwire.plan import Network, parse_rate, parse_seconds, spell_rate

EXAMPLES = '--link "100mbit, 40ms, 0.1% loss" or "20mbit up 100mbit down, 30ms; worker 3: 5mbit up"'
_RATES = re.compile(r"(?:[\d.]+\s*[kmgt]?bit(?:/s|ps)?\s*(?:up|down)?\s*)+", re.IGNORECASE)
_RATE = re.compile(r"([\d.]+\s*[kmgt]?bit(?:/s|ps)?)\s*(up|down)?", re.IGNORECASE)
_ROUND_TRIP = re.compile(r"([\d.]+\s*[um]?s)(?:\s*(?:\+-|\+/-|±)\s*([\d.]+\s*[um]?s))?", re.IGNORECASE)
_LOSS = re.compile(r"([\d.]+)\s*%\s*loss", re.IGNORECASE)
_LATER = re.compile(r"(.*)\bafter\s+([\d.]+\s*[um]?s)", re.IGNORECASE | re.DOTALL)
_WORKER = re.compile(r"worker\s+(\d+)\s*:(.*)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Change:
    """What a link is from some time on; None is for what stays as it was."""

    up: float | None = None  # bits a second
    down: float | None = None
    rtt: float | None = None  # seconds
    jitter: float | None = None
    loss: float | None = None  # of all packets
    works: bool | None = None
    after: float = 0.0  # seconds

    def upon(self, before: "Change") -> "Change":
        """This change, made to what held before."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(before, **said)

    def __repr__(self) -> str:
        words = []
        if self.works is not None:
            words.append("up" if self.works else "down")
        if self.up is not None and self.up == self.down:
            words.append(_exactly(self.up))
        else:
            rates = [(self.up, "up"), (self.down, "down")]
            told = [f"{_exactly(rate)} {way}" for rate, way in rates if rate is not None]
            words += [" ".join(told)] if told else []
        if self.rtt is not None:
            words.append(spell_seconds(self.rtt) + (f" +- {spell_seconds(self.jitter)}" if self.jitter else ""))
        if self.loss is not None:
            words.append(f"{100 * self.loss:.10g}% loss")
        return ", ".join(words)


START = Change(rtt=0.0, jitter=0.0, loss=0.0, works=True)


@dataclass(frozen=True, repr=False)
class Link:
    """What lies between a worker and the others; `Link.parse` reads what `repr` writes."""

    common: tuple[Change, ...]
    apart: tuple[tuple[int, tuple[Change, ...]], ...] = field(default=())  # workers with something of their own

    @staticmethod
    def parse(text: str) -> "Link":
        common: tuple[Change, ...] = ()
        apart: dict[int, tuple[Change, ...]] = {}
        for number, section in enumerate(text.split(";")):
            found = _WORKER.fullmatch(section.strip())
            if found and number == 0:
                raise _wrong(text, "what all links have in common comes first")
            if found and int(found[1]) in apart:
                raise _wrong(text, f"worker {found[1]} stands there twice")
            if not found and number > 0:
                raise _wrong(text, f"after a ';' comes a worker and what its link has of its own, not {section!r}")
            if found:
                apart[int(found[1])] = _changes(found[2], text)
            else:
                common = _changes(section, text)
        link = Link(common, tuple(sorted(apart.items())))
        for worker in (None, *apart):
            _check(link.timeline(worker), text)
        return link

    def __repr__(self) -> str:
        sections = [_spell(self.common), *(f"worker {worker}: {_spell(own)}" for worker, own in self.apart)]
        return "; ".join(sections)

    def timeline(self, worker: int | None) -> list[Change]:
        """All that holds for a worker's link, from the start and after each change; None for one without its own."""
        own = dict(self.apart).get(worker, ()) if worker is not None else ()
        times = sorted({change.after for change in (*self.common, *own)})
        held = []
        for time in times:
            now = START
            for change in (*self.common, *own):
                if change.after <= time:
                    now = change.upon(now)
            held.append(replace(now, after=time))
        return held

    @property
    def plain(self) -> bool:
        """Whether a rate is all there is: nothing waits, is lost or changes."""
        lines = [self.timeline(worker) for worker in (None, *dict(self.apart))]
        return all(len(line) == 1 and line[0] == replace(START, up=line[0].up, down=line[0].down) for line in lines)

    def check(self, workers: int) -> "Link":
        """This link, if there are the workers that it names."""
        for worker, _ in self.apart:
            if worker >= workers:
                raise LabError(f"the link of worker {worker} is spelled, but workers are 0 to {workers - 1}: {self!r}")
        return self

    def network(self, workers: int) -> Network:
        """As the planner sees it: collectives wait for the slowest link, as it is at the start."""
        at_start = [self.timeline(worker)[0] for worker in range(workers)]
        slowest = min(rate for now in at_start for rate in (now.up, now.down) if rate is not None)
        return Network(slowest, workers, max(now.rtt or 0.0 for now in at_start))

    def with_round_trip(self, seconds: float) -> "Link":
        """The same link with another round trip from the start."""
        first, *later = self.common
        return Link((replace(first, rtt=seconds, jitter=first.jitter or 0.0), *later), self.apart)


def read_link(link: str | None, rtt: str | None) -> Link | None:
    """What `--link` and `--rtt` ask for together."""
    if link is None:
        if rtt is not None:
            raise LabError("--rtt needs a --link beside it: --link 100mbit --rtt 20ms")
        return None
    asked = Link.parse(link)
    return asked.with_round_trip(_read(parse_seconds, rtt, rtt)) if rtt else asked


def spell_seconds(seconds: float) -> str:
    """A time as a person writes it: 0.04 is '40ms'."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.10g}{unit}"
    return f"{seconds / 1e-6:.10g}us" if seconds else "0ms"


def _exactly(rate: float) -> str:
    return spell_rate(rate, digits=10)


def _changes(section: str, text: str) -> tuple[Change, ...]:
    first, *later = re.split(r",?\s*\bthen\b", section, flags=re.IGNORECASE)
    changes = [_change(first, text)]
    for one in later:
        found = _LATER.fullmatch(one.strip())
        if not found:
            raise _wrong(text, f"'then{one.rstrip()}' does not say when: then 10mbit after 60s")
        change = replace(_change(found[1], text), after=_read(parse_seconds, found[2], text))
        changes.append(replace(change, works=True) if _comes_back(change, changes) else change)
    times = [change.after for change in changes]
    if times != sorted(set(times)):
        raise _wrong(text, "changes are written in the order of their times, all counted from the start")
    return tuple(changes)


def _change(words: str, text: str) -> Change:
    said: dict[str, float | bool] = {}
    for term in filter(None, (one.strip() for one in words.split(","))):
        new = _term(term, text)
        if said.keys() & new.keys():
            raise _wrong(text, f"{term!r} says again what was said before it")
        said |= new
    if not said:
        raise _wrong(text, "nothing is said about a link")
    if "rtt" in said:
        said.setdefault("jitter", 0.0)
    return Change(**said)  # type: ignore[arg-type]


def _term(term: str, text: str) -> dict[str, float | bool]:
    if term.lower() in ("up", "down"):
        return {"works": term.lower() == "up"}
    if _RATES.fullmatch(term):
        rates: dict[str, float | bool] = {}
        for rate, way in _RATE.findall(term):
            for one in [way.lower()] if way else ["up", "down"]:
                if one in rates:
                    raise _wrong(text, f"{term!r} says the rate {one} twice")
                rates[one] = _read(parse_rate, rate, text)
        return rates
    if found := _ROUND_TRIP.fullmatch(term):
        rtt = _read(parse_seconds, found[1], text)
        return {"rtt": rtt, "jitter": _read(parse_seconds, found[2], text) if found[2] else 0.0}
    if found := _LOSS.fullmatch(term):
        return {"loss": _read(float, found[1], text) / 100}
    raise _wrong(text, f"{term!r} is no rate, no round trip and no loss")


def _check(timeline: list[Change], text: str) -> None:
    for now in timeline:
        if now.up is None or now.down is None:
            raise _wrong(text, "a rate is missing, up and down")
        if now.loss is not None and not 0 <= now.loss < 1:
            raise _wrong(text, "below 100% can be lost; a link that loses all is down")
        if (now.jitter or 0.0) > (now.rtt or 0.0):
            raise _wrong(text, "the jitter is longer than the round trip")


def _spell(changes: tuple[Change, ...]) -> str:
    words = []
    for number, change in enumerate(changes):
        implied = _comes_back(change, changes[:number])
        told = repr(replace(change, works=None) if implied else change)
        words.append(f"then {told} after {spell_seconds(change.after)}" if number else told)
    return ", ".join(words)


def _comes_back(change: Change, before: Sequence[Change]) -> bool:
    """Whether a rate is told for a link that was down, which says that it works again."""
    told = [one.works for one in before if one.works is not None]
    rates = change.up is not None or change.down is not None
    return told[-1:] == [False] and rates and change.works is not False


def _read(reader: Callable[[str], float], word: str, text: str) -> float:
    try:
        return reader(word)
    except ValueError as error:
        raise _wrong(text, str(error)) from error


def _wrong(text: str, what: str) -> LabError:
    return LabError(f"the link {text!r} cannot be read: {what}. Write {EXAMPLES}")
