"""Words of 32 bits: a sign, three bits of exponent and an index within a group."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.common import NUMPY, compiled, tensor, view
from thinwire.kernels.reference import POWER_BITS, WORD_INDEX_BITS, WORD_STEPS, index_dtype

LAYOUTS = {  # the integer of the same size; bits of a magnitude, bits of its mantissa, bias of its exponent
    torch.float32: (np.int32, (31, 23, 127)),
    torch.float64: (np.int64, (63, 52, 1023)),
}


@compiled
def _nearest(size: Any, pattern: int, mantissa: int, bias: int) -> int:
    """The exponent of the power of two nearest to a magnitude: adding half a mantissa carries into the exponent."""
    if pattern >> mantissa:
        return ((pattern + (1 << (mantissa - 1))) >> mantissa) - bias
    part, exponent = math.frexp(size)  # subnormal, or zero
    return exponent - 1 if part < 0.75 else exponent


@compiled
def _pack_words(
    index: Any, values: Any, patterns: Any, layout: Any, starts: Any, tops: Any, counts: Any, words: Any, kept: Any
) -> int:
    width, mantissa, bias = layout
    found, begin = 0, 0
    for group in range(tops.size):
        end, largest = begin, values.dtype.type(0)
        while end < index.size and index[end] < starts[group + 1]:
            largest = max(largest, abs(values[end]))
            end += 1
        top = min(max(math.frexp(largest)[1] - 1, -128), 127) if largest > 0 else 0
        first = found
        for i in range(begin, end):
            size, pattern = abs(values[i]), np.int64(patterns[i]) & ((1 << width) - 1)
            steps = max(top - _nearest(size, pattern, mantissa, bias), 0)
            kept[i] = size > 0 and steps <= WORD_STEPS
            if kept[i]:
                negative = np.int64(values[i] < 0)
                place = np.int64(index[i]) - starts[group]
                words[found] = (negative << 31) | (steps << WORD_INDEX_BITS) | place
                found += 1
        tops[group], counts[group], begin = top, found - first, end
    return found


def pack_words(index: Tensor, values: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups, count = starts.numel() - 1, index.numel()
    tops, counts = np.empty(groups, np.int8), np.empty(groups, np.int64)
    words, kept = np.empty(count, np.int32), np.empty(count, np.bool_)
    pattern, layout = LAYOUTS[values.dtype]
    sent = view(index), view(values), view(values).view(pattern), layout
    found = _pack_words(*sent, view(starts), tops, counts, words, kept)
    return tensor(tops), tensor(counts), tensor(words[:found]), tensor(kept)


@compiled
def _unpack_words(tops: Any, counts: Any, words: Any, starts: Any, index: Any, values: Any) -> int:
    found, last = 0, np.int64(-1)
    powers = np.empty(WORD_STEPS + 1)
    for group in range(tops.size):
        for steps in range(WORD_STEPS + 1):
            powers[steps] = math.ldexp(1.0, int(tops[group]) - steps)
        for i in range(found, found + counts[group]):
            word = np.int64(words[i])
            place = starts[group] + (word & ((1 << WORD_INDEX_BITS) - 1))
            if place <= last or place >= starts[group + 1]:
                return i
            index[i] = last = place
            size = powers[(word >> WORD_INDEX_BITS) & WORD_STEPS]
            values[i] = -size if word < 0 else size
        found += counts[group]
    return found


def unpack_words(
    tops: Tensor, counts: Tensor, words: Tensor, starts: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    index = np.empty(words.numel(), NUMPY[index_dtype(int(starts[-1]))])
    values = np.empty(words.numel(), NUMPY[dtype if dtype in NUMPY else torch.float32])
    found = _unpack_words(view(tops), view(counts), view(words), view(starts), index, values)
    return tensor(index[:found]), tensor(values[:found]).to(dtype)


@compiled
def _join_powers(index: Any, words: Any, kept: Any, places: Any) -> None:
    found, mask = 0, (1 << POWER_BITS) - 1
    for i in range(index.size):
        if kept[i]:
            places[found] = (np.int64(index[i]) << POWER_BITS) | ((np.int64(words[found]) >> WORD_INDEX_BITS) & mask)
            found += 1


def join_powers(index: Tensor, words: Tensor, kept: Tensor, numel: int) -> Tensor:
    places = np.empty(words.numel(), NUMPY[index_dtype(numel << POWER_BITS)])
    _join_powers(view(index), view(words), view(kept), places)
    return tensor(places)


@compiled
def _split_powers(places: Any, tops: Any, starts: Any, index: Any, values: Any) -> int:
    group, last = -1, np.int64(-1)
    powers = np.empty(1 << POWER_BITS)
    for i in range(places.size):
        place = np.int64(places[i]) >> POWER_BITS
        if place <= last:
            return i
        while place >= starts[group + 1]:
            group += 1
            for steps in range(WORD_STEPS + 1):
                powers[steps] = math.ldexp(1.0, int(tops[group]) - steps)
                powers[steps + WORD_STEPS + 1] = -powers[steps]
        index[i] = last = place
        values[i] = powers[places[i] & ((1 << POWER_BITS) - 1)]
    return places.size


def split_powers(places: Tensor, tops: Tensor, starts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    index = np.empty(places.numel(), NUMPY[index_dtype(int(starts[-1]))])
    values = np.empty(places.numel(), NUMPY[dtype if dtype in NUMPY else torch.float32])
    found = _split_powers(view(places), view(tops), view(starts), index, values)
    return tensor(index[:found]), tensor(values[:found]).to(dtype)
