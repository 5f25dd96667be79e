"""Sorted positions as the gaps between them, one compiled function a message: after a pass over a gradient the caches
are cold, and every further call costs more than the few thousand numbers it is for.
"""

from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu.common import NUMPY, compiled, tensor, view
from thinwire.kernels.cpu.lanes import LANES, NONE, ONE, WIDTH, lowest
from thinwire.kernels.cpu.pack import get, in_bytes, in_words, put_codes, set_bit, stream
from thinwire.kernels.reference import Survey, in_whole_bytes, index_dtype

EVERY = ~NONE


@compiled
def _gap_sum(index: Any, shift: int) -> Any:
    total = np.int64(0)
    for i in range(1, index.size):
        total += (np.int64(index[i]) - np.int64(index[i - 1]) - 1) >> shift
    return total


@compiled
def _survey(index: Any) -> Any:
    count = index.size - 1
    first, last = np.int64(index[0]), np.int64(index[count])
    if not count:
        return 0, 0, 0, 0, first, last
    least = most = np.int64(index[1]) - first - 1
    for i in range(1, index.size):
        gap = np.int64(index[i]) - np.int64(index[i - 1]) - 1
        least, most = min(least, gap), max(most, gap)
    shift, mean = 0, 0.69 * (last - first) / count
    while np.int64(2) << shift <= mean:
        shift += 1
    high = _gap_sum(index, shift)
    for step in (1, -1):
        while shift + step >= 0:
            other = _gap_sum(index, shift + step)
            if count * step + other >= high:
                break
            shift, high = shift + step, other
    return least, most, shift, high, first, last


def survey(index: Tensor) -> Survey:
    return Survey(*_survey(view(index)))


@compiled
def _pack_gaps(index: Any, bits: Any, words: Any) -> None:
    gaps = np.empty(index.size - 1, index.dtype)
    for i in range(gaps.size):
        gaps[i] = index[i + 1] - index[i] - 1
    put_codes(gaps, bits, words)


def pack_gaps(index: Tensor, bits: int) -> Tensor:
    length = (index.numel() - 1) * bits
    words = stream(length)
    _pack_gaps(view(index), np.uint64(bits), words)
    return in_bytes(words, length)


@compiled
def _unpack_gaps(words: Any, bits: Any, index: Any, first: int, numel: int) -> int:
    mask, at, place = (ONE << bits) - ONE, NONE, np.int64(first)
    index[0] = first
    for i in range(1, index.size):
        place += np.int64(get(words, at, mask)) + 1
        at += bits
        if place >= numel:
            return i
        index[i] = place
    return index.size


def unpack_gaps(packed: Tensor, count: int, bits: int, first: int, numel: int) -> tuple[Tensor, int]:
    index = np.empty(count, NUMPY[index_dtype(numel)])
    found = _unpack_gaps(in_words(packed), np.uint64(bits), index, first, numel)
    return tensor(index[:found]), in_whole_bytes((count - 1) * bits)


@compiled
def _pack_rice(index: Any, shift: Any, at: Any, words: Any) -> None:
    """The low bits of the gaps, and from bit `at` a mark for each, after as many zeros as its high part says."""
    _pack_gaps(index, shift, words)
    for i in range(1, index.size):
        at += np.uint64(index[i] - index[i - 1] - 1) >> shift
        set_bit(words, at)
        at += ONE


def pack_rice(index: Tensor, shift: int, high: int) -> Tensor:
    split = 8 * in_whole_bytes((index.numel() - 1) * shift)
    length = split + index.numel() - 1 + high
    words = stream(length)
    _pack_rice(view(index), np.uint64(shift), np.uint64(split), words)
    return in_bytes(words, length)


@compiled
def _unpack_rice(words: Any, shift: Any, split: Any, end: Any, index: Any, first: int, numel: int) -> Any:
    """How many positions there are, and where the last mark is."""
    mask, at, found, count = (ONE << shift) - ONE, NONE, ONE, np.uint64(index.size)
    place, last, highest = np.int64(first), np.int64(split) - 1, np.int64(numel) >> np.int64(shift)
    index[0] = first
    for begin in range(split, end, WIDTH):
        word = get(words, begin, EVERY)
        while word:
            if found == count:
                return found, last
            mark = np.int64(begin + lowest(word))
            high = mark - last - 1
            place += (high << np.int64(shift)) + np.int64(get(words, at, mask)) + 1
            if high > highest or place >= numel:
                return found, last
            index[found] = place
            at += shift
            found += ONE
            last = mark
            word &= word - ONE
    return found, last


def unpack_rice(packed: Tensor, count: int, shift: int, first: int, numel: int) -> tuple[Tensor, int]:
    split = 8 * in_whole_bytes((count - 1) * shift)
    index = np.empty(count, NUMPY[index_dtype(numel)])
    places = np.uint64(shift), np.uint64(split), np.uint64(8 * packed.numel())
    found, last = _unpack_rice(in_words(packed), *places, index, first, numel)
    return tensor(index[:found]), last // 8 + 1


@compiled
def _pack_marks(index: Any, words: Any) -> None:
    for i in range(1, index.size):
        at = np.uint64(index[i] - index[0] - 1)
        set_bit(words, at)


def pack_marks(index: Tensor) -> Tensor:
    length = int(index[-1]) - int(index[0])
    words = stream(length)
    _pack_marks(view(index), words)
    return in_bytes(words, length)


@compiled
def _unpack_marks(words: Any, index: Any, first: int, numel: int) -> int:
    index[0] = first
    found = 1
    for at in range(words.size):
        word = words[at]
        while word:
            place = first + 1 + at * LANES + np.int64(lowest(word))
            if place >= numel or found == index.size:
                return found
            index[found] = place
            found += 1
            word &= word - ONE
    return found


def unpack_marks(packed: Tensor, count: int, first: int, numel: int) -> tuple[Tensor, int]:
    index = np.empty(count, NUMPY[index_dtype(numel)])
    index = index[: _unpack_marks(in_words(packed), index, first, numel)]
    return tensor(index), in_whole_bytes(int(index[-1]) - first)
