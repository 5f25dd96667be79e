"""SignSGD: one bit an entry, and one magnitude for each parameter.

Bernstein, Wang, Azizzadenesheli and Anandkumar, signSGD, ICML 2018; in the form that converges with error
feedback, of Karimireddy, Rebjock, Stich and Jaggi, Error Feedback Fixes SignSGD, ICML 2019: sign(x) times the
mean magnitude (both recalled).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.memory import Owned
from thinwire.core.reducer import Layout, Reducer


@dataclass
class SignSGDState:
    sizes: list[int] = memory.derived()  # of the parameters, each of which has a magnitude of its own


@dataclass
class TwoWaySignSGDState(SignSGDState):
    owned: Owned = field(kw_only=True)


@dataclass(frozen=True)
class SignSGD(Reducer[Tensor, SignSGDState]):
    """The sign of every entry times its parameter's mean magnitude. Zero counts as positive.

    With `two_way` the owners of parts average and send signs again: a link's bytes do not grow with the workers, and
    a parameter that lies in several parts has a magnitude in each.
    """

    two_way: bool = False

    def init(self, layout: Layout, /) -> SignSGDState:
        if self.two_way:
            return TwoWaySignSGDState(layout.sizes, owned=Owned(layout.numel))
        return SignSGDState(layout.sizes)

    def reduce(self, x: Tensor, state: SignSGDState, comm: Comm, out: Tensor, /) -> None:
        code = SignCode(state.sizes, x.dtype)
        if isinstance(state, TwoWaySignSGDState):
            exchange.mean_two_ways(x, code, comm, out, state.owned)
        else:
            exchange.gather_coded(x, code, comm, out)

    @property
    def needs_memory(self) -> bool:
        return True


@dataclass(frozen=True)
class SignCode:
    """The mean magnitude of each parameter, as far as it lies in the stretch, then the signs."""

    sizes: list[int]
    dtype: torch.dtype

    def _within(self, start: int, stop: int) -> list[int]:
        """How many entries of each parameter lie in a stretch; parameters with none are left out."""
        found, first = [], 0
        for size in self.sizes:
            found.append(min(stop, first + size) - max(start, first))
            first += size
        return [count for count in found if count > 0]

    def nbytes(self, start: int, stop: int) -> int:
        return len(self._within(start, stop)) * self.dtype.itemsize + -(-(stop - start) // 8)

    def encode(self, x: Tensor, start: int, message: Tensor) -> None:
        sizes = self._within(start, start + x.numel())
        means = [torch.linalg.vector_norm(part, 1) / part.numel() for part in x.split(sizes)] if sizes else []
        magnitudes = torch.stack(means) if means else x.new_empty(0)
        coded = torch.cat([magnitudes.view(torch.uint8), kernels.pack_signs(x)])
        message[: coded.numel()] = coded
        self.decode(message.unsqueeze(0), start, x, -1.0, add=True)

    def decode(self, messages: Tensor, start: int, out: Tensor, scale: float, add: bool) -> None:
        sizes = self._within(start, start + out.numel())
        head = len(sizes) * self.dtype.itemsize
        for at in range(0, out.numel(), exchange.PIECE):
            part = out[at : at + exchange.PIECE]
            total = torch.zeros_like(part)
            for message in messages:
                magnitudes = message[:head].clone().view(self.dtype)
                stop = at + part.numel()
                values = kernels.unpack_signs(message[head + at // 8 : head - (-stop // 8)], part.numel(), out.dtype)
                first = 0
                for size, magnitude in zip(sizes, magnitudes, strict=True):
                    values[max(0, first - at) : max(0, first + size - at)].mul_(magnitude)
                    first += size
                total += values
            exchange.put(part, total, scale, add)
