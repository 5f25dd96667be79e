"""A comparison as one small file, and the table and the picture that pages make of it.

`thinwire compare ... --page-in docs/comparisons/demo.json` writes it. A page asks for its parts like for a study's, as
`compare-demo`. Several commands can be one picture, where methods need optimizers of their own: `compare-demo` is made
of demo.json and of demo-ANYTHING.json beside it.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from thinwire.lab import LabError
from thinwire.lab.pages import svg
from thinwire.lab.pages.pieces import Drawing, Series
from thinwire.lab.pages.scales import Axis, in_bytes, percent
from thinwire.lab.pages.styles import short
from thinwire.lab.papers.tables import quality, wrapped
from thinwire.lab.records.summary import Records
from thinwire.lab.studies import kept

PREFIX = "compare-"


@dataclass(frozen=True)
class Comparison:
    command: str
    task: str
    model: str | None
    workers: int
    steps: int
    optimizer: str
    link: str | None
    metric: str
    target: float | None
    winner: str
    versions: dict[str, str]
    methods: list[dict[str, Any]]  # name, end, seconds a step, bytes a step, seconds to the target, and the curve


def keep(command: str, summary: Mapping[str, Any], folders: Sequence[Path]) -> Comparison:
    """What a file holds of a `summary.json` and of the runs that it sums up."""
    records = {folder.name: Records.read(folder) for folder in folders}
    run = next(iter(records.values())).run
    methods = []
    for told in summary["methods"]:
        judged = records[told["folder"]].evaluations()
        curve = [[kept.short(line["seconds"]), kept.short(line["value"])] for line in judged if line["seconds"] > 0]
        measured = told.get("measured_bytes_a_step") or told["wire_bytes_a_step"]
        methods.append(
            {
                "method": told["method"],
                "value": kept.short(told["validation"]),
                "step_s": kept.short(told["step_s"]),
                "bytes": kept.short(measured),
                "seconds_to_target": kept.short(told["seconds_to_target"]) if told["holds_target"] else None,
                "curve": curve,
            }
        )
    goal = summary["target"]
    return Comparison(
        command, run.task, run.model, run.workers, run.steps, run.optimizer, summary["link"], run.metric,
        goal and goal["value"], summary["winner"], kept.versions(), methods,
    )  # fmt: skip


def write(told: Comparison, path: Path) -> None:
    kept.write_rows({f.name: getattr(told, f.name) for f in fields(Comparison)}, "methods", path)


def read_all(folder: Path) -> dict[str, Comparison]:
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = Comparison(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise LabError(
                f"{path} cannot be read ({error!r}): make it again with thinwire compare --page-in"
            ) from error
    return found


def named(name: str, files: Mapping[str, Comparison]) -> list[Comparison]:
    return kept.named(name.removeprefix(PREFIX), files)


# ── what pages show ────────────────────────────────────────────────────────────────────────────────────────────────


def command(file: Comparison) -> str:
    return f"```bash\n{wrapped(file.command)}\n```"


def says(file: Comparison) -> str:
    return file.winner


def table(file: Comparison) -> str:
    goal = "the target" if file.target is None else quality(file.target, file.metric)
    head = f"| | validation {file.metric} | ms a step | on a link, a step | seconds to {goal} |"
    rows = [
        f"| `{one['method']}` | {quality(one['value'], file.metric)} | {1000 * one['step_s']:.3g} "
        f"| {in_bytes(one['bytes'])} | {_seconds(one['seconds_to_target'])} |"
        for one in file.methods
    ]
    return "\n".join([head, f"|{' --- |' * 5}", *rows])


def draw(files: Sequence[Comparison]) -> Drawing:
    """Quality against seconds, a line for each method."""
    first = files[0]
    several = len({file.optimizer for file in files}) > 1
    runs = [
        (one["method"], f", {file.optimizer}" if several else "", one["curve"])
        for file in files
        for one in file.methods
    ]
    slots = itertools.count(1)
    series = []
    for method, under, curve in runs:
        seconds, values = zip(*curve)
        slot = 0 if method == "DDP" else next(slots)
        series.append(Series(method + under, seconds, values, slot, short(method) + under))
    spell = percent if first.metric == "accuracy" else lambda v: f"{v:.4g}"
    goal = None if first.target is None else (first.target, f"target {spell(first.target)}")
    where = f"over {first.link}" if first.link else "on one machine"
    title = f"validation {first.metric} against seconds, {first.task}, {first.workers} workers {where}"
    x = Axis("seconds of training, logarithmic", log=True)
    y = Axis(f"validation {first.metric}", spell=spell)
    return svg.lines(title, series, x, y, width=860, height=420, goal=goal)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"
