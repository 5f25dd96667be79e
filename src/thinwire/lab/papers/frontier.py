"""Quality against bytes: a line for each family of methods, and what dense exchanges reach as lines across."""

import re
from collections.abc import Sequence

from thinwire.core.reducer import inner_reducers
from thinwire.lab.pages.panels import scatter
from thinwire.lab.pages.pieces import Series
from thinwire.lab.pages.scales import Axis
from thinwire.lab.papers.picture import Picture, best_of, quality_axis
from thinwire.lab.papers.tables import one_over, quality
from thinwire.lab.records.spellings import DDP, method_of, reducer_in
from thinwire.lab.studies.kept import File, Kept

ASIDE = {"ErrorFeedback", "Momentum", "Adam", "Cast", "Route", "Warmup"}  # wrappers, which make no family
DENSE = ("Dense()", "DDP", "DDP('fp16')", "DDP('bf16')", "Cast(Dense())")


def draw(files: Sequence[File]) -> Picture:
    cells = [cell for file in files for cell in file.cells if cell.result.wire > 0]
    metric, full = files[0].metric, max((cell.result.wire for cell in cells if cell.method in DENSE), default=0.0)
    full = full or max(cell.result.wire for cell in cells)
    across = _levels([cell for cell in cells if cell.method in DENSE], metric)
    families: dict[str, list[Kept]] = {}
    several = len({cell["optimizer"] for cell in cells}) > 1
    for cell in cells:
        if cell.method not in DENSE and cell.result.validation is not None:
            name = family(cell.method) + (f", {cell['optimizer']}" if several else "")
            families.setdefault(name, []).append(cell)
    series = []
    for slot, (name, some) in enumerate(sorted(families.items()), 1):
        best = _front(some)
        tips = [
            f"{c.method}, {c['optimizer']}: {quality(c.result.validation, metric)}, {one_over(full / c.result.wire)}"
            for c in best
        ]
        series.append(
            Series(name, [c.result.wire / full for c in best], [c.result.validation for c in best], slot, "", tips)
        )
    x = Axis(
        "bytes, relative to a dense exchange at every step, logarithmic", log=True, spell=lambda v: one_over(1 / v)
    )
    y = quality_axis(metric, cells)
    title = f"validation {metric} against bytes, by family, {files[0].task}"
    drawing = scatter(title, series, x, y, levels=across, joined=True, width=860, height=460)
    return Picture(drawing, _says(cells, families, full, metric))


def family(method: str) -> str:
    """The method inside, without what is wrapped around it."""
    known = method_of(method)
    if isinstance(known, DDP):
        return repr(known)
    reducer = reducer_in(known)
    kinds = [type(part).__name__ for part in inner_reducers(reducer)] if reducer is not None else []
    inside = next((kind for kind in kinds if kind not in ASIDE), re.split(r"\(", method)[0])
    return f"{inside} in local steps" if known is not reducer and inside == "Dense" else inside


def _front(cells: Sequence[Kept]) -> list[Kept]:
    """Those of a family that no other one of it beats in both, so that its line says what it can do."""
    best: list[Kept] = []
    for cell in sorted(cells, key=lambda c: (c.result.wire, -c.result.gain)):
        if not best or cell.result.gain > best[-1].result.gain:
            best.append(cell)
    return best


def _levels(dense: Sequence[Kept], metric: str) -> list[tuple[float, str]]:
    found = []
    for method in dict.fromkeys(cell.method for cell in dense):
        for optimizer in dict.fromkeys(cell["optimizer"] for cell in dense):
            best = best_of([c for c in dense if c.method == method and c["optimizer"] == optimizer])
            if best is not None and best.result.validation is not None:
                called = {"Dense()": "dense", "DDP": "dense"}.get(method, method)
                found.append(
                    (best.result.validation, f"{called}, {optimizer}: {quality(best.result.validation, metric)}")
                )
    return found


def _says(cells: Sequence[Kept], families: dict[str, list[Kept]], full: float, metric: str) -> list[str]:
    dense = best_of([cell for cell in cells if cell.method in DENSE])
    said = []
    if dense is not None and dense.result.validation is not None:
        said.append(f"The best dense run ({dense['optimizer']}) has {quality(dense.result.validation, metric)}.")
    for least in (30, 100, 300, 1000):
        few = best_of([c for some in families.values() for c in some if full / c.result.wire >= least])
        if few is not None:
            said.append(
                f"At 1/{least} of the bytes or less the best is `{few.method}` ({few['optimizer']}): "
                f"{quality(few.result.validation, metric)} at {one_over(full / few.result.wire)}{_behind(few, dense)}."
            )
    return said


def _behind(cell: Kept, dense: Kept | None) -> str:
    value, best = cell.result.validation, dense.result.validation if dense else None
    if value is None or best is None:
        return ""
    if cell.result.metric == "accuracy":
        return f", {100 * (value - best):+.1f} points from it"
    return f", {100 * (value / best - 1):+.1f} % from it"
