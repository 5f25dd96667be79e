"""What the fields of a method's state mean to a checkpoint, another loss scale, another number of workers.

A state is a plain dataclass. Each field says where its value is placed among the workers, so that saving, undoing,
moving and resizing are written once, here, and never in a method:

- `unsent()`: a value per gradient entry, handed to this worker and not sent yet. What counts is the sum over workers.
- `summed()`, `averaged()`: a value per gradient entry of this worker's own, whose sum or mean over workers counts.
- `alike()`, and any unmarked field: the same on every worker.
- `own()`: a number of this worker's own; another number of workers takes the mean of several.
- `Owned`: the part of a vector of means that this worker is responsible for, in an exchange with owners.
- `per_world()`: meaningless when the number of workers changes: made anew then.
- `derived()`: follows from the layout, so `init` makes it and nothing saves it.

A field that holds another dataclass is a nested state. `entries` and `shared` are older names of the first four.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.core.reducer import Layout, MethodWarning

Merge = Literal["sum", "mean"]
BY_NAME = ("summed", "averaged")  # placements with one value per gradient entry


# ── what a field is ────────────────────────────────────────────────────────────────────────────────────────────────


def unsent() -> Any:
    """One value per gradient entry, in gradient units, that waits to be sent: a residual."""
    return field(metadata={"place": "summed", "degree": 1, "unsent": True})


def summed(*, degree: int = 1) -> Any:
    """One value per gradient entry, in gradient units to the power `degree`; None until it is needed."""
    return field(metadata={"place": "summed", "degree": degree})


def averaged(*, degree: int = 1) -> Any:
    """The same, where the mean over the workers counts: a velocity."""
    return field(metadata={"place": "averaged", "degree": degree})


def alike(default: Any = None, *, degree: int = 0) -> Any:
    """The same on every worker; a number in gradient units to the power `degree`."""
    return field(default=default, metadata={"place": "alike", "degree": degree})


def own(default: float, *, degree: int = 0) -> Any:
    """A number of this worker's own, in gradient units to the power `degree`."""
    return field(default=default, metadata={"place": "own", "degree": degree})


def per_world(factory: Callable[[], Any], *, degree: int = 0, unsent: bool = False) -> Any:
    """What holds for this number of workers. If it is `unsent`, losing it is said."""
    return field(default_factory=factory, metadata={"place": "per_world", "degree": degree, "unsent": unsent})


def derived() -> Any:
    """What `init` works out from the layout, once."""
    return field(metadata={"place": "derived"})


@dataclass
class Owned:
    """A vector of `numel` means, cut into equal parts, of which every worker owns one; None until the first exchange.

    What an owner could not send of a mean waits here: a whole mean, not one worker's share of it.
    """

    numel: int = derived()
    part: Tensor | None = field(default=None, metadata={"place": "owner", "degree": 1, "unsent": True})

    def size(self, world: int) -> int:
        """The length of a part: the last one may reach beyond the vector."""
        return -(-self.numel // world)


def entries(*, merge: Merge = "sum", degree: int = 1) -> Any:
    """One value per gradient entry: `unsent`, `summed` or `averaged`, as 0.1 spelled them."""
    if merge == "mean":
        return averaged(degree=degree)
    return unsent() if degree == 1 else summed(degree=degree)


shared = alike


def nested(state: Any) -> list[tuple[str, Any]]:
    """The states inside a state, by field name."""
    return [(f.name, getattr(state, f.name)) for f in _fields(state) if is_dataclass(getattr(state, f.name))]


def walk(state: Any, path: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Every field of a state and of the states inside it: its dotted name, itself, its value."""
    for f in _fields(state):
        value = getattr(state, f.name)
        if is_dataclass(value):
            yield from walk(value, f"{path}{f.name}.")
        else:
            yield f"{path}{f.name}", f, value


def entry_tensors(state: Any) -> dict[str, Tensor]:
    """All tensors with one value per gradient entry, by dotted field name."""
    return {name: value for name, f, value in walk(state) if place(f) in BY_NAME and value is not None}


def unsent_tensors(state: Any) -> list[Tensor]:
    """What this worker was handed, or made of what all were, and has not sent."""
    return [value for _, f, value in walk(state) if f.metadata.get("unsent") and isinstance(value, Tensor)]


def unsent_vector(state: Any, layout: Layout, rank: int, world: int) -> Tensor:
    """All that this worker holds of gradients handed in and not sent, such that the mean over the workers counts."""
    total = layout.zeros()
    for _, f, value in walk(state):
        if not f.metadata.get("unsent") or value is None:
            continue
        if place(f) == "summed":
            total += value
        elif place(f) == "owner":  # a part of the mean itself
            part = total[rank * len(value) : (rank + 1) * len(value)]
            part += value[: len(part)] * world
    return total


def place(f: Field[Any]) -> str:
    """Where a field's value is placed among the workers."""
    found: str = f.metadata.get("place", f.metadata.get("kind", "alike"))
    return found


# ── saving and loading ─────────────────────────────────────────────────────────────────────────────────────────────


def save(state: Any, layout: Layout) -> dict[str, Any] | None:
    """A tree of tensors, numbers, strings and lists that `torch.load(weights_only=True)` takes."""
    if state is None:
        return None
    saved: dict[str, Any] = {}
    for f in _kept(state):
        value = getattr(state, f.name)
        if is_dataclass(value):
            saved[f.name] = save(value, layout)
        elif place(f) in BY_NAME and value is not None:
            views = layout.views(value)
            saved[f.name] = {name: view.detach().clone() for name, view in zip(layout.names, views, strict=True)}
        else:
            saved[f.name] = copy.deepcopy(value)
    return saved


def load(state: Any, saved: dict[str, Any] | None, layout: Layout, *, same_world: bool = True) -> None:
    """Fill `state`, fresh from `init`, with what `save` wrote."""
    if state is None or saved is None:
        return
    for f in _kept(state):
        if f.name not in saved:
            if place(f) == "per_world":
                continue  # a version before this one did not know it; it begins anew, as in another number of workers
            raise ValueError(
                f"the checkpoint has no '{f.name}' for {type(state).__name__}: was it made by another method?"
            )
        value, kept = getattr(state, f.name), saved[f.name]
        if is_dataclass(value):
            load(value, kept, layout, same_world=same_world)
        elif place(f) in BY_NAME:
            setattr(state, f.name, None if kept is None else _flat(kept, layout, f.name))
        elif place(f) != "per_world" or same_world:
            setattr(state, f.name, _moved(copy.deepcopy(kept), layout.device))
        elif f.metadata.get("unsent") and kept is not None:
            warnings.warn(
                f"{type(state).__name__} of {layout.names[0]} and what lies beside it: what was not sent yet (norm "
                f"{float(kept.norm()):.3g}) cannot be dealt out among another number of workers, and is dropped",
                MethodWarning,
                stacklevel=2,
            )


def new_world(saved: list[dict[str, Any] | None], state: Any, rank: int, world: int) -> dict[str, Any] | None:
    """The state of worker `rank` of `world`, out of the saved states of all workers of another number, by rank.

    What is unsent is conserved as a sum: worker r takes the old workers r, r + world, ...; one that joins brings
    nothing. `state`, fresh from `init`, tells the kinds.
    """
    first = saved[0]
    if state is None or first is None:
        return None
    mine = saved[rank::world]
    made: dict[str, Any] = {}
    for f in _kept(state):
        if f.name not in first and place(f) == "per_world":
            continue
        value, everyone = getattr(state, f.name), [s[f.name] for s in saved if s is not None]
        parts = [s[f.name] for s in mine if s is not None]
        kept = parts[0] if parts else everyone[0]
        if is_dataclass(value):
            made[f.name] = new_world(everyone, value, rank, world)
        elif place(f) in BY_NAME and kept is not None:
            made[f.name] = {name: _merged([p[name] for p in parts], like, f) for name, like in kept.items()}
        elif place(f) == "own":
            made[f.name] = sum(parts) / len(parts) if parts else kept
        elif place(f) == "owner" and kept is not None:
            made[f.name] = _recut(everyone, value, state, rank, world)
        else:
            made[f.name] = kept
    return made


def nothing_unsent(saved: dict[str, Any] | None, state: Any) -> dict[str, Any] | None:
    """A saved state as that of a worker that has nothing to send: to stand in for one whose state is lost."""
    if state is None or saved is None:
        return saved
    made = dict(saved)
    for f in _kept(state):
        value, kept = getattr(state, f.name), saved[f.name]
        if is_dataclass(value):
            made[f.name] = nothing_unsent(kept, value)
        elif place(f) == "summed" and kept is not None:
            made[f.name] = {name: torch.zeros_like(part) for name, part in kept.items()}
        elif place(f) == "owner" and kept is not None:
            made[f.name] = torch.zeros_like(kept)
    return made


def _merged(parts: list[Tensor], like: Tensor, f: Field[Any]) -> Tensor:
    if not parts:  # a worker that joins
        return torch.zeros_like(like) if place(f) == "summed" else like
    total = sum(part.double() for part in parts)
    assert isinstance(total, Tensor)
    return (total / len(parts) if place(f) == "averaged" else total).to(like.dtype)


def _recut(parts: list[Tensor], value: Any, state: Any, rank: int, world: int) -> Tensor:
    """One worker's part of a vector of means that was cut otherwise; its share in a sum over workers stays."""
    whole = torch.cat(parts)[: state.numel] * (len(parts) / world)
    size = state.size(world)
    part = whole.new_zeros(size)
    here = whole[rank * size : (rank + 1) * size]
    part[: len(here)] = here
    return part


# ── going back, and another loss scale ─────────────────────────────────────────────────────────────────────────────


def snapshot(state: Any, into: Any = None) -> Any:
    """A copy of a state, to be handed to `restore`; in the tensors of `into`, an older copy, where they fit."""
    if state is None:
        return None
    copied = copy.copy(state)
    for f in _fields(state):
        value, room = getattr(state, f.name), getattr(into, f.name, None)
        if place(f) == "derived":
            continue
        if is_dataclass(value):
            kept = snapshot(value, room if type(room) is type(value) else None)
        elif isinstance(value, Tensor) and isinstance(room, Tensor) and room.shape == value.shape:
            kept = room.copy_(value)
        else:
            kept = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        setattr(copied, f.name, kept)
    return copied


def restore(state: Any, kept: Any) -> None:
    """Put back what `snapshot` kept, into the same tensors. The snapshot may be used again."""
    for f in _fields(state):
        value, before = getattr(state, f.name), getattr(kept, f.name)
        if place(f) == "derived":
            continue
        if is_dataclass(value):
            restore(value, before)
        elif isinstance(value, Tensor) and isinstance(before, Tensor) and value.shape == before.shape:
            value.copy_(before)
        else:
            setattr(state, f.name, before.clone() if isinstance(before, Tensor) else copy.deepcopy(before))


def rescale(state: Any, ratio: float) -> None:
    """Follow a change of the loss scale: gradients are now `ratio` times as large as when they were stored."""
    for f in _fields(state):
        value, degree = getattr(state, f.name), f.metadata.get("degree", 0)
        if is_dataclass(value):
            rescale(value, ratio)
        elif degree and isinstance(value, Tensor):
            value.mul_(ratio**degree)
        elif degree and isinstance(value, (int, float)):
            setattr(state, f.name, value * ratio**degree)


def _fields(state: Any) -> tuple[Field[Any], ...]:
    return fields(state) if state is not None else ()


def _kept(state: Any) -> list[Field[Any]]:
    return [f for f in _fields(state) if place(f) != "derived"]


def _flat(by_name: dict[str, Tensor], layout: Layout, what: str) -> Tensor:
    missing = [name for name in layout.names if name not in by_name]
    if missing:
        raise ValueError(f"the checkpoint's {what} has nothing for {missing[0]} ({len(missing)} parameters missing)")
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if by_name[name].shape != shape:
            found = tuple(by_name[name].shape)
            raise ValueError(f"the checkpoint's {what} for {name} has shape {found}, the model's is {tuple(shape)}")
    flat = torch.cat([by_name[name].flatten() for name in layout.names])
    return flat.to(layout.device, layout.working)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value
