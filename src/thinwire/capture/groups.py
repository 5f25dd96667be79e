"""A group: the parameters that one call of a reducer serves, and where their gradients lie.

DDP's buckets come and go: their number, order and contents change after the first steps, and again when a run is
resumed. A group does not: its layout is settled once and goes into the checkpoint. Where the layout happens
to be what one bucket holds, side by side, the bucket itself is the flat vector and nothing is copied.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from thinwire.comm import Comm
from thinwire.reducer import Layout, Reducer

Grain = Literal["tensor", "bucket", "model"]


@dataclass
class Arrived:
    """A bucket as it stands in this step: its parameters' names, shapes and flat gradient."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    buffer: Tensor

    def spans(self) -> dict[str, Tensor]:
        """Each parameter's part of the buffer, flat."""
        sizes = [shape.numel() for shape in self.shapes]
        return dict(zip(self.names, self.buffer.split(sizes), strict=True))


@dataclass
class Group:
    layout: Layout
    state: Any
    scratch: Tensor | None = field(default=None, repr=False)

    def read(self, arrived: list[Arrived]) -> Tensor:
        """The group's gradients as one flat vector: a view where they lie so, else a copy in the scratch vector."""
        view = self._view(arrived)
        if view is not None:
            return view
        if self.scratch is None:
            self.scratch = self.layout.zeros()
        spans = _all_spans(arrived)
        for part, name in zip(self.scratch.split(self.layout.sizes), self.layout.names, strict=True):
            part.copy_(spans[name])
        return self.scratch

    def write(self, flat: Tensor, arrived: list[Arrived]) -> None:
        """Put the vector back where `read` found it."""
        if flat is not self.scratch:
            return
        spans = _all_spans(arrived)
        for part, name in zip(flat.split(self.layout.sizes), self.layout.names, strict=True):
            spans[name].copy_(part)

    def _view(self, arrived: list[Arrived]) -> Tensor | None:
        if self.layout.dtype is not self.layout.working:
            return None
        first = self.layout.names[0]
        for bucket in arrived:
            if first in bucket.names:
                at = bucket.names.index(first)
                if bucket.names[at : at + len(self.layout.names)] != self.layout.names:
                    return None
                start = sum(shape.numel() for shape in bucket.shapes[:at])
                return bucket.buffer[start : start + self.layout.numel]
        return None


class Capture(Protocol):
    """What takes from a model what a reducer reduces, and owns the reducer's states."""

    reducer: Reducer[Any, Any]
    comm: Comm
    grain: Any
    parameters: dict[str, nn.Parameter]
    groups: list[Group]
    step: int
    scale: float
    last: dict[str, float]


def make_groups(arrived: list[Arrived], grain: Grain, reducer: Reducer[Any, Any]) -> list[Group]:
    """Settle the layouts from the buckets as they lie now."""
    if grain == "tensor":
        parts = [Arrived((n,), (s,), b.buffer) for b in arrived for n, s in zip(b.names, b.shapes)]
    elif grain == "bucket":
        parts = arrived
    else:  # one vector for all that can lie in one: the same dtype on the same device
        parts = []
        for kind in dict.fromkeys((b.buffer.dtype, b.buffer.device) for b in arrived):
            alike = [b for b in arrived if (b.buffer.dtype, b.buffer.device) == kind]
            names = tuple(n for b in alike for n in b.names)
            parts.append(Arrived(names, tuple(s for b in alike for s in b.shapes), alike[0].buffer))
    layouts = [Layout(p.names, p.shapes, p.buffer.dtype, p.buffer.device) for p in parts]
    return [Group(layout, reducer.init(layout)) for layout in layouts]


def layout_of(names: list[str], parameters: dict[str, nn.Parameter]) -> Layout:
    """The layout of a group whose order a checkpoint has kept."""
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise ValueError(
            f"the checkpoint has the parameter {unknown[0]}, the model has not: load it into the one it was made with"
        )
    first = parameters[names[0]]
    return Layout(tuple(names), tuple(parameters[n].shape for n in names), first.dtype, first.device)


def _all_spans(arrived: list[Arrived]) -> dict[str, Tensor]:
    return {name: span for bucket in arrived for name, span in bucket.spans().items()}
