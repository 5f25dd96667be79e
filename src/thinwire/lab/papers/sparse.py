"""Sparse schemes: accuracy against bytes, once for each of the parameters, with its levels told apart."""

from collections.abc import Sequence

from thinwire.lab.pages.panels import scatter, together
from thinwire.lab.pages.pieces import Series
from thinwire.lab.papers.picture import BYTES, Picture, best_of, quality_axis
from thinwire.lab.papers.tables import quality
from thinwire.lab.studies.kept import File, Kept
from thinwire.lab.studies.studies import sparse_tell

FACTORS = {  # with what each is called, and its levels in a fixed order so that a level looks the same on all tasks
    "memory": ("memory of what was not sent", {"on": "with", "off": "without"}),
    "grain": ("where the largest are chosen", {"model": "in the whole model", "tensor": "in each tensor"}),
    "coordinates": ("coordinates", {"shared": "the same on all workers", "own": "each worker's own"}),
    "momentum": ("momentum", {"before": "before the choice", "after": "after the exchange", "none": "none"}),
    "method": ("scheme", {"RandomBlock": "random block", "TopK": "largest entries"}),
}


def draw(files: Sequence[File]) -> Picture:
    cells = [cell for file in files for cell in file.cells]
    sparse = [cell for cell in cells if cell["method"] != "Dense"]
    dense = best_of([cell for cell in cells if cell["method"] == "Dense"])
    metric = files[0].metric
    y = quality_axis(metric, cells)
    levels = (
        [] if dense is None else [(dense.result.validation or 0.0, f"dense {quality(dense.result.validation, metric)}")]
    )
    charts = []
    for factor, (called, known) in FACTORS.items():
        if len({str(cell[factor]) for cell in sparse}) > 1:
            series = [_series(slot, said, sparse, factor, level, metric) for slot, (level, said) in _slots(known)]
            shown = [one for one in series if one.points()]
            charts.append(scatter(called, shown, BYTES, y, levels=levels))
    title = f"validation {metric} against bytes, by each parameter of sparse schemes, {files[0].task}"
    if not charts:
        charts = [scatter(title, [_series(1, "sparse", sparse, "", None, metric)], BYTES, y, levels=levels)]
    return Picture(together(title, charts), [line for file in files for line in sparse_tell(file.results)])


def _slots(known: dict[str, str]) -> list[tuple[int, tuple[str, str]]]:
    return list(enumerate(known.items(), 1))


def _series(slot: int, said: str, cells: Sequence[Kept], factor: str, level: str | None, metric: str) -> Series:
    here = [cell for cell in cells if level is None or str(cell[factor]) == level]
    here = [cell for cell in here if cell.result.wire > 0]
    tips = [
        f"{', '.join(f'{k} {v}' for k, v in cell.result.factors.items())}: {quality(cell.result.validation, metric)}"
        for cell in here
    ]
    return Series(said, [c.result.wire for c in here], [c.result.validation for c in here], slot, "", tips)
