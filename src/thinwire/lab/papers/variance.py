"""The variance criterion: what it sends as training goes, and accuracy against compression over alpha."""

from collections.abc import Sequence

from thinwire.lab.pages import svg
from thinwire.lab.pages.panels import scatter, together
from thinwire.lab.pages.pieces import Drawing, Series
from thinwire.lab.pages.scales import Axis, percent
from thinwire.lab.pages.styles import styles
from thinwire.lab.papers.picture import Picture, quality_axis
from thinwire.lab.papers.tables import dense_for, quality
from thinwire.lab.studies.kept import File, Kept
from thinwire.lab.studies.studies import variance_tell


def draw(files: Sequence[File]) -> Picture:
    cells = [cell for file in files for cell in file.cells]
    metric, style = files[0].metric, styles(list(dict.fromkeys(cell.method for cell in cells)), "Dense()")
    first = cells[0]["optimizer"]
    waiting = [c for c in cells if c.method.startswith("Variance(") and c["optimizer"] == first and "steps" in c.curves]
    charts = []
    if waiting:
        share = [
            style[c.method].series(c.method, _steps(c), c.curves["density"]) for c in waiting if "density" in c.curves
        ]
        if share:  # records of 0.1 do not have it
            y = Axis(log=True, spell=percent)
            charts.append(svg.lines(f"share of the entries sent, {first}", share, Axis("steps"), y))
        times = [style[c.method].series(c.method, _steps(c), _compression(c, cells)) for c in waiting]
        charts.append(svg.lines(f"times fewer bytes than dense, {first}", times, Axis("steps"), Axis(log=True)))
    for optimizer in dict.fromkeys(cell["optimizer"] for cell in cells):
        charts.append(_quality(f"{metric} against compression, {optimizer}", cells, optimizer, style, metric))
    title = f"what the variance criterion sends, and {metric} against compression, {files[0].task}"
    says = [line for c in waiting for line in _over_time(c, cells)]
    return Picture(together(title, charts), says + [line for file in files for line in variance_tell(file.results)])


def _steps(cell: Kept) -> list[float]:
    return [float(step) for step in cell.curves["steps"] if step is not None]


def _compression(cell: Kept, cells: Sequence[Kept]) -> list[float | None]:
    dense = dense_for(cell, cells)
    return [dense.result.wire / sent if dense and sent else None for sent in cell.curves["wire_bytes"]]


def _over_time(cell: Kept, cells: Sequence[Kept]) -> list[str]:
    """How the share and the compression moved from the first stretch of steps to the last."""
    share, times = cell.curves.get("density", []), _compression(cell, cells)
    if not share or share[0] is None or share[-1] is None or times[0] is None or times[-1] is None:
        return []
    return [
        f"`{cell.method}`: {percent(float(f'{share[0]:.2g}'))} of the entries are sent at first and "
        f"{percent(float(f'{share[-1]:.2g}'))} at last; "
        f"{times[0]:.3g} times fewer bytes than dense become {times[-1]:.3g}."
    ]


def _quality(title: str, cells: Sequence[Kept], optimizer: object, style: dict, metric: str) -> Drawing:
    here = [cell for cell in cells if cell["optimizer"] == optimizer]
    series, levels = [], []
    for cell in here:
        dense = dense_for(cell, here)
        if cell is dense and cell.result.validation is not None:
            levels.append((cell.result.validation, f"dense {quality(cell.result.validation, metric)}"))
        elif dense is not None and cell.result.wire:
            series.append(_point(style[cell.method].series(cell.method), cell, dense))
    x = Axis("times fewer bytes than dense, logarithmic", log=True)
    return scatter(title, series, x, quality_axis(metric, here), levels=levels, legend=False)


def _point(one: Series, cell: Kept, dense: Kept) -> Series:
    return Series(one.name, [dense.result.wire / cell.result.wire], [cell.result.validation], one.slot, one.label)
