"""Some entries of a vector: chosen by all alike, by each worker, or by any."""

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm import Comm
from thinwire.comm.table import wire_bytes
from thinwire.exchange import bytes as wire
from thinwire.exchange.dense import dense_bytes, dense_price, fall_back, rounded
from thinwire.exchange.lengths import MessageRoom, gather_bytes
from thinwire.exchange.values import mean_of_rounded


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
    values, rest = mean_of_rounded(take(x, index, comm), comm)
    if rest is not None:
        kernels.scatter_add(x, index, rest)
    kernels.fill_sparse(out, [(index, values)], 1.0)


def gather_pairs(x: Tensor, index: Tensor, comm: Comm, out: Tensor, room: MessageRoom) -> None:
    """Average the entries that each worker chose for itself: sum of what was sent over the number of workers."""
    values = rounded(kernels.gather(x, index), comm)
    message = wire.encode(index, values, x.numel(), comm.wire_dtype(x.dtype))
    messages = gather_bytes(message, comm, room, limit=dense_bytes(x, comm))
    if messages is None:
        return fall_back(x, comm, out)
    take(x, index, comm)
    kernels.fill_sparse(out, [wire.decode(m, x.numel()) for m in messages], 1 / comm.world)


def gather_union(x: Tensor, index: Tensor, comm: Comm, out: Tensor, room: MessageRoom) -> list[Tensor] | None:
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
        told = wire_bytes("all_gather", max(m.numel() for m in messages), comm.world)
        values = wire_bytes("all_mean", comm.value_bytes(union.numel(), x.dtype), comm.world)
        if union.numel() < x.numel() and told + values <= dense_price(x, comm):
            mean_at(x, union, comm, out)
            return chosen
    fall_back(x, comm, out)
    return None
