"""Ranks: how many directions a layer's gradient has as training goes, how they weigh, how far workers agree."""

from collections.abc import Sequence

from thinwire.lab.pages import svg
from thinwire.lab.pages.panels import together
from thinwire.lab.pages.scales import Axis
from thinwire.lab.papers.picture import Picture
from thinwire.lab.studies.kept import File, Kept

MAPS = {
    "entropy_rank": "effective rank by layer",
    "overlap": "overlap of the workers' directions by layer",
    "captured": "share of the gradient that was sent, by layer",
}
LAYERS = 6  # whose spectra are drawn: the ones with the most directions


def draw(files: Sequence[File]) -> Picture:
    told = [cell for file in files for cell in file.cells if any("/" in key for key in cell.curves)]
    charts, says = [], []
    for cell in told[-1:]:
        x = [float(step) for step in cell.curves["steps"] if step is not None]
        for what, called in MAPS.items():
            rows = by_layer(cell, what)
            if rows:
                charts.append(svg.heat_map(called, rows, x, Axis("steps"), Axis(spell=lambda v: f"{v:.3g}")))
                says += _says(cell, what, rows)
        spectrum = _spectra(cell)
        if spectrum:
            axis = Axis(spell=lambda v: f"{v:.2g}", low=0.0, high=1.0)
            charts.append(svg.heat_map("spectrum: singular values over the largest", spectrum, x, Axis("steps"), axis))
    title = f"rank, overlap and spectrum of each layer's gradient over training, {files[0].task}"
    if not charts:
        charts = [svg.heat_map(title, {}, [], Axis(), Axis())]
    return Picture(together(title, charts), says)


def by_layer(cell: Kept, what: str) -> dict[str, list[float | None]]:
    return {
        key.rpartition("/")[0].removesuffix(".weight"): values
        for key, values in cell.curves.items()
        if key.endswith(f"/{what}") and any(value is not None for value in values)
    }


def _spectra(cell: Kept) -> dict[str, list[float | None]]:
    """A row for each singular value of a layer, relative to the layer's largest at the time."""
    rows: dict[str, list[float | None]] = {}
    widest = sorted(by_layer(cell, "entropy_rank"), key=lambda layer: -_last(by_layer(cell, "entropy_rank")[layer]))
    layers = [layer for layer in by_layer(cell, "spectrum_0") if layer in widest[:LAYERS]]
    for layer in layers:
        largest = by_layer(cell, "spectrum_0")[layer]
        for number in range(1, 8):
            values = by_layer(cell, f"spectrum_{number}").get(layer)
            if values:
                rows[f"{layer}, {number + 1}."] = [
                    v / top if v is not None and top else None for v, top in zip(values, largest)
                ]
    return rows


def _says(cell: Kept, what: str, rows: dict[str, list[float | None]]) -> list[str]:
    firsts = [_first(values) for values in rows.values()]
    lasts = [_last(values) for values in rows.values()]
    called = {"entropy_rank": "the effective rank", "overlap": "the workers' overlap", "captured": "the share sent"}[
        what
    ]
    return [
        f"`{cell.method}`: {called} of the {len(rows)} layers goes from {_range(firsts)} at first "
        f"to {_range(lasts)} at last."
    ]


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.2g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _first(values: Sequence[float | None]) -> float:
    return next(value for value in values if value is not None)


def _last(values: Sequence[float | None]) -> float:
    return _first(values[::-1])
