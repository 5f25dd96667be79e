"""The kernels in Triton. Not measured on a GPU: they are tested through Triton's interpreter on the CPU.

A selection is two passes. The first does what is done to every entry and writes one bit an entry, 32 to a word, and how
many are set in each block; a prefix sum says where each block's finds go; the second reads only the words. What is not
here the reference does with torch's own kernels. Set TRITON_INTERPRET=1 before the first import to run it on the CPU.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference import index_dtype, rounded

BLOCK = 1024
WORD = 32
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def covers(*vectors: Tensor) -> bool:
    """Whether these kernels take such vectors; the rest is the reference's."""
    return len({x.dtype for x in vectors}) == 1 and all(
        x.dtype in (torch.float32, torch.float64) and x.is_contiguous() and (x.is_cuda or INTERPRETED) for x in vectors
    )


@triton.jit
def _note(chosen: Any, words: Any, counts: Any, block: Any, BLOCK: tl.constexpr, WORD: tl.constexpr) -> None:
    """Write which entries of a block are chosen, and how many."""
    lanes = tl.arange(0, WORD)
    bits = tl.reshape(chosen.to(tl.int32), (BLOCK // WORD, WORD)) << lanes[None, :]
    places = block * (BLOCK // WORD) + tl.arange(0, BLOCK // WORD)
    tl.store(words + places, tl.sum(bits, 1))
    tl.store(counts + block, tl.sum(chosen.to(tl.int32), 0))


@triton.jit
def _find(
    x: Any, bound: Any, words: Any, counts: Any, begin: Any, end: Any, BLOCK: tl.constexpr, WORD: tl.constexpr
) -> None:
    block = tl.program_id(0).to(tl.int64)
    at = begin + block * BLOCK + tl.arange(0, BLOCK)
    chosen = (tl.abs(tl.load(x + at, mask=at < end, other=0)) >= tl.load(bound)) & (at < end)
    _note(chosen, words, counts, block, BLOCK, WORD)


@triton.jit
def _add_test_decay(
    r: Any,
    v: Any,
    mean: Any,
    square: Any,
    factors: Any,
    words: Any,
    counts: Any,
    n: Any,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(r + at, mask=at < n, other=0) + tl.load(mean + at, mask=at < n, other=0)
    noise = tl.load(v + at, mask=at < n, other=0) + tl.load(square + at, mask=at < n, other=0)
    sure = (total * total > tl.load(factors) * noise) & (at < n)
    tl.store(r + at, total, mask=at < n)
    tl.store(v + at, tl.where(sure, noise, noise * tl.load(factors + 1)), mask=at < n)
    _note(sure, words, counts, block, BLOCK, WORD)


@triton.jit
def _find_negative(x: Any, words: Any, counts: Any, n: Any, BLOCK: tl.constexpr, WORD: tl.constexpr) -> None:
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    _note((tl.load(x + at, mask=at < n, other=0) < 0) & (at < n), words, counts, block, BLOCK, WORD)


@triton.jit
def _collect(words: Any, ends: Any, index: Any, begin: Any, BLOCK: tl.constexpr, WORD: tl.constexpr) -> None:
    """Write the positions of the bits that are set."""
    block = tl.program_id(0).to(tl.int64)
    word = tl.load(words + block * (BLOCK // WORD) + tl.arange(0, BLOCK // WORD))
    chosen = tl.reshape((word[:, None] >> tl.arange(0, WORD)[None, :]) & 1, (BLOCK,))
    to = tl.load(ends + block) - tl.sum(chosen, 0) + tl.cumsum(chosen, 0) - 1
    at = begin + block * BLOCK + tl.arange(0, BLOCK)
    tl.store(index + to, at.to(index.dtype.element_ty), mask=chosen > 0)


@triton.jit
def _add_at(out: Any, index: Any, values: Any, count: Any, BLOCK: tl.constexpr) -> None:
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + i, mask=i < count, other=0)
    total = tl.load(out + at, mask=i < count, other=0) + tl.load(values + i, mask=i < count, other=0)
    tl.store(out + at, total, mask=i < count)


def _answers(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Room for one bit of each of n entries, and for the number of bits set in each block."""
    blocks = triton.cdiv(n, BLOCK)
    words = torch.empty(blocks * (BLOCK // WORD), dtype=torch.int32, device=x.device)
    return words, torch.empty(blocks, dtype=torch.int64, device=x.device)


def _places(words: Tensor, counts: Tensor, x: Tensor, lo: int) -> Tensor:
    ends = counts.cumsum(0)
    found = int(ends[-1]) if ends.numel() else 0
    index = torch.empty(found, dtype=index_dtype(x.numel()), device=x.device)
    if found:
        _collect[(counts.numel(),)](words, ends, index, lo, BLOCK=BLOCK, WORD=WORD)
    return index


def select(x: Tensor, threshold: float, lo: int, hi: int) -> Tensor:
    words, counts = _answers(x, hi - lo)
    if hi > lo:
        bound = rounded(threshold, x).to(x.device)
        _find[(counts.numel(),)](x, bound, words, counts, lo, hi, BLOCK=BLOCK, WORD=WORD)
    return _places(words, counts, x, lo)


def variance_step(r: Tensor, v: Tensor, mean: Tensor, square: Tensor, alpha: float, zeta: float) -> Tensor:
    words, counts = _answers(r, r.numel())
    if r.numel():
        factors = torch.stack([rounded(alpha, r), rounded(zeta, r)]).to(r.device)
        grid = (counts.numel(),)
        _add_test_decay[grid](r, v, mean, square, factors, words, counts, r.numel(), BLOCK=BLOCK, WORD=WORD)
    return _places(words, counts, r, 0)


def pack_signs(x: Tensor) -> Tensor:
    words, counts = _answers(x, x.numel())
    if x.numel():
        _find_negative[(counts.numel(),)](x, words, counts, x.numel(), BLOCK=BLOCK, WORD=WORD)
    return words.view(torch.uint8)[: (x.numel() + 7) // 8]


def fill_sparse(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> None:
    out.zero_()
    for index, values in parts:
        if index.numel():
            scaled = values.to(out.dtype) * rounded(scale, out)  # rounded before the sum, as everywhere
            _add_at[(triton.cdiv(index.numel(), BLOCK),)](out, index, scaled, index.numel(), BLOCK=BLOCK)
