"""The papers' own experiments, as grids for `thinwire study`."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer, inner_reducers
from thinwire.lab.pages import figures, svg
from thinwire.lab.pages.pieces import Drawing
from thinwire.lab.pages.scales import Axis, percent
from thinwire.lab.records.record import Run
from thinwire.lab.records.spellings import Method, canonical, method_of, reducer_in
from thinwire.lab.records.summary import Records
from thinwire.lab.studies.study import Cell, Result, Study, effect, pareto, points, styles_of
from thinwire.methods import METHODS
from thinwire.methods.dgc import DGC
from thinwire.spelling import parse
from thinwire.wrappers.adam import Adam
from thinwire.wrappers.anchored import Outer
from thinwire.wrappers.local_steps import LocalSteps
from thinwire.wrappers.momentum import Momentum

LEARNING_RATES = {"sgd": 0.05, "adamw": 2e-3, "muon": 2e-3}  # where a task's own optimizer is not the one in question


def _cells(
    base: Run,
    rates: Sequence[float],
    seeds: Sequence[int],
    settings: list[tuple[dict, dict]],
    muon_rates: Sequence[float] = (1.0,),
) -> list[Cell]:
    """Every setting (its factors, what it changes in the run) at every learning rate and seed."""
    cells = []
    for (factors, changes), rate, seed in itertools.product(settings, rates, seeds):
        run = replace(base, **changes)
        run = replace(run, method=canonical(run.method), lr=run.lr * rate, seed=seed)
        if run.optimizer != "muon":
            cells.append(Cell({**factors, "lr": run.lr, "seed": seed}, run))
            continue
        for muon_rate in muon_rates:
            one = replace(run, muon_lr=run.muon_lr * muon_rate)
            cells.append(Cell({**factors, "lr": one.lr, "muon_lr": one.muon_lr, "seed": seed}, one))
    return cells


def _with(base: Run, optimizer: str) -> dict:
    lr = base.lr if base.optimizer == optimizer else LEARNING_RATES[optimizer]
    return {"optimizer": optimizer, "lr": lr}


# ── sparse: memory, grain, agreement, momentum ─────────────────────────────────────────────────────────────────────


def sparse_cells(base: Run, quick: bool) -> list[Cell]:
    methods = ("RandomBlock",) if quick else ("RandomBlock", "TopK")
    densities = (0.1,) if quick else (0.1, 0.01)
    momenta = ("after",) if quick else ("none", "before", "after")
    settings = []
    for momentum in momenta:
        after = {**_with(base, "sgd"), "momentum": 0.9 if momentum == "after" else 0.0}
        after["lr"] *= 10 if momentum == "none" else 1  # a momentum of 0.9 makes steps ten times as long
        for method, density, feedback, grain, agree in itertools.product(
            methods, densities, ("on", "off"), ("tensor", "model"), ("shared", "own")
        ):
            spelled = f"{method}({density}, agree={agree == 'shared'})"
            spelled = f"ErrorFeedback({spelled})" if feedback == "on" else spelled
            spelled = f"Momentum({spelled})" if momentum == "before" else spelled
            factors = {"method": method, "density": density, "memory": feedback, "grain": grain}
            factors |= {"coordinates": agree, "momentum": momentum}
            settings.append((factors, {**after, "method": spelled, "grain": grain}))
        if momentum != "before":
            nothing = dict.fromkeys(("memory", "grain", "coordinates"), "-")
            settings.append(
                ({"method": "Dense", "density": 1.0, **nothing, "momentum": momentum}, {**after, "method": "Dense()"})
            )
    return _cells(base, (1.0, 0.3) if quick else (1.0, 0.3, 0.1), (0,) if quick else (0, 1), settings)


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


def sparsifiers(density: float) -> list[str]:
    """Every method that is told a density, with the memory it needs."""
    spelled = []
    for name, method in METHODS.items():
        if "density" in _options(name) and method.wants is Tensor:
            reducer = parse(f"{name}(density={density})")
            remembers = memory.entry_tensors(reducer.init(Layout(("weight",), (torch.Size([8]),))))
            spelled.append(repr(reducer) if remembers else f"ErrorFeedback({reducer!r})")
    return spelled


def _options(method: str) -> list[str]:
    return [f.name for f in fields(METHODS[method])] if method in METHODS else []  # type: ignore[arg-type]


def exdyna_cells(base: Run, quick: bool) -> list[Cell]:
    settings = []
    for workers, density in itertools.product((2, 4) if quick else (2, 4, 8), (0.01,) if quick else (0.01, 0.001)):
        for method in ["Dense()", *sparsifiers(density)]:
            changes = {"method": method, "workers": workers, **_instead(reducer_in(method_of(method)))}
            settings.append(({"method": method, "workers": workers}, changes))
    unique = {repr(factors): (factors, changes) for factors, changes in settings}
    return _cells(base, (1.0,), (0,), list(unique.values()))


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


def variance_cells(base: Run, quick: bool) -> list[Cell]:
    methods = ["Dense()"] + [f"Variance(alpha={alpha})" for alpha in (1.0, 1.5, 2.0, 4.0)]
    methods += ["Strom(0.01)", "QSGD(4)"] + ([] if quick else ["Strom(0.1)", "VarianceStrom(2.0, tau=0.01)", "QSGD(2)"])
    settings = []
    for optimizer, method in itertools.product(("adamw",) if quick else ("sgd", "adamw"), methods):
        changes = {**_with(base, optimizer), "method": method}
        settings.append(({"method": method, "optimizer": optimizer}, changes))
    return _cells(base, (1.0,) if quick else (1.0, 0.3), (0,) if quick else (0, 1, 2), settings)


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


def rank_cells(base: Run, quick: bool) -> list[Cell]:
    ranks = (8,) if quick else (4, 8, 16)
    settings = [({"method": f"RankDAD({rank})"}, {"method": f"RankDAD({rank}, iterations=2)"}) for rank in ranks]
    return _cells(base, (1.0,), (0,) if quick else (0, 1), [({"method": "Dense()"}, {"method": "Dense()"}), *settings])


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


BEFORE_STEPS = {"sgd": ("DGC(0.01)",), "adamw": ("Adam(ErrorFeedback(ExDyna(0.01)))",)}  # what moves before sending


def frontier_cells(base: Run, quick: bool) -> list[Cell]:
    inner = ["Dense()", "ErrorFeedback(TopK(0.1))"]
    if not quick:
        inner += ["Cast(Dense())", "ErrorFeedback(TopK(0.01))", "RandomBlock(0.1)", "ErrorFeedback(SignSGD())"]
        inner += [f"ErrorFeedback(ExDyna({density}))" for density in (0.1, 0.03, 0.01, 0.001)]
        inner += ["ErrorFeedback(PowerSGD(4))", "ErrorFeedback(QSGD(4))"]
    settings = []
    for optimizer in (base.optimizer,) if quick else ("sgd", "adamw"):
        spelled = list(inner)
        spelled += [f"LocalSteps({method}, every={n})" for n in ((10,) if quick else (4, 10, 30)) for method in inner]
        if not quick:
            spelled += ["Variance(2.0)", "RankDAD(4)", *BEFORE_STEPS[optimizer]]
            fed_back = (method for method in inner if method.startswith("ErrorFeedback"))
            spelled += [f"LocalSteps({method}, every=1, ahead=True)" for method in fed_back]
        for method in map(method_of, spelled):
            changes = {**_with(base, optimizer), **_instead(reducer_in(method)), "method": repr(method)}
            settings.append((_factors(method, optimizer), changes))
    return _cells(base, (1.0,) if quick else (1.0, 0.3, 3.0), (0,) if quick else (0, 1), settings)


def asked_cells(
    base: Run,
    methods: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    muon_rates: Sequence[float] = (1.0,),
    optimizers: Sequence[str] = (),
) -> list[Cell]:
    """The methods that somebody wants to see on the front, local steps and all, under each of the optimizers."""
    settings: list[tuple[dict, dict]] = []
    for optimizer, method in itertools.product(optimizers or (base.optimizer,), dict.fromkeys(map(method_of, methods))):
        changes = {**_with(base, optimizer), "method": repr(method), **_instead(reducer_in(method))}
        settings.append((_factors(method, optimizer), changes))
    return _cells(base, rates, seeds, settings, muon_rates)


def _factors(method: Method, optimizer: str) -> dict:
    if not isinstance(method, LocalSteps):
        return {"method": repr(method), "every": 1, "optimizer": optimizer}
    every = method.every if isinstance(method.every, int) else repr(method.every)
    factors = {"method": repr(method.inner), "every": every, "optimizer": optimizer}
    if method.ahead:
        factors["ahead"] = "ahead"
    if method.outer != Outer():
        factors["outer"] = f"{method.outer.lr:g} {method.outer.momentum:g}"
    return factors | {name: n for name in ("fragments", "delay") if (n := getattr(method, name)) != _plain(name)}


def _plain(name: str) -> int:
    return int(getattr(LocalSteps, name))  # a dataclass keeps its defaults on the class


def _instead(reducer: Reducer | None) -> dict:
    """What the optimizer leaves to a reducer that does it before the exchange."""
    if reducer is None:
        return {}
    kinds = {type(part) for part in inner_reducers(reducer)}
    if Adam in kinds:
        return {"optimizer": "sgd", "momentum": 0.0}
    return {"momentum": 0.0} if kinds & {Momentum, DGC} else {}


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
    "sparse": Study("memory, grain, agreement and momentum of sparse methods", sparse_cells, sparse_tell),
    "exdyna": Study("density, build-up, imbalance and traffic of sparsifiers", exdyna_cells, exdyna_tell, exdyna_draw),
    "variance": Study("accuracy against compression over alpha, rivals beside it", variance_cells, variance_tell),
    "rank": Study("effective rank of each layer's gradient over training", rank_cells, rank_tell, rank_draw),
    "frontier": Study("quality against bytes, per step and with local steps", frontier_cells, frontier_tell),
}
