"""DeMo: the fast components of each worker's momentum, found by a cosine transform of its chunks.

Peng, Quesnelle and Kingma, DeMo: Decoupled Momentum Optimization, arXiv 2411.19870, as its public code does it
(bloc97/DeMo, demo.py, read). Per step, on each worker:

    m = decay m + g; c = the k largest of each chunk of the transform of m; m = m - inverse(c);
    out = sign(inverse(mean of all c, each over those who sent it))

What differs: the momentum holds gradients, not gradients times the learning rate at their time, which under a constant
rate and the sign is the same; positions take as many bits as a chunk needs, not 64; tensors of more than two dimensions
are matrices; all tensors go in one message. Weight decay and the step belong to the optimizer: SGD without momentum,
with the learning rate of a sign method. Inverse transforms are matrix products, which all workers must do alike:
machines of one kind.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire import exchange
from thinwire.comm import Comm
from thinwire.comm.codec import as_bytes
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer
from thinwire.exchange import chunks
from thinwire.exchange.chunks import Tiles


@dataclass
class DeMoState:
    tiles: list[Tiles] = memory.derived()
    momentum: Tensor = memory.unsent()  # m: what was handed in, forgotten slowly, and not sent
    unit: float = memory.alike(1.0, degree=1)  # what 1 in gradient units is now, under a loss scale


@dataclass(frozen=True)
class DeMo(Reducer[Tensor, DeMoState]):
    """The `k` largest cosine components of each `chunk` x `chunk` tile of the momentum, averaged over their senders.

    The momentum is what `decay` leaves of all that was not sent. With `sign` the result is that of a sign method, as
    in the authors' optimizer: use SGD without momentum and a sign method's learning rate.
    """

    k: int = 32
    chunk: int = 64
    decay: float = 0.999
    sign: bool = True

    def __post_init__(self) -> None:
        if self.k < 1 or self.chunk < 1:
            raise ValueError(f"k and chunk must be 1 or more, not {self.k} and {self.chunk}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must lie between 0 and 1, not {self.decay}")

    def init(self, layout: Layout, /) -> DeMoState:
        return DeMoState(chunks.tiles_of(layout, self.chunk), layout.zeros())

    def reduce(self, x: Tensor, state: DeMoState, comm: Comm, out: Tensor, /) -> None:
        momentum, tiles = state.momentum, state.tiles
        momentum.mul_(self.decay).add_(x)
        exchange.empty(x, out)
        picks = sum(each.picks(self.k) for each in tiles)
        size = chunks.position_bytes(tiles, self.k) + comm.value_bytes(picks, x.dtype)
        if not picks or size > exchange.dense_bytes(momentum, comm):
            exchange.fall_back(momentum, comm, out)
        else:
            self._exchange(momentum, tiles, comm, out)
        if self.sign:
            out.sign_().mul_(state.unit)  # a GradScaler divides by its scale what comes out

    def _exchange(self, momentum: Tensor, tiles: list[Tiles], comm: Comm, out: Tensor) -> None:
        waves = [transformed(each.cut(momentum)) for each in tiles]
        indices = [chunks.largest(wave, self.k) for wave in waves]
        found = [wave.flatten(1).gather(1, index).flatten() for wave, index in zip(waves, indices, strict=True)]
        values = exchange.rounded(torch.cat(found), comm)
        comm.ledger.picked += values.numel()
        stored = as_bytes(values) if comm.carries is None else comm.carries.encode(values)
        messages = comm.all_gather(torch.cat([chunks.pack_positions(tiles, indices), stored]))

        counts = [each.picks(self.k) for each in tiles]
        head = messages.shape[1] - stored.numel()
        theirs = [chunks.unpack_positions(message[:head], tiles, self.k) for message in messages]
        sent = [self._values(message[head:], values, comm).split(counts) for message in messages]
        for number, (each, wave) in enumerate(zip(tiles, waves, strict=True)):
            own = chunks.place(wave, theirs[comm.rank][number], sent[comm.rank][number])
            each.join(each.cut(momentum) - restored(own), momentum)
            mean = chunks.mean_of_senders(wave, [t[number] for t in theirs], [s[number] for s in sent])
            each.join(restored(mean), out)

    def _values(self, stored: Tensor, like: Tensor, comm: Comm) -> Tensor:
        if comm.carries is None:
            return stored.clone().view(like.dtype)
        return comm.carries.decode(stored, like.numel(), like.dtype)

    @property
    def conserves(self) -> bool:
        return False


@lru_cache(maxsize=64)
def cosines(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal cosine transform (type II) of n entries, as a matrix."""
    k, i = torch.arange(n, dtype=torch.float64).unsqueeze(1), torch.arange(n, dtype=torch.float64)
    waves = torch.cos(math.pi * (2 * i + 1) * k / (2 * n)) * math.sqrt(2 / n)
    waves[0] *= math.sqrt(0.5)
    return waves.to(device, dtype)


def transformed(tile: Tensor) -> Tensor:
    """The cosine transform of each of [chunks, high, wide], along both sides."""
    high, wide = (cosines(n, tile.dtype, tile.device) for n in tile.shape[1:])
    return high @ tile @ wide.T


def restored(waves: Tensor) -> Tensor:
    high, wide = (cosines(n, waves.dtype, waves.device) for n in waves.shape[1:])
    return high.T @ waves @ wide
