"""The same workers, with floating-point values sent in fewer bits."""

import torch
from torch import Tensor

from thinwire.comm.base import Comm


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in fewer bits; what is finite but too large for them becomes the largest number there is."""
    largest = torch.finfo(dtype).max
    if largest > 1e38:  # the range of float32: nothing can be too large
        return x.to(dtype)
    return torch.where(x.isinf(), x, x.clamp(-largest, largest)).to(dtype)


class CastComm:
    """Sends floating-point tensors as `carries`, and hands them back in the dtype they came in."""

    carries: torch.dtype | None

    def __init__(self, comm: Comm, carries: torch.dtype):
        self.comm, self.carries, self._dtype = comm, carries, carries
        self.rank, self.world, self.ledger = comm.rank, comm.world, comm.ledger

    def _cast(self, x: Tensor) -> Tensor:
        return saturated(x, self._dtype) if x.is_floating_point() else x

    def all_mean(self, x: Tensor) -> Tensor:
        return x.copy_(self.comm.all_mean(saturated(x, self._dtype)))

    def all_gather(self, x: Tensor) -> Tensor:
        return self.comm.all_gather(self._cast(x)).to(x.dtype)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self.comm.broadcast(self._cast(x), source))

    def all_to_all(self, parts: list[Tensor]) -> list[Tensor]:
        received = self.comm.all_to_all([self._cast(p) for p in parts])
        return [r.to(parts[0].dtype) for r in received]

    def shift(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        received = self.comm.shift(self._cast(x), to, source)
        return None if received is None else received.to(x.dtype)
