"""What a run came to, worked out from its records alone: also of a run that was killed."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.comm.table import algorithm
from thinwire.lab import LabError
from thinwire.lab.records.record import Line, Run, has_ended, rank_files, read_whole_lines
from thinwire.lab.records.spellings import PLAIN, label
from thinwire.plan import Network

PHASES = ("capture_s", "select_s", "exchange_s", "apply_s")
BYTES = ("payload_bytes", "wire_bytes", "measured_bytes")


@dataclass(frozen=True)
class Records:
    """The records of all workers of one run."""

    folder: Path
    run: Run
    ranks: list[list[Line]]  # for each worker, its steps
    tested: Line  # what the last line says of the test set

    @staticmethod
    def read(folder: Path) -> "Records":
        run = Run.read(folder)
        run = replace(run, method=label(run.method))
        lines = [read_whole_lines(path) for path in rank_files(folder)]
        ranks = [[line for line in one if "step" in line] for one in lines]
        if not ranks or not any(ranks):
            raise LabError(f"{folder} holds no records yet: run it again")
        return Records(folder, run, ranks, next((line for line in reversed(lines[0]) if "end" in line), {}))

    @property
    def steps(self) -> list[Line]:
        """The first worker's steps, the state before the first one left out."""
        return [line for line in self.ranks[0] if line["step"] > 0]

    def evaluations(self) -> list[Line]:
        """Where the model was judged, with what had been sent and taken by then, added up."""
        metric, found, totals = self.run.metric, [], dict.fromkeys((*BYTES, "seconds"), 0.0)
        for line in self.ranks[0]:
            for key in BYTES:
                totals[key] += line.get(key) or 0
            totals["seconds"] = line["seconds"]
            if f"validation_{metric}" in line:
                found.append({"step": line["step"], "value": line[f"validation_{metric}"], **totals})
        return found


@dataclass(frozen=True)
class Target:
    """A metric and the value that a run is timed to."""

    metric: str
    value: float

    def reached(self, value: float | None) -> bool:
        if value is None:
            return False
        return value >= self.value if self.metric == "accuracy" else value <= self.value

    @staticmethod
    def near(metric: str, final: float) -> "Target":
        """What a run ended with, give or take: one point of accuracy, two per cent of loss."""
        return Target(metric, final - 0.01 if metric == "accuracy" else final * 1.02)


def default_target(records: Sequence[Records]) -> Target | None:
    """Near what plain DDP ended with, or the first method if there is no plain DDP."""
    for one in sorted(records, key=lambda r: r.run.method != repr(PLAIN)):
        judged = [line["value"] for line in one.evaluations() if line["value"] is not None]
        if judged:
            return Target.near(one.run.metric, judged[-1])
    return None


def summarise(records: Records, target: Target | None, predicted: Network | None) -> dict[str, Any]:
    """One method's line in `summary.json`. `predicted`: the link that was asked for and could not be emulated."""
    metric, steps = records.run.metric, records.steps
    judged = records.evaluations()
    final = judged[-1]["value"] if judged else None
    tail = steps[-max(1, len(steps) // 10) :]
    losses = [line["loss"] for line in tail if line["loss"] is not None]
    warm = steps[min(3, len(steps) // 2) :]  # the first ones compile, connect, and go dense
    reached = next((line for line in judged if target and target.reached(line["value"])), None)
    summary: dict[str, Any] = {
        "method": records.run.method,
        "folder": records.folder.name,
        "metric": metric,
        "validation": final,
        "train_loss": statistics.fmean(losses) if losses else None,
        "test": records.tested.get(f"test_{metric}"),
        "steps": steps[-1]["step"] if steps else 0,
        "ended": has_ended(records.folder),
        "diverged": bool(steps) and (len(losses) < len(tail) or has_diverged(records)),
        "seconds": steps[-1]["seconds"] if steps else 0.0,
        "step_s": statistics.median(line["step_s"] for line in warm) if warm else None,
        "seconds_split": split_of(warm),
        "predicted": predicted is not None,
        **{key: total(records, key) for key in BYTES},
        **{f"{key}_a_step": a_step(records, key) for key in BYTES},
        "bytes_per_worker": {key: [worker_total(rank, key) for rank in records.ranks] for key in BYTES},
        "target": asdict(target) if target else None,
        "steps_to_target": reached and reached["step"],
        "seconds_to_target": reached and reached["seconds"],
        "holds_target": bool(target and target.reached(final)),  # at the end, and not only on the way
        "wire_bytes_to_target": reached and reached["wire_bytes"],
    }
    if predicted and steps:
        factor = _add_predicted(summary, warm, predicted)
        if reached:
            summary["seconds_to_target"] = reached["seconds"] * factor
    return summary


def has_diverged(records: Records) -> bool:
    """Whether the model ended worse than it began, or as no number at all."""
    losses = [line["validation_loss"] for line in records.ranks[0] if "validation_loss" in line]
    return bool(losses) and (losses[-1] is None or (losses[0] is not None and losses[-1] > losses[0]))


def split_of(steps: list[Line]) -> dict[str, float]:
    """Mean seconds of a step's parts; what is none of thinwire's is the model's own compute."""
    if not steps:
        return {}
    if not any(key in steps[0] for key in PHASES):
        return {"whole step": statistics.fmean(line["step_s"] for line in steps)}
    parts = {key[:-2]: statistics.fmean(line.get(key) or 0.0 for line in steps) for key in PHASES}
    rest = statistics.fmean(line["step_s"] for line in steps) - sum(parts.values())
    return {"compute": max(0.0, rest), **parts}


def _add_predicted(summary: dict[str, Any], steps: list[Line], network: Network) -> float:
    """Replace the seconds of this machine by those of the link; by how much they grew."""
    times = []
    for line in steps:
        on_the_link = network.link.carries(line.get("wire_bytes") or 0, _trips(line, network))
        times.append(line["step_s"] - (line.get("exchange_s") or 0.0) + on_the_link)
    factor = statistics.fmean(times) / statistics.fmean(line["step_s"] for line in steps)
    summary["step_s"] = statistics.median(times)
    summary["seconds"] *= factor
    return factor


def _trips(line: Line, network: Network) -> float:
    """How often messages of a step wait for one another on this link, which may not be the one it was recorded on."""
    collectives = line.get("collectives")
    if collectives is None:
        return algorithm("all_mean").trips(network.workers)  # DDP's ring
    trips: float = collectives if network.link.far else line.get("trips") or collectives
    return trips


def total(records: Records, key: str) -> float | None:
    """Bytes of the whole run, a worker's share: the mean over the workers."""
    each = [worker_total(rank, key) for rank in records.ranks]
    known = [value for value in each if value is not None]
    return statistics.fmean(known) if known else None


def a_step(records: Records, key: str) -> float | None:
    """A worker's bytes in a step like most: the mean, without the first one, which is dense for every method, and
    the one after it, in which a slow link may still be sending that."""
    usual = [[line for line in rank if line["step"] > 2] or rank for rank in records.ranks]
    each = [(worker_total(lines, key), len(lines)) for lines in usual]
    known = [value / steps for value, steps in each if value is not None]
    return statistics.fmean(known) if known else None


def worker_total(steps: list[Line], key: str) -> float | None:
    found = [line[key] for line in steps if line.get(key) is not None]
    return sum(found) if found else None
