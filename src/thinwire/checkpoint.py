"""States on disk and back: by parameter name, one file a rank, for as many workers as there are next time.

A state is this rank's own. Loading another rank's is refused, since every rank would then send the same residual. Going
to another number of workers takes the files of all ranks: sums (residuals) are conserved as sums, what all ranks hold
alike is kept, and what makes no sense for another number of workers starts anew.
"""

import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from thinwire import memory
from thinwire.capture.groups import Capture, Group, layout_of
from thinwire.reducer import Reducer

if TYPE_CHECKING:
    from thinwire.capture.layers import Layers

FORMAT = 1
_KEYS = {"format", "method", "grain", "rank", "world", "step", "scale", "groups", "layers"}


class CheckpointError(ValueError):
    """A checkpoint cannot be used here; the message says why and what to do. Nothing was changed."""


def state_dict(reducer: Reducer[Any, Any], buckets: Capture, layers: "Layers | None") -> dict[str, Any]:
    return {
        "format": FORMAT,
        "method": repr(reducer),
        "grain": buckets.grain,
        "rank": buckets.comm.rank,
        "world": buckets.comm.world,
        "step": buckets.step,
        "scale": buckets.scale,
        "groups": [
            {"names": list(group.layout.names), "state": memory.save(group.state, group.layout)}
            for group in buckets.groups
        ],
        "layers": None if layers is None else layers.state_dict(),
    }


def load_state_dict(
    reducer: Reducer[Any, Any],
    buckets: Capture,
    layers: "Layers | None",
    states: dict[str, Any] | list[dict[str, Any]],
) -> None:
    rank, world = buckets.comm.rank, buckets.comm.world
    given = states if isinstance(states, list) else [states]
    for state in given:
        _check(state, reducer, buckets)
    of = given[0]["world"]
    if of == world:
        mine = [state for state in given if state["rank"] == rank]
        if not mine:
            raise CheckpointError(
                f"this is the state of rank {given[0]['rank']}, this is rank {rank}: every rank saves and loads its own"
            )
        chosen = mine[:1]
    else:
        if sorted(state["rank"] for state in given) != list(range(of)):
            raise CheckpointError(
                f"the run had {of} workers and this one has {world}: give load_state_dict the states of all {of} "
                "ranks, as a list, or use handle.save(folder) and handle.load(folder), which see to it"
            )
        chosen = sorted((s for s in given if s["rank"] % world == rank), key=lambda s: s["rank"]) or given[:1]
    groups = [
        _group(position, chosen, reducer, buckets, joins=of < world and rank >= of)
        for position in range(len(given[0]["groups"]))
    ]
    if layers is not None:
        layers.load_state_dict([state["layers"] for state in chosen], joins=of < world and rank >= of)
    # Only now, when nothing can fail any more.
    buckets.groups = groups
    buckets.step, buckets.scale = chosen[0]["step"], chosen[0]["scale"]


def _group(
    position: int, chosen: list[dict[str, Any]], reducer: Reducer[Any, Any], buckets: Capture, joins: bool
) -> Group:
    try:
        layout = layout_of(chosen[0]["groups"][position]["names"], buckets.parameters)
        state = buckets.reducer.init(layout)
        parts = [one["groups"][position]["state"] for one in chosen]
        saved = parts[0] if len(parts) == 1 else memory.merge(parts, state)
        memory.load(state, saved, layout, same_world=chosen[0]["world"] == buckets.comm.world)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint does not fit this model and method: {error}") from error
    if joins:
        memory.empty_sums(state)
    return Group(layout, state)


def _check(state: Any, reducer: Reducer[Any, Any], buckets: Capture) -> None:
    if not isinstance(state, dict) or not state.keys() >= _KEYS:
        raise CheckpointError(
            "this is not a state that handle.state_dict() made, or only a part of one: take an earlier checkpoint"
        )
    if state["format"] != FORMAT:
        raise CheckpointError(f"the checkpoint has format {state['format']}, this version of thinwire reads {FORMAT}")
    for what, here in (("method", repr(reducer)), ("grain", buckets.grain)):
        if state[what] != here:
            raise CheckpointError(
                f"the checkpoint was made with {what} {state[what]}, this run has {here}: use the same, or start "
                "without the checkpoint's method state (residuals not sent yet are lost then)"
            )


def save(state: dict[str, Any], folder: Path) -> Path:
    """Write one rank's state: first beside the file, then in its place, so that a crash leaves the old one whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _file(state["rank"], state["world"])
    beside = path.with_suffix(f".{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def read(folder: Path, rank: int, world: int) -> dict[str, Any] | list[dict[str, Any]]:
    """This rank's state, or all ranks' if the run that wrote them had another number of workers."""
    own = folder / _file(rank, world)
    if own.exists():
        return _read_file(own)
    found = sorted(folder.glob("thinwire-*-of-*.pt"))
    if not found:
        raise CheckpointError(f"{folder} holds no thinwire state: handle.save(folder) writes one file a rank there")
    worlds = {path.stem.split("-of-")[1] for path in found}
    if len(worlds) > 1 or len(found) != int(next(iter(worlds))):
        raise CheckpointError(
            f"{folder} holds {len(found)} files of runs with {', '.join(sorted(str(int(w)) for w in worlds))} workers: "
            "one whole set, from every rank of one run, is needed to go on with another number of workers"
        )
    return [_read_file(path) for path in found]


def _file(rank: int, world: int) -> str:
    return f"thinwire-{rank:05d}-of-{world:05d}.pt"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is truncated or damaged: take an earlier checkpoint ({error})") from error
    return state
