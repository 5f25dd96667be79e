"""SignSGD: one bit an entry, and one magnitude for each parameter.

Bernstein, Wang, Azizzadenesheli and Anandkumar, signSGD, ICML 2018; in the form that converges with error
feedback, of Karimireddy, Rebjock, Stich and Jaggi, Error Feedback Fixes SignSGD, ICML 2019: sign(x) times the
mean magnitude (both recalled).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import exchange, kernels, memory
from thinwire.comm import Comm
from thinwire.reducer import Layout, Reducer


@dataclass
class SignSGDState:
    sizes: list[int] = memory.derived()  # of the parameters, each of which has a magnitude of its own


@dataclass(frozen=True)
class SignSGD(Reducer[Tensor, SignSGDState]):
    """The sign of every entry times its parameter's mean magnitude. Zero counts as positive."""

    def init(self, layout: Layout, /) -> SignSGDState:
        return SignSGDState(layout.sizes)

    def reduce(self, x: Tensor, state: SignSGDState, comm: Comm, out: Tensor, /) -> None:
        message = _encode(x, state.sizes)
        if message.numel() > exchange.dense_bytes(x, comm):
            return exchange.fall_back(x, comm, out)
        comm.ledger.picked += x.numel()
        x.sub_(_decode(message, x, state.sizes))
        messages = comm.all_gather(message)
        total = sum((_decode(m, x, state.sizes) for m in messages[1:]), _decode(messages[0], x, state.sizes))
        torch.mul(total, 1 / comm.world, out=out)

    @property
    def needs_memory(self) -> bool:
        return True


def _encode(x: Tensor, sizes: list[int]) -> Tensor:
    """The magnitudes, then the signs."""
    sums = [torch.linalg.vector_norm(part, 1) / max(1, part.numel()) for part in x.split(sizes)]
    magnitudes = torch.stack(sums) if sums else x.new_empty(0)
    return torch.cat([magnitudes.view(torch.uint8), kernels.pack_signs(x)])


def _decode(message: Tensor, x: Tensor, sizes: list[int]) -> Tensor:
    head = len(sizes) * x.itemsize
    magnitudes = message[:head].clone().view(x.dtype)
    values = kernels.unpack_signs(message[head:], x.numel(), x.dtype)
    for part, magnitude in zip(values.split(sizes), magnitudes, strict=True):
        part.mul_(magnitude)
    return values
