"""The papers' own experiments as cells: which runs a study makes."""

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer, inner_reducers
from thinwire.lab import LabError
from thinwire.lab.records.record import Run
from thinwire.lab.records.spellings import Method, canonical, method_of, reducer_in
from thinwire.lab.studies.study import Cell
from thinwire.methods import METHODS
from thinwire.methods.dgc import DGC
from thinwire.spelling import parse
from thinwire.wrappers.adam import Adam
from thinwire.wrappers.anchored import Outer
from thinwire.wrappers.local_steps import LocalSteps
from thinwire.wrappers.momentum import Momentum

SEEDS = (0, 1, 2)
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


def cut(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells at some levels alone, as `density=0.01,0.001` says: a grid that is too long is cut where all see it."""
    left = list(cells)
    for one in only:
        factor, given, levels = one.partition("=")
        known = list(dict.fromkeys(str(cell.factors[factor]) for cell in cells if factor in cell.factors))
        wanted = [level.strip() for level in _levels(levels)]
        if not given or not known:
            factors = dict.fromkeys(name for cell in cells for name in cell.factors)
            raise LabError(f"--only is a factor and levels of it, {', '.join(factors)}, as density=0.01, not {one}")
        if missing := [level for level in wanted if level not in known]:
            raise LabError(f"--only {factor} has no level {missing[0]}: there are {', '.join(known)}")
        left = [cell for cell in left if str(cell.factors.get(factor)) in wanted]
    return left


def _levels(text: str) -> list[str]:
    """Parts between commas; those inside parentheses belong to a method."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


# ── sparse


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
    return _cells(base, (1.0, 0.3) if quick else (1.0, 0.3, 0.1), (0,) if quick else SEEDS, settings)


# ── exdyna


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
    """Momentum is masked before the choice for all of them, or comes after the exchange for all of them."""
    settings: list[tuple[dict, dict]] = [
        ({"method": "Dense()", "workers": workers, "density": 1.0, "momentum": "after"}, {"workers": workers})
        for workers in ((2, 4) if quick else (2, 4, 8, 16))
    ]
    for _, dense in settings[:]:
        densities, momenta = ((0.01,), ("after",)) if quick else ((0.01, 0.001), ("after", "masked"))
        for density, momentum in itertools.product(densities, momenta):
            for method in sparsifiers(density):
                spelled = masked(method) if momentum == "masked" else unmasked(method)
                factors = {"method": method, **dense, "density": density, "momentum": momentum}
                changes = {"method": spelled, **dense, **_instead(reducer_in(method_of(spelled)))}
                settings.append((factors, changes))
    return _cells(base, (1.0,) if quick else (1.0, 0.3), (0,) if quick else SEEDS, settings)


def masked(method: str) -> str:
    """With momentum before the choice, which is forgotten where an entry was sent; DGC does that by itself."""
    return method if isinstance(method_of(method), DGC) else f"Momentum({method})"


def unmasked(method: str) -> str:
    """With momentum in the optimizer alone."""
    reducer = method_of(method)
    return repr(replace(reducer, momentum=0.0)) if isinstance(reducer, DGC) else method


# ── variance and rank


def variance_cells(base: Run, quick: bool) -> list[Cell]:
    methods = ["Dense()"] + [f"Variance(alpha={alpha})" for alpha in (1.0, 1.5, 2.0, 4.0)]
    methods += ["Strom(0.01)", "QSGD(4)"] + ([] if quick else ["Strom(0.1)", "VarianceStrom(2.0, tau=0.01)", "QSGD(2)"])
    settings = []
    for optimizer, method in itertools.product(("adamw",) if quick else ("sgd", "adamw"), methods):
        changes = {**_with(base, optimizer), "method": method}
        settings.append(({"method": method, "optimizer": optimizer}, changes))
    return _cells(base, (1.0,) if quick else (1.0, 0.3), (0,) if quick else SEEDS, settings)


def rank_cells(base: Run, quick: bool) -> list[Cell]:
    ranks = (8,) if quick else (4, 8, 16)
    settings = [({"method": f"RankDAD({rank})"}, {"method": f"RankDAD({rank}, iterations=2)"}) for rank in ranks]
    return _cells(
        base,
        (1.0,) if quick else (1.0, 0.3),
        (0,) if quick else SEEDS,
        [({"method": "Dense()"}, {"method": "Dense()"}), *settings],
    )


# ── frontier


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
    told = [repr(factors) for factors, _ in settings]
    for (factors, changes), one in zip(settings, told):
        if told.count(one) > 1:  # methods that differ in what no factor tells, as an outer step's keep_length
            factors["spelled"] = changes["method"]
    return _cells(base, rates, seeds, settings, muon_rates)


def _factors(method: Method, optimizer: str) -> dict:
    if not isinstance(method, LocalSteps):
        return {"method": repr(method), "every": 1, "optimizer": optimizer}
    every = method.every if isinstance(method.every, int) else repr(method.every)
    factors = {"method": repr(method.inner), "every": every, "optimizer": optimizer}
    if method.ahead:
        factors["ahead"] = "all" if method.ahead == "all" else "ahead"
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
    moves = Momentum in kinds or any(isinstance(part, DGC) and part.momentum for part in inner_reducers(reducer))
    return {"momentum": 0.0} if moves else {}
