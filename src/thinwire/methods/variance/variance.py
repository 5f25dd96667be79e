"""Variance-based compression: an entry waits until the samples agree on it, and is sent then.

Tsuzuku, Imachi and Akiba, Variance-based Gradient Compression for Efficient Distributed Deep Learning, ICLR 2018
workshop (arXiv 1802.06058). That updates wait until they are unambiguous is in its abstract; the update rules and
the 32-bit word are recalled, and the rules were found alike in two independent implementations. For each entry:

    r += mean of the gradient over the worker's batch
    v += sum over its samples of (their gradient / batch size)^2
    if r^2 > alpha v: send r; r = v = 0
    else: v *= zeta

so no density is chosen: the data decides. r^2 <= B v on a first step, hence only alpha below the batch size B can
send at once; alpha = 1 is the line above which more than one sample must agree. Multiplying the loss by a
constant changes no decision.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Moments, Reducer
from thinwire.exchange import MessageRoom
from thinwire.exchange import bytes as wire
from thinwire.methods.variance import published

PACKINGS = {"gaps": (wire.encode_powers, wire.decode_powers), "words": published.WORDS}


@dataclass
class VarianceState:
    r: Tensor = memory.unsent()  # gradients that were not sent yet
    v: Tensor = memory.summed(degree=2)  # their noise
    sizes: list[int] = memory.derived()  # of the tensors, each of which has its own largest exponent
    lost: float = memory.derived()  # of the last step, so never saved: what the quantiser dropped, as a norm
    held: float = memory.derived()  # likewise: the fraction of sure entries that were too small to tell
    room: MessageRoom = field(default_factory=MessageRoom)


@dataclass(frozen=True)
class Variance(Reducer[Moments, VarianceState]):
    """Sends the entries whose sum of gradients r has r^2 > `alpha` v, where v is the noise in it.

    `zeta` makes the noise of entries not sent fade, so that none waits for ever. With `quantise` each is a power of
    two; the rounding is dropped, or with `feedback` stays in r. Entries below a 128th of the largest in their tensor
    have no code: `on_underflow` they "keep" waiting, or are "reset", which loses them. `packing` is by the "gaps"
    between entries, or in "words" of 32 bits, three times as long. "reset" and "words" are the paper's, to the letter.
    """

    wants: ClassVar[type] = Moments
    alpha: float = 2.0
    zeta: float = 0.999
    quantise: bool = True
    on_underflow: Literal["keep", "reset"] = "keep"
    feedback: bool = False
    packing: Literal["gaps", "words"] = "gaps"

    def __post_init__(self) -> None:
        check_noise(self.alpha, self.zeta)
        if self.on_underflow not in ("keep", "reset"):
            raise ValueError(f"on_underflow must be 'keep' or 'reset', not {self.on_underflow!r}")
        if self.packing not in PACKINGS:
            raise ValueError(f"packing must be 'gaps' or 'words', not {self.packing!r}")

    def init(self, layout: Layout, /) -> VarianceState:
        return VarianceState(layout.zeros(), layout.zeros(), layout.sizes, lost=0.0, held=0.0)

    def reduce(self, local: Moments, state: VarianceState, comm: Comm, out: Tensor, /) -> None:
        r, v = state.r, state.v
        sure = kernels.variance_step(r, v, local.mean, local.square, self.alpha, self.zeta)
        exchange.empty(local.mean, out)
        message, told = self._encode(r, sure, state, comm)
        messages = exchange.gather_bytes(message, comm, state.room, limit=exchange.dense_bytes(r, comm))
        state.lost = state.held = 0.0
        if messages is None:
            kernels.clear(v, sure)
            return exchange.fall_back_at(r, sure, kernels.gather(r, sure), comm, out)

        sent = [self._decode(m, state) for m in messages]
        index, values = sent[comm.rank]  # what the others received, not what was meant
        comm.ledger.picked += index.numel()
        kernels.scatter_add(r, index, values, -1.0)
        kernels.clear(v, index)
        if self.quantise:
            state.held = 1 - index.numel() / sure.numel() if sure.numel() else 0.0
            if not self.feedback:  # what rounding left of what was sent
                state.lost = float(torch.linalg.vector_norm(kernels.take(r, index)))
            if self.on_underflow == "reset":
                state.lost = math.hypot(state.lost, published.reset(r, v, sure[~told]))
        kernels.fill_sparse(out, sent, 1 / comm.world)

    def _encode(self, r: Tensor, sure: Tensor, state: VarianceState, comm: Comm) -> tuple[Tensor, Tensor]:
        """A message, and which of the entries are in it."""
        if self.quantise:
            encode, _ = PACKINGS[self.packing]
            return encode(sure, kernels.gather(r, sure), state.sizes)
        values = exchange.rounded(kernels.gather(r, sure), comm)
        everything = torch.ones_like(sure, dtype=torch.bool)
        return wire.encode(sure, values, r.numel(), comm.wire_dtype(r.dtype)), everything

    def _decode(self, message: Tensor, state: VarianceState) -> tuple[Tensor, Tensor]:
        if self.quantise:
            _, decode = PACKINGS[self.packing]
            return decode(message, state.sizes, state.r.dtype)
        index, values = wire.decode(message, state.r.numel())
        return index, values.to(state.r.dtype)

    def metrics(self, state: VarianceState, /) -> dict[str, float]:
        return {"lost_norm": state.lost, "held_fraction": state.held} if self.quantise else {}

    @property
    def conserves(self) -> bool:
        return not self.quantise or (self.feedback and self.on_underflow == "keep")


def check_noise(alpha: float, zeta: float) -> None:
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha must be 0 or more, not {alpha}: 1 to 2 is usual, and 0 sends everything")
    if not 0 < zeta <= 1:
        raise ValueError(f"zeta must lie above 0 and at most at 1, not {zeta}: 0.999 fades over 1000 steps")
