"""Putting back a part of a state: what it holds for some of the parameters."""

import itertools
from collections.abc import Collection
from dataclasses import Field
from typing import Any

from torch import Tensor

from thinwire.core.memory import BY_NAME, place, walk
from thinwire.core.reducer import Layout


def restore_unsent(state: Any, kept: Any, layout: Layout, names: Collection[str], rank: int, world: int) -> None:
    """Put back what was unsent of these parameters, and leave the rest of the state as it is."""
    unsent = [(path, f, value) for path, f, value in walk(state) if f.metadata.get("unsent")]
    _restore_spans(unsent, kept, layout, names, rank, world)


def restore_entries(state: Any, kept: Any, layout: Layout, names: Collection[str], rank: int, world: int) -> None:
    """Put back all that there is entry by entry of these parameters, and leave the rest of the state as it is."""
    by_entry = [(path, f, value) for path, f, value in walk(state) if f.metadata.get("unsent") or place(f) in BY_NAME]
    _restore_spans(by_entry, kept, layout, names, rank, world)


def _restore_spans(
    found: list[tuple[str, Field[Any], Any]], kept: Any, layout: Layout, names: Collection[str], rank: int, world: int
) -> None:
    before = {path: value for path, _, value in walk(kept)}
    stops = list(itertools.accumulate(layout.sizes))
    spans = [(stop - size, stop) for name, size, stop in zip(layout.names, layout.sizes, stops) if name in names]
    for path, f, value in found:
        owner = place(f) == "owner"
        whole = -(-layout.numel // world) if owner else layout.numel
        if not isinstance(value, Tensor) or len(value) != whole:
            continue
        first = rank * len(value) if owner else 0  # an owner holds its part of the vector alone
        for start, stop in spans:
            part = slice(max(start - first, 0), max(stop - first, 0))
            value[part] = 0 if before[path] is None else before[path][part]
