"""Every entry in 1 to 8 bits: the plain twin of `cpu.low_bit`, and what the two share.

A block of entries is one scale (bfloat16) and one small integer an entry. The levels are those that suit normal
entries, the scale is fitted by least squares, so that a block's error is always smaller than the block itself:

    bits  levels                 chosen by
    1     -1, 1                  sign; the scale is the mean magnitude
    1.6   -1, 0, 1               a magnitude of 0.61 standard deviations; five to a byte, in base 3
    2     -1, -R, 1, R           0.9816 standard deviations; R = 1.510 / 0.4528
    3, 4  -h + 1/2 ... h - 1/2   steps of 0.586 and 0.3352 deviations, wider where the largest magnitude lies far out
    8     -127 ... 127           steps of a 127th of the largest magnitude

A message about some blocks is their scales, then block by block the codes in whole bytes. Neighbouring bytes hold
neighbouring entries: with four codes to a byte, byte i of a block of n holds entries i, i + n/4, i + n/2, i + 3n/4,
which is what vector instructions like. Three bits are two, then one.

Sums run in 64 lanes which are then folded, here and in the compiled twin: the same bits.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

BITS = (1, 1.6, 2, 3, 4, 8)
LANES = 64
LARGEST_BLOCK = 2**15  # up to here 8 bits contract without a fit
TERNARY, BORDER, RATIO = 0.61, 0.9816, 1.510 / 0.4528
STEPS = {3: 0.586, 4: 0.3352}
FAR = 3.1  # standard deviations: where the largest of a few hundred normal entries lies
SMALLEST, GREATEST = 1e-36, 1e38  # a magnitude below is no magnitude, and no scale is above
SQUARES = 1e-24  # sums of squares within this and its inverse have lost nothing to the range of float32


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of a vector lie, and their codes in a message. Made by `blocks_of`."""

    bits: float
    starts: Tensor
    lengths: Tensor
    places: Tensor  # of each block's codes in the message
    nbytes: int


@lru_cache(maxsize=4096)
def blocks_of(spans: tuple[tuple[int, int], ...], bits: float, block: int, device: torch.device) -> Blocks:
    """Blocks of at most `block` entries that cover the spans [start, stop), none of them in two spans."""
    starts = [at for start, stop in spans for at in range(start, stop, block)]
    lengths = [min(block, stop - at) for start, stop in spans for at in range(start, stop, block)]
    places = [2 * len(starts)]
    for length in lengths:
        places.append(places[-1] + code_bytes(length, bits))
    table = torch.tensor([starts, lengths, places[:-1]], dtype=torch.int64, device=device)
    return Blocks(bits, table[0], table[1], table[2], places[-1])


def code_bytes(length: int, bits: float) -> int:
    """The bytes of a block's codes."""
    return sum(-(-length // per_byte) for per_byte in planes(bits))


def planes(bits: float) -> tuple[int, ...]:
    """How many codes a byte holds; three bits lie in two planes."""
    return {1: (8,), 1.6: (5,), 2: (4,), 3: (4, 8), 4: (2,), 8: (1,)}[bits]


def encode_blocks(x: Tensor, blocks: Blocks, message: Tensor) -> None:
    for rows, entries in _by_length(blocks):
        y = x[entries]
        codes = _codes(y, blocks.bits)
        levels = _levels(codes, blocks.bits, x.dtype)
        scales = _scales(y, levels, blocks.bits)
        x[entries] = y - scales.to(x.dtype).unsqueeze(1) * levels
        packed = _pack(codes, blocks.bits)
        places = blocks.places[rows].unsqueeze(1) + torch.arange(packed.shape[1], device=x.device)
        message[places] = packed
        places = 2 * rows.unsqueeze(1) + torch.arange(2, device=x.device)
        message[places] = scales.view(torch.uint8).view(-1, 2)


def decode_blocks(messages: Tensor, blocks: Blocks, out: Tensor, scale: float, add: bool) -> None:
    for rows, entries in _by_length(blocks):
        length = entries.shape[1]
        total = out[entries] if add else torch.zeros(entries.shape, dtype=out.dtype, device=out.device)
        for message in messages:
            head = 2 * rows.unsqueeze(1) + torch.arange(2, device=out.device)
            scales = message[head].view(torch.bfloat16).to(out.dtype) * scale
            places = torch.arange(code_bytes(length, blocks.bits), device=out.device)
            codes = _unpack(message[blocks.places[rows].unsqueeze(1) + places], length, blocks.bits)
            total += scales * _levels(codes, blocks.bits, out.dtype)
        out[entries] = total


def _by_length(blocks: Blocks) -> list[tuple[Tensor, Tensor]]:
    """The blocks of each length: their numbers, and the positions of their entries as rows of a matrix."""
    found = []
    for length in blocks.lengths.unique().tolist():
        rows = (blocks.lengths == length).nonzero().flatten()
        found.append((rows, blocks.starts[rows].unsqueeze(1) + torch.arange(length, device=rows.device)))
    return found


def _sum(y: Tensor) -> Tensor:
    """Row by row, in the order that the compiled twin takes."""
    lanes = torch.nn.functional.pad(y, (0, -y.shape[1] % LANES)).view(y.shape[0], -1, LANES)
    total = torch.zeros_like(lanes[:, 0])
    for row in range(lanes.shape[1]):
        total = total + lanes[:, row]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _codes(y: Tensor, bits: float) -> Tensor:
    if bits == 1:
        return (y >= 0).to(torch.uint8)
    largest = y.abs().amax(1)
    there = largest >= SMALLEST
    shrink = torch.where(there, 1 / torch.where(there, largest, 1), 0).unsqueeze(1)
    if bits == 8:
        unit = _stored(largest * (1 / 127)).to(y.dtype)
        inverse = torch.where(unit > 0, 1 / torch.where(unit > 0, unit, 1), 0).unsqueeze(1)
        return ((y * inverse).round().clamp(-127, 127) + 128).to(torch.uint8)
    if bits <= 2:
        squares = _sum(y * y)
        kept = (squares >= SQUARES) & (squares <= 1 / SQUARES)
        shrink = torch.where(kept.unsqueeze(1), 1, shrink)
    small = y * shrink
    deviation = (_sum(small * small) * (1 / y.shape[1])).sqrt()  # in units of the largest
    if bits in STEPS:
        half = 2 ** (bits - 1)
        steps = STEPS[int(bits)] * (deviation * (1 / FAR)).sqrt()
        inverse = torch.where(there, 1 / steps, 0).unsqueeze(1)
        return ((small * inverse).floor().clamp(-half, half - 1) + half).to(torch.uint8)
    border = ((TERNARY if bits == 1.6 else BORDER) * deviation).unsqueeze(1)
    outer, positive = (small.abs() >= border).to(torch.uint8), (small >= 0).to(torch.uint8)
    return torch.where(outer == 1, 2 * positive, 1) if bits == 1.6 else 2 * positive + outer


def _levels(codes: Tensor, bits: float, dtype: torch.dtype) -> Tensor:
    levels = codes.to(dtype)
    if bits == 1:
        return levels * 2 - 1
    if bits == 1.6:
        return levels - 1
    if bits == 2:
        size = torch.ones_like(levels).masked_fill_(codes & 1 == 1, RATIO)
        return torch.where(codes < 2, -size, size)
    return levels - (128.0 if bits == 8 else 2 ** (bits - 1) - 0.5)


def _scales(y: Tensor, levels: Tensor, bits: float) -> Tensor:
    """What makes scale * levels nearest to y, as it is stored."""
    if bits == 8:
        return _stored(y.abs().amax(1) * (1 / 127))
    product, square = _sum(levels * y), (levels * levels).sum(1)  # a sum of small fractions: exact in any order
    if bits == 1:
        return _stored(product * (1 / y.shape[1]))
    if bits == 2:
        outer = (levels.abs() > 1).sum(1).to(y.dtype)
        square = (y.shape[1] - outer) + outer * RATIO**2
    return _stored(torch.where(square > 0, product / torch.where(square > 0, square, 1), 0))


def _stored(scales: Tensor) -> Tensor:
    scales = torch.where(scales >= SMALLEST / 256, scales.clamp(max=GREATEST), 0)
    return scales.to(torch.float32).to(torch.bfloat16)


def _pack(codes: Tensor, bits: float) -> Tensor:
    if bits == 3:
        return torch.cat([_pack_plane(codes & 3, 4, 4), _pack_plane(codes >> 2, 8, 2)], 1)
    (per_byte,) = planes(bits)
    return _pack_plane(codes, per_byte, 3 if bits == 1.6 else 256 ** (1 / per_byte))


def _pack_plane(codes: Tensor, per_byte: int, base: float) -> Tensor:
    parts = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_byte)).view(codes.shape[0], per_byte, -1)
    total = torch.zeros_like(parts[:, 0])
    for part in reversed(parts.unbind(1)):
        total = total * round(base) + part if per_byte > 1 else part
    return total


def _unpack(packed: Tensor, length: int, bits: float) -> Tensor:
    if bits == 3:
        split = math.ceil(length / 4)
        return _unpack_plane(packed[:, :split], length, 4, 4) | _unpack_plane(packed[:, split:], length, 8, 2) << 2
    (per_byte,) = planes(bits)
    return _unpack_plane(packed, length, per_byte, 3 if bits == 1.6 else 256 ** (1 / per_byte))


def _unpack_plane(packed: Tensor, length: int, per_byte: int, base: float) -> Tensor:
    if per_byte == 1:
        return packed
    parts, rest = [], packed
    for _ in range(per_byte):
        parts.append(rest % round(base))
        rest = rest // round(base)
    return torch.cat(parts, 1)[:, :length]
