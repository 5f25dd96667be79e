"""ExDyna beside the other sparsifiers: density, balance, traffic and accuracy against the number of workers."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from thinwire.lab.pages import svg
from thinwire.lab.pages.panels import together
from thinwire.lab.pages.pieces import Drawing
from thinwire.lab.pages.scales import Axis, percent
from thinwire.lab.pages.styles import Style, styles
from thinwire.lab.papers.picture import Picture, quality_axis, workers_axis
from thinwire.lab.papers.tables import dense_for
from thinwire.lab.studies.kept import File, Kept

Value = Callable[[Kept], float | None]


def draw(files: Sequence[File]) -> Picture:
    cells = [cell for file in files for cell in file.cells]
    sparse = [cell for cell in cells if cell["method"] != "Dense()"]
    style = styles(list(dict.fromkeys(str(cell["method"]) for cell in cells)), "Dense()")
    x = workers_axis(files)
    densities = sorted({float(cell["density"]) for cell in sparse}, reverse=True)
    charts, says = [], []
    dense, metric = [cell for cell in cells if cell["method"] == "Dense()"], files[0].metric
    for density in densities:
        here = [cell for cell in sparse if cell["density"] == density]
        of = f", density {density:g}" if len(densities) > 1 else ""
        for title, value, y in (
            ("entries sent by all together over those asked for", over_asked, Axis(log=True)),
            ("bytes of the busiest worker over the mean", lambda c: c.means.get("busiest"), Axis()),
            ("share of dense's bytes", lambda c: _share(c, cells), Axis(log=True, spell=percent)),
        ):
            charts.append(_lines(title + of, here, value, x, y, style))
        momenta = list(dict.fromkeys(cell["momentum"] for cell in here))
        for momentum in momenta:  # masked for all, or for none: the two are not mixed
            some = [*dense, *(cell for cell in here if cell["momentum"] == momentum)]
            title = f"validation {metric}{of}" + (f", momentum {momentum}" if len(momenta) > 1 else "")
            charts.append(_lines(title, some, lambda c: c.result.validation, x, quality_axis(metric, some), style))
        says += _says(here, cells, density)
    title = f"density, balance, traffic and {files[0].metric} of sparsifiers against workers, {files[0].task}"
    return Picture(together(title, charts), says)


def _lines(title: str, cells: Sequence[Kept], value: Value, x: Axis, y: Axis, style: Mapping[str, Style]) -> Drawing:
    """A line for each method, against the number of workers."""
    series = []
    for method in dict.fromkeys(str(cell["method"]) for cell in cells):
        at = _by_workers([cell for cell in cells if cell["method"] == method], value)
        if at:
            series.append(style[method].series(method, list(at), list(at.values())))
    return svg.lines(title, series, x, y, width=460, height=300)


def _by_workers(cells: Sequence[Kept], value: Value) -> dict[float, float]:
    """The mean over the ways momentum is handled, for each number of workers."""
    found: dict[float, list[float]] = {}
    for cell in sorted(cells, key=lambda cell: cell.workers):
        known = value(cell)
        if known is not None and math.isfinite(known):
            found.setdefault(float(cell.workers), []).append(known)
    return {workers: statistics.fmean(values) for workers, values in found.items()}


def over_asked(cell: Kept) -> float | None:
    """Entries that the workers sent together over those asked for: 1 is what was asked, more is build-up."""
    sent = cell.means.get("union", cell.means.get("density"))
    return None if sent is None else float(sent) / float(cell["density"])


def _share(cell: Kept, cells: Sequence[Kept]) -> float | None:
    dense = dense_for(cell, cells)
    return cell.result.wire / dense.result.wire if dense and cell.result.wire else None


def _says(here: Sequence[Kept], cells: Sequence[Kept], density: float) -> list[str]:
    most = max(cell.workers for cell in here)
    last = [cell for cell in here if cell.workers == most]
    said = []
    for value, sentence in (
        (over_asked, "entries sent by all together over those asked for: {}"),
        (lambda c: c.means.get("busiest"), "bytes of the busiest worker over the mean: {}"),
        (lambda c: _share(c, cells), "share of dense's bytes: {}"),
    ):
        known = {str(c["method"]): v for c in last if (v := value(c)) is not None}
        if known:
            ours = next((v for method, v in known.items() if "ExDyna" in method), None)
            low, high = min(known, key=lambda m: known[m]), max(known, key=lambda m: known[m])
            between = f"{known[low]:.3g} (`{low}`) to {known[high]:.3g} (`{high}`)"
            mine = "" if ours is None else f"; `ErrorFeedback(ExDyna({density:g}))` has {ours:.3g}"
            said.append(f"Density {density:g}, {most} workers, {sentence.format(between)}{mine}.")
    return said
