"""What records of runs show, as drawings. A method has one style throughout: `styles` gives it.

Figures of documents are made from the same functions: `front_of` takes results of a study (a row of `study.json` has
all that a point needs), `by_layer` the records of one run, and every drawing has `.write(path)`.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from thinwire.lab.pages import svg
from thinwire.lab.pages.pieces import Drawing, Series
from thinwire.lab.pages.scales import Axis, in_bytes, percent
from thinwire.lab.pages.splits import PARTS, Split
from thinwire.lab.pages.styles import Style
from thinwire.lab.records.record import Line
from thinwire.lab.records.summary import Records, Target, total, worker_total

LOGARITHMIC = ("density", "threshold", "residual_norm")
POINTS, LEAST_POINTS = 160, 24  # of a curve; a page with many curves gives each fewer, so that it stays small
PAGE_POINTS, PAGE_CELLS = 8_000, 4_000  # of all curves and of all heat maps of a page
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
Named = Mapping[str, Records]
Points = tuple[list[float], list[float | None]]


@dataclass(frozen=True)
class View:
    """Which part of the values tells the methods apart, and the target among them."""

    metric: str
    low: float
    high: float
    goal: float | None

    @property
    def axis(self) -> Axis:
        return Axis(f"validation {self.metric}", spell=self.spell, low=self.low, high=self.high)

    def spell(self, value: float) -> str:
        return percent(value) if self.metric == "accuracy" else f"{value:.4g}"

    def line(self) -> tuple[float, str] | None:
        return None if self.goal is None else (self.goal, f"target {self.spell(self.goal)}")


def view(named: Named, target: Target | None) -> View:
    """From the best value to a bit beyond the worst end; the first plunge, and who ends far away, are cut off."""
    metric = next(iter(named.values())).run.metric
    sign = 1.0 if metric == "accuracy" else -1.0
    judged = [[line["value"] for line in one.evaluations() if line["value"] is not None] for one in named.values()]
    known = [values for values in judged if values]
    goal = target.value if target and target.metric == metric else None
    if not known:
        return View(metric, 0.0, 1.0, goal)
    best = max(sign * value for values in known for value in values)
    whole = best - min(sign * values[0] for values in known)
    behind = [best - sign * values[-1] for values in known]
    near = max(4 * statistics.median(behind), 0.12 * abs(whole))
    if goal is not None:
        behind.append(best - sign * goal)
        near = max(near, 1.5 * abs(behind[-1]))
    reach = (
        max(1.7 * max([one for one in behind if one <= near], default=0.0), 0.12 * abs(whole)) or 0.1 * abs(best) or 1.0
    )
    far, close = sign * (best - reach), sign * (best + 0.08 * reach)
    if metric == "accuracy":
        far, close = max(0.0, far), min(1.0, max(close, sign * best))
    return View(metric, min(far, close), max(far, close), goal)


def against_seconds(
    named: Named, styles: Mapping[str, Style], seen: View, slower: Mapping[str, float], width: float, height: float
) -> Drawing:
    """The main one. `slower`: by how much the seconds of a run grow on a link that could not be emulated."""
    series = []
    for name, records in named.items():
        lines = [line for line in records.evaluations() if line["seconds"] > 0]
        x = [line["seconds"] * slower.get(name, 1.0) for line in lines]
        y = [line["value"] for line in lines]
        told = [
            "" if v is None else f"{name}: {seen.spell(v)} after {s:.3g} s, step {line['step']}"
            for line, s, v in zip(lines, x, y)
        ]
        series.append(styles[name].series(name, x, y, told))
    axis = Axis("seconds of training, logarithmic", log=True, low=_entry(series, seen))
    title = f"validation {seen.metric} against seconds of training"
    return svg.lines(title, series, axis, seen.axis, width=width, height=height, goal=seen.line())


def _entry(series: Sequence[Series], seen: View) -> float | None:
    """When the first line comes into view: nothing can be seen before."""
    starts = []
    for one in series:
        inside = [i for i, y in enumerate(one.y) if y is not None and seen.low <= y <= seen.high]
        if inside:
            starts.append(one.x[max(0, inside[0] - 1)])
    return min(starts, default=None)


def costs(named: Named, styles: Mapping[str, Style], seen: View, splits: Mapping[str, Split]) -> list[Drawing]:
    """What the result was paid with: bytes, steps, time."""
    return [
        curves(named, styles, "validation against bytes sent by a worker", BYTES, "wire_bytes", evaluated, seen.axis),
        curves(named, styles, "validation against steps", Axis("steps"), "step", evaluated, seen.axis),
        time_split(named, styles, splits),
        bytes_per_worker(named, styles),
        curves(named, styles, "training loss, smoothed", Axis("steps"), "step", loss, Axis(log=True)),
    ]


BYTES = Axis("bytes, logarithmic", log=True, spell=in_bytes)


def diagnostics(named: Named, styles: Mapping[str, Style]) -> list[Drawing]:
    """What the methods told of themselves: a chart for each measure; for measures of layers, a map for each method."""
    keys = own_metrics(named)
    most = max(LEAST_POINTS, min(POINTS, PAGE_POINTS // max(1, len(keys) * len(named))))
    drawn = []
    for key in keys:
        title, y = TITLES.get(key, key.replace("_", " ")), Axis(log=key in LOGARITHMIC)
        drawn.append(curves(named, styles, title, Axis("steps"), "step", told(key, most), y))
    layers = sum(len(_layer_keys(records)) for records in named.values())
    columns = max(8, min(60, PAGE_CELLS // max(1, layers)))
    return drawn + [one for name, records in named.items() for one in by_layer(name, records, columns)]


def own_metrics(named: Named) -> list[str]:
    """What the methods themselves told of the whole model, the best known first; what was always zero is left out."""
    lines = [line for records in named.values() for line in records.steps]
    seen = dict.fromkeys(
        key for line in lines for key, value in line.items() if isinstance(value, int | float) and value
    )
    keys = [key for key in seen if key not in BASE and "/" not in key and not key.endswith("_s")]
    keys = [key for key in keys if not key.startswith("validation")]
    return sorted(keys, key=lambda key: (list(TITLES).index(key) if key in TITLES else len(TITLES), key))


def by_layer(name: str, records: Records, columns: int = 60, width: float = 440) -> list[Drawing]:
    """What a method told of each layer, as `layer/what`: a heat map for each what, a row for each layer."""
    keys, drawn = _layer_keys(records), []
    for what in dict.fromkeys(key.rpartition("/")[2] for key in keys):
        lines = [
            line for line in records.steps if any(line.get(key) is not None for key in keys if key.endswith(f"/{what}"))
        ]
        spans = list(stretches(lines, columns))
        rows = {
            key.rpartition("/")[0].removesuffix(".weight"): [_mean(line.get(key) for line in part) for part in spans]
            for key in keys
            if key.endswith(f"/{what}")
        }
        title = f"{what.replace('_', ' ')} by layer, {name}"
        x = [float(part[-1]["step"]) for part in spans]
        drawn.append(svg.heat_map(title, rows, x, Axis("steps"), Axis(spell=lambda v: f"{v:.3g}"), width=width))
    return drawn


def _layer_keys(records: Records) -> list[str]:
    return list(dict.fromkeys(key for line in records.steps for key in line if "/" in key and "spectrum" not in key))


def stretches(lines: list[Line], most: int) -> Iterator[list[Line]]:
    """The lines in at most so many parts of equal length."""
    stride = math.ceil(len(lines) / most) or 1
    return (lines[i : i + stride] for i in range(0, len(lines), stride))


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def evaluated(records: Records, axis: str) -> Points:
    judged = records.evaluations()
    return [line[axis] for line in judged], [line["value"] for line in judged]


def told(key: str, most: int = POINTS) -> Callable[[Records, str], Points]:
    """A measure over the run. Local steps between exchanges have nothing to tell, so they are left out."""

    def points(records: Records, axis: str) -> Points:
        lines = [line for line in records.steps if line.get(key) is not None and line.get("collectives") != 0]
        lines = _thin(lines, most)
        return [line[axis] for line in lines], [line[key] for line in lines]

    return points


def loss(records: Records, axis: str) -> Points:
    """The mean over the workers and the last few steps: a single batch is mostly noise."""
    steps = records.steps
    width = max(1, len(steps) // 50)
    columns = list(zip(*[[line["loss"] for line in rank if line["step"] > 0] for rank in records.ranks]))
    means = [math.nan if None in column else sum(column) / len(column) for column in columns]
    smooth = [sum(means[max(0, i - width + 1) : i + 1]) / (i + 1 - max(0, i - width + 1)) for i in range(len(means))]
    lines = _thin([{"x": line[axis], "y": value} for line, value in zip(steps, smooth)], POINTS)
    return [line["x"] for line in lines], [None if math.isnan(line["y"]) else line["y"] for line in lines]


def _thin(lines: list[Line], most: int) -> list[Line]:
    stride = math.ceil(len(lines) / most) or 1
    kept = lines[::stride]
    return kept if not lines or kept[-1] is lines[-1] else [*kept, lines[-1]]


def curves(
    named: Named,
    styles: Mapping[str, Style],
    title: str,
    x: Axis,
    key: str,
    points: Callable[[Records, str], Points],
    y: Axis,
    *,
    width: float = 440,
) -> Drawing:
    """A line for each run that has something to show; `key` is what it is drawn against."""
    series = []
    for name, records in named.items():
        across, up = points(records, key)
        if x.log:  # nothing has been sent before the first step
            kept = [(a, b) for a, b in zip(across, up) if a > 0]
            across, up = [a for a, _ in kept], [b for _, b in kept]
        if across:
            series.append(styles[name].series(name, across, up))
    return svg.lines(title, series, x, y, width=width)


def time_split(named: Named, styles: Mapping[str, Style], splits: Mapping[str, Split], width: float = 440) -> Drawing:
    rows = [
        (styles[name].series(name), {part: 1e3 * s for part, s in splits[name].parts.items()}, splits[name].guess)
        for name in named
    ]
    return svg.bars("where the time of a step goes (ms)", rows, PARTS, "ms", width=width)


def bytes_per_worker(named: Named, styles: Mapping[str, Style], width: float = 440) -> Drawing:
    """What each worker's link carried, by the ledger on the mean and by each interface's own count."""
    rows = []
    for name, records in named.items():
        steps = max(1, len(records.steps))
        mean = total(records, "wire_bytes")
        marks = {"mean, by the ledger": [mean / steps] if mean else []}
        each = [worker_total(rank, "measured_bytes") for rank in records.ranks]
        if any(each):
            marks["each worker, by its interface"] = [value / steps for value in each if value]
        rows.append((styles[name].series(name), marks))
    return svg.dots("bytes a step on each worker's wire", rows, BYTES, width=width)


def front_of(
    points: Sequence[tuple[str, float, float, str]],
    styles: Mapping[str, Style],
    metric: str,
    *,
    width: float = 640,
    height: float = 400,
) -> Drawing:
    """Quality against bytes a step. A point: whose it is, its bytes, its value, and what is told of it."""
    series = []
    for name in dict.fromkeys(name for name, *_ in points):
        here = [(x, y, tip) for other, x, y, tip in points if other == name and x > 0]
        x, y, tips = [x for x, _, _ in here], [y for _, y, _ in here], [tip for *_, tip in here]
        series.append(styles[name].series(name, x, list(y), tips))
    axis = Axis("bytes a step on a worker's wire, logarithmic", log=True, spell=in_bytes)
    y_axis = Axis(f"validation {metric}", spell=percent if metric == "accuracy" else lambda v: f"{v:.4g}")
    title = f"validation {metric} against bytes a step; no other point beats those on the line"
    return svg.front(title, series, axis, y_axis, more_is_better=metric == "accuracy", width=width, height=height)
