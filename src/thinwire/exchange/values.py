"""Values in few bits: how they are stored in a message, and the codec that lets any method send them so.

- floating-point numbers, as they are;
- `int8` and `int4`: multiples of a power of two, which goes before them;
- `uint4`, `uint2`, `uint1`: a sign, and which of 8, 2 or 1 magnitudes, which go before them as float32.

Magnitudes are split at their mean, each half at its own, and so on; what stands for a part is its mean. A single bit is
a sign and the mean magnitude. Zeros do not count: they take the smallest magnitude, and feedback makes that good.
If one value is not finite, all arrive as NaN, so that an overflow is noticed wherever it is sent.
Storing what was restored is exact, so it does not matter how often values are rounded on their way.
"""

import math
import struct

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm import Codec, Comm
from thinwire.comm.codec import Floats, as_bytes

# torch has these, its stubs do not
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
UINT1: torch.dtype = torch.uint1  # type: ignore[attr-defined]
UINT2: torch.dtype = torch.uint2  # type: ignore[attr-defined]
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
MULTIPLES = {torch.int8: 8, INT4: 4}
MAGNITUDES = {UINT1: 1, UINT2: 2, UINT4: 4}
FEW = {1: UINT1, 2: UINT2, 4: UINT4, 8: torch.int8}  # what a codec of so many bits stores values as


NO_NUMBERS = 2**15 - 1  # in the place of the power of two: some value was not finite, so that none can be told


class WireError(ValueError):
    """A message that cannot have been encoded here, or not for a vector of this size."""


class FewBits(Codec):
    """Values in 1, 2, 4 or 8 bits, which no network can add up: owners of parts do."""

    def __init__(self, bits: int):
        self.dtype = FEW[bits]

    def nbytes(self, n: int) -> int:
        return stored_bytes(n, self.dtype)

    def encode(self, values: Tensor) -> Tensor:
        return store(values, self.dtype)

    def decode(self, stored: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        if stored.dim() > 1:
            return torch.stack([self.decode(row, n, dtype) for row in stored])
        return restore(stored, n, self.dtype).to(dtype)


def mean_of_rounded(values: Tensor, comm: Comm) -> tuple[Tensor, Tensor | None]:
    """The mean of values as the wire carries them, and what is left of it with this worker, for it to keep.

    A mean of values in few bits takes more bits than that. Who owns a part of the mean rounds it, for all; the error,
    times the workers, is its own from then on. Where the network adds up numbers there is nothing to keep.
    """
    codec = comm.carries
    if codec is None or isinstance(codec, Floats) or not values.numel():
        return comm.all_mean(values), None
    size = -(-values.numel() // comm.world)
    mine = comm.scatter_mean(torch.cat([values, values.new_zeros(size * comm.world - values.numel())]))
    told = codec.rounded(mine)
    rest = values.new_zeros(comm.world, size)
    rest[comm.rank] = (mine - told) * comm.world
    return comm.all_gather(told).flatten()[: values.numel()], rest.flatten()[: values.numel()]


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values as they arrive when stored as `dtype`."""
    return restore(store(values, dtype), values.numel(), dtype).to(values.dtype)


def store(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype in MAGNITUDES:
        return _store_magnitudes(values, MAGNITUDES[dtype])
    if dtype in MULTIPLES:
        return _store_multiples(values, MULTIPLES[dtype])
    return as_bytes(values.to(dtype))


def restore(stored: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    if stored.numel() != stored_bytes(count, dtype):
        raise WireError(f"{stored.numel()} bytes are not those of {count} values, {stored_bytes(count, dtype)} are")
    if dtype in MAGNITUDES:
        return _restore_magnitudes(stored, count, MAGNITUDES[dtype])
    if dtype in MULTIPLES:
        return _restore_multiples(stored, count, MULTIPLES[dtype])
    return stored.clone().view(dtype)  # a copy, because the bytes may begin at any address


def stored_bytes(count: int, dtype: torch.dtype | None) -> int:
    if dtype in MAGNITUDES:
        return 4 * _parts(MAGNITUDES[dtype]) + -(-count * MAGNITUDES[dtype] // 8)
    if dtype in MULTIPLES:
        return 2 + -(-count * MULTIPLES[dtype] // 8)
    return count * dtype.itemsize if dtype else 0


def _parts(bits: int) -> int:
    """How many magnitudes there are beside the sign."""
    return int(2 ** (bits - 1))


def _store_magnitudes(values: Tensor, bits: int) -> Tensor:
    sizes, parts = values.double().abs(), _parts(bits)
    there = sizes[sizes > 0]
    few = there[:64].unique().numel() <= parts and there.unique()  # as they are, if they were rounded before
    if isinstance(few, Tensor) and few.numel() <= parts:
        means, borders = few.tolist(), few[1:].tolist()
    else:
        means, borders = _split(there, parts)
    table = torch.zeros(parts, dtype=torch.float64)
    table[: len(means)] = torch.tensor(means, dtype=torch.float64)
    table = table.clamp(max=torch.finfo(torch.float32).max).float().to(values.device)
    if not math.isfinite(float(sizes.sum())):
        table.fill_(torch.nan)
    codes = torch.bucketize(sizes, torch.tensor(borders, dtype=torch.float64, device=values.device), right=True)
    codes |= (values < 0).long() << (bits - 1)
    return torch.cat([as_bytes(table), kernels.pack_bits(codes.to(torch.uint8), bits)])


def _split(sizes: Tensor, parts: int) -> tuple[list[float], list[float]]:
    """The means of as many parts, and the borders between them."""
    mean = float(sizes.mean()) if sizes.numel() else 0.0
    if parts == 1:
        return [mean], []
    above = sizes >= mean
    low, high = _split(sizes[~above], parts // 2), _split(sizes[above], parts // 2)
    return low[0] + high[0], [*low[1], mean, *high[1]]


def _restore_magnitudes(stored: Tensor, count: int, bits: int) -> Tensor:
    parts = _parts(bits)
    table = stored[: 4 * parts].clone().view(torch.float32)
    codes = kernels.unpack_bits(stored[4 * parts :], count, bits).long()
    sizes = table[codes & (parts - 1)]
    return torch.where(codes >> (bits - 1) == 1, -sizes, sizes)


def _store_multiples(values: Tensor, bits: int) -> Tensor:
    most = 2 ** (bits - 1) - 1
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not math.isfinite(largest):
        return torch.cat([_unit(NO_NUMBERS, values.device), values.new_zeros(-(-values.numel() * bits // 8)).byte()])
    # The unit is the smallest power of two that reaches the largest value, so storing what was restored is exact.
    mantissa, exponent = math.frexp(largest / most)
    unit = min(max(exponent - (mantissa == 0.5), -149), 127 - bits)
    codes = torch.ldexp(values.double(), torch.tensor(-unit)).round().clamp(-most, most).long()
    return torch.cat([_unit(unit, values.device), kernels.pack_bits(codes, bits)])


def _unit(unit: int, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(struct.pack("<h", unit)), dtype=torch.uint8).to(device)


def _restore_multiples(stored: Tensor, count: int, bits: int) -> Tensor:
    (unit,) = struct.unpack("<h", bytes(stored[:2].tolist()))
    if unit == NO_NUMBERS:
        return torch.full((count,), torch.nan, device=stored.device)
    if not -149 <= unit <= 127 - bits:
        raise WireError(f"2^{unit} is no unit for values of {bits} bits")
    codes = kernels.unpack_bits(stored[2:], count, bits).int()
    codes -= (codes >> (bits - 1)) << bits
    return torch.ldexp(codes.double(), torch.tensor(unit)).float()
