"""Every kernel in plain torch: slow, for any device and dtype, and the specification of the fast ones.

A fast kernel has the same name and signature and gives the same indices and the same bits. Vectors are flat. Thresholds
and factors are rounded to the dtype of the vector they meet before anything is compared or multiplied.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.low_bit import decode_blocks as decode_blocks
from thinwire.kernels.low_bit import encode_blocks as encode_blocks

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the step of splitmix64
ROUNDS = 8  # of the permutation behind random_k
POWER_BITS = 4  # of a word that are not its position: the sign and the exponent
WORD_INDEX_BITS = 28  # of the 32 bits of a sign/exponent word; above them 3 of exponent and the sign
WORD_STEPS = 7  # how many powers of two below the group's largest a word can express


def index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel < 2**31 else torch.int64


def rounded(value: float, x: Tensor) -> Tensor:
    """A number as the dtype of x sees it."""
    return torch.tensor(value, dtype=torch.float64).to(x.dtype)


def finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def accumulate(into: Tensor, x: Tensor) -> None:
    into.add_(x)


def select(x: Tensor, threshold: float, lo: int = 0, hi: int | None = None) -> Tensor:
    chosen = x[lo:hi].abs() >= rounded(threshold, x)
    return (chosen.nonzero().flatten() + lo).to(index_dtype(x.numel()))


def magnitude(x: Tensor) -> Tensor:
    """|x|, with NaN below everything so that it is chosen last."""
    size = x.abs()
    return torch.where(size.isnan(), -1, size)


def top_k(x: Tensor, k: int) -> Tensor:
    order = magnitude(x).sort(descending=True, stable=True).indices[:k]
    return order.sort().values.to(index_dtype(x.numel()))


def kth_magnitude(x: Tensor, k: int) -> float:
    kth = magnitude(x).sort(descending=True).values[k - 1].item()
    return float("nan") if kth < 0 else kth


def sample(x: Tensor, samples: int) -> Tensor:
    """One entry out of each of `samples` equal stretches, at a place that jumps about so as not to follow the rows."""
    n = x.numel()
    m = min(samples, n)
    i = torch.arange(m, device=x.device)
    return x[i * n // m + (i * 2654435761 >> 8) % max(n // m, 1)]


def quantile(x: Tensor, density: float, samples: int) -> float:
    seen = sample(x, samples)
    k = min(max(round(density * seen.numel()), 1), seen.numel())
    return kth_magnitude(seen, k) if k else 0.0


def shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(word: int) -> int:
    """The 64-bit pattern of `word` as int64 holds it."""
    word &= 2**64 - 1
    return word - 2**64 if word >> 63 else word


def scramble(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), on int64 patterns."""
    x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shifted(x, 31)


def permute(x: Tensor, bits: int, key: int) -> Tensor:
    """A keyed permutation of [0, 2^bits): a Feistel network whose halves differ by at most one bit."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = x >> right_bits, x & ((1 << right_bits) - 1)
    for turn in range(ROUNDS):
        noise = scramble(right + signed(key + GOLDEN * (turn + 1)))
        left, right = right, left ^ shifted(noise, 64 - left_bits)
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


def permutation_bits(n: int) -> int:
    """Wide enough for n, and for the network to mix: narrow halves have too few functions to draw from."""
    return max((n - 1).bit_length(), 8)


def random_k(n: int, k: int, key: int, device: torch.device) -> Tensor:
    bits = permutation_bits(n)
    index = permute(torch.arange(k, device=device), bits, key)
    while bool((outside := index >= n).any()):  # walk the cycle until it comes back below n
        index[outside] = permute(index[outside], bits, key)
    return index.sort().values.to(index_dtype(n))


def gather(x: Tensor, index: Tensor) -> Tensor:
    return x[index]


def take(x: Tensor, index: Tensor) -> Tensor:
    values = x[index]
    x[index] = 0
    return values


def scatter_add(out: Tensor, index: Tensor, values: Tensor, scale: float = 1.0) -> None:
    out.index_add_(0, index, values.to(out.dtype) * rounded(scale, out))


def fill_sparse(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> None:
    out.zero_()
    for index, values in parts:
        scatter_add(out, index, values, scale)


def variance_step(r: Tensor, v: Tensor, mean: Tensor, square: Tensor, alpha: float, zeta: float) -> Tensor:
    r.add_(mean)
    v.add_(square)
    sure = r * r > rounded(alpha, v) * v
    torch.where(sure, v, v * rounded(zeta, v), out=v)
    return sure.nonzero().flatten().to(index_dtype(r.numel()))


def pack_words(index: Tensor, values: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups = starts.numel() - 1
    group = torch.searchsorted(starts, index.long(), right=True) - 1
    mantissa, exponent = torch.frexp(values.abs())
    exponent, there = exponent.long(), mantissa > 0
    largest = torch.full((groups,), -(2**20), device=index.device)
    largest.scatter_reduce_(0, group[there], exponent[there] - 1, "amax")
    tops = torch.where(largest > -(2**20), largest.clamp(-128, 127), 0)
    steps = (tops[group] - exponent + (mantissa < 0.75).long()).clamp(min=0)
    kept = there & (steps <= WORD_STEPS)
    word = (values < 0).long() << 31 | steps << WORD_INDEX_BITS | index.long() - starts[group]
    counts = torch.bincount(group[kept], minlength=groups)
    return tops.to(torch.int8), counts, word[kept].to(torch.int32), kept


def unpack_words(
    tops: Tensor, counts: Tensor, words: Tensor, starts: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    group = torch.repeat_interleave(counts)
    index = starts[group] + (words & ((1 << WORD_INDEX_BITS) - 1))
    steps = words >> WORD_INDEX_BITS & WORD_STEPS
    sign = torch.where(words < 0, -1, 1).to(dtype)
    values = torch.ldexp(sign, tops.int()[group] - steps)
    wrong = index >= starts[group + 1]
    wrong[1:] |= index[1:] <= index[:-1]
    valid = int((~wrong).long().cumprod(0).sum())
    return index[:valid].to(index_dtype(int(starts[-1]))), values[:valid]


def join_powers(index: Tensor, words: Tensor, kept: Tensor, numel: int) -> Tensor:
    places = (index[kept].long() << POWER_BITS) + (words.long() >> WORD_INDEX_BITS & (1 << POWER_BITS) - 1)
    return places.to(index_dtype(numel << POWER_BITS))


def split_powers(places: Tensor, tops: Tensor, starts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    index = places.long() >> POWER_BITS
    wrong = torch.zeros_like(index, dtype=torch.bool)
    wrong[1:] = index[1:] <= index[:-1]
    valid = int((~wrong).long().cumprod(0).sum())
    sign = torch.where(places >> (POWER_BITS - 1) & 1 == 1, -1, 1).to(dtype)
    group = torch.bucketize(index, starts[1:], right=True)
    values = torch.ldexp(sign, tops.int()[group] - (places & WORD_STEPS))
    return index[:valid].to(index_dtype(int(starts[-1]))), values[:valid]


def clear(x: Tensor, index: Tensor) -> None:
    x[index] = 0


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    places = torch.arange(bits, device=codes.device)
    flat = (codes.long().unsqueeze(1) >> places & 1).flatten()
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, device=codes.device)).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int, bits: int) -> Tensor:
    flat = packed.long().unsqueeze(1) >> torch.arange(8, device=packed.device) & 1
    places = torch.arange(bits, device=packed.device)
    codes = (flat.flatten()[: count * bits].view(count, bits) << places).sum(1)
    return codes.to(code_dtype(bits))


def in_whole_bytes(bits: int) -> int:
    return (bits + 7) // 8


def code_dtype(bits: int) -> torch.dtype:
    return torch.uint8 if bits <= 8 else torch.int32 if bits < 32 else torch.int64


def pack_signs(x: Tensor) -> Tensor:
    return pack_bits(x < 0, 1)


def unpack_signs(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return 1 - 2 * unpack_bits(packed, count, 1).to(dtype)


def gaps(index: Tensor) -> Tensor:
    """How many entries lie between neighbours."""
    index = index.long()
    return index[1:] - index[:-1] - 1


class Survey(NamedTuple):
    """What there is to know about sorted positions before they are packed."""

    narrowest: int  # gap between neighbours: below zero if they are not sorted and different
    widest: int
    shift: int  # for which Rice's code of the gaps is shortest
    high: int  # the sum of all gaps >> shift
    first: int
    last: int


def survey(index: Tensor) -> Survey:
    between = gaps(index)
    count = between.numel()
    first, last = int(index[0]), int(index[-1])
    if not count:
        return Survey(0, 0, 0, 0, first, last)
    mean = 0.69 * (last - first) / count
    shift = max(int(mean), 1).bit_length() - 1  # the best if gaps are geometric, or its neighbour
    high = int((between >> shift).sum())
    for step in (1, -1):  # a further bit of shift saves less than the one before: walk down to the minimum
        while shift + step >= 0 and count * step + (other := int((between >> shift + step).sum())) < high:
            shift, high = shift + step, other
    return Survey(int(between.min()), int(between.max()), shift, high, first, last)


def pack_gaps(index: Tensor, bits: int) -> Tensor:
    return pack_bits(gaps(index), bits)


def unpack_gaps(packed: Tensor, count: int, bits: int, first: int, numel: int) -> tuple[Tensor, int]:
    index = follow(first, unpack_bits(packed, count - 1, bits).long(), numel)
    return index, in_whole_bytes((count - 1) * bits)


def follow(first: int, between: Tensor, numel: int) -> Tensor:
    """The positions that these gaps lead to, up to the last one below numel."""
    steps = torch.cat([between.new_tensor([first]), between + 1])
    within = steps.to(torch.float64).cumsum(0) < numel  # no overflow, and exact below 2^53
    return steps[within].cumsum(0).to(index_dtype(numel))


def pack_marks(index: Tensor) -> Tensor:
    """A bit for each position from the first to the last, the first one's own left out."""
    index = index.long() - index[0] - 1
    marks = index.new_zeros(int(index[-1]) + 1)
    marks[index[1:]] = 1
    return pack_bits(marks, 1)


def unpack_marks(packed: Tensor, count: int, first: int, numel: int) -> tuple[Tensor, int]:
    index = torch.cat([torch.tensor([first], device=packed.device), first + 1 + marked(packed)])[:count]
    index = index[index < numel]
    return index.to(index_dtype(numel)), in_whole_bytes(int(index[-1]) - first)


def marked(packed: Tensor) -> Tensor:
    return unpack_bits(packed, packed.numel() * 8, 1).nonzero().flatten()


def pack_rice(index: Tensor, shift: int, high: int) -> Tensor:
    between = gaps(index)
    marks = between.new_zeros(index.numel() - 1 + high)
    marks[((between >> shift) + 1).cumsum(0) - 1] = 1
    return torch.cat([pack_bits(between, shift), pack_bits(marks, 1)])


def unpack_rice(packed: Tensor, count: int, shift: int, first: int, numel: int) -> tuple[Tensor, int]:
    split = in_whole_bytes((count - 1) * shift)
    low = unpack_bits(packed[:split], count - 1, shift).long()
    ends = torch.nn.functional.pad(marked(packed[split:]), (1, 0), value=-1)[:count]
    high = gaps(ends)
    index = follow(first, high << shift | low[: high.numel()], numel)
    return index, split + in_whole_bytes(int(ends[index.numel() - 1]) + 1)
