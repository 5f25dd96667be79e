"""Ratios of times taken side by side: on a shared machine nothing else means anything."""

import json
import platform
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Work = Callable[[], Any]


@dataclass
class Row:
    name: str
    ratio: float  # to the baseline beside it
    bar: float | None = None  # what the ratio may be at most
    against_reference: float | None = None
    note: str = ""


def seconds(work: Work) -> float:
    """CPU seconds of this thread: what the scheduler gives to others does not count."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def ratio(baseline: Work, work: Work, rounds: int, before: Work = lambda: None) -> float:
    """The median over the rounds of the time of `work` over that of `baseline`, taken just before and just after."""
    ratios = []
    for _ in range(rounds + 1):  # the first round warms up
        first = seconds(baseline)
        before()
        taken = seconds(work)
        ratios.append(2 * taken / (first + seconds(baseline)))
    return statistics.median(ratios[1:])


def arguments(description: str | None) -> Namespace:
    parser = ArgumentParser(description=description)
    parser.add_argument("--entries", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the ratios here")
    parser.add_argument("--against", type=Path, help="fail if a ratio is a quarter above the one recorded here")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    return chosen


def report(title: str, rows: list[Row], chosen: Namespace) -> None:
    print(f"{title}, {chosen.entries:,} entries, one thread, {chosen.rounds} rounds")
    for row in rows:
        bar = "" if row.bar is None else f"  at most {row.bar:g}: {'yes' if row.ratio <= row.bar else 'NO'}"
        twin = "" if row.against_reference is None else f"  {row.against_reference:.3f} of the reference"
        print(f"  {row.name:58} {row.ratio:8.4f}{bar:22}{twin}  {row.note}".rstrip())
    if chosen.json:
        content = {"title": title, "entries": chosen.entries, "rounds": chosen.rounds, "machine": platform.processor()}
        chosen.json.write_text(json.dumps(content | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    if chosen.against:
        recorded = {row["name"]: row["ratio"] for row in json.loads(chosen.against.read_text())["rows"]}
        check({row.name: row.ratio for row in rows}, recorded)


def check(found: dict[str, float], recorded: dict[str, float]) -> None:
    """Leave with an error if a ratio is a quarter above what was recorded."""
    worse = {name: value for name, value in found.items() if value > 1.25 * recorded.get(name, float("inf"))}
    for name, value in worse.items():
        print(f"worse than recorded: {name}, {value:.3f} against {recorded[name]:.3f}")
    sys.exit(bool(worse))
