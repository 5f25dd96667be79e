"""Every entry in a few bits: messages of one length from every worker."""

from typing import Protocol

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.exchange.dense import dense_bytes, fall_back

PIECE = 2**18  # entries that are coded and decoded at a time: they fit the cache


class Code(Protocol):
    """Says something about every entry of a stretch of a vector, in as many bytes as all workers know beforehand."""

    def nbytes(self, start: int, stop: int) -> int:
        """The bytes of a message about the entries [start, stop)."""

    def encode(self, x: Tensor, start: int, message: Tensor) -> None:
        """Write what is said about `x`, the entries from `start` on; that leaves `x`, the rest stays."""

    def decode(self, messages: Tensor, start: int, out: Tensor, scale: float, add: bool) -> None:
        """Write the sum of what messages [any, nbytes] say, times scale, or add it to `out`."""


def gather_coded(x: Tensor, code: Code, comm: Comm, out: Tensor) -> None:
    """Average what every worker says to all; what this worker's own message says leaves `x`."""
    size = code.nbytes(0, x.numel())
    if size > dense_bytes(x, comm):
        return fall_back(x, comm, out)
    comm.ledger.picked += x.numel()
    message = torch.zeros(size, dtype=torch.uint8, device=x.device)
    code.encode(x, 0, message)
    code.decode(comm.all_gather(message), 0, out, 1 / comm.world, add=False)


def put(out: Tensor, total: Tensor, scale: float, add: bool) -> None:
    """Write total * scale, or add it to `out`."""
    if add:
        out.add_(total, alpha=scale)
    else:
        torch.mul(total, scale, out=out)
