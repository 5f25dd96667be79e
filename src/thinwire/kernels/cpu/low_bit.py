"""Every entry in 1 to 8 bits. A block is worked on in a few sweeps that stay in the first cache.

A sweep is one plain loop over bytes, which LLVM turns into vector instructions, or one of `levels` and `sums`. Those
take a multiple of 64 entries: other blocks are worked on in scratch memory, with zeros behind them.
"""

from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu.common import compiled, view
from thinwire.kernels.cpu.levels import (
    TRITS,
    add_1,
    add_2,
    add_3,
    add_4,
    add_8,
    add_trits,
    quantise_1,
    quantise_2,
    quantise_3,
    quantise_4,
    quantise_8,
    quantise_trits,
    set_1,
    set_2,
    set_3,
    set_4,
    set_8,
    set_trits,
)
from thinwire.kernels.cpu.sums import largest, sum_of_squares
from thinwire.kernels.low_bit import BORDER, FAR, GREATEST, LANES, RATIO, SMALLEST, SQUARES, STEPS, TERNARY, Blocks

STEP3, STEP4, LEAST = STEPS[3], STEPS[4], SMALLEST / 256
SPARE = 8  # codes beyond the block that share its last bytes


def encode_blocks(x: Tensor, blocks: Blocks, message: Tensor) -> None:
    _encode(view(x), _bits(blocks), *_tables(blocks), view(message))


def decode_blocks(messages: Tensor, blocks: Blocks, out: Tensor, scale: float, add: bool) -> None:
    _decode(view(messages), _bits(blocks), *_tables(blocks), view(out), scale, add)


def _bits(blocks: Blocks) -> int:
    return TRITS if blocks.bits == 1.6 else int(blocks.bits)


def _tables(blocks: Blocks) -> tuple[Any, Any, Any, int]:
    return view(blocks.starts), view(blocks.lengths), view(blocks.places), blocks.nbytes


@compiled
def _padded(length: Any) -> Any:
    return (length + LANES - 1) // LANES * LANES


@compiled
def _encode(x: Any, bits: Any, starts: Any, lengths: Any, places: Any, nbytes: Any, message: Any) -> None:
    room = _padded(lengths.max() if lengths.size else 0)
    scratch, codes = np.zeros(room, x.dtype), np.zeros(room + SPARE, np.uint8)
    for block in range(starts.size):
        start, length = starts[block], lengths[block]
        size = _padded(length)
        end = places[block + 1] if block + 1 < places.size else nbytes
        if size == length:
            y = x[start : start + size]
        else:
            y = scratch[:size]
            y[:length], y[length:] = x[start : start + length], 0
        scale = _encode_block(y, length, bits, codes)
        if size != length:
            x[start : start + length] = y[:length]
        codes[length : length + SPARE] = 0
        message[2 * block], message[2 * block + 1] = scale & np.uint32(255), scale >> np.uint32(8)
        _pack(codes, length, bits, message[places[block] : end])


@compiled
def _encode_block(y: Any, length: Any, bits: Any, codes: Any) -> Any:
    """Write the codes, take what they say out of y; returns the bits of the scale."""
    kind, size = y.dtype.type, y.size
    one, zero = kind(1), kind(0)
    if bits == 1:
        product, square = quantise_1(y, size, zero, zero, codes)
        fit = product * kind(1 / length)
    elif bits == 8:
        fit = largest(y, size) * kind(1 / 127)
        unit = _as_number(_stored(fit), one)
        quantise_8(y, size, one / unit if unit > zero else zero, one, codes)
    else:
        shrink, square = one, zero
        if bits <= 2:
            square = sum_of_squares(y, size, one)
        if not kind(SQUARES) <= square <= kind(1 / SQUARES):
            top = largest(y, size)
            shrink = one / top if top >= kind(SMALLEST) else zero
            square = sum_of_squares(y, size, shrink)
        deviation = np.sqrt(square * kind(1 / length))
        if bits == TRITS:
            product, square = quantise_trits(y, size, shrink, kind(TERNARY) * deviation, codes)
        elif bits == 2:
            product, outer = quantise_2(y, size, shrink, kind(BORDER) * deviation, codes)
            square = (kind(length) - outer) + outer * kind(RATIO * RATIO)
        else:
            border = kind(STEP3 if bits == 3 else STEP4) * np.sqrt(deviation * kind(1 / FAR))
            border = one / border if border > zero else zero
            if bits == 3:
                product, square = quantise_3(y, size, shrink, border, codes)
            else:
                product, square = quantise_4(y, size, shrink, border, codes)
            square -= kind(size - length) * kind(0.25)
        fit = product / square if square > zero else zero
    scale = _stored(fit)
    _add(codes, size, bits, -_as_number(scale, one), y)
    return scale


@compiled
def _as_number(scale: Any, one: Any) -> Any:
    return one * type(one)(np.uint32(scale << np.uint32(16)).view(np.float32))


@compiled
def _add(codes: Any, size: Any, bits: Any, scale: Any, target: Any) -> None:
    if bits == 1:
        add_1(codes, size, scale, target)
    elif bits == TRITS:
        add_trits(codes, size, scale, target)
    elif bits == 2:
        add_2(codes, size, scale, target)
    elif bits == 3:
        add_3(codes, size, scale, target)
    elif bits == 4:
        add_4(codes, size, scale, target)
    else:
        add_8(codes, size, scale, target)


@compiled
def _set(codes: Any, size: Any, bits: Any, scale: Any, target: Any) -> None:
    if bits == 1:
        set_1(codes, size, scale, target)
    elif bits == TRITS:
        set_trits(codes, size, scale, target)
    elif bits == 2:
        set_2(codes, size, scale, target)
    elif bits == 3:
        set_3(codes, size, scale, target)
    elif bits == 4:
        set_4(codes, size, scale, target)
    else:
        set_8(codes, size, scale, target)


@compiled
def _stored(scale: Any) -> Any:
    """The bits of a scale as bfloat16, rounded to the nearest, of two equally near to the even one."""
    if not scale >= LEAST:
        return np.uint32(0)
    raw = np.float32(min(scale, GREATEST)).view(np.uint32)
    return (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@compiled
def _pack(codes: Any, length: Any, bits: Any, packed: Any) -> None:
    if bits == 8:
        _copy(codes, packed)
    elif bits == 4:
        _pack_4(codes, packed)
    elif bits == 2:
        _pack_2(codes, packed)
    elif bits == 1:
        _pack_1(codes, np.uint8(0), packed)
    elif bits == 3:
        split = (length + 3) // 4
        _pack_2(codes, packed[:split])
        _pack_1(codes, np.uint8(2), packed[split:])
    else:
        _pack_trits(codes, packed)


@compiled
def _copy(source: Any, target: Any) -> None:
    for i in range(target.size):
        target[i] = source[i]


@compiled
def _pack_4(codes: Any, packed: Any) -> None:
    n = packed.size
    for i in range(n):
        packed[i] = codes[i] | codes[i + n] << 4


@compiled
def _pack_2(codes: Any, packed: Any) -> None:
    """The lowest two bits of each code."""
    n = packed.size
    for i in range(n):
        low = (codes[i] & 3) | (codes[i + n] & 3) << 2
        packed[i] = low | (codes[i + 2 * n] & 3) << 4 | (codes[i + 3 * n] & 3) << 6


@compiled
def _pack_1(codes: Any, place: Any, packed: Any) -> None:
    """One bit of each code."""
    n = packed.size
    for i in range(n):
        packed[i] = codes[i] >> place & 1
    for part in range(1, 8):
        theirs, left = codes[part * n : part * n + n], np.uint8(part)
        for i in range(n):
            packed[i] |= (theirs[i] >> place & np.uint8(1)) << left


@compiled
def _pack_trits(codes: Any, packed: Any) -> None:
    n = packed.size
    for i in range(n):
        low = codes[i] + 3 * codes[i + n] + 9 * codes[i + 2 * n]
        packed[i] = low + 27 * codes[i + 3 * n] + 81 * codes[i + 4 * n]


@compiled
def _decode(
    messages: Any, bits: Any, starts: Any, lengths: Any, places: Any, nbytes: Any, out: Any, scale: Any, add: Any
) -> None:
    kind, room = out.dtype.type, _padded(lengths.max() if lengths.size else 0)
    scratch, codes = np.zeros(room, out.dtype), np.zeros(room + SPARE, np.uint8)
    factor = kind(scale)
    for block in range(starts.size):
        start, length = starts[block], lengths[block]
        size = _padded(length)
        end = places[block + 1] if block + 1 < places.size else nbytes
        if size == length:
            target = out[start : start + size]
        else:
            target = scratch[:size]
            target[:length] = out[start : start + length]
        for row in range(messages.shape[0]):
            message = messages[row]
            stored = np.uint32(message[2 * block + 1]) << np.uint32(8) | np.uint32(message[2 * block])
            unit = _as_number(stored, factor)
            _unpack(message[places[block] : end], length, bits, codes)
            if add or row:
                _add(codes, size, bits, unit, target)
            else:
                _set(codes, size, bits, unit, target)
        if size != length:
            out[start : start + length] = target[:length]


@compiled
def _unpack(packed: Any, length: Any, bits: Any, codes: Any) -> None:
    if bits == 8:
        _copy(packed, codes[:length])
    elif bits == 4:
        _unpack_places(packed, 2, 4, codes)
    elif bits == 2:
        _unpack_places(packed, 4, 2, codes)
    elif bits == 1:
        _unpack_places(packed, 8, 1, codes)
    elif bits == 3:
        split = (length + 3) // 4
        _unpack_places(packed[:split], 4, 2, codes)
        _unpack_above(packed[split:], codes)
    else:
        _unpack_trits(packed, codes)


@compiled
def _unpack_places(packed: Any, per_byte: Any, bits: Any, codes: Any) -> None:
    n, mask = packed.size, np.uint8(2**bits - 1)
    for part in range(per_byte):
        theirs, right = codes[part * n : part * n + n], np.uint8(part * bits)
        for i in range(n):
            theirs[i] = packed[i] >> right & mask


@compiled
def _unpack_above(packed: Any, codes: Any) -> None:
    """The third bit of each code."""
    n = packed.size
    for part in range(8):
        theirs, right = codes[part * n : part * n + n], np.uint8(part)
        for i in range(n):
            theirs[i] |= (packed[i] >> right & np.uint8(1)) << np.uint8(2)


@compiled
def _unpack_trits(packed: Any, codes: Any) -> None:
    n, weight = packed.size, np.uint32(1)
    for part in range(5):
        theirs = codes[part * n : part * n + n]
        for i in range(n):
            theirs[i] = np.uint8(np.uint32(packed[i]) // weight % np.uint32(3))
        weight *= np.uint32(3)
