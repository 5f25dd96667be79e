"""The papers' claims, one row each: what was measured here, and whether it holds. Unfavourable rows stay.

Claims are those of the abstracts. A row is worked out from kept results where a study measures it; a row that rests on
a test or a benchmark names it. What nobody has measured yet is said to be so.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.lab.papers.picture import best_of
from thinwire.lab.papers.ranks import by_layer
from thinwire.lab.papers.sparsifiers import over_asked
from thinwire.lab.papers.tables import chosen_rates, dense_for, one_over, quality
from thinwire.lab.studies.kept import File, Kept
from thinwire.lab.studies.study import effect, points

HOLDS, FAILS, PARTLY, OPEN = "holds", "does not hold here", "in part", "not measured yet"
NEAR = {"accuracy": 0.01, "loss": 0.03}  # what counts as the same: one point, three per cent


@dataclass(frozen=True)
class Row:
    claim: str
    setting: str
    command: str
    measured: str
    verdict: str


Measure = Callable[[File], tuple[str, str] | None]  # what was measured, and the verdict


@dataclass(frozen=True)
class Claim:
    said: str
    study: str
    tasks: tuple[str, ...]
    measure: Measure
    quality: bool = True  # then it needs learning rates to choose from, since a setting may want another one

    def rows(self, files: Mapping[str, File]) -> list[Row]:
        found, missing = [], []
        for task in self.tasks:
            here = [f for f in files.values() if f.study == self.study and f.task == task]
            told = [(file, seen) for file in here if (seen := self.measure(file))]
            for file, (measured, verdict) in told:
                if self.quality and not chosen_rates(file):
                    verdict = f"{OPEN}: at one learning rate alone"
                found.append(Row(self.said, setting(file), f"`{file.command}`", measured, verdict))
            missing += [] if told else [task]
        if missing:
            command = f"`thinwire study {self.study} --task {missing[0]} --page`"
            found.append(Row(self.said, ", ".join(missing), command, "-", OPEN))
        return found


def setting(file: File) -> str:
    seeds = max(len(cell.result.values) for cell in file.cells)
    steps = f", {file.settings['steps']} steps" if "steps" in file.settings else ""
    return f"{file.task}{f' ({file.model})' if file.model else ''}{steps}, {seeds} seed{'s' if seeds > 1 else ''}"


def behind(cell: Kept, dense: Kept) -> float:
    """How much worse a setting is than dense: in points of accuracy / 100, or as a share of the loss."""
    gap = dense.result.gain - cell.result.gain
    return gap if cell.result.metric == "accuracy" else gap / abs(dense.result.gain)


def is_near(cell: Kept, dense: Kept) -> bool:
    return behind(cell, dense) <= NEAR[cell.result.metric]


def _against(cell: Kept, dense: Kept) -> str:
    metric = cell.result.metric
    told = f"{quality(cell.result.validation, metric)} against {quality(dense.result.validation, metric)}"
    return f"`{cell.method}`: {told} at {one_over(dense.result.wire / cell.result.wire)} of the bytes"


def _dense(file: File) -> Kept | None:
    return best_of([cell for cell in file.cells if cell.method in ("Dense()", "DDP")])


def three_parameters(file: File) -> tuple[str, str] | None:
    """A parameter decides if changing it alone moves the result by more than what counts as the same."""
    moved = {}
    for factor, one, other in (("memory", "on", "off"), ("grain", "model", "tensor"), ("coordinates", "shared", "own")):
        seen = effect(file.results, factor, one, other)
        if seen and seen[2] == seen[2]:
            moved[factor] = seen[2]
    if len(moved) < 3:
        return None
    best = best_of(file.cells)
    least = NEAR[file.metric] * (1.0 if file.metric == "accuracy" or best is None else abs(best.result.gain))
    large = [factor for factor, gap in moved.items() if abs(gap) > least]
    told = "; ".join(f"{factor} {points(gap, file.metric)} on average" for factor, gap in moved.items())
    return told, HOLDS if len(large) == 3 else FAILS if not large else f"{PARTLY}: {', '.join(large)}"


def close_to_sgd(file: File) -> tuple[str, str] | None:
    dense, best = _dense(file), best_of([cell for cell in file.cells if cell["method"] == "RandomBlock"])
    if dense is None or best is None:
        return None
    return _against(best, dense), HOLDS if is_near(best, dense) else FAILS


def high_compression(file: File) -> tuple[str, str] | None:
    """The most compressed setting of the criterion that is still as good as dense, under each optimizer."""
    told, good = [], []
    for optimizer in dict.fromkeys(cell["optimizer"] for cell in file.cells):
        ours = [c for c in file.cells if c.method.startswith("Variance(") and c["optimizer"] == optimizer]
        pairs = [(c, d) for c in ours if (d := dense_for(c, file.cells)) and c.result.validation is not None]
        near = [(c, d) for c, d in pairs if is_near(c, d)]
        if pairs:
            cell, dense = min(near or pairs, key=lambda p: p[0].result.wire if near else -p[0].result.gain)
            told.append(f"{optimizer}, {_against(cell, dense)}")
            good.append(bool(near))
    return (". ".join(told), HOLDS if all(good) else PARTLY if any(good) else FAILS) if told else None


def power_iterations(file: File) -> tuple[str, str] | None:
    dense, ours = _dense(file), [c for c in file.cells if "RankDAD" in c.method and c.result.validation is not None]
    if dense is None or not ours:
        return None
    near = [cell for cell in ours if is_near(cell, dense)]
    cell = min(near, key=lambda c: c.result.wire) if near else max(ours, key=lambda c: c.result.gain)
    return _against(cell, dense), HOLDS if near else FAILS


def dynamics(file: File) -> tuple[str, str] | None:
    """The view is there if the effective rank of some layer moved by a tenth or more."""
    cells = [cell for cell in file.cells if by_layer(cell, "entropy_rank")]
    if not cells:
        return None
    moved = {}
    for layer, values in by_layer(cells[-1], "entropy_rank").items():
        known = [value for value in values if value is not None]
        moved[layer] = known[0], known[-1]
    told = ", ".join(
        f"layer {layer} from {first:.2g} to {last:.2g}" for layer, (first, last) in list(moved.items())[:4]
    )
    seen = any(abs(last / first - 1) >= 0.1 for first, last in moved.values() if first)
    return f"effective rank over training: {told}", HOLDS if seen else FAILS


def _ours(file: File) -> list[Kept]:
    return [cell for cell in file.cells if "ExDyna" in cell.method]


def _over_asked(cells: Sequence[Kept]) -> dict[str, float]:
    return {c.method: over for c in cells if (over := over_asked(c)) is not None}


def no_build_up(file: File) -> tuple[str, str] | None:
    most = max(cell.workers for cell in file.cells)
    over = _over_asked([cell for cell in file.cells if cell.workers == most and cell["method"] != "Dense()"])
    ours = {method: value for method, value in over.items() if "ExDyna" in method}
    if not ours:
        return None
    worst, largest = max(ours.values()), max(over, key=lambda method: over[method])
    told = f"{most} workers: {worst:.3g} times the entries asked for; the most of all, `{largest}`, {over[largest]:.3g}"
    return told, HOLDS if worst <= 1.05 else FAILS


def asked_density(file: File) -> tuple[str, str] | None:
    off = [abs(value - 1) for value in _over_asked(_ours(file)).values()]
    if not off:
        return None
    return f"mean density off by {100 * max(off):.2g} % at most", HOLDS if max(off) <= 0.05 else FAILS


def balanced(file: File) -> tuple[str, str] | None:
    ours = [cell.means["imbalance"] for cell in _ours(file) if "imbalance" in cell.means]
    others = [c.means["imbalance"] for c in file.cells if "imbalance" in c.means and "ExDyna" not in c.method]
    if not ours:
        return None
    beside = f"; the others {min(others):.3g} to {max(others):.3g}" if others else ""
    told = f"fullest worker over the mean: {max(ours):.3g} at most{beside}"
    return told, HOLDS if max(ours) <= 1.1 else FAILS


def cost_at_scale(file: File) -> tuple[str, str] | None:
    shares: dict[int, list[float]] = {}
    for cell in _ours(file):
        dense = dense_for(cell, file.cells)
        if dense is not None:
            shares.setdefault(cell.workers, []).append(cell.result.wire / dense.result.wire)
    if len(shares) < 2:
        return None
    few, many = (statistics.fmean(shares[workers]) for workers in (min(shares), max(shares)))
    told = f"{100 * few:.3g} % of dense's bytes with {min(shares)} workers, {100 * many:.3g} % with {max(shares)}"
    return told, HOLDS if many <= 1.15 * few else FAILS


def fast_and_accurate(file: File) -> tuple[str, str] | None:
    """Bytes and accuracy beside the other sparsifiers', at the same density, workers and momentum."""
    most, told, good = max(cell.workers for cell in file.cells), [], []
    for mine in (cell for cell in _ours(file) if cell.workers == most and cell.result.validation is not None):
        like_mine = [c for c in file.cells if all(c[f] == mine[f] for f in ("workers", "density", "momentum"))]
        rivals = [c for c in like_mine if c is not mine and c.result.validation is not None]
        better = [c for c in rivals if c.result.wire <= mine.result.wire and c.result.gain >= mine.result.gain]
        told.append(
            f"density {mine['density']:g}, momentum {mine['momentum']}, {most} workers: "
            f"{quality(mine.result.validation, file.metric)}, {len(better)} of {len(rivals)} others send no more "
            "and end no worse"
        )
        good.append(not better)
    if not told:
        return None
    verdict = HOLDS if all(good) else PARTLY if any(good) else FAILS
    return "; ".join(told) + ("" if not file.rehearsed else " (no times: a rehearsal)"), verdict
