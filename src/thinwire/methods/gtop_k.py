"""gTop-k: the k largest sums, found by merging the workers' choices two by two.

Shi, Wang, Chu et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
Networks, ICDCS 2019. The tree was read in the authors' code, which needs a power of two workers; here any number
will do, a worker without a partner passing on what it has.

In each of log2(n) rounds half of the workers left send k pairs of index and value to the others, who add up equal
indices and keep the k largest; the last one tells all. What a merge drops stays with those who sent it, unless its
index comes through by another branch: the published code then loses what was dropped. Here the worker that dropped
it takes the sum into its own residual, which conserves mass and sends nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.comm.codec import as_bytes
from thinwire.comm.table import wire_bytes
from thinwire.core.reducer import Layout, Reducer, check_density, count


@dataclass(frozen=True)
class GTopK(Reducer[Tensor, None]):
    """The `density` largest entries of a sum over all workers, merged along a tree."""

    density: float

    def __post_init__(self) -> None:
        check_density(self.density)

    def init(self, layout: Layout, /) -> None:
        return None

    def reduce(self, x: Tensor, state: None, comm: Comm, out: Tensor, /) -> None:
        n, k = x.numel(), count(self.density, x.numel())
        message = k * kernels.index_dtype(n).itemsize + comm.value_bytes(k, x.dtype)
        rounds = (comm.world - 1).bit_length()
        told = rounds * wire_bytes("shift", message, comm.world) + wire_bytes("broadcast", message, comm.world)
        if k == n or told > exchange.dense_price(x, comm):
            return exchange.fall_back(x, comm, out)

        own = kernels.top_k(x, k)
        index, values = own, exchange.rounded(x[own], comm)
        sent = values
        dropped: list[tuple[Tensor, Tensor]] = []  # given back where an index comes through all the same
        for distance in (2**turn for turn in range(rounds)):
            place = comm.rank % (2 * distance)
            to = comm.rank - distance if place == distance else None
            source = comm.rank + distance if place == 0 and comm.rank + distance < comm.world else None
            received = comm.shift(_pack(index, values, comm), to, source)
            if received is not None:
                index, values, lost = _merge(index, values, *_unpack(received, x, k, comm), k)
                dropped.append(lost)
                exact, values = values, exchange.rounded(values, comm)
                dropped.append((index, exact - values))
        index, values = _unpack(comm.broadcast(_pack(index, values, comm), 0), x, k, comm)

        comm.ledger.picked += k
        came = torch.isin(own, index)
        kernels.scatter_add(x, own[came], sent[came], -1.0)
        for places, rest in dropped:
            back = torch.isin(places, index)
            kernels.scatter_add(x, places[back], rest[back])
        kernels.fill_sparse(out, [(index, values)], 1 / comm.world)

    @property
    def needs_memory(self) -> bool:
        return True


def _pack(index: Tensor, values: Tensor, comm: Comm) -> Tensor:
    stored = as_bytes(values) if comm.carries is None else comm.carries.encode(values)
    return torch.cat([as_bytes(index), stored])


def _unpack(message: Tensor, x: Tensor, k: int, comm: Comm) -> tuple[Tensor, Tensor]:
    kind = kernels.index_dtype(x.numel())
    index, stored = message.split([k * kind.itemsize, message.numel() - k * kind.itemsize])
    if comm.carries is not None:
        return index.clone().view(kind), comm.carries.decode(stored, k, x.dtype)
    return index.clone().view(kind), stored.clone().view(x.dtype)


def _merge(
    index: Tensor, values: Tensor, others: Tensor, their_values: Tensor, k: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The k largest of the sums, sorted by index, and all the others."""
    union, place = torch.unique(torch.cat([index, others]), return_inverse=True)
    sums = values.new_zeros(union.numel()).index_add_(0, place, torch.cat([values, their_values]))
    kept = kernels.top_k(sums, k).long()
    rest = torch.ones_like(sums, dtype=torch.bool)
    rest[kept] = False
    return union[kept], sums[kept], (union[rest], sums[rest])
