"""A worker that talks to nobody and keeps the ledger: for planning."""

from collections.abc import Callable

from torch import Tensor

from thinwire.comm.link import Link
from thinwire.comm.protocol import Comm


class Dry:
    """Answers as if every worker had sent the same."""

    def __init__(self, world: int, rank: int = 0, link: Link | None = None):
        self.rank, self.world, self.link = rank, world, link
        self.far = link is not None and link.far

    def abandon(self, reason: str) -> None:
        pass

    def renew(self) -> None:
        pass

    def blame(self, error: BaseException) -> str | None:
        return None

    def close(self) -> None:
        pass

    def way(self, op: str, size: int) -> str | None:
        return self.link.way(op, size, self.world, self.far) if self.link else None

    def took(self, op: str, size: int, riding: int, seconds: float) -> None:
        return None

    def all_mean(self, x: Tensor) -> None:
        return None

    def all_gather(self, raw: Tensor) -> Tensor:
        return raw.expand(self.world, *raw.shape)

    def two_phases(self, pieces: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [self.all_gather(reduce(self.all_to_all(piece))) for piece in pieces]

    def broadcast(self, raw: Tensor, source: int) -> None:
        return None

    def broadcast_with(self, head: Tensor, raw: Tensor, source: int) -> Tensor:
        return self.all_gather(head)

    def all_to_all(self, parts: Tensor) -> Tensor:
        return parts[self.rank].expand(self.world, -1).clone()

    def all_to_all_uneven(self, sent: Tensor, sizes: list[int], coming: list[int]) -> Tensor:
        return sent.split(sizes)[self.rank].repeat(self.world)

    def shift(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        return None if source is None else x.clone()


class DryComm(Comm):
    def __init__(self, world: int, rank: int = 0, link: Link | None = None):
        super().__init__(Dry(world, rank, link))
