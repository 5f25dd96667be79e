"""What to use between sites: every method on links of many round trips and rates, by the planner's formula.

Exchanges alone, without computing: what a model adds to them depends on the machine. The same numbers come out on every
machine, since bytes and trips are those of a dry run.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinwire import plan
from thinwire.core.reducer import Layout
from thinwire.lab import LabError
from thinwire.lab.pages import svg
from thinwire.lab.pages.pieces import Drawing, Series
from thinwire.lab.pages.scales import Axis
from thinwire.lab.records.spellings import method_of
from thinwire.wrappers.local_steps import LocalSteps, interval

TRIPS = (0.001, 0.01, 0.04, 0.1)  # seconds
RATES = (1e7, 1e8, 1e9)  # bits a second
WORKERS = 4
BASELINES = ("DDP", "DDP('fp16')")
EVERY_STEP = (
    "Dense()",
    "Cast(Dense())",
    "ErrorFeedback(TopK(0.01))",
    "ErrorFeedback(ExDyna(0.01))",
    "ErrorFeedback(PowerSGD(4))",
    "RankDAD(4)",
)
NOW_AND_THEN = ("LocalSteps(ErrorFeedback(PowerSGD(4)), every=5)", "LocalSteps(Dense(), every=50)")


def predicted(
    layout: Layout, model: str, workers: Sequence[int] = (WORKERS,), on_cell: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The seconds, trips and bytes of an exchange, a step, in every cell of the grid."""
    cells = []
    for count in workers:
        for rate in RATES:
            for rtt in TRIPS:
                network = plan.Network(rate, count, rtt)
                costs = {name: _cost(name, layout, network) for name in (*BASELINES, *EVERY_STEP, *NOW_AND_THEN)}
                methods = {
                    name: {
                        "seconds": cost.exchange(network),
                        "trips": cost.trips(network),
                        "bytes": cost.wire(count),
                    }
                    for name, cost in costs.items()
                }
                cells.append({"workers": count, "rate": rate, "rtt": rtt, "methods": methods})
                on_cell()
    return {"study": "sites", "model": model, "parameters": layout.numel, "cells": cells}


def _cost(name: str, layout: Layout, network: plan.Network) -> plan.Cost:
    if name in BASELINES:
        return plan.dense(layout, 4 if name == "DDP" else 2, name)
    method: Any = method_of(name)
    if isinstance(method, LocalSteps):
        every = interval(method.every, 10**9)
        return plan.local_steps(method.inner, layout, network.workers, every, network.link)
    return plan.dry_run(method, layout, network.workers, until_steady=True, link=network.link)


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        if found["study"] == "sites" and found["cells"]:
            return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} cannot be read as what `thinwire study sites` wrote ({error})") from error
    raise LabError(f"{path} is not of the study sites")


def table(found: dict[str, Any]) -> str:
    """For each cell: DDP and its fp16 hook, the fastest method that exchanges at every step, and local steps."""
    lines = [
        "| link | workers | DDP / fp16, ms | `Dense()`, ms | fastest at every step, ms | local steps, ms a step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for cell in found["cells"]:
        took = {name: 1e3 * row["seconds"] for name, row in cell["methods"].items()}
        best, rare = (min(names, key=took.__getitem__) for names in (EVERY_STEP, NOW_AND_THEN))
        link = f"{plan.spell_rate(cell['rate'])}, {1e3 * cell['rtt']:g} ms"
        lines.append(
            f"| {link} | {cell['workers']} | {took['DDP']:.0f} / {took[BASELINES[1]]:.0f} | {took['Dense()']:.0f} "
            f"| `{best}`: {took[best]:.0f} | `{rare}`: {took[rare]:.1f} |"
        )
    return "\n".join(lines) + "\n"


def picture(found: dict[str, Any]) -> Drawing:
    """Milliseconds of an exchange against the round trip, one chart for each rate, at the first number of workers."""
    first = found["cells"][0]["workers"]
    cells = [cell for cell in found["cells"] if cell["workers"] == first]
    panels = {}
    for rate in sorted({cell["rate"] for cell in cells}):
        here = sorted((cell for cell in cells if cell["rate"] == rate), key=lambda cell: cell["rtt"])
        x = [1e3 * cell["rtt"] for cell in here]
        panels[plan.spell_rate(rate)] = [
            Series(name, x, [1e3 * cell["methods"][name]["seconds"] for cell in here], slot)
            for slot, name in enumerate(here[0]["methods"])
        ]
    title = f"ms of an exchange, a step: {found['parameters']:,} parameters, {first} workers"
    wide, fastest = 900.0, next(reversed(panels))
    axes = Axis("round trip, ms", log=True), Axis("ms a step", log=True)
    last = panels.pop(fastest)  # large, with the names of all
    drawing = svg.facets(title, panels, *axes, columns=2, width=wide, height=230)
    names = svg.lines("", last, Axis(f"round trip, ms, at {fastest}", log=True), axes[1], width=wide, height=300)
    body = f'{drawing.body}<g transform="translate(0 {drawing.height:g})">{names.body}</g>'
    return Drawing(title, wide, drawing.height + names.height, body, drawing.series)
