"""What the fields of a method's state mean to a checkpoint, another loss scale, another number of workers.

A state is a plain dataclass. Each field is one of four kinds, so that saving, moving and resizing are
written once, here, and never in a method:

- `entries()`: a tensor with one value per gradient entry, this worker's own. Saved by parameter name.
- `shared()`, and any unmarked field: alike on every worker. Saved as it is.
- `per_world()`: meaningless when the number of workers changes: made anew then.
- `derived()`: follows from the layout, so `init` makes it and nothing saves it.

A field that holds another dataclass is a nested state.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.reducer import Layout, MethodWarning

Merge = Literal["sum", "mean"]


def entries(*, merge: Merge = "sum", degree: int = 1) -> Any:
    """One value per gradient entry, in gradient units to the power `degree`; None until it is needed."""
    return field(metadata={"kind": "entries", "merge": merge, "degree": degree})


def shared(default: Any = None, *, degree: int = 0) -> Any:
    """Alike on every worker; a number in gradient units to the power `degree`."""
    return field(default=default, metadata={"kind": "shared", "degree": degree})


def per_world(factory: Callable[[], Any]) -> Any:
    """What holds for this number of workers."""
    return field(default_factory=factory, metadata={"kind": "per_world"})


def derived() -> Any:
    """What `init` works out from the layout, once."""
    return field(metadata={"kind": "derived"})


def nested(state: Any) -> list[tuple[str, Any]]:
    """The states inside a state, by field name."""
    return [(f.name, getattr(state, f.name)) for f in fields(state) if is_dataclass(getattr(state, f.name))]


def save(state: Any, layout: Layout) -> dict[str, Any] | None:
    """A tree of tensors, numbers, strings and lists that `torch.load(weights_only=True)` takes."""
    if state is None:
        return None
    saved: dict[str, Any] = {}
    for f in _kept(state):
        value = getattr(state, f.name)
        if is_dataclass(value):
            saved[f.name] = save(value, layout)
        elif f.metadata.get("kind") == "entries" and value is not None:
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
            raise ValueError(
                f"the checkpoint has no '{f.name}' for {type(state).__name__}: was it made by another method?"
            )
        value, kept = getattr(state, f.name), saved[f.name]
        if is_dataclass(value):
            load(value, kept, layout, same_world=same_world)
        elif f.metadata.get("kind") == "entries":
            setattr(state, f.name, None if kept is None else _flat(kept, layout, f.name))
        elif f.metadata.get("kind") != "per_world" or same_world:
            setattr(state, f.name, _moved(copy.deepcopy(kept), layout.device))
        elif f.metadata.get("unsent") and kept is not None:
            warnings.warn(
                f"{type(state).__name__} of {layout.names[0]} and what lies beside it: what was not sent yet (norm "
                f"{float(kept.norm()):.3g}) cannot be dealt out among another number of workers, and is dropped",
                MethodWarning,
                stacklevel=2,
            )


def merge(saved: list[dict[str, Any] | None], state: Any) -> dict[str, Any] | None:
    """One saved state out of several workers': sums summed, means averaged, shared ones from the first.

    `state`, fresh from `init`, tells the kinds.
    """
    first = saved[0]
    if state is None or first is None:
        return None
    merged: dict[str, Any] = {}
    for f in _kept(state):
        value, parts = getattr(state, f.name), [s[f.name] for s in saved if s is not None]
        if is_dataclass(value):
            merged[f.name] = merge(parts, value)
        elif f.metadata.get("kind") == "entries" and parts[0] is not None:
            total = {name: sum(part[name].double() for part in parts) for name in parts[0]}
            scale = 1 / len(parts) if f.metadata["merge"] == "mean" else 1
            merged[f.name] = {name: (t * scale).to(parts[0][name].dtype) for name, t in total.items()}
        else:
            merged[f.name] = parts[0]
    return merged


def empty_sums(state: Any) -> None:
    """A worker that joins brings nothing: what is summed over workers starts at zero, the rest stays."""
    for f in fields(state) if state is not None else ():
        value = getattr(state, f.name)
        if is_dataclass(value):
            empty_sums(value)
        elif isinstance(value, Tensor) and f.metadata.get("merge") == "sum":
            value.zero_()


def rescale(state: Any, ratio: float) -> None:
    """Follow a change of the loss scale: gradients are now `ratio` times as large as when they were stored."""
    for f in fields(state) if state is not None else ():
        value, degree = getattr(state, f.name), f.metadata.get("degree", 0)
        if is_dataclass(value):
            rescale(value, ratio)
        elif degree and isinstance(value, Tensor):
            value.mul_(ratio**degree)
        elif degree and isinstance(value, (int, float)):
            setattr(state, f.name, value * ratio**degree)


def entry_tensors(state: Any) -> dict[str, Tensor]:
    """All tensors with one value per gradient entry, by dotted field name."""
    found: dict[str, Tensor] = {}
    for f in fields(state) if state is not None else ():
        value = getattr(state, f.name)
        if is_dataclass(value):
            found |= {f"{f.name}.{name}": t for name, t in entry_tensors(value).items()}
        elif f.metadata.get("kind") == "entries" and value is not None:
            found[f.name] = value
    return found


def restore(state: Any, snapshot: Any) -> None:
    """Put back what `copy.deepcopy(state)` kept, into the same tensors."""
    for f in fields(state) if state is not None else ():
        value, kept = getattr(state, f.name), getattr(snapshot, f.name)
        if is_dataclass(value):
            restore(value, kept)
        elif isinstance(value, Tensor) and isinstance(kept, Tensor) and value.shape == kept.shape:
            value.copy_(kept)
        else:
            setattr(state, f.name, kept)


def _kept(state: Any) -> list[Field[Any]]:
    return [f for f in fields(state) if f.metadata.get("kind") != "derived"]


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
