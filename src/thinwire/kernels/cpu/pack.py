"""Bits side by side. A stream is built and read as 64-bit words, which on little-endian machines are its bytes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.common import NUMPY, compiled, tensor, view
from thinwire.kernels.cpu.lanes import LANES, NONE, ONE, WIDTH, below_zero
from thinwire.kernels.reference import code_dtype

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
def get(words: Any, at: Any, mask: Any) -> Any:
    word, shift = at >> SIX, at & LAST
    above = (words[word + ONE] << ONE) << (LAST - shift)  # in two shifts, because one by 64 is undefined
    return ((words[word] >> shift) | above) & mask


@compiled
def set_bit(words: Any, at: Any) -> None:
    words[at >> SIX] |= ONE << (at & LAST)


@compiled
def put_codes(codes: Any, bits: Any, words: Any) -> None:
    """The low `bits` of each code, from the first word on."""
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
    put_codes(view(codes), np.uint64(bits), words)
    return in_bytes(words, codes.numel() * bits)


@compiled
def _unpack_bits(words: Any, bits: Any, codes: Any) -> None:
    mask = (ONE << bits) - ONE
    for i in range(codes.size):
        codes[i] = get(words, np.uint64(i) * bits, mask)


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
    table = np.empty((256, 8), signs.dtype)  # eight signs for each byte there is
    for byte in range(256):
        for bit in range(8):
            table[byte, bit] = 1 - 2 * ((byte >> bit) & 1)
    whole = signs.size // 8
    for at in range(whole):
        for bit in range(8):
            signs[8 * at + bit] = table[packed[at], bit]
    for place in range(8 * whole, signs.size):
        signs[place] = table[packed[whole], place - 8 * whole]


def unpack_signs(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    signs = torch.empty(count, dtype=dtype if dtype in NUMPY else torch.float32)
    _unpack_signs(view(packed), view(signs))
    return signs.to(dtype)
