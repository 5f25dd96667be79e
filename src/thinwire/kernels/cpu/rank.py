"""Exact ranks: magnitudes sort as their bits do, so histograms of the bits find the k-th in as many passes as digits.

A sample says first where the k-th will lie, one pass collects what lies above, and the histograms see only that. Where
the sample misleads (nearly everything equal, say), they see the whole vector: slower, and no less exact.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.common import NUMPY, compiled, tensor, view
from thinwire.kernels.cpu.select import _select, room
from thinwire.kernels.reference import index_dtype

ORDER = {  # the integer of the same size, how many bits a magnitude has, and the bits of infinity
    torch.float32: (np.int32, 31, 0x7F800000),
    torch.float64: (np.int64, 63, 0x7FF0000000000000),
}
DIGIT = 11  # bits settled by one histogram: its 2048 counters stay in the first cache
GUESS = 2**16  # entries of the sample that says where the k-th magnitude will lie


@compiled
def _key(pattern: Any, width: int, infinity: int) -> Any:
    """The bits of a magnitude; below all others, -1, for NaN."""
    key = np.int64(pattern) & np.int64((np.uint64(1) << np.uint64(width)) - np.uint64(1))
    return key if key <= infinity else -1


@compiled
def _kth(patterns: Any, width: int, infinity: int, k: int) -> Any:
    """The k-th largest key, and how many entries of just this key are among the k largest."""
    counts = np.empty(1 << DIGIT, np.int64)
    known, shift = 0, width  # the key without its lowest `shift` bits
    while shift:
        digit = min(DIGIT, shift)
        low = shift - digit
        counts[:] = 0
        for pattern in patterns:
            key = _key(pattern, width, infinity)
            if key >= 0 and (key >> shift) == known:
                counts[(key >> low) & ((1 << digit) - 1)] += 1
        place = (1 << digit) - 1
        while place >= 0 and counts[place] < k:
            k -= counts[place]
            place -= 1
        if place < 0:
            return -1, k  # only NaN is left
        known, shift = (known << digit) | place, low
    return known, k


@compiled
def _cut(patterns: Any, width: int, infinity: int, kth: int, ties: int, places: Any) -> int:
    """The positions among `patterns` of the keys above the k-th, and of the first `ties` equal to it."""
    found = 0
    for place in range(patterns.size):
        key = _key(patterns[place], width, infinity)
        if key > kth or (key == kth and ties > 0):
            ties -= key == kth
            places[found] = place
            found += 1
    return found


@compiled
def _sample(x: Any, seen: Any) -> None:
    n, m = x.size, seen.size
    stretch = max(n // m, 1)
    for i in range(m):
        seen[i] = x[i * n // m + (i * 2654435761 >> 8) % stretch]


def _magnitude_of(key: int, dtype: torch.dtype) -> float:
    return math.nan if key < 0 else float(np.array(key, ORDER[dtype][0]).view(NUMPY[dtype]))


def quantile(x: Tensor, density: float, samples: int) -> float:
    pattern, *order = ORDER[x.dtype]
    seen = np.empty(min(samples, x.numel()), NUMPY[x.dtype])
    _sample(view(x), seen)
    k = min(max(round(density * len(seen)), 1), len(seen))
    return _magnitude_of(_kth(seen.view(pattern), *order, k)[0], x.dtype)


def _candidates(x: Tensor, k: int) -> Any:
    """Positions of which the k largest magnitudes are a fair part, or None if a sample does not lead to them."""
    n = x.numel()
    if 8 * k > n:
        return None
    expected = GUESS * k / n
    threshold = quantile(x, (expected + 4 * math.sqrt(expected) + 4) / GUESS, GUESS)  # four deviations below
    limit = 4 * k + n // 128
    index = _select(view(x), threshold, 0, room(n, index_dtype(n)), limit)
    return index if k <= len(index) <= limit else None


def top_k(x: Tensor, k: int) -> Tensor:
    pattern, *order = ORDER[x.dtype]
    dtype = index_dtype(x.numel())
    patterns, candidates = view(x).view(pattern), _candidates(x, k) if k else None
    if candidates is not None:
        patterns = patterns[candidates]
    places = np.empty(k, NUMPY[dtype])
    if k:
        _cut(patterns, *order, *_kth(patterns, *order, k), places)
    return tensor(places if candidates is None else candidates[places])


def kth_magnitude(x: Tensor, k: int) -> float:
    pattern, *order = ORDER[x.dtype]
    patterns, candidates = view(x).view(pattern), _candidates(x, k)
    return _magnitude_of(_kth(patterns if candidates is None else patterns[candidates], *order, k)[0], x.dtype)
