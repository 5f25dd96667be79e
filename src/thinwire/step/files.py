"""Sets on disk, by all ranks together: written whole or not at all, and the same one taken by everybody.

Every step of it ends with a small message of all to all, so that an error of one rank is an error on every rank.
"""

import errno
import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from thinwire.comm import Comm
from thinwire.core.reducer import MethodWarning
from thinwire.step import agreement, sets
from thinwire.step.checkpoints import CheckpointError
from thinwire.step.sets import Entry, Manifest

Missing = Literal["refuse", "drop"]


class NotSaved(CheckpointError, OSError):
    """A save came to nothing, on all ranks; the message says where and why. The sets before it are whole."""


@dataclass(frozen=True)
class Found:
    """What `read` has chosen: the states that this rank needs, and whose files are lost."""

    place: Path
    run: str | None
    states: list[dict[str, Any]]
    lost: tuple[int, ...] = ()


class Together:
    """The ranks, while they save or load."""

    def __init__(self, comm: Comm, device: torch.device):
        self.comm, self.device = comm, device

    def tell(self, words: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank has to say, by rank."""
        return agreement.told_by_all(words, self.comm, self.device)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Nobody waits for a rank that could not go on: the others hear why."""
        self.comm.renew()
        try:
            yield
        except CheckpointError:
            raise  # on all ranks at the same point
        except BaseException as error:
            told = self.comm.explain(error)
            self.comm.abandon(f"{what}: {type(told).__name__}: {told}")
            if told is error:
                raise
            raise told from error

    @contextmanager
    def all_or_none(self, undo: Callable[[], None]) -> Iterator[None]:
        """What is done inside stays only if no rank refuses; then all ranks raise what the first of them did."""
        error: CheckpointError | None = None
        try:
            yield
        except CheckpointError as problem:
            error = problem
        refused = [one["refused"] for one in self.tell({"refused": None if error is None else str(error)})]
        if any(word is not None for word in refused):
            if error is not None:
                raise error
            undo()
            rank = next(rank for rank, word in enumerate(refused) if word is not None)
            raise CheckpointError(f"rank {rank} cannot go on from this set: {refused[rank]}")


# ── saving ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def save(
    state: dict[str, Any], folder: Path, together: Together, *, run: str | None, step: int, unsent: float, keep: int
) -> tuple[Path, str]:
    """Write a set, by all ranks; this rank's file and the run's id."""
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep must be 1 set or more, not {keep!r}: the newest one is never removed")
    with together.guarded(f"saving into {folder}"):
        return _save(state, folder, together, run or uuid.uuid4().hex[:8], step, unsent, keep)


def _save(
    state: dict[str, Any], folder: Path, together: Together, run: str, step: int, unsent: float, keep: int
) -> tuple[Path, str]:
    rank, world = state["rank"], state["world"]
    place, saved, error = sets.new_place(folder, step, run), 0.0, None
    if rank == 0:
        try:
            sets.remove(sets.part_of(place))  # what a kill has left under this very name
            sets.part_of(place).mkdir(parents=True)
            saved = sets.later_than_all(folder)
        except OSError as problem:
            error = _why(problem, sets.part_of(place))
    told = together.tell(
        {"run": run, "step": state["step"], "name": place.name, "saved": saved, "at": step, "error": error}
    )
    _check_same_step([one["step"] for one in told])
    run, place = told[0]["run"], folder / told[0]["name"]
    part = sets.part_of(place)
    path = part / sets.file_name(rank, world)
    entry = Entry(0, "", 0.0)
    if told[0]["error"] is None:
        try:
            part.mkdir(parents=True, exist_ok=True)  # where this rank's disk is another than rank 0's
            entry = replace(sets.write_state(state, path), unsent=unsent)
        except OSError as problem:
            error = _why(problem, path)
    written = together.tell({"error": error, **asdict(entry)})
    _check_written(written, part)
    entries = [Entry(one["size"], one["sha256"], one["unsent"]) for one in written]
    manifest = Manifest(run, told[0]["at"], state["step"], world, told[0]["saved"], entries)
    if rank == 0:
        error = _committed(place, manifest, keep)
    _check_written(together.tell({"error": error}), part)
    if rank != 0 and not (place / sets.MANIFEST).exists():  # a disk that rank 0 does not see
        problem_here = _committed(place, manifest, keep)
        if problem_here is not None and not (place / sets.MANIFEST).exists():
            raise NotSaved(_failed(rank, problem_here))
    return place / path.name, run


def _committed(place: Path, manifest: Manifest, keep: int) -> dict[str, Any] | None:
    try:
        sets.commit(place, manifest)
    except OSError as problem:
        return _why(problem, place)
    sets.clean(place.parent, manifest.run, keep)
    return None


def _why(problem: OSError, path: Path) -> dict[str, Any]:
    what = os.strerror(problem.errno) if problem.errno else str(problem)
    return {"errno": problem.errno, "what": what, "at": str(path)}


def _check_written(told: list[dict[str, Any]], part: Path) -> None:
    """Raise, on every rank, if one could not write; what is there of this save is removed."""
    bad = next((number for number, one in enumerate(told) if one["error"] is not None), None)
    if bad is not None:
        sets.remove(part)
        raise NotSaved(_failed(bad, told[bad]["error"]))


def _failed(rank: int, error: dict[str, Any]) -> str:
    full = error["errno"] in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    what = "make room, or keep fewer sets (keep=1)" if full else "see that every rank may write there"
    return (
        f"rank {rank} could not write {error['at']}: {error['what']}. Nothing of this save is kept on any rank, and "
        f"the sets before it are whole: {what}, and save again on every rank"
    )


def _check_same_step(steps: list[int]) -> None:
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"the ranks are at different steps: {dict(enumerate(steps))}. Call save on every rank after the same step"
        )


# ── loading ────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(folder: Path, together: Together, *, run: str | None, missing: Missing) -> Found:
    """The newest whole set, the same on all ranks: this rank's state, or all states if there were more or fewer."""
    if missing not in ("refuse", "drop"):
        raise ValueError(f"missing must be 'refuse' or 'drop', not {missing!r}")
    with together.guarded(f"loading from {folder}"):
        return _read(folder, together, run, missing)


def _read(folder: Path, together: Together, run: str | None, missing: Missing) -> Found:
    notes, seen = _look(folder)
    texts = {name: json.dumps(asdict(manifest)) for name, manifest in seen.items()}
    told = together.tell({"sets": texts, "notes": notes, "run": run})
    by_all = {name: m for name, m in seen.items() if all(one["sets"].get(name) == texts[name] for one in told)}
    for name in sorted({name for one in told for name in one["sets"]} - by_all.keys()):
        strays = [rank for rank, one in enumerate(told) if one["sets"].get(name) != told[0]["sets"].get(name)]
        notes.setdefault(name, f"is not the same on all ranks: rank {strays[0]} sees another than rank 0, or none")
    if not any(one["sets"] or one["notes"] for one in told):
        return _read_flat(folder, together)
    runs = {manifest.run for manifest in by_all.values()}
    if told[0]["run"] in runs:
        by_all = {name: m for name, m in by_all.items() if m.run == told[0]["run"]}
    for name, manifest in sorted(by_all.items(), key=lambda item: item[1].saved, reverse=True):
        found = _try(_at(folder, name), manifest, together, missing, notes)
        if found is not None:
            if len(runs) > 1 and told[0]["run"] not in runs:
                others = ", ".join(sorted(runs - {manifest.run}))
                _warn(f"{folder} holds sets of other runs too ({others}): {name}, the newest of all, was taken")
            if notes:
                _warn(f"{name} was taken; {_listed(notes)}")
            return found
    raise CheckpointError(f"{folder} holds no whole set: {_listed(notes)}")


def _look(folder: Path) -> tuple[dict[str, str], dict[str, Manifest]]:
    notes, seen = {}, {}
    for place in sets.sets_in(folder):
        try:
            seen[place.name] = Manifest.read(place)
        except CheckpointError as error:
            notes[place.name] = str(error)
    return notes, seen


def _at(folder: Path, name: str) -> Path:
    return folder if (folder / sets.MANIFEST).exists() else folder / name


def _try(place: Path, manifest: Manifest, together: Together, missing: Missing, notes: dict[str, str]) -> Found | None:
    """The states of a set, or a note on why it is not whole; alike on all ranks."""
    rank, of = together.comm.rank, manifest.world
    needed = [rank] if of == together.comm.world and missing == "refuse" else range(of)
    wrong: dict[int, str] = {}
    states: dict[int, dict[str, Any]] = {}
    for number in needed:
        path = place / sets.file_name(number, of)
        problem = sets.check_file(path, manifest.files[number])
        if problem is None:
            try:
                states[number] = sets.read_state(path)
                _check_belongs(states[number], number, manifest)
            except CheckpointError:
                problem = "damaged"
        if problem is not None:
            wrong[number] = problem
            states.pop(number, None)
    told = [{int(n): what for n, what in one["wrong"].items()} for one in together.tell({"wrong": wrong})]
    problems = {number: what for one in told for number, what in one.items()}
    lost = tuple(sorted(problems))
    if not lost:
        mine = [states[rank]] if of == together.comm.world else list(states.values())
        return Found(place, manifest.run, mine)
    told_of = ", ".join(f"the file of rank {number} is {problems[number]}" for number in lost)
    price = sum(manifest.files[number].unsent ** 2 for number in lost) ** 0.5
    whole = sum(entry.unsent**2 for entry in manifest.files) ** 0.5
    share = f"norm {price:.3g}" + (f" of {whole:.3g} in all" if whole else "")
    if missing == "drop" and len(lost) < of and all(one == told[0] for one in told):
        _warn(f"{place.name}: {told_of}. What {'it' if len(lost) == 1 else 'they'} had not sent is dropped: {share}")
        return Found(place, manifest.run, list(states.values()), lost)
    way = "" if len(lost) == of else f"; load(folder, missing='drop') goes on without what is not sent in it, {share}"
    notes[place.name] = f"(step {manifest.step}, {of} workers) is not whole: {told_of}{way}"
    return None


def _check_belongs(state: Any, rank: int, manifest: Manifest) -> None:
    if not isinstance(state, dict) or (state.get("rank"), state.get("world"), state.get("step")) != (
        rank,
        manifest.world,
        manifest.exchanges,
    ):
        raise CheckpointError("not the state that the manifest speaks of")


def _read_flat(folder: Path, together: Together) -> Found:
    """What 0.1 wrote: files without a manifest, which must be one set, of one step."""
    rank, world = together.comm.rank, together.comm.world
    here = sets.flat_files(folder)
    steps: dict[str, dict[str, Any]] = {}
    states: dict[int, dict[int, dict[str, Any]]] = {}
    bad = ""
    for of, paths in here.items():
        for number, path in paths.items():
            try:
                state = sets.read_state(path)
                steps.setdefault(str(of), {})[str(number)] = int(state["step"])
                states.setdefault(of, {})[number] = state
            except (CheckpointError, KeyError, TypeError, ValueError) as error:
                bad = bad or (str(error) if isinstance(error, CheckpointError) else f"{path} is damaged")
    told = together.tell({"steps": steps, "bad": bad})
    if first_bad := next((one["bad"] for one in told if one["bad"]), ""):
        raise CheckpointError(first_bad)
    everyone: dict[int, dict[int, set[int]]] = {}
    for one in told:
        for of, by_rank in one["steps"].items():
            for number, step in by_rank.items():
                everyone.setdefault(int(of), {}).setdefault(int(number), set()).add(step)
    if not everyone:
        begun = ", ".join(path.name for path in sorted(folder.glob("step-*.part")))
        beside = f" (only saves that did not come to their end: {begun})" if begun else ""
        raise CheckpointError(
            f"{folder} holds no thinwire state{beside}: handle.save(folder) writes one folder a save there"
        )
    if len(everyone) > 1:
        worlds = "; ".join(f"{of} workers, steps {_steps(by_rank)}" for of, by_rank in sorted(everyone.items()))
        raise CheckpointError(
            f"{folder} holds files of runs with different numbers of workers ({worlds}): leave there only those that "
            "belong to the weights you go on from"
        )
    of, by_rank = next(iter(everyone.items()))
    if sorted(by_rank) != list(range(of)) or len(set().union(*by_rank.values())) > 1:
        raise CheckpointError(
            f"{folder} holds {len(by_rank)} of {of} files, of steps {_steps(by_rank)}: one whole set is needed, from "
            f"all {of} ranks and of one step. Take an earlier folder, or start without the method's state"
        )
    wanted = [rank] if of == world else list(range(of))
    lacking = [number for number in wanted if number not in states.get(of, {})]
    if any(one["lacking"] for one in together.tell({"lacking": lacking})):
        raise CheckpointError(f"{folder} does not hold the files of all {of} ranks on every machine: copy them there")
    return Found(folder, None, [states[of][number] for number in wanted])


def _steps(by_rank: dict[int, set[int]]) -> str:
    return ", ".join(str(step) for step in sorted(set().union(*by_rank.values())))


def _listed(notes: dict[str, str]) -> str:
    return "; ".join(f"{name} {why}" for name, why in sorted(notes.items(), reverse=True))


def _warn(text: str) -> None:
    warnings.warn(text, MethodWarning, stacklevel=6)
