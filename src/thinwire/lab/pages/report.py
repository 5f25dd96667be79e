"""One page that shows what runs came to: who was first at the target, at what price, and how each got there."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

from thinwire.lab import LabError
from thinwire.lab.pages import figures
from thinwire.lab.pages.page import Page, Row, Section
from thinwire.lab.pages.scales import percent
from thinwire.lab.pages.show import number, size
from thinwire.lab.pages.splits import splits
from thinwire.lab.pages.styles import Style, styles
from thinwire.lab.records.record import Run, rank_files, write_text
from thinwire.lab.records.spellings import PLAIN, label
from thinwire.lab.records.summary import Records, Target, default_target, summarise
from thinwire.lab.run.links.spelling import Link
from thinwire.plan import Network

LONGEST_REASON = 400


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Folders of runs: the given ones, or those directly inside them."""
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise LabError(f"there is no folder {folder}: give the one that train, compare or study wrote")
        inside = [folder, *sorted(p for p in folder.iterdir() if p.is_dir())]
        runs = [place for place in inside if (place / "run.json").exists() and rank_files(place)]
        if not runs:
            raise LabError(f"{folder} holds no run: give the folder that train, compare or study wrote")
        found += runs
    return found


def read_summary(folder: Path) -> dict[str, Any]:
    """What a comparison concluded, if there was one here and its file is whole."""
    try:
        kept = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def winner(folder: Path) -> str:
    """The sentence that a comparison ended with, if there was one here."""
    return str(read_summary(folder).get("winner", ""))


@dataclass(frozen=True)
class Conclusion:
    """What is known of runs beside their records: what a comparison was timed to, and on which link."""

    target: Target | None
    predicted: Network | None  # the link that was asked for and could not be emulated
    failed: Mapping[str, str]  # folder: what went wrong

    @staticmethod
    def of(records: Sequence[Records], summary: Mapping[str, Any]) -> "Conclusion":
        """From a summary, as far as it is whole; else from the records."""
        try:
            target: Target | None = Target(str(summary["target"]["metric"]), float(summary["target"]["value"]))
        except (KeyError, TypeError, ValueError):
            target = default_target(records)
        predicted = None
        if summary.get("link") and summary.get("emulated") is False:
            try:
                predicted = Link.parse(str(summary["link"])).network(records[0].run.workers)
            except (LabError, ValueError):
                predicted = None
        failed = summary.get("failed")
        told = {str(k): str(v) for k, v in failed.items()} if isinstance(failed, dict) else {}
        return Conclusion(target, predicted, told)


def write_report(runs: Sequence[Path], path: Path, lead: str = "", summary: Mapping[str, Any] | None = None) -> None:
    """Write the page for these runs; `lead` is the sentence at its head, `summary` what summary.json says of them."""
    write_text(path, render([Records.read(folder) for folder in runs], lead, summary))


def render(records: Sequence[Records], lead: str, summary: Mapping[str, Any] | None = None) -> str:
    known = Conclusion.of(records, summary or {})
    named = names(records)
    plain = next((name for name, one in named.items() if one.run.method == repr(PLAIN)), None)
    style = styles(list(named), plain)
    told = {name: summarise(one, known.target, known.predicted) for name, one in named.items()}
    good = {name: one for name, one in named.items() if not _reason(told[name], one, known)}
    shown = good or named
    slower = {name: _slower(told[name], one) for name, one in named.items()} if known.predicted else {}
    steps_s = {name: one["step_s"] or 0.0 for name, one in told.items()} if known.predicted else {}
    view, parts = figures.view(shown, known.target), splits(named, steps_s)
    wide, narrow = (
        figures.against_seconds(named, style, view, slower, *shape) for shape in ((1040.0, 430.0), (400.0, 400.0))
    )
    sections = [
        Section("", [], wide=(wide, narrow), note="Seconds are predicted for the link." if known.predicted else ""),
        Section("What it cost", figures.costs(named, style, view, parts), note=_cost_note(named, parts)),
    ]
    inside = figures.diagnostics(named, style)
    if inside:
        note = "What methods tell of themselves. Where local steps are taken, only the exchanges are drawn."
        sections.append(Section("Inside the methods", inside, note, folded=True))
    head, rows = _table(named, told, style, known)
    commands = [command(one.run) for one in named.values()]
    return Page(_title(named), lead, head, rows, sections, commands, sub=_sub(named, known)).render()


def _slower(told: Mapping[str, Any], records: Records) -> float:
    measured = records.steps[-1]["seconds"] if records.steps else 0.0
    return told["seconds"] / measured if measured else 1.0


def _cost_note(named: Mapping[str, Records], parts: Mapping[str, Any]) -> str:
    if not any(parts[name].guess for name in named):
        return ""
    return (
        "DDP does not time its exchange. Its computing (dashed) is taken from a run that exchanges nothing, or else is "
        "the median of the other methods' computing; the rest of its step counts as exchange."
    )


def names(records: Sequence[Records]) -> dict[str, Records]:
    """A name for each run: its method, with whatever sets it apart from others of the same method."""
    settings = [asdict(one.run) for one in records]
    differ = [f.name for f in fields(Run) if f.name != "method" and len({str(s[f.name]) for s in settings}) > 1]
    named: dict[str, Records] = {}
    for one, setting in zip(records, settings):
        more = ", ".join(f"{key} {setting[key]}" for key in differ)
        name = f"{one.run.method} ({more})" if more else one.run.method
        while name in named:
            name += "'"
        named[name] = one
    return named


def _title(named: Mapping[str, Records]) -> str:
    runs = [one.run for one in named.values()]
    tasks = _each(f"{run.task}/{run.model}" if run.model else run.task for run in runs)
    workers = _each(str(run.workers) for run in runs)
    links = _each(
        f"{run.link} link" + (f", {run.rtt}" if run.rtt else "") if run.link else "no slow link" for run in runs
    )
    return f"{tasks}, {workers} workers, {links}"


def _sub(named: Mapping[str, Records], known: Conclusion) -> str:
    written = (max(path.stat().st_mtime for path in rank_files(one.folder)) for one in named.values())
    days = sorted({date.fromtimestamp(when).isoformat() for when in written})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    steps = _each(str(one.run.steps) for one in named.values())
    predicted = "; the link could not be emulated: times are predicted" if known.predicted else ""
    return f"{when}, {steps} steps, {_each(one.run.optimizer for one in named.values())}{predicted}"


def _each(told: Any) -> str:
    return " and ".join(dict.fromkeys(told))


def _table(
    named: Mapping[str, Records], told: Mapping[str, dict[str, Any]], style: Mapping[str, Style], known: Conclusion
) -> tuple[list[str], list[Row]]:
    """The first at the target first; what did not hold it after those, what failed last."""
    metric = next(iter(named.values())).run.metric
    accuracy = metric == "accuracy"
    goal = (
        "target"
        if not known.target
        else f"{100 * known.target.value:.1f} %"
        if accuracy
        else f"{known.target.value:.3f}"
    )
    lost = "points lost to DDP" if accuracy else "% more loss than DDP"
    counted = any(one["measured_bytes_a_step"] for one in told.values())
    head = ["method", f"seconds to {goal}", "times as fast as DDP", lost, f"validation {metric}", "ms a step"]
    head.append("bytes a step, by the interface" if counted else "bytes a step")
    rows = []
    for name, records in named.items():
        one, slot = told[name], style[name].slot
        if why := _reason(one, records, known):
            rows.append((math.inf, math.inf, Row([name], slot=slot, failed=why)))
            continue
        plain = _plain_of(name, named, told)
        seconds = one["seconds_to_target"] if one["holds_target"] else None
        cells = [name, *_cells(one, plain)]
        times = _times(one, plain)
        sent = one["measured_bytes_a_step"] or one["wire_bytes_a_step"]
        values = [seconds, times, _lost(one, plain), one["validation"], one["step_s"], sent]
        worse = one["validation"] if one["validation"] is not None else math.inf
        rows.append((math.inf if seconds is None else seconds, -worse if accuracy else worse, Row(cells, values, slot)))
    rows.sort(key=lambda row: (bool(row[2].failed), *row[:2]))
    missing = [folder for folder in known.failed if folder not in {one.folder.name for one in named.values()}]
    parent = next(iter(named.values())).folder.parent
    absent = [Row([_method_in(parent / folder)], failed=known.failed[folder][:LONGEST_REASON]) for folder in missing]
    return head, [*(row for *_, row in rows), *absent]


def _cells(one: Mapping[str, Any], plain: Mapping[str, Any] | None) -> list[str]:
    seconds, times, lost = one["seconds_to_target"], _times(one, plain), _lost(one, plain)
    reached = "-" if seconds is None else f"{seconds:.3g}" if one["holds_target"] else f"({seconds:.3g}, not held)"
    sent = one["measured_bytes_a_step"] or one["wire_bytes_a_step"]
    return [
        reached,
        "-" if times is None else f"{times:.3g}",
        "-" if lost is None else f"{lost:.1f}",
        percent(one["validation"]) if one["metric"] == "accuracy" else number(one["validation"]),
        number(one["step_s"] and 1e3 * one["step_s"], 1),
        size(sent),
    ]


def _times(one: Mapping[str, Any], plain: Mapping[str, Any] | None) -> float | None:
    if plain is None or not (one["holds_target"] and plain["holds_target"] and one["seconds_to_target"]):
        return None
    return float(plain["seconds_to_target"] / one["seconds_to_target"])


def _lost(one: Mapping[str, Any], plain: Mapping[str, Any] | None) -> float | None:
    """Points of accuracy below plain DDP, or per cent of loss above it."""
    if plain is None or one["validation"] is None or plain["validation"] is None:
        return None
    if one["metric"] == "accuracy":
        return 100 * float(plain["validation"] - one["validation"])
    return 100 * float(one["validation"] / plain["validation"] - 1) if plain["validation"] else None


def _plain_of(name: str, named: Mapping[str, Records], told: Mapping[str, dict[str, Any]]) -> Mapping[str, Any] | None:
    """Plain DDP under the same settings; or the only one there is, if it is of the same task."""
    mine = named[name].run
    plains = {other: one.run for other, one in named.items() if one.run.method == repr(PLAIN)}
    same = [other for other, run in plains.items() if run == replace(mine, method=repr(PLAIN))]
    if not same and len(plains) == 1:
        same = [other for other, run in plains.items() if (run.task, run.metric) == (mine.task, mine.metric)]
    return told[same[0]] if same else None


def _reason(one: Mapping[str, Any], records: Records, known: Conclusion) -> str:
    """Why a run is no result, if it is none."""
    if said := known.failed.get(records.folder.name):
        return said[:LONGEST_REASON]
    if one["diverged"]:
        return f"diverged: the loss after step {one['steps']} is no number, or above that of the start"
    if not one["ended"]:
        return f"stopped after step {one['steps']} of {records.run.steps}"
    return ""


def _method_in(folder: Path) -> str:
    try:
        return label(Run.read(folder).method)
    except LabError:
        return folder.name


def command(run: Run) -> str:
    """The command that makes this run again."""
    return run.command()
