"""One set on disk: a folder with a file of every rank and a manifest, which was written last and tells the rest apart.

A set counts if its manifest is there and every file has the size and the digest that the manifest says.
"""

import hashlib
import json
import math
import os
import pickle
import re
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from thinwire.step.checkpoints import CheckpointError

MANIFEST = "manifest.json"
LEFT_BEHIND = 3600.0  # seconds after which a save under way, of whatever run, is taken for what a kill has left
_FORMAT = 1
_FLAT = re.compile(r"thinwire-(\d{5})-of-(\d{5})\.pt")


@dataclass(frozen=True)
class Entry:
    """What the manifest says of one rank's file; `unsent` is the norm of what that rank had not sent."""

    size: int
    sha256: str
    unsent: float


@dataclass(frozen=True)
class Manifest:
    run: str
    step: int
    exchanges: int
    world: int
    saved: float  # the time, later than that of every set before it in the folder
    files: list[Entry]  # by rank
    format: int = _FORMAT

    def write(self, place: Path) -> None:
        told = asdict(self)
        write_whole(place / MANIFEST, json.dumps(told | {"sha256": _digest(told)}, indent=1))

    @staticmethod
    def read(place: Path) -> "Manifest":
        """Raises CheckpointError where there is none that can be used."""
        try:
            told = json.loads((place / MANIFEST).read_text())
            if told.pop("sha256") != _digest(told):
                raise ValueError("its digest is another")
            if told["format"] != _FORMAT:
                raise CheckpointError(f"has format {told['format']}, this version of thinwire reads {_FORMAT}")
            files = [Entry(int(one["size"]), str(one["sha256"]), float(one["unsent"])) for one in told["files"]]
            known = {f.name: told[f.name] for f in fields(Manifest)}
            found = Manifest(**known | {"files": files, "saved": float(told["saved"])})
            counts = (found.step, found.exchanges, found.world)
            if not isinstance(found.run, str) or not all(type(one) is int and one >= 0 for one in counts):
                raise ValueError("its run is no name, or a count is no number")
            if not math.isfinite(found.saved):
                raise ValueError("its time is not finite")  # sets are ordered by it
            if len(files) != found.world or not files:
                raise ValueError(f"{len(files)} files of {found.world} workers")
        except FileNotFoundError:
            raise CheckpointError("has no manifest: the save did not come to its end") from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"has a damaged manifest ({error})") from error
        return found


def _digest(told: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def file_name(rank: int, world: int) -> str:
    return f"thinwire-{rank:05d}-of-{world:05d}.pt"


def sets_in(folder: Path) -> list[Path]:
    """The sets in a folder, whole or not; the folder itself if it is one."""
    if (folder / MANIFEST).exists():
        return [folder]
    with suppress(OSError):
        return sorted(p for p in folder.iterdir() if p.name.startswith("step-") and not _is_part(p) and p.is_dir())
    return []


def flat_files(folder: Path) -> dict[int, dict[int, Path]]:
    """The files of version 0.1, which lay in the folder itself: by world, by rank."""
    found: dict[int, dict[int, Path]] = {}
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            match = _FLAT.fullmatch(path.name)
            if match and not path.is_symlink():
                found.setdefault(int(match[2]), {})[int(match[1])] = path
    return found


# ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Hashed:
    """A file that knows the size and digest of what was written, and the error that torch would hide."""

    def __init__(self, path: Path):
        self.file, self.size, self.digest = path.open("wb"), 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        raw = memoryview(data).nbytes
        self.size += raw
        self.digest.update(data)
        return raw

    def flush(self) -> None:
        self.file.flush()


def write_state(state: dict[str, Any], path: Path) -> Entry:
    """Write one rank's state and see that it is on the disk; an error of the disk is told as the disk tells it."""
    out = _Hashed(path)
    try:
        torch.save(state, out)  # type: ignore[arg-type]
        out.flush()
        os.fsync(out.file.fileno())
    except (OSError, RuntimeError):
        if out.error is not None:
            raise out.error from None
        raise
    finally:
        with suppress(OSError):
            out.file.close()
    return Entry(out.size, out.digest.hexdigest(), 0.0)


def write_whole(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with beside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    _sync(path.parent)


def part_of(place: Path) -> Path:
    """Where a set lies until it is whole."""
    return place.with_name(f"{place.name}.part")


def new_place(folder: Path, step: int, run: str) -> Path:
    """A name for a set that nothing in the folder has."""
    name, number = f"step-{step:08d}-{run}", 1
    while (place := folder / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return place


def later_than_all(folder: Path) -> float:
    """Now; or, should clocks differ, a little after the newest set."""
    newest = 0.0
    for place in sets_in(folder):
        with suppress(CheckpointError):
            newest = max(newest, Manifest.read(place).saved)
    return max(time.time(), newest + 1e-3)


def commit(place: Path, manifest: Manifest) -> None:
    """Make a set out of the files that lie ready: from here on it counts."""
    part = part_of(place)
    manifest.write(part)
    part.rename(place)
    _sync(place.parent)
    with suppress(OSError):  # for people and their scripts; `load` looks at the sets themselves
        write_whole(place.parent / "latest", place.name)
        _link(place, manifest.world)


def _link(place: Path, world: int) -> None:
    """Let the names that 0.1 gave its files lead to those of the newest set."""
    names = {file_name(rank, world) for rank in range(world)}
    for path in place.parent.glob("thinwire-*-of-*.pt"):
        if path.is_symlink() and path.name not in names:
            path.unlink()
    for name in sorted(names):
        path, beside = place.parent / name, place.parent / f"{name}.{os.getpid()}.part"
        if path.is_symlink() or not path.exists():  # a file of 0.1 is left alone
            beside.unlink(missing_ok=True)
            beside.symlink_to(Path(place.name) / name)
            beside.replace(path)


def clean(folder: Path, run: str, keep: int) -> None:
    """Keep the newest `keep` sets of this run, and nothing that a kill has left. Other runs' sets are not touched."""
    mine: list[tuple[float, int, Path]] = []
    for place in sets_in(folder):
        with suppress(CheckpointError):
            manifest = Manifest.read(place)
            if manifest.run == run:
                mine.append((manifest.saved, manifest.step, place))
    kept: set[int] = set()  # the steps; of two sets of one step the newer is kept
    for _, step, place in sorted(mine, reverse=True):
        if step not in kept and len(kept) < keep:
            kept.add(step)
            continue
        with suppress(OSError):
            place.rename(part_of(place))  # first of all it must not count any more
    with suppress(OSError):
        for path in folder.iterdir():
            ours = f"-{run}" in path.name and path.name.startswith("step-")
            if _is_part(path) and (ours or time.time() - path.lstat().st_mtime > LEFT_BEHIND):
                remove(path)


def remove(path: Path) -> None:
    """Whatever it is, and as far as it can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _is_part(path: Path) -> bool:
    return path.name.endswith(".part") and path.name.startswith(("step-", "thinwire-", "latest", MANIFEST))


def _sync(folder: Path) -> None:
    """See that names are on the disk too, where a file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_file(path: Path, entry: Entry) -> str | None:
    """What is wrong with a rank's file: "missing", "damaged", or nothing."""
    try:
        if path.stat().st_size != entry.size:
            return "damaged"
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(2**20):
                digest.update(part)
    except FileNotFoundError:
        return "missing"
    except OSError:
        return "damaged"
    return None if digest.hexdigest() == entry.sha256 else "damaged"


def read_state(path: Path | BytesIO) -> Any:
    """What `torch.save` wrote, as far as it is tensors and plain values."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{_called(path)} is truncated or damaged: take an earlier checkpoint ({error})"
        ) from error
    except (AssertionError, AttributeError) as error:  # what a flipped bit does to torch's own reader
        raise CheckpointError(
            f"{_called(path)} is truncated or damaged: take an earlier checkpoint ({error!r})"
        ) from error


def _called(path: Path | BytesIO) -> str:
    return str(path) if isinstance(path, Path) else "the state"
