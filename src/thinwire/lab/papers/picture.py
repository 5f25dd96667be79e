"""A picture of a document, with what one sees in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.lab.pages.pieces import Drawing
from thinwire.lab.pages.scales import Axis, in_bytes, percent
from thinwire.lab.studies.kept import File, Kept

BYTES = Axis("bytes a step on a worker's link, logarithmic", log=True, spell=in_bytes)


@dataclass(frozen=True)
class Picture:
    drawing: Drawing
    says: list[str] = field(default_factory=list)  # worked out from the results, never written by hand


def quality_axis(metric: str, cells: Sequence[Kept]) -> Axis:
    """From a little below most of the results: one that learned nothing would press all others together."""
    spell = percent if metric == "accuracy" else lambda v: f"{v:.4g}"
    known = sorted(cell.result.gain for cell in cells if cell.result.validation is not None)
    if len(known) < 4:
        return Axis(f"validation {metric}", spell=spell)
    best, low = known[-1], known[len(known) // 10]
    far = best - 1.25 * (best - low)
    if known[0] >= far or best == low:
        return Axis(f"validation {metric}", spell=spell)
    if metric == "accuracy":
        return Axis(f"validation {metric}", spell=spell, low=far)
    return Axis(f"validation {metric}", spell=spell, high=-far)


def workers_axis(files: Sequence[File]) -> Axis:
    every = sorted({cell.workers for file in files for cell in file.cells})
    return Axis("workers", log=True, at=tuple(map(float, every)), spell=lambda v: f"{v:g}")


def best_of(cells: Sequence[Kept]) -> Kept | None:
    known = [cell for cell in cells if cell.result.validation is not None]
    return max(known, key=lambda cell: cell.result.gain, default=None)
