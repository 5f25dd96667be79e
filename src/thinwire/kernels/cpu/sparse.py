"""Reading and writing at scattered positions, and drawing them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.common import NUMPY, compiled, inside, tensor, view
from thinwire.kernels.reference import GOLDEN, ROUNDS, index_dtype, permutation_bits

STEP = np.uint64(GOLDEN)
FULL = np.uint64(64)


@compiled
def _gather(x: Any, index: Any, values: Any) -> None:
    for i in range(index.size):
        values[i] = x[index[i]]


def gather(x: Tensor, index: Tensor) -> Tensor:
    values = np.empty(index.numel(), NUMPY[x.dtype])
    _gather(view(x), inside(index, x.numel()), values)
    return tensor(values)


@compiled
def _clear(x: Any, index: Any) -> None:
    for i in range(index.size):
        x[index[i]] = 0


def clear(x: Tensor, index: Tensor) -> None:
    _clear(view(x), inside(index, x.numel()))


@compiled
def _take(x: Any, index: Any, values: Any) -> None:
    for i in range(index.size):
        values[i] = x[index[i]]
    _clear(x, index)


def take(x: Tensor, index: Tensor) -> Tensor:
    values = np.empty(index.numel(), NUMPY[x.dtype])
    _take(view(x), inside(index, x.numel()), values)
    return tensor(values)


@compiled
def _scatter_add(out: Any, index: Any, values: Any, scale: float) -> None:
    factor = out.dtype.type(scale)
    for i in range(index.size):
        out[index[i]] += factor * values[i]


def scatter_add(out: Tensor, index: Tensor, values: Tensor, scale: float = 1.0) -> None:
    _scatter_add(view(out), inside(index, out.numel()), view(values.to(out.dtype)), float(scale))


@compiled
def _zero(out: Any) -> None:
    out[:] = 0


def fill_sparse(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> None:
    _zero(view(out))  # the C library's memset, which goes past the caches: half the time of Tensor.zero_
    for index, values in parts:
        scatter_add(out, index, values, scale)


@compiled
def _permute(x: Any, bits: Any, key: Any) -> Any:
    """`reference.permute` of one number."""
    left_bits, right_bits = bits >> np.uint64(1), bits - (bits >> np.uint64(1))
    left, right = x >> right_bits, x & ((np.uint64(1) << right_bits) - np.uint64(1))
    for _ in range(ROUNDS):
        key += STEP
        noise = right + key
        noise = (noise ^ (noise >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        noise = (noise ^ (noise >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        noise ^= noise >> np.uint64(31)
        left, right = right, left ^ (noise >> (FULL - left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


@compiled
def _draw(n: Any, bits: Any, key: Any, index: Any) -> None:
    for i in range(index.size):
        place = _permute(np.uint64(i), bits, key)
        while place >= n:
            place = _permute(place, bits, key)
        index[i] = place


def random_k(n: int, k: int, key: int, device: torch.device) -> Tensor:
    index = np.empty(k, NUMPY[index_dtype(n)])
    _draw(np.uint64(n), np.uint64(permutation_bits(n)), np.uint64(key & (2**64 - 1)), index)
    index.sort()
    return tensor(index)
