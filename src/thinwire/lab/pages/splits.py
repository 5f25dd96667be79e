"""Where the time of a step goes: measured where a method tells it, worked out for torch's own exchanges."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.lab.records.spellings import NOTHING
from thinwire.lab.records.summary import Records, split_of

COMPUTE, OWN, EXCHANGE, WHOLE = PARTS = ("computing", "the method's own work", "exchange", "not told apart")


@dataclass(frozen=True)
class Split:
    parts: dict[str, float]  # seconds
    guess: bool = False


def splits(named: Mapping[str, Records], predicted: Mapping[str, float]) -> dict[str, Split]:
    """DDP overlaps its exchange with computing and times neither. What computing alone takes is known from a run that
    exchanges nothing, or from the other methods' runs of the same model; the rest of DDP's step is its exchange.

    predicted: seconds of a step on a link that could not be emulated; what they add is exchange.
    """
    measured = {name: split_of(one.steps[min(3, len(one.steps) // 2) :]) for name, one in named.items()}
    floors = {_kind(one): _floor(_kind(one), named, measured) for one in named.values()}
    found = {}
    for name, one in named.items():
        seconds = measured[name]
        whole = predicted.get(name) or sum(seconds.values())
        floor = floors[_kind(one)]
        if "compute" in seconds:
            own = sum(seconds[part] for part in ("capture", "select", "apply"))
            parts = {COMPUTE: seconds["compute"], OWN: own}
            found[name] = Split({**parts, EXCHANGE: max(0.0, whole - sum(parts.values()))})
        elif one.run.method == repr(NOTHING):
            found[name] = Split({COMPUTE: whole})
        elif floor is None:
            found[name] = Split({WHOLE: whole})
        else:
            found[name] = Split({COMPUTE: min(floor, whole), EXCHANGE: max(0.0, whole - floor)}, guess=True)
    return found


def _kind(records: Records) -> tuple[object, ...]:
    run = records.run
    return run.task, run.model, run.batch, run.workers, run.optimizer


def _floor(
    kind: tuple[object, ...], named: Mapping[str, Records], measured: Mapping[str, dict[str, float]]
) -> float | None:
    alike = {name: one for name, one in named.items() if _kind(one) == kind}
    alone = [sum(measured[name].values()) for name, one in alike.items() if one.run.method == repr(NOTHING)]
    told = [measured[name]["compute"] for name in alike if "compute" in measured[name]]
    return statistics.fmean(alone) if alone else statistics.median(told) if told else None
