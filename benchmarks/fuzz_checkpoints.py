"""Checkpoints: whatever became of the files, `load` takes the newest whole set, to the bit, or says what is wrong.

Changes to the bytes and the names of files break a set, which must then never be taken. A change that begins with
"forge" is made to a state or a manifest itself, and its digests are made anew: that must be refused, or load, without
an error of torch or Python.
"""

import json
import random
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from fuzz_things import Case, Fuzzer, Wrong, change_of_bytes, changed_bytes, how_many, json_junk
from torch import Tensor, nn

import thinwire
from thinwire import CheckpointError
from thinwire.comm import Comm
from thinwire.comm.threads import in_threads
from thinwire.step import sets

WORLD, SETS = 2, 2
FILES = [*(sets.file_name(rank, WORLD) for rank in range(WORLD)), sets.MANIFEST]
RECIPE = "LocalSteps(ErrorFeedback(TopK(0.1)), every=2)"
TENSORS = ("wrong shape", "wrong dtype", "nan")


class Checkpoints(Fuzzer):
    errors = (CheckpointError,)

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.whole, self.here = folder / "whole", folder / "here"
        self.right: dict[str, list[list[Tensor]]] = {}  # by set, by rank
        in_threads(WORLD, self._save)
        self.order = sorted(path.name for path in self.whole.iterdir() if path.is_dir())

    def _save(self, comm: Comm) -> None:
        model, optimizer, handle = _fresh(comm)
        for step in range(SETS):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            model(torch.randn(4, 5, generator=generator)).square().mean().backward()
            optimizer.step()
            place = handle.save(self.whole).parent
            if comm.rank == 0:
                self.right[place.name] = [[] for _ in range(WORLD)]
            comm.all_mean(torch.zeros(1))  # so that the list is there
            self.right[place.name][comm.rank] = _held(model, handle)

    def draw(self, rng: random.Random) -> Case:
        changes = [_change(rng) for _ in range(how_many(rng))]
        options = {"world": rng.choice((WORLD, WORLD, WORLD, 1)), "missing": rng.choice(("refuse", "refuse", "drop"))}
        return {"base": 0, "changes": changes, **options}

    def run(self, case: Case) -> None:
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.whole, self.here, symlinks=True)
        forged = any(change["what"].startswith("forge") for change in case["changes"])
        for change in case["changes"]:
            self._make(change)

        def load(comm: Comm) -> tuple[str, list[Tensor]]:
            model, _, handle = _fresh(comm)
            before = _held(model, handle)
            try:
                place = handle.load(self.here, missing=case["missing"])
            except CheckpointError:
                if not _equal(before, _held(model, handle)):
                    raise Wrong("a set was refused, and the handle changed by it") from None
                raise
            return place.name, _held(model, handle)

        newest = next((name for name in reversed(self.order) if self._is_whole(name)), None)
        try:
            found = in_threads(case["world"], load)
        except CheckpointError as error:
            if newest is not None and not forged:
                raise Wrong(f"{newest} is whole and was not taken: {error}") from error
            raise
        taken = found[0][0]
        if {name for name, _ in found} != {taken}:
            raise Wrong("the ranks took different sets")
        if forged or case["missing"] == "drop":
            return
        if taken != newest:
            raise Wrong(f"{taken} was taken, the newest whole set is {newest}")
        if case["world"] == WORLD and not all(
            _equal(held, right) for (_, held), right in zip(found, self.right[taken], strict=True)
        ):
            raise Wrong(f"{taken} came back with other bits")

    def _is_whole(self, name: str) -> bool:
        def content(root: Path, file: str) -> Any:
            path = root / name / file
            raw = path.read_bytes() if path.is_file() else None
            if raw is None or file != sets.MANIFEST:
                return raw
            try:
                return json.loads(raw)  # another order of white space is no other manifest
            except ValueError:
                return None

        return all(content(self.here, file) == content(self.whole, file) for file in FILES)

    def _make(self, change: dict[str, Any]) -> None:
        places = [self.here / name for name in self.order]
        path = places[change["set"]] / FILES[change["file"]]
        other = places[change["other"] // 3] / FILES[change["other"] % 3]
        what = change["what"]
        if what == "swap" and path.is_file() and other.is_file():
            one, two = path.read_bytes(), other.read_bytes()
            path.write_bytes(two)
            other.write_bytes(one)
        elif what == "delete set":
            shutil.rmtree(path.parent, ignore_errors=True)
        elif what == "delete":
            sets.remove(path)
        elif what == "folder" and path.is_file():
            path.unlink()
            path.mkdir()
        elif what == "bytes" and path.is_file():
            path.write_bytes(changed_bytes(path.read_bytes(), change["bytes"]))
        elif what == "forge state" and path.is_file() and path.suffix == ".pt":
            _forge_state(path, change)
        elif what == "forge manifest":
            _forge_manifest(path.parent / sets.MANIFEST, change)


def _change(rng: random.Random) -> dict[str, Any]:
    kinds = ("bytes", "bytes", "delete", "swap", "delete set", "folder", "forge state", "forge state", "forge manifest")
    return {
        "what": rng.choice(kinds),
        "set": rng.randrange(SETS),
        "file": rng.randrange(len(FILES)),
        "other": rng.randrange(SETS * len(FILES)),
        "bytes": change_of_bytes(rng),
        "way": [rng.random() for _ in range(6)],
        "junk": rng.choice((*TENSORS, "remove")) if rng.random() < 0.4 else json_junk(rng),
    }


def _fresh(comm: Comm) -> tuple[nn.Module, torch.optim.Optimizer, thinwire.LocalHandle]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, optimizer, thinwire.local(model, optimizer, thinwire.parse(RECIPE), comm=comm)


def _held(model: nn.Module, handle: thinwire.LocalHandle) -> list[Tensor]:
    """Every tensor that a handle and its model hold, in one order."""
    found: list[Tensor] = []

    def walk(thing: Any) -> None:
        if isinstance(thing, Tensor):
            found.append(thing.detach().clone())
        elif isinstance(thing, dict):
            for value in thing.values():
                walk(value)
        elif isinstance(thing, (list, tuple)):
            for value in thing:
                walk(value)
        elif isinstance(thing, (int, float)):
            found.append(torch.tensor(thing, dtype=torch.float64))

    walk([model.state_dict(), handle.state_dict()])
    return found


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _put(thing: Any, way: list[float], junk: Any) -> None:
    """Put junk at the end of a way into nested dicts and lists; the way ends early where there is nothing below."""
    for number, turn in enumerate(way):
        keys = list(thing) if isinstance(thing, dict) else list(range(len(thing)))
        key = keys[int(turn * len(keys))]
        below = thing[key]
        if number < len(way) - 1 and isinstance(below, (dict, list)) and below and way[-1] > 0.1 * number:
            thing = below
            continue
        if junk == "remove":
            del thing[key]
        elif junk in TENSORS and isinstance(below, Tensor):
            thing[key] = {
                "wrong shape": torch.zeros(3, 3),
                "wrong dtype": below.to(torch.int16),
                "nan": torch.full_like(below, float("nan")) if below.is_floating_point() else below,
            }[junk]
        else:
            thing[key] = junk
        return


def _forge_state(path: Path, change: dict[str, Any]) -> None:
    try:
        state = sets.read_state(path)
        manifest = sets.Manifest.read(path.parent)
    except CheckpointError:
        return  # an earlier change has broken it
    if not isinstance(state, dict) or not state:
        return
    _put(state, change["way"], change["junk"])
    entry = sets.write_state(state, path)
    rank = FILES.index(path.name)
    if rank < len(manifest.files):
        manifest.files[rank] = replace(entry, unsent=manifest.files[rank].unsent)
        manifest.write(path.parent)


def _forge_manifest(path: Path, change: dict[str, Any]) -> None:
    try:
        told = asdict(sets.Manifest.read(path.parent))
    except CheckpointError:
        return
    _put(told, change["way"], change["junk"])
    path.write_text(json.dumps(told | {"sha256": sets._digest(told)}))
