"""What the lab prints: progress while it runs, tables when it has."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from thinwire.lab.records.record import Line, Run
from thinwire.lab.run.launch import OnStep
from thinwire.plan import Prediction, smallest_ratio, spell_rate

PATIENCE = 10.0  # seconds between two lines of a log
BARS = 12  # of the runs made last; a study makes hundreds
_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=20),
    TextColumn("{task.completed:.0f}/{task.total:.0f}"),
    TextColumn("{task.fields[told]}"),
    TimeRemainingColumn(),
)


@contextmanager
def progress(console: Console, note: Callable[[str], None], runs: int = 1) -> Iterator[OnStep]:
    """A bar for each run: loss, steps a second, bytes a step, time left. Without a terminal, a line at times."""
    if not console.is_terminal:
        yield _Lines(note)
        return
    with Progress(*_COLUMNS, console=console) as bars:
        known: dict[Run, TaskID] = {}
        whole = bars.add_task("runs", total=runs, told="") if runs > 1 else None

        def on_step(run: Run, line: Line) -> None:
            if run not in known:
                if len(known) >= BARS:
                    bars.remove_task(known.pop(next(iter(known))))
                known[run] = bars.add_task(run.method, total=run.steps, told="")
            if "loss" in line:
                bars.update(known[run], completed=line["step"], told=_told(line))
                if whole is not None:
                    bars.advance(whole, 1 / run.steps)

        yield on_step


@contextmanager
def waiting(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar for work that is done piece by piece."""
    with Progress(*_COLUMNS, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=total, told="")
        yield lambda: bars.advance(task)


class _Lines:
    """Progress for a log: a line when a run begins to move, and then every ten seconds."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note, self.last, self.began = note, 0.0, (0.0, 0)
        self.run: Run | None = None

    def __call__(self, run: Run, line: Line) -> None:
        if "loss" not in line:
            return
        now = time.monotonic()
        if run != self.run:
            self.run, self.began, self.last = run, (now, line["step"]), 0.0
        if now - self.last < PATIENCE:
            return
        self.last = now
        began, first = self.began
        done = line["step"] - first
        left = f", {(now - began) / done * (run.steps - line['step']):.0f} s left" if done else ""
        self.note(f"{run.method}: step {line['step']} of {run.steps}, {_told(line)}{left}")


def _told(line: Line) -> str:
    loss = "diverged" if line["loss"] is None else f"loss {line['loss']:.3f}"
    return f"{loss}  {1 / line['step_s']:.1f} steps/s  {size(line.get('wire_bytes'))}/step"


_WIRE = "wire bytes: what one worker's link carried out"
_LOST = f"{_WIRE}; in brackets: came to the target and did not hold it"


def comparison(summary: dict[str, Any]) -> Table:
    metric = summary["methods"][0]["metric"]
    goal = summary["target"]
    table = Table(title=_title(summary), caption=_LOST if any(map(_fell, summary["methods"])) else _WIRE, expand=False)
    table.add_column("method", overflow="fold", min_width=28)
    for heading in (metric, "train loss", "ms/step", "wire/step", "measured", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column(f"s to {goal['value']:.3f}" if goal else "s to target", justify="right")
    for m in summary["methods"]:
        table.add_row(
            m["method"],
            "diverged" if m["diverged"] else number(m["validation"]),
            number(m["train_loss"]),
            number(m["step_s"] and 1e3 * m["step_s"], 1),
            size(m["wire_bytes_a_step"]),
            size(m["measured_bytes_a_step"]),
            number(m["seconds"], 1),
            _to_target(m),
        )
    return table


def _fell(told: dict[str, Any]) -> bool:
    return told["seconds_to_target"] is not None and not told["holds_target"]


def _to_target(told: dict[str, Any]) -> str:
    seconds = number(told["seconds_to_target"], 1)
    return f"({seconds})" if _fell(told) else seconds


def _title(summary: dict[str, Any]) -> str:
    task = summary["task"] + (f"/{summary['model']}" if summary["model"] else "")
    link = f"a link of {summary['link']}" if summary["link"] else "loopback"
    marked = " (times are predicted)" if summary["link"] and not summary["emulated"] else ""
    return f"{task}, {summary['workers']} workers, {link}{marked}"


def predictions(told: list[Prediction], title: str) -> Table:
    caption = (
        "trips: messages that wait for one another; pays below: it beats a bf16 all-reduce on links of a lower rate"
    )
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("method", overflow="fold", min_width=28)
    for heading in ("ms a step", "local ms", "exchange ms", "trips", "payload", "on the wire", "memory", "pays below"):
        table.add_column(heading, justify="right")
    for p in told:
        table.add_row(
            p.cost.method,
            number(1e3 * p.step, 1),
            number(1e3 * p.cost.local, 1),
            number(1e3 * p.exchange, 1),
            f"{p.trips:.3g}",
            size(p.payload),
            size(p.wire),
            size(p.cost.memory),
            "-" if not p.cost.memory and p.cost.hidden and not p.cost.local else spell_rate(p.break_even),
        )
    return table


def prediction(told: Prediction) -> dict[str, Any]:
    """The same for programs, in seconds, bytes and bits a second."""
    return {
        "method": told.cost.method,
        "step_s": told.step,
        "local_s": told.cost.local,
        "exchange_s": told.exchange,
        "trips": told.trips,
        "payload_bytes": told.payload,
        "wire_bytes": told.wire,
        "memory_bytes": told.cost.memory,
        "pays_below": told.break_even if math.isfinite(told.break_even) else None,
    }


def scaling(told: dict[str, list[float]], workers: list[int], title: str) -> Table:
    """A column for each number of workers; the smallest compression with which a gather beats each ring, below."""
    body = [[name, *(number(1e3 * seconds, 1) for seconds in row)] for name, row in told.items()]
    for bits in (32, 16):
        body.append(
            [f"a gather pays above (against {bits} bits)", *(f"{smallest_ratio(w, bits):g} x" for w in workers)]
        )
    table = rows(["method", *map(str, workers)], body)
    table.title = title
    return table


def rows(head: list[str], body: list[list[str]]) -> Table:
    table = Table()
    for position, heading in enumerate(head):
        table.add_column(heading, overflow="fold", justify="left" if position == 0 else "right")
    for row in body:
        table.add_row(*row)
    return table


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def size(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"
