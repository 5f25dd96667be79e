"""One page that shows what happened: self-contained, readable on a phone, one colour for each method."""

import html
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from thinwire.lab import LabError, figures
from thinwire.lab.record import Run, rank_files, write_text
from thinwire.lab.show import number, size
from thinwire.lab.summary import Records


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


def winner(folder: Path) -> str:
    """The sentence that a comparison ended with, if there was one here."""
    try:
        return str(json.loads((folder / "summary.json").read_text())["winner"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def write_report(runs: Sequence[Path], path: Path, lead: str = "") -> None:
    """Write the page for these runs; `lead` is the sentence at its head."""
    write_text(path, render([Records.read(folder) for folder in runs], lead))


def render(records: Sequence[Records], lead: str) -> str:
    named = names(records)
    head, *rows = _table(named)
    return page(lead, head, rows, figures.of_runs(named), [command(one.run) for one in named.values()])


def page(
    lead: str, head: Sequence[str], rows: Sequence[Sequence[str]], drawn: Sequence[go.Figure], commands: list[str]
) -> str:
    """The page around a sentence, a table (cells are HTML), figures, and the commands that make them again."""
    for figure in drawn:
        figures.make_room(figure)
    data = json.dumps([json.loads(figure.to_json()) for figure in drawn]).replace("</", "<\\/")
    table = "<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"
    table += "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    template = files("thinwire.lab").joinpath("report.html").read_text()
    parts = {
        "LEAD": html.escape(lead),
        "TABLE": table,
        "SETTINGS": html.escape("\n".join(commands)),
        "PLOTLY": get_plotlyjs(),
        "FIGURES": data,
    }
    for key, value in parts.items():
        template = template.replace(f"<!--{key}-->", value, 1)
    return template


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


def _table(named: dict[str, Records]) -> list[list[str]]:
    metric = next(iter(named.values())).run.metric
    rows = [["method", f"validation {metric}", "seconds", "ms a step", "wire bytes", "measured"]]
    for position, (name, records) in enumerate(named.items()):
        judged, steps = records.evaluations(), records.steps
        last = judged[-1] if judged else {"value": None, "wire_bytes": None, "measured_bytes": None}
        colour = figures.style(position)["color"]
        rows.append(
            [
                f"<span class=dot style='background:{colour}'></span>{html.escape(name)}",
                number(last["value"]),
                number(steps[-1]["seconds"], 1) if steps else "-",
                number(1e3 * steps[-1]["seconds"] / len(steps), 1) if steps else "-",
                size(last["wire_bytes"]),
                size(last["measured_bytes"] or None),
            ]
        )
    return rows


def command(run: Run) -> str:
    """The command that makes this run again."""
    words = ["thinwire", "train", "--task", run.task]
    words += ["--model", run.model] if run.model else []
    words += ["--method", run.method, "--workers", str(run.workers), "--steps", str(run.steps)]
    words += ["--batch", str(run.batch), "--optimizer", run.optimizer, "--lr", f"{run.lr:g}", "--seed", str(run.seed)]
    defaults = {f.name: f.default for f in fields(Run)}
    for key in ("momentum", "weight_decay", "schedule", "grain", "link", "rtt"):
        if getattr(run, key) != defaults[key]:
            words += [f"--{key.replace('_', '-')}", str(getattr(run, key))]
    if run.overlap is not None:
        words.append("--overlap" if run.overlap else "--no-overlap")
    return shlex.join(words)


def figures_of(text: str) -> list[dict[str, Any]]:
    """The figures inside a page, as plotly would draw them."""
    inside = text.split("<script id=figures type=application/json>", 1)[1].split("</script>", 1)[0]
    found: list[dict[str, Any]] = json.loads(inside.replace("<\\/", "</"))
    return found
