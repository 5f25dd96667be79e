"""SignSGD: one bit an entry, and one magnitude for each parameter.

Bernstein, Wang, Azizzadenesheli and Anandkumar, signSGD, ICML 2018; in the form that converges with error
feedback, of Karimireddy, Rebjock, Stich and Jaggi, Error Feedback Fixes SignSGD, ICML 2019: sign(x) times the
mean magnitude (both recalled).
"""

from dataclasses import dataclass
from functools import partial

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
        exchange.gather_coded(x, message, partial(_decode, x, state.sizes), comm, out)

    @property
    def needs_memory(self) -> bool:
        return True


def _encode(x: Tensor, sizes: list[int]) -> Tensor:
    """The magnitudes, then the signs."""
    means = [torch.linalg.vector_norm(part, 1) / max(1, part.numel()) for part in x.split(sizes)]
    magnitudes = torch.stack(means) if means else x.new_empty(0)
    return torch.cat([magnitudes.view(torch.uint8), kernels.pack_signs(x)])


def _decode(x: Tensor, sizes: list[int], message: Tensor, start: int, stop: int) -> Tensor:
    head = len(sizes) * x.itemsize
    magnitudes = message[:head].clone().view(x.dtype)
    values = kernels.unpack_signs(message[head + start // 8 : head - (-stop // 8)], stop - start, x.dtype)
    first = 0
    for size, magnitude in zip(sizes, magnitudes, strict=True):
        values[max(0, first - start) : max(0, first + size - start)].mul_(magnitude)
        first += size
    return values
