"""Messages straight to everybody at once, for gloo, whose rings take a round trip for each of their hops."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.groups import Members


class Direct:
    """Sends and receives between all pairs of a group, under way at the same time.

    The tag of a message is made of how many exchanges there have been and of its length, so that none can be taken
    for another: a worker that is an exchange behind, or expects another length, waits until the group's timeout.
    """

    def __init__(self, members: Members):
        self.members = members
        self.rank, self.world = dist.get_rank(members.group), dist.get_world_size(members.group)
        self.count = 0

    def _tag(self, length: int) -> int:
        self.count += 1
        return (self.count & 0xFFFF) << 15 | (40503 * length & 0x7FFF)

    def swap(self, sent: list[Tensor], received: list[Tensor]) -> None:
        """Send sent[i] to worker i and fill received[i] with what it sent here: flat, contiguous, of one length."""
        _finish(self._begin(sent, received, sent[0].numel() * sent[0].element_size()))

    def _begin(self, sent: list[Tensor], received: list[Tensor], length: int) -> list[dist.Work | None]:
        """`length`: what all workers take for that of the exchange."""
        received[self.rank].copy_(sent[self.rank])
        tag = self._tag(length)
        works: list[dist.Work | None] = []
        # Receives first: whoever sends may begin as soon as it is told that somebody is ready.
        for distance in range(1, self.world):
            source = (self.rank - distance) % self.world
            works.append(dist.irecv(received[source], group=self.members.group, group_src=source, tag=tag))
        for distance in range(1, self.world):
            to = (self.rank + distance) % self.world
            works.append(dist.isend(sent[to], group=self.members.group, group_dst=to, tag=tag))
        return works

    def all_gather(self, raw: Tensor) -> Tensor:
        out = raw.new_empty(self.world, raw.numel())
        self.swap([raw] * self.world, list(out))
        return out

    def all_to_all(self, parts: Tensor) -> Tensor:
        received = parts.new_empty(parts.shape)
        self.swap(list(parts), list(received))
        return received

    def two_phases(self, pieces: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Of each piece, row i to worker i, what `reduce` makes of the rows there to all; all pieces under way at once.

        While the second phase of one piece waits for its trip, the others fill the link.
        """
        arriving = [torch.empty_like(piece) for piece in pieces]
        first = [
            self._begin(list(piece), list(rows), piece.shape[1]) for piece, rows in zip(pieces, arriving, strict=True)
        ]
        second: list[list[dist.Work | None]] = []
        out: list[Tensor] = []
        try:
            while first:
                _finish(first.pop(0))
                mine = reduce(arriving[len(out)])
                out.append(mine.new_empty(self.world, mine.numel()))
                second.append(self._begin([mine] * self.world, list(out[-1]), mine.numel()))
        finally:  # also when `reduce` raises, as it then does on all workers: nobody is left waiting
            for works in first + second:
                _finish(works)
        return out

    def broadcast(self, raw: Tensor, source: int) -> None:
        tag = self._tag(raw.numel())
        if self.rank != source:
            return _finish([dist.irecv(raw, group=self.members.group, group_src=source, tag=tag)])
        others = [rank for rank in range(self.world) if rank != source]
        _finish([dist.isend(raw, group=self.members.group, group_dst=rank, tag=tag) for rank in others])

    def broadcast_with(self, head: Tensor, raw: Tensor, source: int) -> Tensor:
        """Everybody's head, [world, n]; the message of `source` has the bytes `raw` behind it."""
        longest = head.numel() + raw.numel()
        mine = torch.cat([head, raw]) if self.rank == source else head
        rows = [head.new_empty(longest if rank == source else head.numel()) for rank in range(self.world)]
        _finish(self._begin([mine] * self.world, rows, longest))
        raw.copy_(rows[source][head.numel() :])
        return torch.stack([row[: head.numel()] for row in rows])


def _finish(works: list[dist.Work | None]) -> None:
    """Wait for all; the group's timeout is the limit. What is not done holds memory that nobody may free."""
    for work in works:
        assert work is not None  # this worker is in the group
        work.wait()
