"""What each study says and draws of its results."""

import math
import statistics

from thinwire.lab.pages import figures, svg
from thinwire.lab.pages.pieces import Drawing
from thinwire.lab.pages.scales import Axis, percent
from thinwire.lab.records.summary import Records
from thinwire.lab.studies import grids
from thinwire.lab.studies.study import Result, Study, effect, pareto, points, styles_of

# ── sparse: memory, grain, agreement, momentum ─────────────────────────────────────────────────────────────────────


def sparse_tell(found: list[Result]) -> list[str]:
    said = []
    for factor, better, worse, one, other in (
        ("memory", "on", "off", "with memory", "without"),
        ("grain", "model", "tensor", "choosing in the whole model", "in each tensor"),
        ("coordinates", "shared", "own", "with coordinates that workers share", "with their own"),
        ("momentum", "before", "after", "with momentum before the method", "after the exchange"),
    ):
        seen = effect(found, factor, better, worse)
        if seen:
            won, pairs, gap = seen
            mean = "" if math.isnan(gap) else f", on average {points(gap, found[0].metric)}"
            said.append(f"Validation was better {one} than {other} in {won} of {pairs} pairs{mean}.")
    trained = [r for r in found if r.validation is not None and r.factors["method"] != "Dense"]
    dense = [r for r in found if r.factors["method"] == "Dense" and r.validation is not None]
    if trained and dense:
        best, plain = max(trained, key=lambda r: r.gain), max(dense, key=lambda r: r.gain)
        setting = ", ".join(f"{k} {v}" for k, v in best.factors.items())
        behind = points(best.gain - plain.gain, best.metric)
        said.append(f"The best sparse cell ({setting}) is {behind} from dense, at {_ratio(plain, best)} of its bytes.")
    lost = sum(r.validation is None for r in found)
    return [*said, f"{lost} of {len(found)} settings diverged at every learning rate."] if lost else said


# ── exdyna: density, build-up, imbalance and traffic against workers ───────────────────────────────────────────────


def exdyna_tell(found: list[Result]) -> list[str]:
    said = []
    for method, growth in traffic_growth(found).items():
        if method != "Dense()":
            fewest, most, first, last = growth
            said.append(
                f"{method}: {100 * first:.2g} % of dense's bytes with {fewest} workers, {100 * last:.2g} % with {most} "
                f"({last / first:.2f} times the share)."
            )
    return said


def traffic_growth(found: list[Result]) -> dict[str, tuple[int, int, float, float]]:
    """For each method, its share of the dense ring's bytes with the fewest and with the most workers."""
    shares: dict[str, dict[int, float]] = {}
    for r in found:
        if r.wire > 0:
            shares.setdefault(str(r.factors["method"]), {})[int(r.factors["workers"])] = r.wire
    ring = shares.get("Dense()", {})
    told = {}
    for method, by_workers in shares.items():
        known = sorted(w for w in by_workers if w in ring)
        if len(known) > 1:
            first, last = (by_workers[w] / ring[w] for w in (known[0], known[-1]))
            told[method] = (known[0], known[-1], first, last)
    return told


def exdyna_draw(found: list[Result]) -> list[Drawing]:
    style = styles_of(found)
    ring = {int(r.factors["workers"]): r.wire for r in found if r.factors["method"] == "Dense()"}
    methods = [m for m in dict.fromkeys(str(r.factors["method"]) for r in found) if m != "Dense()"]
    shares = []
    for method in methods:
        here = sorted((r for r in found if r.factors["method"] == method), key=lambda r: int(r.factors["workers"]))
        x = [int(r.factors["workers"]) for r in here]
        shares.append(style[method].series(method, x, [r.wire / ring[w] for r, w in zip(here, x)]))
    growth = svg.lines(
        "share of dense's bytes against workers", shares, Axis("workers", log=True), Axis(log=True, spell=percent)
    )
    most = max(int(r.factors["workers"]) for r in found)
    named = {str(r.factors["method"]): Records.read(r.folders[0]) for r in found if r.factors["workers"] == most}
    named.pop("Dense()", None)
    told = [
        figures.curves(
            named, style, f"{figures.TITLES[key]}, {most} workers", Axis("steps"), "step", figures.told(key),
            Axis(log=key == "density"),
        )
        for key in ("density", "build_up", "imbalance")
    ]  # fmt: skip
    return [growth, *told]


# ── variance: accuracy against compression, over alpha ─────────────────────────────────────────────────────────────


def variance_tell(found: list[Result]) -> list[str]:
    said = []
    for optimizer in dict.fromkeys(r.factors["optimizer"] for r in found):
        here = [r for r in found if r.factors["optimizer"] == optimizer]
        dense = next((r for r in here if r.factors["method"] == "Dense()"), None)
        if dense is None or dense.validation is None:
            continue
        for r in here:
            if r is not dense:
                gap = "diverged" if r.validation is None else points(r.gain - dense.gain, r.metric)
                said.append(f"{optimizer}, {r.factors['method']}: {gap}, {_ratio(dense, r)} of dense's bytes.")
    return said


# ── rank: how many directions a layer's gradient has, as training goes ─────────────────────────────────────────────


def rank_tell(found: list[Result]) -> list[str]:
    said = []
    for r in found:
        steps = Records.read(r.folders[0]).steps
        for key in dict.fromkeys(key for line in steps for key in line if key.endswith("/entropy_rank")):
            values = [line[key] for line in steps if line.get(key) is not None]
            part = max(1, len(values) // 20)
            first, last = statistics.fmean(values[:part]), statistics.fmean(values[-part:])
            layer = key.removesuffix("/entropy_rank")
            said.append(f"{r.factors['method']}, {layer}: effective rank {first:.1f} at first, {last:.1f} at last.")
    return said


def rank_draw(found: list[Result]) -> list[Drawing]:
    largest = [r for r in found if r.factors["method"] != "Dense()"][-1:]
    return [f for r in largest for f in figures.by_layer(str(r.factors["method"]), Records.read(r.folders[0]))]


# ── frontier: quality against bytes, at every step and with local steps ────────────────────────────────────────────


def frontier_tell(found: list[Result]) -> list[str]:
    said = []
    for optimizer in dict.fromkeys(r.factors["optimizer"] for r in found):
        here = [r for r in found if r.factors["optimizer"] == optimizer]
        dense = next((r for r in here if r.factors["method"] == "Dense()" and r.factors["every"] == 1), None)
        if dense is None or dense.validation is None:
            continue
        for r in pareto(here):
            gap = points(r.gain - dense.gain, r.metric)
            every = "" if r.factors["every"] == 1 else f" every {r.factors['every']}"
            every += " ahead" if "ahead" in r.factors else ""
            said.append(f"{optimizer}, {r.factors['method']}{every}: {gap} at {_ratio(dense, r)} of dense's bytes.")
    return said


def _ratio(dense: Result, other: Result) -> str:
    return f"1/{dense.wire / other.wire:.3g}" if other.wire else "none"


STUDIES = {
    "sparse": Study("memory, grain, agreement and momentum of sparse methods", grids.sparse_cells, sparse_tell),
    "exdyna": Study(
        "density, build-up, imbalance and traffic of sparsifiers", grids.exdyna_cells, exdyna_tell, exdyna_draw
    ),
    "variance": Study("accuracy against compression over alpha, rivals beside it", grids.variance_cells, variance_tell),
    "rank": Study("effective rank of each layer's gradient over training", grids.rank_cells, rank_tell, rank_draw),
    "frontier": Study("quality against bytes, per step and with local steps", grids.frontier_cells, frontier_tell),
}
