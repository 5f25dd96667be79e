"""The verbs methods are written in. What they send leaves `x`; the mean over the workers goes into `out`.

`out` may be the storage of `x`, so each verb finishes with `x` before it writes `out`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels, memory, wire
from thinwire.comm import Comm
from thinwire.comm.cast import saturated

PIECE = 2**18  # entries that are coded and decoded at a time


@dataclass
class Room:
    """How many bytes the next message of unknown length may take without a second collective.

    The lengths travel inside the messages. When every worker's fits the room agreed after the last exchange,
    one collective does; when one does not, a second one brings the rest.
    """

    size: int = memory.per_world(int)


def dense(x: Tensor, comm: Comm, out: Tensor) -> None:
    """Average everything."""
    comm.ledger.picked += x.numel()
    if out.data_ptr() != x.data_ptr():
        out.copy_(rounded(x, comm))
        x.zero_() if comm.carries is None else x.sub_(out)
    comm.all_mean(out)


def empty(x: Tensor, out: Tensor) -> None:
    """All of `x` has gone into a memory. Where `out` is the same storage, it is written over and needs no zeros."""
    if out.data_ptr() != x.data_ptr():
        x.zero_()


def fall_back(x: Tensor, comm: Comm, out: Tensor) -> None:
    """Average everything because that costs less than what the method would have sent."""
    comm.ledger.fallbacks += 1
    dense(x, comm, out)


def fall_back_at(x: Tensor, index: Tensor, values: Tensor, comm: Comm, out: Tensor) -> None:
    """Move `values` at `index`, each worker's own, out of `x` and into the mean, in a vector that is zero elsewhere.

    For methods whose choices depend on what stays: those are as they would be, only the bytes are a dense mean's.
    """
    whole = torch.zeros_like(x)
    whole[index] = values
    x.sub_(whole)
    fall_back(whole, comm, out)
    x.add_(whole)  # what the wire could not carry


def rounded(values: Tensor, comm: Comm) -> Tensor:
    """`values` as the wire will carry them; what is too large for it is cut off, and so stays behind."""
    return values if comm.carries is None else saturated(values, comm.carries).to(values.dtype)


def take(x: Tensor, index: Tensor, comm: Comm) -> Tensor:
    """Remove from `x` the entries at `index`, as the wire will carry them; rounding stays behind."""
    comm.ledger.picked += index.numel()
    if comm.carries is None:
        return kernels.take(x, index)
    values = rounded(kernels.gather(x, index), comm)
    kernels.scatter_add(x, index, values, -1.0)
    return values


def mean_at(x: Tensor, index: Tensor, comm: Comm, out: Tensor) -> None:
    """Average the entries at `index`, which every worker holds alike."""
    values = comm.all_mean(take(x, index, comm))
    kernels.fill_sparse(out, [(index, values)], 1.0)


def gather_pairs(x: Tensor, index: Tensor, comm: Comm, out: Tensor, room: Room) -> None:
    """Average the entries that each worker chose for itself: sum of what was sent over the number of workers."""
    values = rounded(kernels.gather(x, index), comm)
    message = wire.encode(index, values, x.numel(), comm.carries or x.dtype)
    messages = gather_bytes(message, comm, room, limit=dense_bytes(x, comm))
    if messages is None:
        return fall_back(x, comm, out)
    take(x, index, comm)
    kernels.fill_sparse(out, [wire.decode(m, x.numel()) for m in messages], 1 / comm.world)


def gather_union(x: Tensor, index: Tensor, comm: Comm, out: Tensor, room: Room) -> list[Tensor] | None:
    """Average the entries that any worker chose, every worker contributing its own value at each.

    Returns what each worker chose, or None where averaging everything was cheaper and was done instead.
    """
    message = wire.encode_index(index, x.numel())
    messages = gather_bytes(message, comm, room, limit=dense_bytes(x, comm))
    if messages is not None:
        chosen = [wire.decode_index(m, x.numel()) for m in messages]
        union = torch.cat(chosen)
        if comm.world > 1:
            union = torch.unique(union)
        bytes_each = (comm.carries or x.dtype).itemsize
        worst = max(m.numel() for m in messages) * (comm.world - 1)
        if worst + 2 * union.numel() * bytes_each < 2 * x.numel() * bytes_each:
            mean_at(x, union, comm, out)
            return chosen
    fall_back(x, comm, out)
    return None


def gather_coded(
    x: Tensor,
    message: Tensor,
    decode: Callable[[Tensor, int, int], Tensor],
    comm: Comm,
    out: Tensor,
    piece: int = PIECE,
) -> None:
    """Average what messages of one length say; what this worker's own says leaves `x`.

    `decode(message, start, stop)` reads the entries of one piece, at most `piece` of them: small enough for the
    cache, and for the allocator to hand out the same memory again.
    """
    if message.numel() > dense_bytes(x, comm):
        return fall_back(x, comm, out)
    comm.ledger.picked += x.numel()
    messages = comm.all_gather(message)
    for start in range(0, x.numel(), piece):
        stop = min(start + piece, x.numel())
        total = torch.zeros_like(x[start:stop])
        for rank, theirs in enumerate(messages):
            values = decode(theirs, start, stop)
            total += values
            if rank == comm.rank:
                x[start:stop] -= values
        torch.mul(total, 1 / comm.world, out=out[start:stop])


def dense_bytes(x: Tensor, comm: Comm) -> int:
    """The message length above which gathering costs every link more than averaging all of `x`."""
    return 2 * x.numel() * (comm.carries or x.dtype).itemsize // max(1, comm.world)


def gather_bytes(message: Tensor, comm: Comm, room: Room, limit: int | None = None) -> list[Tensor] | None:
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


def gather_rows(x: Tensor, comm: Comm) -> list[Tensor]:
    """Each worker's rows, however many."""
    counts = comm.all_gather(torch.tensor([len(x)], device=x.device)).flatten().tolist()
    padded = x.new_zeros(max(counts), *x.shape[1:])
    padded[: len(x)] = x
    return [rows[:n] for rows, n in zip(comm.all_gather(padded), counts, strict=True)]


def mean_of(tensors: list[Tensor], comm: Comm) -> list[Tensor]:
    """Average several tensors in one message."""
    if not tensors:
        return []
    flat = comm.all_mean(torch.cat([t.flatten() for t in tensors]))
    return [part.view_as(t) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
