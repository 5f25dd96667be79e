"""The kernels in numba: one thread, at the memory's speed, on torch's own memory.

A pass reads 64 entries as one word of answers (`lanes`) and looks closer only where the word is not zero; at the
densities gradients are sent with that is one block in twenty, so selecting costs little more than reading.
What is compiled is cached on disk; `thinwire.kernels.warm` compiles it before training starts.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.lanes import LANES, at_least, below_zero, lowest, square_exceeds

compiled = njit(nogil=True, cache=True)
ONE, WIDTH = np.uint64(1), np.uint64(LANES)
NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}
BITS = {torch.float32: np.int32, torch.float64: np.int64}
DIGIT = 11  # bits of a magnitude that one pass of the histogram settles: 2048 counters stay in the first cache


def covers(*vectors: Tensor) -> bool:
    """Whether these kernels take such vectors: the rest is the reference's."""
    return all(x.device.type == "cpu" and x.dtype in BITS and x.is_contiguous() for x in vectors) and (
        len({x.dtype for x in vectors}) == 1
    )


def view(x: Tensor) -> Any:
    return x.detach().numpy()


def room(numel: int, dtype: torch.dtype) -> Any:
    """A first buffer for what a selection finds; it doubles when it must."""
    return np.empty(numel // 1024 + 2 * LANES, NUMPY[dtype])


def within(index: Tensor, numel: int) -> Any:
    """The positions, after making sure that none leads outside: compiled code would follow it."""
    places = view(index)
    if len(places) and not (places.min() >= 0 and places.max() < numel):
        raise IndexError(f"an index lies outside a vector of {numel} entries")
    return places


# Selecting


@compiled
def _grown(buffer: Any, used: int) -> Any:
    larger = np.empty(2 * buffer.size, buffer.dtype)
    larger[:used] = buffer[:used]
    return larger


@compiled
def _at_least(x: Any, start: Any, threshold: Any) -> Any:
    if start + WIDTH <= np.uint64(x.size):
        return at_least(x, start, threshold)
    word = np.uint64(0)
    for lane in range(np.uint64(x.size) - start):
        word |= np.uint64(abs(x[start + lane]) >= threshold) << lane
    return word


@compiled
def _select(x: Any, threshold: Any, offset: int, index: Any) -> Any:
    bound, base, found = x.dtype.type(threshold), np.uint64(offset), 0
    for block in range(0, x.size, LANES):
        start = np.uint64(block)
        word = _at_least(x, start, bound)
        if word:
            if found + LANES > index.size:
                index = _grown(index, found)
            while word:
                index[found] = base + start + lowest(word)
                found += 1
                word &= word - ONE
    return index[:found]
