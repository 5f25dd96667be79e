"""Averaging everything: the exact mean, and what methods fall back on when it is cheaper."""

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.comm.table import WIRE, wire_bytes
from thinwire.exchange.values import mean_of_rounded


def dense(x: Tensor, comm: Comm, out: Tensor) -> None:
    """Average everything."""
    comm.ledger.picked += x.numel()
    if out.data_ptr() == x.data_ptr():
        comm.all_mean(out)
        return
    out.copy_(rounded(x, comm))
    x.zero_() if comm.carries is None else x.sub_(out)
    mean, rest = mean_of_rounded(out, comm)
    if rest is not None:
        x.add_(rest)
        out.copy_(mean)


def mean_of(tensors: list[Tensor], comm: Comm) -> list[Tensor]:
    """Average several tensors in one message."""
    if not tensors:
        return []
    flat = comm.all_mean(torch.cat([t.flatten() for t in tensors]))
    return [part.view_as(t) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]


def empty(x: Tensor, out: Tensor) -> None:
    """All of `x` has gone into a memory. Where `out` is the same storage, it is written over and needs no zeros."""
    if out.data_ptr() != x.data_ptr():
        x.zero_()


def rounded(values: Tensor, comm: Comm) -> Tensor:
    """`values` as the wire will carry them; what is too large for it is cut off, and so stays behind."""
    return values if comm.carries is None else comm.carries.rounded(values)


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


def dense_bytes(x: Tensor, comm: Comm) -> int:
    """The message length above which gathering costs every link more than averaging all of `x`."""
    gathered = WIRE["all_gather"](comm.world)
    return int(dense_price(x, comm) / gathered) if gathered else 2 * comm.value_bytes(x.numel(), x.dtype)


def dense_price(x: Tensor, comm: Comm) -> float:
    """What averaging all of `x` costs every link, in bytes."""
    return wire_bytes("all_mean", comm.value_bytes(x.numel(), x.dtype), comm.world)
