"""A study's results as one small file: what the documents' tables, figures and claims are made of.

`thinwire study NAME --page` writes docs/studies/NAME-TASK.json, `python docs/make_studies.py` makes the pages of all
such files. A file holds the command, the settings and versions, and for each setting the validation of each seed, the
test, the bytes, the learning rates, means of what the method told, and the few curves that the pictures need. It
holds no dates and no places, so that whoever runs the command again can compare the two.
"""

import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.lab import LabError
from thinwire.lab.pages.figures import stretches
from thinwire.lab.records.files import write_text
from thinwire.lab.records.record import Line, Run, rank_file, read_lines
from thinwire.lab.records.summary import Records
from thinwire.lab.studies.study import Result

FORMAT = 1
DIGITS = 5  # of a number: more than seeds agree on
COLUMNS, NUMBERS = 24, 3000  # points of a curve, and numbers of all curves of a setting
WITHIN = ("data", "checkpoint_every", "metric", "seed")  # settings that are told elsewhere, or are of this machine
MEANS = ("density", "union", "busiest", "build_up", "imbalance", "load_imbalance", "captured", "residual_norm")
LOCAL = ("capture_s", "select_s", "apply_s")
CURVES = {  # what the study's pictures draw
    "exdyna": ("density", "union", "imbalance"),
    "variance": ("density", "wire_bytes"),
}
LAYERS = ("rank", "entropy_rank", "captured", "overlap", "spectrum")  # of `layer/what`, in the study of ranks
SPECTRUM = 8  # singular values of a layer: the first ones


@dataclass(frozen=True)
class Kept:
    """One setting of a study, as its file tells it."""

    result: Result
    method: str  # the whole spelling
    workers: int
    tests: list[float | None]
    means: dict[str, float] = field(default_factory=dict)  # over the last four fifths of the steps, and the seeds
    curves: dict[str, list[float | None]] = field(default_factory=dict)  # of the first seed, against `steps`

    def __getitem__(self, factor: str) -> Any:
        return self.result.factors.get(factor)


@dataclass(frozen=True)
class File:
    name: str  # NAME-TASK
    study: str
    about: str
    task: str
    model: str | None
    metric: str
    command: str
    rehearsed: bool  # then it has no times
    versions: dict[str, str]
    settings: dict[str, Any]
    says: list[str]
    failed: dict[str, str]
    cells: list[Kept]

    @property
    def results(self) -> list[Result]:
        return [cell.result for cell in self.cells]


def keep(
    study: str, about: str, command: str, found: Sequence[Result], said: Sequence[str], failed: Mapping[Path, str]
) -> dict[str, Any]:
    """What a file holds."""
    runs = [Run.read(result.folders[0]) for result in found]
    common = {f.name: getattr(runs[0], f.name) for f in fields(Run) if f.name not in WITHIN}
    common = {name: v for name, v in common.items() if v is not None and all(getattr(r, name) == v for r in runs)}
    rehearsed = any("rehearsal" in line for line in read_lines(rank_file(found[0].folders[0], 0))[:1])
    return {
        "format": FORMAT,
        "study": study,
        "about": about,
        "task": runs[0].task,
        "model": runs[0].model,
        "metric": found[0].metric,
        "command": command,
        "rehearsed": rehearsed,
        "versions": versions(),
        "settings": {name: v for name, v in common.items() if name not in ("task", "model")},
        "says": list(said),
        "failed": {folder.name: _last_line(why) for folder, why in failed.items()},
        "cells": [_cell(study, result, rehearsed, result is found[-1]) for result in found],
    }


def versions() -> dict[str, str]:
    """Of what a result was made with."""
    return {"thinwire": thinwire.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _cell(study: str, result: Result, rehearsed: bool, last: bool) -> dict[str, Any]:
    records = [Records.read(folder) for folder in result.folders]
    run = records[0].run
    told: dict[str, Any] = {
        "factors": result.factors,
        "method": run.method,
        "workers": run.workers,
        "validation": short(result.validation),
        "values": [short(value) for value in result.values],
        "test": short(result.test),
        "tests": [short(one.tested.get(f"test_{result.metric}")) for one in records],
        "wire": short(result.wire),
        "lr": result.lr,
        "rate": result.rate,
        "others": {rate: short(value) for rate, value in result.unchosen.items()},
        "means": _means(records, result.factors, rehearsed),
        "curves": _curves(study, records[0], last),
    }
    return told if rehearsed else told | {"step_s": short(result.step_s)}


def _means(records: Sequence[Records], factors: Mapping[str, Any], rehearsed: bool) -> dict[str, float]:
    """What the method told of itself, when its first steps are over."""
    late = [one.steps[len(one.steps) // 5 :] for one in records]
    means: dict[str, Any] = {}
    for key in MEANS:
        values = [line[key] for steps in late for line in steps if line.get(key) is not None]
        if values:
            means[key] = short(statistics.fmean(values))
    asked = factors.get("density")
    of = "union" if "union" in means else "density"
    if isinstance(asked, float) and of in means:  # step by step: errors of both signs do not make up for each other
        off = [abs(line[of] / asked - 1) for steps in late for line in steps if line.get(of) is not None]
        means["density_error"] = short(statistics.fmean(off))
    if not rehearsed and any("select_s" in line for line in late[0]):
        parts = [sum(line.get(key) or 0.0 for key in LOCAL) for steps in late for line in steps]
        means["local_s"] = short(statistics.median(parts))
    return means


def _curves(study: str, records: Records, last: bool) -> dict[str, list[Any]]:
    judged = records.evaluations()
    thin = judged[:: math.ceil(len(judged) / COLUMNS) or 1]
    thin += judged[-1:] if thin[-1:] != judged[-1:] else []
    if study == "sparse":
        return {}  # its pictures are of ends alone, and it has a hundred settings
    curves: dict[str, list[Any]] = {
        "judged": [line["step"] for line in thin],
        "validation": [short(line["value"]) for line in thin],
    }
    steps = records.steps
    keys = [key for key in CURVES.get(study, ()) if any(line.get(key) is not None for line in steps)]
    if study == "rank" and last:  # the largest rank has seen the most
        keys += _layer_keys(steps)
    if keys:
        columns = max(8, min(COLUMNS, NUMBERS // len(keys)))
        parts = list(stretches(steps, columns))
        curves["steps"] = [part[-1]["step"] for part in parts]
        curves |= {key: [_mean(line.get(key) for line in part) for part in parts] for key in keys}
    return curves


def _layer_keys(steps: Sequence[Line]) -> list[str]:
    found = []
    for key in dict.fromkeys(key for line in steps for key in line if "/" in key):
        what = key.rpartition("/")[2]
        kind, _, number = what.partition("_") if what.startswith("spectrum") else (what, "", "0")
        if kind in LAYERS and int(number) < SPECTRUM:
            found.append(key)
    return found


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return short(statistics.fmean(known)) if known else None


def short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short == int(short) and abs(short) >= 1000 else short


def _last_line(why: str) -> str:
    return why.strip().splitlines()[-1] if why.strip() else "failed"


def write(told: dict[str, Any], place: Path) -> Path:
    """NAME-TASK.json in a folder, or the file that was named."""
    task = told["task"].replace(":", ".")
    path = place if place.suffix == ".json" else place / f"{told['study']}-{task}.json"
    write_rows(told, "cells", path)
    return path


def write_rows(told: Mapping[str, Any], last: str, path: Path) -> None:
    """As JSON whose last field is a list with a line for each row, so that a change can be read."""
    head = json.dumps({**told, last: []}, indent=1, ensure_ascii=False).removesuffix("[]\n}")
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in told[last])
    write_text(path, f"{head}[\n  {rows}\n ]\n}}\n")


def read(path: Path) -> File:
    try:
        told = json.loads(path.read_text())
        if told["format"] != FORMAT:
            raise ValueError(f"its format is {told['format']}, not {FORMAT}")
        cells = [_read_cell(cell, told["metric"]) for cell in told["cells"]]
        rest = {f.name: told[f.name] for f in fields(File) if f.name not in ("name", "cells")}
        return File(name=path.stem, cells=cells, **rest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(f"{path} cannot be read ({error!r}): make it again with thinwire study ... --page") from error


def _read_cell(cell: dict[str, Any], metric: str) -> Kept:
    result = Result(
        cell["factors"], metric, cell["validation"], cell["test"], cell["wire"], cell.get("step_s", 0.0), cell["lr"],
        cell["rate"], cell["values"], cell["others"],
    )  # fmt: skip
    return Kept(result, cell["method"], cell["workers"], cell["tests"], cell["means"], cell["curves"])


def named(name: str, files: Mapping[str, Any]) -> list[Any]:
    """NAME and NAME-ANYTHING: what was made in several commands is shown together."""
    return [file for other, file in files.items() if other == name or other.startswith(f"{name}-")]


def read_all(folder: Path) -> dict[str, File]:
    """All files NAME-TASK.json in a folder; one without a task (sites.json) is of another kind."""
    return {path.stem: read(path) for path in sorted(folder.glob("*-*.json"))}
