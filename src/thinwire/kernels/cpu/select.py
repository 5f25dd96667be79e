"""Selecting, with what is fused to it, at the speed of reading.

A pass asks of 64 entries at once which of them pass (`lanes`), notes the words of answers that are not zero,
and looks at the entries they name only at the end of a chunk. At the densities gradients are sent with that is
one word in twenty; kept out of the stream of loads it costs almost nothing, inside it each would stall the stream.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.common import NUMPY, compiled, tensor, view
from thinwire.kernels.cpu.lanes import (
    LANES,
    NONE,
    ONE,
    WIDTH,
    add_test_decay,
    at_least,
    lowest,
    not_finite,
)
from thinwire.kernels.reference import index_dtype

CHUNK = 8  # words noted before their entries are looked at: 2 kB of float32, which the first cache still holds


def room(numel: int, dtype: torch.dtype) -> Any:
    """A first buffer for what a selection finds; it doubles when it must."""
    return np.empty(numel // 1024 + 2 * LANES, NUMPY[dtype])


@compiled
def _grown(buffer: Any, used: int) -> Any:
    larger = np.empty(2 * buffer.size, buffer.dtype)
    larger[:used] = buffer[:used]
    return larger


@compiled
def _at_least(x: Any, start: Any, bound: Any) -> Any:
    if start + WIDTH <= np.uint64(x.size):
        return at_least(x, start, bound)
    word = NONE
    for lane in range(np.uint64(x.size) - start):
        word |= np.uint64(abs(x[start + lane]) >= bound) << lane
    return word


@compiled
def _find(x: Any, begin: int, bound: Any, starts: Any, words: Any) -> int:
    """Note which blocks of a chunk have entries that reach the bound, without a branch that could be mispredicted."""
    hits = 0
    for block in range(begin, min(begin + CHUNK * LANES, x.size), LANES):
        starts[hits] = block
        words[hits] = _at_least(x, np.uint64(block), bound)
        hits += words[hits] != NONE
    return hits


@compiled
def _places(start: Any, word: Any, index: Any, found: int) -> int:
    while word:
        index[found] = start + lowest(word)
        found += 1
        word &= word - ONE
    return found


@compiled
def _select(x: Any, threshold: float, offset: int, index: Any, limit: int) -> Any:
    bound, base, found = x.dtype.type(threshold), np.uint64(offset), 0
    starts, words = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.uint64)
    for begin in range(0, x.size, CHUNK * LANES):
        for hit in range(_find(x, begin, bound, starts, words)):
            if found + LANES > index.size:
                index = _grown(index, found)
            found = _places(base + starts[hit], words[hit], index, found)
        if found > limit:
            break
    return index[:found]


def select(x: Tensor, threshold: float, lo: int, hi: int) -> Tensor:
    index = room(hi - lo, index_dtype(x.numel()))
    return tensor(_select(view(x)[lo:hi], float(threshold), lo, index, hi))


@compiled
def _add_test_decay(r: Any, v: Any, mean: Any, square: Any, start: Any, alpha: Any, zeta: Any) -> Any:
    if start + WIDTH <= np.uint64(r.size):
        return add_test_decay(r, v, mean, square, start, alpha, zeta)
    word = NONE
    for lane in range(np.uint64(r.size) - start):
        place = start + lane
        r[place] += mean[place]
        v[place] += square[place]
        if r[place] * r[place] > alpha * v[place]:
            word |= ONE << lane
        else:
            v[place] *= zeta
    return word


@compiled
def _variance_step(r: Any, v: Any, mean: Any, square: Any, alpha: float, zeta: float, index: Any) -> Any:
    factor, decay, found = r.dtype.type(alpha), r.dtype.type(zeta), 0
    starts, words = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.uint64)
    for begin in range(0, r.size, CHUNK * LANES):
        hits = 0
        for block in range(begin, min(begin + CHUNK * LANES, r.size), LANES):
            start = np.uint64(block)
            starts[hits] = start
            words[hits] = _add_test_decay(r, v, mean, square, start, factor, decay)
            hits += words[hits] != NONE
        for hit in range(hits):
            if found + LANES > index.size:
                index = _grown(index, found)
            found = _places(starts[hit], words[hit], index, found)
    return index[:found]


def variance_step(r: Tensor, v: Tensor, mean: Tensor, square: Tensor, alpha: float, zeta: float) -> Tensor:
    index = room(r.numel(), index_dtype(r.numel()))
    vectors = view(r), view(v), view(mean), view(square)
    return tensor(_variance_step(*vectors, float(alpha), float(zeta), index))


@compiled
def _finite(x: Any) -> bool:
    whole, wrong = x.size - x.size % LANES, NONE
    for begin in range(0, whole, CHUNK * LANES):
        for block in range(begin, min(begin + CHUNK * LANES, whole), LANES):
            wrong |= not_finite(x, np.uint64(block))
        if wrong:
            return False
    for place in range(whole, x.size):
        wrong |= np.uint64(not abs(x[place]) < np.inf)
    return not wrong


def finite(x: Tensor) -> bool:
    return bool(_finite(view(x)))
