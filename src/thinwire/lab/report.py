"""One page that shows what happened: self-contained, readable on a phone, one colour for each method."""

import html
import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from thinwire.lab import LabError
from thinwire.lab.record import Line, Run, rank_files, write_text
from thinwire.lab.show import number, size
from thinwire.lab.summary import Records, split_of, total, worker_total

# Okabe and Ito's colours, which people who see red and green alike can tell apart; then the same ones, dashed.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#999933")
DASHES = ("solid", "dash", "dot", "dashdot")
PHASE_COLOURS = {
    "compute": "#999999",
    "capture": "#56B4E9",
    "select": "#E69F00",
    "exchange": "#D55E00",
    "apply": "#009E73",
}
POINTS = 400  # a curve holds no more; evaluations are all kept
BASE = {
    "step",
    "loss",
    "seconds",
    "step_s",
    "payload_bytes",
    "wire_bytes",
    "measured_bytes",
    "collectives",
    "fallbacks",
}
TITLES = {
    "density": "density: share of the entries really sent",
    "imbalance": "imbalance: the largest worker's picks against the mean",
    "build_up": "build-up: entries in the union against those asked for",
    "threshold": "threshold",
    "residual_norm": "residual norm: what has been handed in and not sent",
}


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


def write_report(runs: Sequence[Path], page: Path, lead: str = "") -> None:
    """Write the page for these runs; `lead` is the sentence at its head."""
    records = [Records.read(folder) for folder in runs]
    write_text(page, render(records, lead))


def render(records: Sequence[Records], lead: str) -> str:
    named = names(records)
    figures = [
        _curves(named, "validation against steps", "steps", "step", _evaluated),
        _curves(named, "validation against seconds of training", "seconds", "seconds", _evaluated),
        _curves(named, "validation against bytes on a worker's wire", "bytes", "wire_bytes", _evaluated, log=True),
        _curves(named, "training loss", "steps", "step", _loss, log_y=True),
        _time_split(named),
        _bytes_per_worker(named),
    ]
    extra = _extra_metrics(records)
    figures += [
        _curves(
            named, TITLES.get(key, key.replace("_", " ")), "steps", "step", _metric(key), log_y=key in ("threshold",)
        )
        for key in extra
    ]
    data = json.dumps([json.loads(figure.to_json()) for figure in figures]).replace("</", "<\\/")
    template = files("thinwire.lab").joinpath("report.html").read_text()
    parts = {
        "LEAD": html.escape(lead),
        "TABLE": _table(named),
        "SETTINGS": _settings(named),
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


Points = tuple[list[float], list[float | None]]


def _evaluated(records: Records, axis: str) -> Points:
    judged = records.evaluations()
    return [line[axis] for line in judged], [line["value"] for line in judged]


def _metric(key: str) -> Callable[[Records, str], Points]:
    def points(records: Records, axis: str) -> Points:
        lines = _thin([line for line in records.steps if line.get(key) is not None])
        return [line[axis] for line in lines], [line[key] for line in lines]

    return points


def _loss(records: Records, axis: str) -> Points:
    """The mean over the workers and the last few steps: a single batch is mostly noise."""
    steps = records.steps
    width = max(1, len(steps) // 50)
    columns = list(zip(*[[line["loss"] for line in rank if line["step"] > 0] for rank in records.ranks]))
    means = [math.nan if None in column else sum(column) / len(column) for column in columns]
    smooth = [sum(means[max(0, i - width + 1) : i + 1]) / (i + 1 - max(0, i - width + 1)) for i in range(len(means))]
    lines = _thin([{"x": line[axis], "y": value} for line, value in zip(steps, smooth)])
    return [line["x"] for line in lines], [None if math.isnan(line["y"]) else line["y"] for line in lines]


def _thin(lines: list[Line]) -> list[Line]:
    stride = math.ceil(len(lines) / POINTS) or 1
    return lines[::stride]


def style(position: int) -> dict[str, str]:
    return {"color": COLOURS[position % len(COLOURS)], "dash": DASHES[position // len(COLOURS) % len(DASHES)]}


def _curves(
    named: dict[str, Records],
    title: str,
    label: str,
    axis: str,
    points: Callable[[Records, str], Points],
    log: bool = False,
    log_y: bool = False,
) -> go.Figure:
    figure = _figure(title)
    for position, (name, records) in enumerate(named.items()):
        x, y = points(records, axis)
        if not x:
            continue
        if log:
            x, y = x[1:], y[1:]  # nothing has been sent before the first step
        few = "lines+markers" if len(x) <= 60 else "lines"
        figure.add_scatter(x=x, y=y, name=name, mode=few, line=style(position), legendgroup=name)
    figure.update_xaxes(title=label, type="log" if log else "linear")
    metric = next(iter(named.values())).run.metric
    figure.update_yaxes(title=f"validation {metric}" if points is _evaluated else "", type="log" if log_y else "linear")
    return figure


def _time_split(named: dict[str, Records]) -> go.Figure:
    figure = _figure("where the time of a step goes (ms)")
    splits = {name: split_of(records.steps[3:] or records.steps) for name, records in named.items()}
    for phase in dict.fromkeys(phase for split in splits.values() for phase in split):
        values = [1e3 * split.get(phase, 0.0) for split in splits.values()]
        colour = PHASE_COLOURS.get(phase, "#555555")
        figure.add_bar(y=list(splits), x=values, name=phase, orientation="h", marker_color=colour)
    figure.update_layout(barmode="stack", height=120 + 42 * len(named))
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def _bytes_per_worker(named: dict[str, Records]) -> go.Figure:
    """A bar for what the ledger says a link carried, on the mean; marks for each worker, predicted and counted."""
    figure = _figure("bytes a step on each worker's wire")
    means, colours = [], []
    marks: dict[str, tuple[list[float], list[str]]] = {"wire_bytes": ([], []), "measured_bytes": ([], [])}
    for position, (name, records) in enumerate(named.items()):
        colours.append(style(position)["color"])
        means.append((total(records, "wire_bytes") or 0.0) / max(1, len(records.steps)))
        for key, (x, y) in marks.items():
            each = [worker_total(rank, key) for rank in records.ranks]
            known = [value / max(1, len(records.steps)) for value in each if value]
            x += known
            y += [name] * len(known)
    figure.add_bar(x=means, y=list(named), name="mean, by the ledger", orientation="h", marker_color=colours)
    for (key, (x, y)), symbol in zip(marks.items(), ("circle-open", "diamond")):
        told = "each worker, by the ledger" if key == "wire_bytes" else "each worker, by its interface"
        if x:
            figure.add_scatter(x=x, y=y, name=told, mode="markers", marker={"color": "#000000", "symbol": symbol})
    figure.update_xaxes(type="log", title="bytes")
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(height=160 + 42 * len(named))
    return figure


def _figure(title: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        title={"text": title, "x": 0, "xanchor": "left"},
        template="plotly_white",
        height=420,
        margin={"l": 60, "r": 12, "t": 48, "b": 48},
        legend={"orientation": "h", "yanchor": "top", "y": -0.18, "x": 0},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    return figure


def _extra_metrics(records: Sequence[Records]) -> list[str]:
    """What the methods themselves told, the best known first."""
    seen = dict.fromkeys(
        key
        for one in records
        for line in one.steps
        for key, value in line.items()
        if isinstance(value, (int, float)) and not key.endswith("_s") and not key.startswith("validation")
    )
    keys = [key for key in seen if key not in BASE]
    return sorted(keys, key=lambda key: (list(TITLES).index(key) if key in TITLES else len(TITLES), key))


def _table(named: dict[str, Records]) -> str:
    rows = []
    for position, (name, records) in enumerate(named.items()):
        judged, steps = records.evaluations(), records.steps
        last = judged[-1] if judged else {"value": None, "wire_bytes": None, "measured_bytes": None}
        cells = [
            f"<span class=dot style='background:{style(position)['color']}'></span>{html.escape(name)}",
            number(last["value"]),
            number(steps[-1]["seconds"], 1) if steps else "-",
            number(1e3 * steps[-1]["seconds"] / len(steps), 1) if steps else "-",
            size(last["wire_bytes"]),
            size(last["measured_bytes"] or None),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    metric = next(iter(named.values())).run.metric
    headings = ("method", f"validation {metric}", "seconds", "ms a step", "wire bytes", "measured")
    return "<tr>" + "".join(f"<th>{h}</th>" for h in headings) + "</tr>" + "".join(rows)


def _settings(named: dict[str, Records]) -> str:
    return "\n".join(html.escape(command(records.run)) for records in named.values())


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


def figures_of(page: str) -> list[dict[str, Any]]:
    """The figures inside a page, as plotly would draw them."""
    inside = page.split("<script id=figures type=application/json>", 1)[1].split("</script>", 1)[0]
    figures: list[dict[str, Any]] = json.loads(inside.replace("<\\/", "</"))
    return figures
