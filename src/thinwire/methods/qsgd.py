"""QSGD: each entry as a small integer times the largest magnitude (or the norm) of its bucket.

Alistarh, Grubic, Li, Tomioka and Vojnovic, QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding, NeurIPS 2017 (recalled). Codes have a fixed width here; the paper's variable-length code is left out.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.draws import group_key, mix64
from thinwire.core.memory import Owned
from thinwire.core.reducer import Layout, Reducer


@dataclass
class QSGDState:
    group: int = memory.derived()  # a number for this layout, so that layouts round apart
    step: int = memory.alike(0)


@dataclass
class TwoWayQSGDState(QSGDState):
    owned: Owned = field(kw_only=True)


@dataclass(frozen=True)
class QSGD(Reducer[Tensor, QSGDState]):
    """Codes of `bits` (2 to 16, the sign included), each `bucket` entries in units of their own.

    Stochastic rounding is unbiased and needs no memory; with error feedback round to the "nearest", whose
    error is never larger than the entry itself. The norm "max" uses all codes; "l2" is that of the proofs.
    With `two_way` the owners of parts average and code again: a link's bytes do not grow with the workers.
    """

    bits: int = 4
    bucket: int = 512
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    norm: Literal["max", "l2"] = "max"
    seed: int = 0
    two_way: bool = False

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
        if self.two_way:
            return TwoWayQSGDState(group_key(layout), owned=Owned(layout.numel))
        return QSGDState(group_key(layout))

    def reduce(self, x: Tensor, state: QSGDState, comm: Comm, out: Tensor, /) -> None:
        key = mix64(self.seed, state.step, state.group, comm.rank)
        state.step += 1
        code = BucketCode(self, torch.Generator(x.device).manual_seed(key >> 1), x.dtype)
        if isinstance(state, TwoWayQSGDState):
            exchange.mean_two_ways(x, code, comm, out, state.owned)
        else:
            exchange.gather_coded(x, code, comm, out)

    @property
    def needs_memory(self) -> bool:
        return self.rounding == "nearest"


@dataclass(frozen=True)
class BucketCode:
    """The unit of each bucket, then the codes."""

    method: QSGD
    generator: torch.Generator
    dtype: torch.dtype

    def nbytes(self, start: int, stop: int) -> int:
        return self._head(stop - start) + -(-(stop - start) * self.method.bits // 8)

    def _head(self, count: int) -> int:
        return -(-count // self.method.bucket) * self.dtype.itemsize

    @property
    def _piece(self) -> int:
        """Entries that are worked on at a time: whole buckets in whole bytes."""
        piece = math.lcm(self.method.bucket, 8)
        return piece * max(1, exchange.PIECE // piece)

    def encode(self, x: Tensor, start: int, message: Tensor) -> None:
        coded = [self._encode(part) for part in x.split(self._piece)] if x.numel() else []
        parts = [units.view(torch.uint8) for units, _ in coded] + [packed for _, packed in coded]
        whole = torch.cat([message[:0], *parts])
        message[: whole.numel()] = whole
        self.decode(message.unsqueeze(0), start, x, -1.0, add=True)

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        method = self.method
        norm = _largest if method.norm == "max" else _length
        units = torch.cat([norm(rows) for rows in self._rows(x)]) / method.levels
        levels = self._scale(x.clone(), 1 / units.clamp_min(torch.finfo(x.dtype).tiny))
        if method.rounding == "stochastic":
            levels.add_(torch.rand(x.shape, generator=self.generator, dtype=x.dtype, device=x.device)).floor_()
        else:
            levels.round_()
        codes = levels.clamp_(-method.levels, method.levels).add_(method.levels)
        return units, kernels.pack_bits(codes.to(torch.uint8 if method.bits <= 8 else torch.int32), method.bits)

    def decode(self, messages: Tensor, start: int, out: Tensor, scale: float, add: bool) -> None:
        for at in range(0, out.numel(), self._piece):
            part = out[at : at + self._piece]
            total = torch.zeros_like(part)
            for message in messages:
                total += self._decode(message, out.numel(), at, at + part.numel())
            exchange.put(part, total, scale, add)

    def _decode(self, message: Tensor, count: int, start: int, stop: int) -> Tensor:
        head, bits, bucket = self._head(count), self.method.bits, self.method.bucket
        units = message[:head].clone().view(self.dtype)[start // bucket : -(-stop // bucket)]
        packed = message[head + start * bits // 8 : head - (-stop * bits // 8)]
        codes = kernels.unpack_bits(packed, stop - start, bits)
        return self._scale(codes.to(self.dtype).sub_(self.method.levels), units)

    def _scale(self, values: Tensor, factors: Tensor) -> Tensor:
        """Multiply each bucket by its factor, in place."""
        rows = self._rows(values)
        for part, scale in zip(rows, factors.split([len(part) for part in rows]), strict=True):
            part.mul_(scale.unsqueeze(1))
        return values

    def _rows(self, x: Tensor) -> list[Tensor]:
        """The full buckets, and the last one if it is shorter, as rows of two matrices."""
        full = x.numel() // self.method.bucket * self.method.bucket
        rest = x[full:]
        return [x[:full].view(-1, self.method.bucket), rest.view(-1, max(1, rest.numel()))]


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(dim=1)


def _length(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1)
