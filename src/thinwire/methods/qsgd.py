"""QSGD: each entry as a small integer times the largest magnitude (or the norm) of its bucket.

Alistarh, Grubic, Li, Tomioka and Vojnovic, QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding, NeurIPS 2017 (recalled). Codes have a fixed width here; the paper's variable-length code is left out.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from thinwire import exchange, kernels, memory
from thinwire.comm import Comm
from thinwire.reducer import Layout, Reducer, group_key, mix64


@dataclass
class QSGDState:
    group: int = memory.derived()  # a number for this layout, so that layouts round apart
    step: int = memory.shared(0)


@dataclass(frozen=True)
class QSGD(Reducer[Tensor, QSGDState]):
    """Codes of `bits` (2 to 16, the sign included), each `bucket` entries in units of their own.

    Stochastic rounding is unbiased and needs no memory; with error feedback round to the "nearest", whose
    error is never larger than the entry itself. The norm "max" wastes no codes; "l2" is that of the proofs.
    """

    bits: int = 4
    bucket: int = 512
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    norm: Literal["max", "l2"] = "max"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits must lie between 2 and 16, not {self.bits}: a sign and at least one level")
        if self.bucket < 1:
            raise ValueError(f"bucket must be 1 entry or more, not {self.bucket}")
        if self.rounding not in ("stochastic", "nearest"):
            raise ValueError(f"rounding must be 'stochastic' or 'nearest', not {self.rounding!r}")
        if self.norm not in ("max", "l2"):
            raise ValueError(f"norm must be 'max' or 'l2', not {self.norm!r}")

    @property
    def levels(self) -> int:
        """How many steps there are from zero to the norm."""
        return 2 ** (self.bits - 1) - 1

    def init(self, layout: Layout, /) -> QSGDState:
        return QSGDState(group_key(layout))

    def reduce(self, x: Tensor, state: QSGDState, comm: Comm, out: Tensor, /) -> None:
        key = mix64(self.seed, state.step, state.group, comm.rank)
        state.step += 1
        piece = math.lcm(self.bucket, 8)  # whole buckets in whole bytes
        piece *= max(1, exchange.PIECE // piece)
        generator = torch.Generator(x.device).manual_seed(key >> 1)
        coded = [self._encode(part, generator) for part in x.split(piece)]
        message = torch.cat([units.view(torch.uint8) for units, _ in coded] + [packed for _, packed in coded])
        exchange.gather_coded(x, message, partial(self._decode, x), comm, out, piece)

    def _encode(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The unit of each bucket, and the codes."""
        norm = _largest if self.norm == "max" else _length
        units = torch.cat([norm(rows) for rows in self._rows(x)]) / self.levels
        levels = self._scale(x.clone(), 1 / units.clamp_min(torch.finfo(x.dtype).tiny))
        if self.rounding == "stochastic":
            levels.add_(torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)).floor_()
        else:
            levels.round_()
        codes = levels.clamp_(-self.levels, self.levels).add_(self.levels)
        return units, kernels.pack_bits(codes.to(torch.uint8 if self.bits <= 8 else torch.int32), self.bits)

    def _decode(self, x: Tensor, message: Tensor, start: int, stop: int) -> Tensor:
        head = -(-x.numel() // self.bucket) * x.itemsize
        units = message[:head].clone().view(x.dtype)[start // self.bucket : -(-stop // self.bucket)]
        packed = message[head + start * self.bits // 8 : head - (-stop * self.bits // 8)]
        codes = kernels.unpack_bits(packed, stop - start, self.bits)
        return self._scale(codes.to(x.dtype).sub_(self.levels), units)

    def _scale(self, values: Tensor, factors: Tensor) -> Tensor:
        """Multiply each bucket by its factor, in place."""
        rows = self._rows(values)
        for part, scale in zip(rows, factors.split([len(part) for part in rows]), strict=True):
            part.mul_(scale.unsqueeze(1))
        return values

    def _rows(self, x: Tensor) -> list[Tensor]:
        """The full buckets, and the last one if it is shorter, as rows of two matrices."""
        full = x.numel() // self.bucket * self.bucket
        rest = x[full:]
        return [x[:full].view(-1, self.bucket), rest.view(-1, max(1, rest.numel()))]

    @property
    def needs_memory(self) -> bool:
        return self.rounding == "nearest"


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(dim=1)


def _length(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1)
