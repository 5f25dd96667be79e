"""Bits side by side. A stream is built and read as 64-bit words, which on little-endian machines are its bytes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.common import NUMPY, compiled, tensor, view
from thinwire.kernels.cpu.lanes import LANES, NONE, ONE, WIDTH, below_zero, lowest
from thinwire.kernels.reference import code_dtype, index_dtype

SIX, LAST = np.uint64(6), WIDTH - ONE  # a bit's word is its place >> 6, and its place in the word that & 63


def stream(bits: int) -> Any:
    """Zeros for that many bits, and a word to spare so that a code may be written across the end."""
    return np.zeros(bits // LANES + 2, np.uint64)


def in_bytes(words: Any, bits: int) -> Tensor:
    return tensor(words.view(np.uint8)[: (bits + 7) // 8])


def in_words(packed: Tensor) -> Any:
    words = stream(8 * packed.numel())
    words.view(np.uint8)[: packed.numel()] = view(packed)
    return words


@compiled
def _get(words: Any, at: Any, mask: Any) -> Any:
    word, shift = at >> SIX, at & LAST
    above = (words[word + ONE] << ONE) << (LAST - shift)  # in two shifts, because one by 64 is undefined
    return ((words[word] >> shift) | above) & mask


@compiled
def _mark(words: Any, at: Any) -> None:
    words[at >> SIX] |= ONE << (at & LAST)


@compiled
def _pack_bits(codes: Any, bits: Any, words: Any) -> None:
    mask, word, filled, at = (ONE << bits) - ONE, NONE, NONE, NONE
    for i in range(codes.size):
        code = np.uint64(codes[i]) & mask
        word |= code << filled
        filled += bits
        if filled >= WIDTH:
            words[at] = word
            at += ONE
            filled -= WIDTH
            word = code >> (bits - filled)  # what did not fit
    words[at] = word


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    words = stream(codes.numel() * bits)
    _pack_bits(view(codes), np.uint64(bits), words)
    return in_bytes(words, codes.numel() * bits)


@compiled
def _unpack_bits(words: Any, bits: Any, codes: Any) -> None:
    mask = (ONE << bits) - ONE
    for i in range(codes.size):
        codes[i] = _get(words, np.uint64(i) * bits, mask)


def unpack_bits(packed: Tensor, count: int, bits: int) -> Tensor:
    codes = torch.empty(count, dtype=code_dtype(bits))
    _unpack_bits(in_words(packed), np.uint64(bits), view(codes))
    return codes


@compiled
def _pack_signs(x: Any, words: Any) -> None:
    whole = x.size // LANES
    for block in range(whole):
        words[block] = below_zero(x, np.uint64(block) * WIDTH)
    for place in range(whole * LANES, x.size):
        words[whole] |= np.uint64(x[place] < 0) << np.uint64(place - whole * LANES)


def pack_signs(x: Tensor) -> Tensor:
    words = stream(x.numel())
    _pack_signs(view(x), words)
    return in_bytes(words, x.numel())


@compiled
def _unpack_signs(packed: Any, signs: Any) -> None:
    for place in range(signs.size):
        signs[place] = 1 - 2 * np.int32((packed[place >> 3] >> (place & 7)) & 1)


def unpack_signs(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    signs = torch.empty(count, dtype=dtype if dtype in NUMPY else torch.float32)
    _unpack_signs(view(packed), view(signs))
    return signs.to(dtype)


# Gaps between sorted positions


@compiled
def _gap_range(index: Any) -> Any:
    least, most = np.int64(0), np.int64(0)
    if index.size > 1:
        least = most = np.int64(index[1]) - np.int64(index[0]) - 1
    for i in range(1, index.size):
        gap = np.int64(index[i]) - np.int64(index[i - 1]) - 1
        least, most = min(least, gap), max(most, gap)
    return least, most


def gap_range(index: Tensor) -> tuple[int, int]:
    return _gap_range(view(index))


@compiled
def _gap_sum(index: Any, shift: int) -> Any:
    total = np.int64(0)
    for i in range(1, index.size):
        total += (np.int64(index[i]) - np.int64(index[i - 1]) - 1) >> shift
    return total


def gap_sum(index: Tensor, shift: int) -> int:
    return _gap_sum(view(index), shift)


def pack_gaps(index: Tensor, bits: int) -> Tensor:
    gaps = np.diff(view(index))
    gaps -= 1
    return pack_bits(tensor(gaps), bits)


@compiled
def _mark_highs(index: Any, shift: Any, words: Any) -> None:
    """A mark for each gap, after as many zeros as its high part says."""
    at = NONE
    for i in range(1, index.size):
        at += np.uint64(index[i] - index[i - 1] - 1) >> shift
        _mark(words, at)
        at += ONE


def pack_rice(index: Tensor, shift: int) -> Tensor:
    length = index.numel() - 1 + gap_sum(index, shift)
    highs = stream(length)
    _mark_highs(view(index), np.uint64(shift), highs)
    return torch.cat([pack_gaps(index, shift), in_bytes(highs, length)])


@compiled
def _unpack_gaps(words: Any, bits: Any, index: Any, numel: int) -> int:
    mask, at, place = (ONE << bits) - ONE, NONE, np.int64(index[0])
    for i in range(1, index.size):
        place += np.int64(_get(words, at, mask)) + 1
        at += bits
        if place >= numel:
            return i
        index[i] = place
    return index.size


def unpack_gaps(packed: Tensor, count: int, bits: int, first: int, numel: int) -> Tensor:
    index = np.empty(count, NUMPY[index_dtype(numel)])
    index[0] = first
    return tensor(index[: _unpack_gaps(in_words(packed), np.uint64(bits), index, numel)])


@compiled
def _unpack_rice(lows: Any, highs: Any, shift: Any, index: Any, numel: int) -> Any:
    mask, at, found = (ONE << shift) - ONE, NONE, ONE
    place, last, highest = np.int64(index[0]), np.int64(-1), np.int64(numel) >> np.int64(shift)
    for block in range(highs.size):
        word = highs[block]
        while word:
            if found == np.uint64(index.size):
                return found
            mark = np.int64(block) * LANES + np.int64(lowest(word))
            high, last = mark - last - 1, mark
            place += (high << np.int64(shift)) + np.int64(_get(lows, at, mask)) + 1
            if high > highest or place >= numel:
                return found
            index[found] = place
            at += shift
            found += ONE
            word &= word - ONE
    return found


def unpack_rice(packed: Tensor, count: int, shift: int, first: int, numel: int) -> Tensor:
    split = ((count - 1) * shift + 7) // 8
    index = np.empty(count, NUMPY[index_dtype(numel)])
    index[0] = first
    lows, highs = in_words(packed[:split]), in_words(packed[split:])
    return tensor(index[: _unpack_rice(lows, highs, np.uint64(shift), index, numel)])


# A bit for every position


@compiled
def _pack_marks(index: Any, words: Any) -> None:
    for i in range(1, index.size):
        _mark(words, np.uint64(index[i] - index[0] - 1))


def pack_marks(index: Tensor) -> Tensor:
    length = int(index[-1]) - int(index[0])
    words = stream(length)
    _pack_marks(view(index), words)
    return in_bytes(words, length)


@compiled
def _count_marks(words: Any) -> int:
    count = 0
    for word in words:
        while word:
            count += 1
            word &= word - ONE
    return count


@compiled
def _unpack_marks(words: Any, index: Any, numel: int) -> int:
    found, first = 1, np.int64(index[0])
    for at in range(words.size):
        word = words[at]
        while word:
            place = first + 1 + at * LANES + np.int64(lowest(word))
            if place >= numel:
                return found
            index[found] = place
            found += 1
            word &= word - ONE
    return found


def unpack_marks(packed: Tensor, first: int, numel: int) -> Tensor:
    words = in_words(packed)
    index = np.empty(1 + _count_marks(words), NUMPY[index_dtype(numel)])
    index[0] = first
    return tensor(index[: _unpack_marks(words, index, numel)])
