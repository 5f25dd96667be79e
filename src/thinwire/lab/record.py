"""What a run leaves on disk: its settings, one JSON line a step for every worker, and a summary.

run.json         the settings, with which the run can be made again
rank0.jsonl ...  {"step": 12, "loss": ..., "seconds": ..., "wire_bytes": ..., ...}
checkpoints/     what --resume goes on from
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from thinwire.lab import LabError

Line = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Everything that decides how a run goes, apart from the machine."""

    method: str
    task: str
    model: str | None = None
    metric: str = "accuracy"  # by which the task is judged: accuracy or loss
    workers: int = 2
    steps: int = 300
    batch: int = 32  # samples a worker takes a step
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str = "constant"
    seed: int = 0
    grain: str | None = None
    overlap: bool | None = None
    evaluate_every: int = 50
    checkpoint_every: int = 0
    data: str = ""
    link: str | None = None  # as it was asked for
    rtt: str | None = None

    @staticmethod
    def read(folder: Path) -> "Run":
        path = folder / "run.json"
        try:
            kept = json.loads(path.read_text())
            known = {f.name for f in fields(Run)}
            return Run(**{key: value for key, value in kept.items() if key in known})
        except FileNotFoundError as error:
            raise LabError(f"{folder} holds no run (there is no run.json in it)") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise LabError(f"{path} cannot be read ({error}): remove the folder and run again") from error

    def write(self, folder: Path) -> None:
        write_json(folder / "run.json", asdict(self))


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
    return sorted(folder.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank") or 0))


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
        except ValueError as error:
            if number == len(text):
                break
            raise LabError(
                f"{path}, line {number} is damaged: remove that line, or the folder, and run again"
            ) from error
        lines.append(line)
    return lines


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


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: written beside, then put in place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise LabError(f"{path} cannot be written ({error.strerror}): choose another folder with --out") from error


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity; a run that diverged says null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
