"""The inner loops that must be fast, and the one place where a device is matched with its kernels.

`reference` is the specification, in plain torch; `cpu` (numba) and `gpu` (triton) give the same indices and the
same bits. The environment variable THINWIRE_KERNELS, one of reference, cpu and gpu, overrides the choice by
device; what the chosen kernels do not cover (a dtype, a device, a layout, a function) the reference does.

Vectors are flat tensors. Indices are sorted positions, int32 where they fit.
"""

import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.low_bit import BITS as BITS
from thinwire.kernels.low_bit import LARGEST_BLOCK as LARGEST_BLOCK
from thinwire.kernels.low_bit import Blocks as Blocks
from thinwire.kernels.low_bit import blocks_of as blocks_of
from thinwire.kernels.reference import Survey as Survey
from thinwire.kernels.reference import index_dtype as index_dtype

_LOG = logging.getLogger("thinwire")
SAMPLES = 2**16  # entries a quantile is estimated from: one in a thousand of them is known to about an eighth


@cache
def _module(name: str) -> Any:
    if name not in ("reference", "cpu", "gpu"):
        raise ValueError(f"THINWIRE_KERNELS is {name!r}: it may be reference, cpu or gpu")
    return importlib.import_module(f"thinwire.kernels.{name}")


@cache
def _by_device(device: str) -> str:
    if device == "cuda" and importlib.util.find_spec("triton"):
        return "gpu"
    if device != "cpu":
        return "reference"
    if importlib.util.find_spec("numba"):
        return "cpu"
    _LOG.warning("numba is not installed: plain torch does the work, several times slower (pip install numba)")
    return "reference"


def chosen(device: torch.device) -> str:
    """Which kernels serve a device: reference, cpu or gpu."""
    return os.environ.get("THINWIRE_KERNELS") or _by_device(device.type)


def _kernel(name: str, *vectors: Tensor) -> Any:
    module = _module(chosen(vectors[0].device))
    covered = hasattr(module, name) and (module is reference or module.covers(*vectors))
    return getattr(module if covered else reference, name)


def warm(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> float:
    """Compile, or load from the cache, all that a step may use; returns the seconds it took."""
    start = time.perf_counter()
    x, y, r, v = (torch.arange(1, 200, dtype=dtype, device=device) for _ in range(4))
    finite(x)
    variance_step(r, v, x, y, 1.0, 0.999)
    quantile(x, 0.5)
    kth_magnitude(x, 2)
    for draw in (199, 2**31):
        random_k(draw, 3, 0, device)
    select(x, 9.0), top_k(x, 3), top_k(x, 99)
    for kind in (torch.int32, torch.int64):
        index = torch.arange(0, 199, 2, dtype=kind, device=device)
        gather(x, index)
        fill_sparse(y, [(index, take(x, index))], 0.5)
        starts = torch.tensor([0, 99, 199], device=device)
        tops, counts, words, kept = pack_words(index, y[index], starts)
        unpack_words(tops, counts, words, starts, dtype)
        for numel in (199, 2**31):
            split_powers(join_powers(index, words, kept, numel), tops, starts, dtype)
        clear(y, index)
        seen = survey(index)
        for numel in (199, 2**31):
            unpack_rice(pack_rice(index, seen.shift, seen.high), index.numel(), seen.shift, 0, numel)
            unpack_gaps(pack_gaps(index, 1), index.numel(), 1, 0, numel)
            unpack_marks(pack_marks(index), index.numel(), 0, numel)
    unpack_signs(pack_signs(x), 199, dtype)
    for kind in (torch.uint8, torch.int32, torch.int64):
        unpack_bits(pack_bits(torch.ones(8, dtype=kind, device=device), 4), 8, 4)
    for bits in (16, 40):
        unpack_bits(pack_bits(torch.ones(8, dtype=torch.int64, device=device), bits), 8, bits)
    blocks = blocks_of(((0, 199),), 2, 64, torch.device(device))
    message = torch.empty(blocks.nbytes, dtype=torch.uint8, device=device)
    encode_blocks(x, blocks, message)
    decode_blocks(message.unsqueeze(0), blocks, y, 0.5, add=True)
    return time.perf_counter() - start


def finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite, in one pass that only reads."""
    return _kernel("finite", x)(x)


def accumulate(into: Tensor, x: Tensor) -> None:
    """into += x."""
    reference.accumulate(into, x)  # torch's own is at the memory's speed


def select(x: Tensor, threshold: float, lo: int = 0, hi: int | None = None) -> Tensor:
    """The positions in [lo, hi) with |x| >= threshold. NaN is never selected, infinity always."""
    return _kernel("select", x)(x, threshold, *_range(x, lo, hi))


def top_k(x: Tensor, k: int) -> Tensor:
    """The positions of exactly k largest magnitudes; of equals, those that come first. NaN counts as smallest."""
    return _kernel("top_k", x)(x, min(max(k, 0), x.numel()))


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude, k from 1; NaN counts as smallest."""
    if not 1 <= k <= x.numel():
        raise ValueError(f"there is no magnitude number {k} among {x.numel()} entries")
    return _kernel("kth_magnitude", x)(x, k)


def quantile(x: Tensor, density: float, samples: int = SAMPLES) -> float:
    """An estimate, from a sample spread evenly, of the magnitude that a `density` fraction of x reaches.

    Zero where that fraction of the sample is zero: a threshold of which every entry is above.
    """
    return _kernel("quantile", x)(x, density, samples) if x.numel() else 0.0


def random_k(n: int, k: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """k different positions below n, any k as likely as any other, the same wherever the 64-bit key is the same.

    The work is in proportion to k: nothing of size n is made.
    """
    if not 0 <= k <= n:
        raise ValueError(f"cannot draw {k} different positions out of {n}")
    where = torch.device(device)
    return _kernel("random_k", torch.empty(0, device=where))(n, k, key, where)


def gather(x: Tensor, index: Tensor) -> Tensor:
    """The values at `index`."""
    return _kernel("gather", x)(x, index)


def take(x: Tensor, index: Tensor) -> Tensor:
    """The values at `index`, which leave zeros behind."""
    return _kernel("take", x)(x, index)


def clear(x: Tensor, index: Tensor) -> None:
    """Leave zeros at `index`."""
    _kernel("clear", x)(x, index)


def scatter_add(out: Tensor, index: Tensor, values: Tensor, scale: float = 1.0) -> None:
    """out[index] += scale * values, for indices that differ."""
    _alike(index, values)
    _kernel("scatter_add", out)(out, index, values, scale)


def fill_sparse(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> None:
    """Write zeros, then add each part's values at its indices, part by part, times scale."""
    for index, values in parts:
        _alike(index, values)
    _kernel("fill_sparse", out)(out, parts, scale)


def variance_step(r: Tensor, v: Tensor, mean: Tensor, square: Tensor, alpha: float, zeta: float) -> Tensor:
    """r += mean, v += square; the positions where r * r > alpha * v. Elsewhere v *= zeta.

    The entries selected keep r and v for the caller to clear.
    """
    _alike(r, v, mean, square)
    return _kernel("variance_step", r, v, mean, square)(r, v, mean, square, alpha, zeta)


def pack_words(index: Tensor, values: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values of sorted positions as 32-bit words, group by group; starts[g] to starts[g + 1] is a group.

    A word holds the sign, 3 bits of exponent and 28 bits of the position within the group. A magnitude becomes the
    nearest power of two, at most the largest one not above any of its group, which is 2^top. Those below 2^(top - 7),
    and zeros, have no word. Returns the tops (int8), the words of each group, the words, and which values have one.
    """
    _alike(index, values)
    return _kernel("pack_words", values)(index, values, starts)


def unpack_words(
    tops: Tensor, counts: Tensor, words: Tensor, starts: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The positions and the values of the words, up to the first that leaves its group or does not come later."""
    return _kernel("unpack_words", words)(tops, counts, words, starts, dtype)


def join_powers(index: Tensor, words: Tensor, kept: Tensor, numel: int) -> Tensor:
    """Positions below `numel` and what the words of those that are kept say beside: 16 position + sign and exponent."""
    _alike(index, kept)
    return _kernel("join_powers", words)(index, words, kept, numel)


def split_powers(
    places: Tensor, tops: Tensor, starts: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The positions, all below starts[-1], and the values, up to the first position that comes twice."""
    return _kernel("split_powers", places)(places, tops, starts, dtype)


def pack_signs(x: Tensor) -> Tensor:
    """One bit an entry, eight to the byte from the lowest: set where x < 0."""
    return _kernel("pack_signs", x)(x)


def unpack_signs(packed: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """-1 where the bit is set, 1 elsewhere."""
    return _kernel("unpack_signs", packed)(_enough(packed, count, 1), count, dtype)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """The lowest `bits` (0 to 48) of each integer code, one after the other from the lowest bit of each byte."""
    return _kernel("pack_bits", codes)(codes, bits)


def unpack_bits(packed: Tensor, count: int, bits: int) -> Tensor:
    """The `count` codes: uint8 up to 8 bits, int32 up to 31, else int64."""
    return _kernel("unpack_bits", packed)(_enough(packed, count, bits), count, bits)


def encode_blocks(x: Tensor, blocks: Blocks, message: Tensor) -> None:
    """Write what codes of a few bits say about the blocks of `x` into `message`; that leaves `x`, the rest stays.

    The rest of a block is always smaller than the block was: what error feedback needs.
    """
    _kernel("encode_blocks", x)(x, blocks, _enough_for(message, blocks))


def decode_blocks(messages: Tensor, blocks: Blocks, out: Tensor, scale: float = 1.0, add: bool = False) -> None:
    """Write the sum of what messages [any, nbytes] about the same blocks say, times scale, or add it to `out`."""
    _kernel("decode_blocks", out)(_enough_for(messages, blocks), blocks, out, scale, add)


def survey(index: Tensor) -> Survey:
    """What there is to know about sorted positions, at least one, before they are packed."""
    return _kernel("survey", index)(index)


def pack_gaps(index: Tensor, bits: int) -> Tensor:
    """The lowest `bits` of the gaps between neighbours."""
    return _kernel("pack_gaps", index)(index, bits)


def pack_rice(index: Tensor, shift: int, high: int) -> Tensor:
    """Rice's code of the gaps: the low `shift` bits of each, then what is above them, `high` in all, in unary."""
    return _kernel("pack_rice", index)(index, shift, high)


def pack_marks(index: Tensor) -> Tensor:
    """A bit for every position after the first up to the last, set for those in `index`."""
    return _kernel("pack_marks", index)(index)


# Unpacking reads nothing outside of what it is given and yields, from `first`, sorted and different positions below
# `numel`: at most `count`, fewer where the bytes do not say more; and how many bytes they took.


def unpack_gaps(packed: Tensor, count: int, bits: int, first: int, numel: int) -> tuple[Tensor, int]:
    return _kernel("unpack_gaps", packed)(_enough(packed, count - 1, bits), count, bits, first, numel)


def unpack_rice(packed: Tensor, count: int, shift: int, first: int, numel: int) -> tuple[Tensor, int]:
    return _kernel("unpack_rice", packed)(_enough(packed, count - 1, shift), count, shift, first, numel)


def unpack_marks(packed: Tensor, count: int, first: int, numel: int) -> tuple[Tensor, int]:
    return _kernel("unpack_marks", packed)(packed, count, first, numel)


def _range(x: Tensor, lo: int, hi: int | None) -> tuple[int, int]:
    hi = x.numel() if hi is None else hi
    if not 0 <= lo <= hi <= x.numel():
        raise IndexError(f"[{lo}, {hi}) is no range within {x.numel()} entries")
    return lo, hi


def _alike(*vectors: Tensor) -> None:
    if len({x.numel() for x in vectors}) > 1:
        raise ValueError(f"vectors of different lengths: {[x.numel() for x in vectors]}")


def _enough(packed: Tensor, count: int, bits: int) -> Tensor:
    if packed.numel() * 8 < count * bits:
        raise ValueError(f"{packed.numel()} bytes do not hold {count} codes of {bits} bits")
    return packed


def _enough_for(messages: Tensor, blocks: Blocks) -> Tensor:
    if messages.shape[-1] < blocks.nbytes:
        raise ValueError(f"{messages.shape[-1]} bytes do not hold blocks that take {blocks.nbytes}")
    return messages
