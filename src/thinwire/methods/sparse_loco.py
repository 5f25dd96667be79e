"""SparseLoCo: the largest entries of each chunk of what local steps changed, with values in two bits.

Sarfi, Thérien, Lidin and Belilovsky, Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706, after
public copies of its optimizer (CCLoco, read). Per exchange, on each worker, where d is what its local steps changed:

    e = decay e + d; c = the k largest of each chunk of e, in 2 bits; e = e - c; out = mean of all c, over senders

The two bits are those of that code: values in steps of 6 standard deviations over the number of levels, around their
mean; what stands for a level is the mean of the values on it, tensor by tensor. Positions take 12 bits in chunks of
64 x 64. There is no outer momentum: the residual is in its place.

    LocalSteps(SparseLoCo(), every=15)

What differs: vectors are cut into chunks of 64 as in that code, but all tensors go in one message.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.comm.codec import as_bytes
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer
from thinwire.exchange import chunks
from thinwire.exchange.chunks import Tiles

RANGE = 6.0  # standard deviations that the levels cover


@dataclass
class SparseLoCoState:
    tiles: list[Tiles] = memory.derived()
    residual: Tensor = memory.unsent()  # e


@dataclass(frozen=True)
class SparseLoCo(Reducer[Tensor, SparseLoCoState]):
    """The `k` largest of each `chunk` x `chunk` tile (3.1 %), with values in `bits`, averaged over their senders.

    The residual decays, and an entry that one worker sends counts in full: mass is not conserved.
    """

    k: int = 128
    chunk: int = 64
    decay: float = 0.95
    bits: int = 2

    def __post_init__(self) -> None:
        if self.k < 1 or self.chunk < 1:
            raise ValueError(f"k and chunk must be 1 or more, not {self.k} and {self.chunk}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must lie between 0 and 1, not {self.decay}")
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits must lie between 1 and 8, not {self.bits}")

    def init(self, layout: Layout, /) -> SparseLoCoState:
        return SparseLoCoState(chunks.tiles_of(layout, self.chunk), layout.zeros())

    def reduce(self, x: Tensor, state: SparseLoCoState, comm: Comm, out: Tensor, /) -> None:
        residual, tiles = state.residual, state.tiles
        residual.mul_(self.decay).add_(x)
        exchange.empty(x, out)
        counts = [each.picks(self.k) for each in tiles]
        head = chunks.position_bytes(tiles, self.k)
        if not tiles or head + sum(map(self._value_bytes, counts)) > exchange.dense_bytes(residual, comm):
            return exchange.fall_back(residual, comm, out)
        comm.ledger.picked += sum(counts)

        cut = [each.cut(residual) for each in tiles]
        indices = [chunks.largest(tile, self.k) for tile in cut]
        found = [tile.flatten(1).gather(1, index).flatten() for tile, index in zip(cut, indices, strict=True)]
        stored = torch.cat([self._store(values) for values in found])
        messages = comm.all_gather(torch.cat([chunks.pack_positions(tiles, indices), stored]))

        theirs = [chunks.unpack_positions(message[:head], tiles, self.k) for message in messages]
        sent = [self._restore(message[head:], counts, x.dtype) for message in messages]
        for number, (each, tile) in enumerate(zip(tiles, cut, strict=True)):
            each.join(tile - chunks.place(tile, theirs[comm.rank][number], sent[comm.rank][number]), residual)
            mean = chunks.mean_of_senders(tile, [t[number] for t in theirs], [s[number] for s in sent])
            each.join(mean, out)

    def _value_bytes(self, count: int) -> int:
        return int(4 * 2**self.bits) + -(-count * self.bits // 8)

    def _store(self, values: Tensor) -> Tensor:
        """What stands for each level, as float32, then the levels."""
        levels = int(2**self.bits)
        middle = values.mean()
        deviation = (values - middle).norm() / max(1, values.numel() - 1) ** 0.5
        step = torch.where(deviation > 0, RANGE * deviation / levels, 1.0)
        codes = ((values - middle) / step + levels // 2).round().clamp(0, levels - 1).long()
        sums = torch.zeros(levels, dtype=torch.float64, device=values.device).index_add_(0, codes, values.double())
        table = sums / torch.bincount(codes, minlength=levels).clamp(min=1)
        return torch.cat([as_bytes(table.float()), kernels.pack_bits(codes.to(torch.uint8), self.bits)])

    def _restore(self, stored: Tensor, counts: list[int], dtype: torch.dtype) -> list[Tensor]:
        found, at = [], 0
        for count in counts:
            part = stored[at : at + self._value_bytes(count)]
            table = part[: 4 * 2**self.bits].clone().view(torch.float32).to(dtype)
            found.append(table[kernels.unpack_bits(part[4 * 2**self.bits :], count, self.bits).long()])
            at += part.numel()
        return found

    @property
    def conserves(self) -> bool:
        return False
