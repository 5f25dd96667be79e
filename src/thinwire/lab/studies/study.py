"""Studies: grids of runs, made cell by cell, resumable, told from what came out.

A cell is one run of the lab. Where a study varies the learning rate, the best one on validation data is chosen for
each cell; seeds are averaged. What the results say is worked out from them.
"""

import hashlib
import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.lab import LabError
from thinwire.lab.pages import figures
from thinwire.lab.pages.page import Page, Row, Section
from thinwire.lab.pages.pieces import Drawing
from thinwire.lab.pages.report import command
from thinwire.lab.pages.show import number, size
from thinwire.lab.pages.styles import Style, styles
from thinwire.lab.records.record import Run, write_json, write_text
from thinwire.lab.records.summary import Records, summarise
from thinwire.lab.run.launch import OnStep
from thinwire.lab.run.links.spelling import Link
from thinwire.lab.run.rehearsal import rehearse_all
from thinwire.lab.studies.compare import keep_settings, run_all

Level = str | float | int
CHOSEN = ("lr", "muon_lr", "seed")  # factors that are chosen among, or averaged over


@dataclass(frozen=True)
class Cell:
    factors: dict[str, Level]  # what sets this run apart from the others of its study
    run: Run

    @property
    def name(self) -> str:
        plain = "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", str(v)).strip("-") for v in self.factors.values())
        mark = hashlib.sha256(repr(self.factors).encode()).hexdigest()[:6]
        return f"{plain[:70]}_{mark}"

    @property
    def rate(self) -> str:
        muon = self.factors.get("muon_lr")
        return f"{self.run.lr:g}" if muon is None else f"{self.run.lr:g} {muon:g}"


@dataclass(frozen=True)
class Result:
    """One setting of a study: its best learning rate, the mean of its seeds."""

    factors: dict[str, Level]
    metric: str
    validation: float | None  # None: diverged at every learning rate
    test: float | None
    wire: float  # bytes a step on one worker's link
    step_s: float
    lr: float
    rate: str  # the learning rate as it is told; with muon, both of them
    values: list[float | None]  # the validation metric of each seed
    unchosen: dict[str, float | None]  # the mean at each of the other learning rates
    folders: list[Path] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """The validation metric, so that more is better; a run that diverged is worse than all others."""
        if self.validation is None:
            return float("-inf")
        return self.validation if self.metric == "accuracy" else -self.validation


@dataclass(frozen=True)
class Study:
    about: str
    cells: Callable[[Run, bool], list[Cell]]  # the task's settings, quick or not
    tell: Callable[[list[Result]], list[str]]
    draw: Callable[[list[Result]], list[Drawing]] = lambda _: []


def prepare(cells: Sequence[Cell], out: Path) -> None:
    for cell in cells:
        keep_settings(out / cell.name, cell.run, resume=True)


def run_study(cells: Sequence[Cell], out: Path, links: Link | None, on_step: OnStep) -> dict[Path, str]:
    """Make the runs that are missing; those that failed, with what was said."""
    prepare(cells, out)
    failed: dict[Path, str] = {}
    for workers in sorted({cell.run.workers for cell in cells}):
        folders = [out / cell.name for cell in cells if cell.run.workers == workers]
        failed |= run_all(folders, workers, links=links, resume=True, on_step=on_step)
    return failed


def rehearse_study(cells: Sequence[Cell], out: Path, at_once: int, on_step: OnStep) -> dict[Path, str]:
    """The same with workers that are threads, several runs at once: no times, but quality and bytes."""
    prepare(cells, out)
    return rehearse_all([out / cell.name for cell in cells], at_once, on_step)


def results(cells: Sequence[Cell], out: Path, failed: dict[Path, str]) -> list[Result]:
    """One for each setting: the learning rate that did best on validation data, seeds averaged."""
    told: dict[str, dict[str, list[tuple[Cell, dict[str, Any]]]]] = {}
    for cell in cells:
        if out / cell.name not in failed:
            setting = repr({key: value for key, value in cell.factors.items() if key not in CHOSEN})
            summary = summarise(Records.read(out / cell.name), None, None)
            told.setdefault(setting, {}).setdefault(cell.rate, []).append((cell, summary))
    found = [_best([_result(runs, out) for runs in rates.values()]) for rates in told.values()]
    if not found:
        raise LabError(f"no cell of the study could be run: {next(iter(failed.values()), 'there are none')}")
    return found


def result_of(cell: Cell, out: Path) -> Result:
    """What one run came to, by itself."""
    return _result([(cell, summarise(Records.read(out / cell.name), None, None))], out)


def _best(rates: list[Result]) -> Result:
    best = max(rates, key=lambda r: r.gain)
    return replace(best, unchosen={r.rate: r.validation for r in rates if r is not best})


def _result(runs: list[tuple[Cell, dict[str, Any]]], out: Path) -> Result:
    cell, first = runs[0]
    summaries = [summary for _, summary in runs]
    whole = not any(s["diverged"] or s["validation"] is None for s in summaries)
    return Result(
        factors={key: value for key, value in cell.factors.items() if key not in CHOSEN},
        metric=first["metric"],
        validation=statistics.fmean(s["validation"] for s in summaries) if whole else None,
        test=statistics.fmean(s["test"] for s in summaries) if whole and first["test"] is not None else None,
        wire=statistics.fmean(s["wire_bytes_a_step"] or 0.0 for s in summaries),
        step_s=statistics.fmean(s["step_s"] for s in summaries),
        lr=cell.run.lr,
        rate=cell.rate,
        values=[s["validation"] for s in summaries],
        unchosen={},
        folders=[out / one.name for one, _ in runs],
    )


def conclude(study: Study, cells: Sequence[Cell], out: Path, failed: dict[Path, str]) -> tuple[list[Result], list[str]]:
    """Write study.json and report.html; the results, and what they say."""
    found = results(cells, out, failed)
    said = study.tell(found)
    write_json(
        out / "study.json",
        {
            "about": study.about,
            "says": said,
            "results": [{**vars(r), "folders": [f.name for f in r.folders]} for r in found],
            "failed": {folder.name: text for folder, text in failed.items()},
        },
    )
    sections = [Section("", [], wide=frontier_figures(found))]
    drawn = study.draw(found)
    if drawn:
        sections.append(Section(study.about, drawn))
    commands = [command(Run.read(result.folders[0])) for result in found]
    style = styles_of(found)
    rows = [Row(cells, slot=style[first_factor(r)].slot) for r, cells in zip(found, table_rows(found))]
    rows += [Row([folder.name], failed=text) for folder, text in failed.items()]
    page = Page(f"Study: {study.about}", "\n".join(said), table_head(found), rows, sections, commands)
    write_text(out / "report.html", page.render())
    return found, said


def read_conclusion(out: Path) -> Any:
    return json.loads((out / "study.json").read_text())


def table_head(found: Sequence[Result]) -> list[str]:
    told = [f"validation {found[0].metric}", "of each seed", "test", "learning rate", "at others", "wire a step"]
    return [*_factors(found), *told, "ms a step"]


def table_rows(found: Sequence[Result]) -> list[list[str]]:
    return [[*(str(r.factors.get(name, "")) for name in _factors(found)), *_told(r)] for r in found]


def _told(result: Result) -> list[str]:
    seeds = " ".join(number(value) for value in result.values)
    others = " ".join(f"{rate}: {_validation(value)}" for rate, value in result.unchosen.items())
    validation, test = _validation(result.validation), number(result.test)
    return [validation, seeds, test, result.rate, others, size(result.wire), number(1e3 * result.step_s, 1)]


def _validation(value: float | None) -> str:
    return "diverged" if value is None else number(value)


def _factors(found: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(name for result in found for name in result.factors))


def first_factor(result: Result) -> str:
    return str(next(iter(result.factors.values())))


def styles_of(found: Sequence[Result]) -> dict[str, Style]:
    """A style for each level of the first factor; the dense one is grey."""
    levels = list(dict.fromkeys(map(first_factor, found)))
    return styles(levels, next((level for level in levels if level in ("DDP", "Dense()", "Dense")), None))


def frontier_figures(found: Sequence[Result]) -> tuple[Drawing, Drawing]:
    """Metric against bytes, a style for each level of the first factor, and the line that nothing beats."""
    points = []
    for r in found:
        if r.validation is not None and r.wire > 0:
            factors = ", ".join(f"{k} {v}" for k, v in r.factors.items())
            points.append((first_factor(r), r.wire, r.validation, f"{factors}: {number(r.validation)}, {size(r.wire)}"))
    drawn = [
        figures.front_of(points, styles_of(found), found[0].metric, width=width, height=height)
        for width, height in ((1040.0, 460.0), (400.0, 400.0))
    ]
    return drawn[0], drawn[1]


def pareto(found: Sequence[Result]) -> list[Result]:
    """Those that no other one beats in both quality and bytes, from few bytes to many."""
    best: list[Result] = []
    for result in sorted(found, key=lambda r: (r.wire, -r.gain)):
        if result.validation is not None and (not best or result.gain > best[-1].gain):
            best.append(result)
    return best


def effect(found: Sequence[Result], factor: str, better: Level, worse: Level) -> tuple[int, int, float] | None:
    """Over pairs that differ in one factor alone: how often `better` is, out of how many, and the mean difference.

    A difference counts where both trained; one that diverged has lost.
    """
    by_rest: dict[str, dict[Level, Result]] = {}
    for r in found:
        if factor in r.factors:
            rest = repr({k: v for k, v in r.factors.items() if k != factor})
            by_rest.setdefault(rest, {})[r.factors[factor]] = r
    pairs = [(one[better], one[worse]) for one in by_rest.values() if better in one and worse in one]
    if not pairs:
        return None
    gaps = [a.gain - b.gain for a, b in pairs if a.validation is not None and b.validation is not None]
    return sum(a.gain > b.gain for a, b in pairs), len(pairs), statistics.fmean(gaps) if gaps else float("nan")


def points(gap: float, metric: str) -> str:
    """A difference as people say it."""
    return f"{100 * gap:+.1f} points of accuracy" if metric == "accuracy" else f"{-gap:+.3f} of loss"
