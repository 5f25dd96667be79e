"""The figures of the report. One colour for each method, throughout."""

import math
from collections.abc import Callable

import plotly.graph_objects as go

from thinwire.lab.record import Line
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
LOGARITHMIC = ("density", "threshold", "residual_norm")
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


def of_runs(named: dict[str, Records]) -> list[go.Figure]:
    """Everything that records of runs can show."""
    drawn = [
        curves(named, "validation against steps", "steps", "step", evaluated),
        curves(named, "validation against seconds of training", "seconds", "seconds", evaluated),
        curves(named, "validation against bytes on a worker's wire", "bytes", "wire_bytes", evaluated, log=True),
        curves(named, "training loss", "steps", "step", loss, log_y=True),
        time_split(named),
        bytes_per_worker(named),
    ]
    for key in _own_metrics(named):
        title = TITLES.get(key, key.replace("_", " "))
        drawn.append(curves(named, title, "steps", "step", told(key), log_y=key in LOGARITHMIC))
    return drawn + [figure for name, records in named.items() for figure in by_layer(name, records)]


def _own_metrics(named: dict[str, Records]) -> list[str]:
    """What the methods themselves told of the whole model, the best known first."""
    lines = [line for records in named.values() for line in records.steps]
    seen = dict.fromkeys(key for line in lines for key, value in line.items() if isinstance(value, (int, float)))
    keys = [key for key in seen if key not in BASE and "/" not in key and not key.endswith("_s")]
    keys = [key for key in keys if not key.startswith("validation")]
    return sorted(keys, key=lambda key: (list(TITLES).index(key) if key in TITLES else len(TITLES), key))


def by_layer(name: str, records: Records) -> list[go.Figure]:
    """What a method told of each layer, as `layer/what`: a figure for each what, a line for each layer."""
    drawn = []
    keys = dict.fromkeys(key for line in records.steps for key in line if "/" in key and "spectrum" not in key)
    for what in dict.fromkeys(key.rpartition("/")[2] for key in keys):
        figure = blank(f"{what.replace('_', ' ')} by layer, {name}")
        for position, key in enumerate(key for key in keys if key.endswith(f"/{what}")):
            x, y = told(key)(records, "step")
            figure.add_scatter(x=x, y=y, name=key.rpartition("/")[0], mode="lines", line=style(position))
        figure.update_xaxes(title="steps")
        drawn.append(figure)
    return drawn


Points = tuple[list[float], list[float | None]]


def evaluated(records: Records, axis: str) -> Points:
    judged = records.evaluations()
    return [line[axis] for line in judged], [line["value"] for line in judged]


def told(key: str) -> Callable[[Records, str], Points]:
    def points(records: Records, axis: str) -> Points:
        lines = _thin([line for line in records.steps if line.get(key) is not None])
        return [line[axis] for line in lines], [line[key] for line in lines]

    return points


def loss(records: Records, axis: str) -> Points:
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


def curves(
    named: dict[str, Records],
    title: str,
    label: str,
    axis: str,
    points: Callable[[Records, str], Points],
    log: bool = False,
    log_y: bool = False,
) -> go.Figure:
    figure = blank(title)
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
    figure.update_yaxes(title=f"validation {metric}" if points is evaluated else "", type="log" if log_y else "linear")
    return figure


def time_split(named: dict[str, Records]) -> go.Figure:
    figure = blank("where the time of a step goes (ms)")
    splits = {name: split_of(records.steps[3:] or records.steps) for name, records in named.items()}
    for phase in dict.fromkeys(phase for split in splits.values() for phase in split):
        values = [1e3 * split.get(phase, 0.0) for split in splits.values()]
        colour = PHASE_COLOURS.get(phase, "#555555")
        figure.add_bar(y=list(splits), x=values, name=phase, orientation="h", marker_color=colour)
    figure.update_layout(barmode="stack", height=120 + 42 * len(named))
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def bytes_per_worker(named: dict[str, Records]) -> go.Figure:
    """A bar for what the ledger says a link carried, on the mean; marks for each worker, predicted and counted."""
    figure = blank("bytes a step on each worker's wire")
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


def blank(title: str) -> go.Figure:
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


def make_room(figure: go.Figure) -> None:
    """A legend below the axis, two names to a row, without taking from the plot."""
    shown = sum(trace.showlegend is not False for trace in figure.data)
    plot = figure.layout.height - 120
    below = 64 + 20 * math.ceil(shown / 2)
    figure.update_layout(height=48 + plot + below, margin={"t": 48, "b": below}, legend={"y": -56 / plot})
