"""Messages whose length depends on the data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.core import memory


@dataclass
class MessageRoom:
    """How many bytes the next message of unknown length may take without a second collective.

    The lengths travel inside the messages. When every worker's fits the room agreed after the last exchange,
    one collective does; when one does not, a second one brings the rest.
    """

    size: int = memory.per_world(int)


def gather_bytes(message: Tensor, comm: Comm, room: MessageRoom, limit: int | None = None) -> list[Tensor] | None:
    """Every worker's message, of whatever length; None, on all alike, if one is longer than `limit`.

    One collective as long as messages keep to the room that the last exchange left.
    """
    length = message.numel()
    header = torch.tensor([length], dtype=torch.int64).view(torch.uint8).to(message.device)
    first = message.new_zeros(8 + room.size)
    first[:8] = header
    first[8 : 8 + length] = message[: room.size]
    gathered = comm.all_gather(first)
    lengths = gathered[:, :8].flatten().view(torch.int64).tolist()

    longest, had = max(lengths), room.size
    # A little more than was needed: a message that grows by a tenth still travels in one piece.
    room.size = longest + longest // 10 + 16
    if comm.far:  # a second piece costs a trip there, and a few bytes do not: forget long messages slowly
        room.size = max(room.size, had - had // 16)
    if limit is not None and longest > limit:
        room.size = 0  # ask again next time, at the price of eight bytes
        return None
    if longest <= had:
        return [row[8 : 8 + n] for row, n in zip(gathered, lengths, strict=True)]
    rest = message.new_zeros(longest - had)
    rest[: max(0, length - had)] = message[had:]
    rests = comm.all_gather(rest)
    return [
        torch.cat([row[8 : 8 + min(n, had)], tail[: max(0, n - had)]])
        for row, tail, n in zip(gathered, rests, lengths, strict=True)
    ]
