"""Words of 32 bits: a sign, three bits of exponent and an index within a group."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.common import NUMPY, compiled, tensor, view
from thinwire.kernels.reference import WORD_INDEX_BITS, WORD_STEPS, index_dtype


@compiled
def _pack_words(index: Any, values: Any, starts: Any, tops: Any, counts: Any, words: Any, kept: Any) -> int:
    found, begin = 0, 0
    for group in range(tops.size):
        end, largest = begin, values.dtype.type(0)
        while end < index.size and index[end] < starts[group + 1]:
            largest = max(largest, abs(values[end]))
            end += 1
        top = min(max(math.frexp(largest)[1] - 1, -128), 127) if largest > 0 else 0
        first = found
        for i in range(begin, end):
            mantissa, exponent = math.frexp(abs(values[i]))
            nearest = exponent - 1 if mantissa < 0.75 else exponent
            steps = max(top - nearest, 0)
            kept[i] = mantissa > 0 and steps <= WORD_STEPS
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
    found = _pack_words(view(index), view(values), view(starts), tops, counts, words, kept)
    sent = tensor(words[:found])
    return tensor(tops), tensor(counts), sent, tensor(kept)


@compiled
def _unpack_words(tops: Any, counts: Any, words: Any, starts: Any, index: Any, values: Any) -> None:
    found = 0
    for group in range(tops.size):
        for i in range(found, found + counts[group]):
            word = np.int64(words[i])
            index[i] = starts[group] + (word & ((1 << WORD_INDEX_BITS) - 1))
            steps = (word >> WORD_INDEX_BITS) & WORD_STEPS
            size = math.ldexp(1.0, int(tops[group] - steps))
            values[i] = -size if word < 0 else size
        found += counts[group]


def unpack_words(
    tops: Tensor, counts: Tensor, words: Tensor, starts: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    index = torch.empty(words.numel(), dtype=index_dtype(int(starts[-1])))
    values = torch.empty(words.numel(), dtype=dtype if dtype in NUMPY else torch.float32)
    _unpack_words(view(tops), view(counts), view(words), view(starts), view(index), view(values))
    return index, values.to(dtype)
