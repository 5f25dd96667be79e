"""A worker that talks to nobody and keeps the ledger: for planning."""

import torch
from torch import Tensor

from thinwire.comm.base import Ledger


class DryComm:
    """Answers as if every worker had sent the same."""

    carries: torch.dtype | None = None

    def __init__(self, world: int, rank: int = 0):
        self.rank, self.world = rank, world
        self.ledger = Ledger(world)

    def all_mean(self, x: Tensor) -> Tensor:
        self.ledger.enter("all_mean", x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self.ledger.enter("all_gather", x)
        return x.expand(self.world, *x.shape)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self.ledger.enter("broadcast", x)
        return x

    def all_to_all(self, parts: list[Tensor]) -> list[Tensor]:
        self.ledger.enter_bytes("all_to_all", 8 * self.world)
        self.ledger.enter_bytes("all_to_all", sum(p.numel() * p.element_size() for p in parts))
        return [parts[self.rank].clone() for _ in parts]

    def shift(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        if to is not None:
            self.ledger.enter("shift", x)
        return None if source is None else x.clone()
