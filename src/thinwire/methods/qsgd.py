"""QSGD: each entry as a small integer times the largest magnitude (or the norm) of its bucket.

Alistarh, Grubic, Li, Tomioka and Vojnovic, QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding, NeurIPS 2017 (recalled). Codes have a fixed width here; the paper's variable-length code is left out.
"""

from dataclasses import dataclass
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
        message = self._encode(x, key)
        if message.numel() > exchange.dense_bytes(x, comm):
            return exchange.fall_back(x, comm, out)
        comm.ledger.picked += x.numel()
        x.sub_(self._decode(message, x))
        messages = comm.all_gather(message)
        total = sum((self._decode(m, x) for m in messages[1:]), self._decode(messages[0], x))
        torch.mul(total, 1 / comm.world, out=out)

    def _encode(self, x: Tensor, key: int) -> Tensor:
        """The unit of each bucket, then the codes."""
        rows = torch.nn.functional.pad(x, (0, -x.numel() % self.bucket)).view(-1, self.bucket)
        order = torch.inf if self.norm == "max" else 2
        units = torch.linalg.vector_norm(rows, order, dim=1) / self.levels
        scaled = (rows / units.clamp_min(torch.finfo(x.dtype).tiny).unsqueeze(1)).flatten()[: x.numel()]
        if self.rounding == "stochastic":
            generator = torch.Generator(x.device).manual_seed(key >> 1)
            whole = scaled.add_(torch.rand_like(scaled, generator=generator)).floor_()
        else:
            whole = scaled.round_()
        codes = (whole + self.levels).clamp_(0, 2 * self.levels).to(torch.int32)
        return torch.cat([units.view(torch.uint8), kernels.pack_bits(codes, self.bits)])

    def _decode(self, message: Tensor, x: Tensor) -> Tensor:
        size = -(-x.numel() // self.bucket) * x.itemsize
        units = message[:size].clone().view(x.dtype).repeat_interleave(self.bucket)[: x.numel()]
        codes = kernels.unpack_bits(message[size:], x.numel(), self.bits)
        return (codes.to(x.dtype) - self.levels).mul_(units)

    @property
    def needs_memory(self) -> bool:
        return self.rounding == "nearest"
