"""What a run leaves on disk: its settings, one JSON line a step for every worker, and a summary.

run.json         the settings, with which the run can be made again
rank0.jsonl ...  {"step": 12, "loss": ..., "seconds": ..., "wire_bytes": ..., ...}
checkpoints/     what --resume goes on from
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.lab import LabError
from thinwire.lab.records.files import write_json as write_json
from thinwire.lab.records.files import write_text as write_text
from thinwire.lab.records.run import Run as Run

Line = dict[str, Any]


class Recorder:
    """Appends one line a step; a line is on its way to the disk before the next step begins."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "a", buffering=1)  # noqa: SIM115  # closed by `close`, at the end of the run

    def write(self, line: Line) -> None:
        self.file.write(json.dumps({k: _plain(v) for k, v in line.items()}) + "\n")

    def close(self) -> None:
        self.file.close()


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def rank_files(folder: Path) -> list[Path]:
    found = {path: path.stem.removeprefix("rank") for path in folder.glob("rank*.jsonl")}
    return sorted((path for path, number in found.items() if number.isdecimal()), key=lambda path: int(found[path]))


def read_lines(path: Path) -> list[Line]:
    """All whole lines. The last one may be torn, by a run that was killed; a bad one before it is an error."""
    try:
        text = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path} cannot be read: {error}") from error
    lines = []
    for number, one in enumerate(text, 1):
        try:
            line = json.loads(one)
            if not isinstance(line, dict):
                raise ValueError("no record")
        except (ValueError, RecursionError) as error:
            if number == len(text):
                break
            raise _damaged(path, number, "no record") from error
        lines.append(line)
    return lines


def read_whole_lines(path: Path) -> list[Line]:
    """The same, each line with all that a summary needs; one that lacks something is an error that names it."""
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        if why := _lacks(line):
            raise _damaged(path, number, why)
    return lines


def _lacks(line: Line) -> str | None:
    if "step" not in line and "end" not in line:
        return None
    for key, value in line.items():
        if isinstance(value, str) or not isinstance(value, int | float | None):
            return f"its {key} is no number"
    if "step" not in line:
        return None
    if not isinstance(line["step"], int) or line["step"] < 0:
        return "its step is no count"
    needed = ("seconds", "step_s") if line["step"] else ("seconds",)
    for key in needed:
        if line.get(key) is None:
            return f"it has no {key}"
    if line["step"] and ("loss" not in line or not line["step_s"] > 0):
        return "it has no loss" if "loss" not in line else "its step took no time"
    return None


def _damaged(path: Path, number: int, why: str) -> LabError:
    return LabError(f"{path}, line {number} is damaged ({why}): remove that line, or the folder, and run again")


def read_steps(path: Path) -> list[Line]:
    """The lines of the steps alone."""
    return [line for line in read_lines(path) if "step" in line]


def keep_until(path: Path, step: int) -> None:
    """Forget the steps after `step`, which a resumed run makes again."""
    if path.exists():
        kept = [line for line in read_lines(path) if line.get("step", 0) <= step and "end" not in line]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def has_ended(folder: Path) -> bool:
    path = rank_file(folder, 0)
    return path.exists() and any("end" in line for line in read_lines(path)[-1:])


def follow(path: Path) -> Iterator[Line | None]:
    """The lines of a file that grows; None whenever there is nothing new. A file put in its place begins anew."""
    at, rest, same = 0, "", -1
    while True:
        if path.exists():
            with open(path) as file:
                if os.fstat(file.fileno()).st_ino != same:
                    at, rest, same = 0, "", os.fstat(file.fileno()).st_ino
                file.seek(at)
                rest += file.read()
                at = file.tell()
        *whole, rest = rest.split("\n")
        for one in whole:
            yield json.loads(one)
        yield None


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity; a run that diverged says null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
