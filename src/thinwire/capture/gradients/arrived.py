"""Buckets as DDP hands them out, and where a group's gradients lie in them.

Where a group's layout happens to be what one bucket holds, side by side, the bucket itself is the flat vector and
nothing is copied.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.core.reducer import Layout
from thinwire.step.groups import Group
from thinwire.step.step import Step

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


class BucketStep:
    """One backward pass: the buckets that have arrived, and those that DDP may have back."""

    def __init__(self, step: Step):
        self.step = step
        self.arrived: list[Arrived] = []
        self.futures: list[Future[Tensor]] = []
        self.started = 0  # groups handed to the lane
        self.called = False  # the roll
        self.nobodys: set[str] = set()  # the parameters that no rank has used
        self.based = False  # all ranks hold the same gradients from before
        self.waiting: set[str] = set()  # the parameters whose gradients of before nobody has used yet
        self._finished: set[str] = set()  # parameters whose gradient is final

    def resolve(self, names: tuple[str, ...]) -> None:
        """Tell DDP of the buckets that are final now that these parameters are."""
        self._finished.update(names)
        for bucket, future in zip(self.arrived, self.futures):
            if not future.done() and self._finished.issuperset(bucket.names):
                future.set_result(bucket.buffer)

    def give_up(self) -> None:
        """Let DDP finish with gradients that nobody can take for good ones."""
        for bucket, future in zip(self.arrived, self.futures):
            if not future.done():
                bucket.buffer.fill_(torch.nan)
                future.set_result(bucket.buffer)


def read(group: Group, arrived: list[Arrived]) -> Tensor:
    """The group's gradients as one flat vector: a view where they lie so, else a copy in the scratch vector."""
    view = _view(group.layout, arrived)
    if view is not None:
        return view
    if group.scratch is None:
        group.scratch = group.layout.zeros()
    spans = _all_spans(arrived)
    for part, name in zip(group.scratch.split(group.layout.sizes), group.layout.names, strict=True):
        part.copy_(spans[name])
    return group.scratch


def write(group: Group, flat: Tensor, arrived: list[Arrived]) -> None:
    """Put the vector back where `read` found it."""
    if flat is not group.scratch:
        return
    spans = _all_spans(arrived)
    for part, name in zip(flat.split(group.layout.sizes), group.layout.names, strict=True):
        spans[name].copy_(part)


def layouts(arrived: list[Arrived], grain: Grain) -> list[Layout]:
    """How the buckets, as they lie now, are cut into groups."""
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
    return [Layout(p.names, p.shapes, p.buffer.dtype, p.buffer.device) for p in parts]


def _view(layout: Layout, arrived: list[Arrived]) -> Tensor | None:
    if layout.dtype is not layout.working:
        return None
    first = layout.names[0]
    for bucket in arrived:
        if first in bucket.names:
            at = bucket.names.index(first)
            if bucket.names[at : at + len(layout.names)] != layout.names:
                return None
            start = sum(shape.numel() for shape in bucket.shapes[:at])
            return bucket.buffer[start : start + layout.numel]
    return None


def _all_spans(arrived: list[Arrived]) -> dict[str, Tensor]:
    return {name: span for bucket in arrived for name, span in bucket.spans().items()}
