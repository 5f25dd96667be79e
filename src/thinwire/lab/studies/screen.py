"""Many short runs first, and longer ones only for those that may still win.

At each stage every cell that is left runs for as many steps, with one seed. Those that no other one beats in both
quality and bytes come first, then those that only these beat, and so on; the best share of them goes on. So the cheap
ones stay in beside the accurate ones, and a learning rate that is beaten by another one leaves early.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from thinwire.lab.records.files import write_json
from thinwire.lab.studies.study import Cell, Result, pareto, result_of

Make = Callable[[Sequence[Cell], Path], dict[Path, str]]  # makes runs in a folder; those that failed


def screened(cells: Sequence[Cell], out: Path, stages: Sequence[int], keep: float, make: Make) -> list[Cell]:
    """The cells that are worth their full length, all seeds of each; what each stage decided is in `screen.json`."""
    first_seed = min(cell.run.seed for cell in cells)
    left = [cell for cell in cells if cell.run.seed == first_seed]
    told = []
    for steps in stages:
        folder = out / f"screen-{steps}"
        short = {_shortened(cell, steps).name: cell for cell in left}
        runs = [_shortened(cell, steps) for cell in left]
        failed = make(runs, folder)
        found = {run.name: result_of(run, folder) for run in runs if folder / run.name not in failed}
        best = ranked(found)[: max(1, math.ceil(keep * len(left)))]
        left = [short[name] for name in best]
        told.append({"steps": steps, "kept": best, "left out": sorted(set(short) - set(best))})
        write_json(out / "screen.json", told)
    kept = {_but_seed(cell) for cell in left}
    return [cell for cell in cells if _but_seed(cell) in kept]


def ranked(found: dict[str, Result]) -> list[str]:
    """Names, front by front, the best quality first within each; those that diverged are left out."""
    names = {id(result): name for name, result in found.items()}
    left = [result for result in found.values() if result.validation is not None]
    order = []
    while left:
        front = pareto(left)
        order += [names[id(result)] for result in sorted(front, key=lambda r: -r.gain)]
        left = [result for result in left if not any(result is one for one in front)]
    return order


def _shortened(cell: Cell, steps: int) -> Cell:
    run = replace(cell.run, steps=steps, evaluate_every=min(cell.run.evaluate_every, steps))
    return Cell({**cell.factors, "steps": steps}, run)


def _but_seed(cell: Cell) -> str:
    return repr({key: value for key, value in cell.factors.items() if key != "seed"})
