"""The largest entries of each chunk of a matrix, with positions in as few bits as the chunk's size needs.

Every chunk sends as many: messages have one length that all know, and a position within a chunk of 64 x 64 is 12 bits.
Chunks are tiles of a matrix. Their sides are the largest divisors of the matrix's that are not above `side`, as in the
public code of DeMo and of SparseLoCo: no chunk is cut off.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.reducer import Layout


@dataclass(frozen=True)
class Tiles:
    """How one parameter, which lies at `start` of a flat vector, is cut into down x across chunks of high x wide."""

    start: int
    down: int
    high: int
    across: int
    wide: int

    @property
    def chunks(self) -> int:
        return self.down * self.across

    @property
    def entries(self) -> int:
        """Of one chunk."""
        return self.high * self.wide

    @property
    def bits(self) -> int:
        """Of a position."""
        return (self.entries - 1).bit_length()

    def picks(self, k: int) -> int:
        """How many entries all its chunks send."""
        return self.chunks * min(k, self.entries)

    def cut(self, flat: Tensor) -> Tensor:
        """[chunks, high, wide]."""
        mine = flat[self.start : self.start + self.chunks * self.entries]
        tiled = mine.view(self.down, self.high, self.across, self.wide)
        return tiled.transpose(1, 2).reshape(self.chunks, self.high, self.wide)

    def join(self, chunks: Tensor, flat: Tensor) -> None:
        """Write chunks back to where they were cut from."""
        mine = flat[self.start : self.start + self.chunks * self.entries]
        tiled = chunks.view(self.down, self.across, self.high, self.wide).transpose(1, 2)
        mine.view(self.down, self.high, self.across, self.wide).copy_(tiled)


def tiles_of(layout: Layout, side: int) -> list[Tiles]:
    """Vectors are cut into rows; what has more than two dimensions is a matrix with the first one's rows."""
    found, start = [], 0
    for shape, size in zip(layout.shapes, layout.sizes, strict=True):
        if size:
            rows = shape[0] if len(shape) > 1 else 1
            high, wide = _side(rows, side), _side(size // rows, side)
            found.append(Tiles(start, rows // high, high, size // rows // wide, wide))
        start += size
    return found


def _side(length: int, most: int) -> int:
    return next(side for side in range(min(length, most), 0, -1) if length % side == 0)


def largest(chunks: Tensor, k: int) -> Tensor:
    """The positions of the k largest magnitudes of each chunk, sorted: [chunks, k]."""
    flat = chunks.flatten(1)
    return flat.abs().topk(min(k, flat.shape[1]), dim=1).indices.sort(1).values


def place(chunks: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Chunks like these that are zero but for some entries."""
    return torch.zeros_like(chunks).flatten(1).scatter_(1, index, values.view_as(index)).view_as(chunks)


def position_bytes(tiles: Sequence[Tiles], k: int) -> int:
    return sum(-(-each.picks(k) * each.bits // 8) for each in tiles)


def pack_positions(tiles: Sequence[Tiles], indices: Sequence[Tensor]) -> Tensor:
    packed = [kernels.pack_bits(index.flatten(), each.bits) for each, index in zip(tiles, indices, strict=True)]
    return torch.cat(packed)


def unpack_positions(message: Tensor, tiles: Sequence[Tiles], k: int) -> list[Tensor]:
    found, at = [], 0
    for each in tiles:
        size = -(-each.picks(k) * each.bits // 8)
        codes = kernels.unpack_bits(message[at : at + size], each.picks(k), each.bits)
        found.append(codes.long().view(each.chunks, -1))
        at += size
    return found


def mean_of_senders(chunks: Tensor, indices: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Each entry averaged over the workers that sent it, added up in the order of ranks."""
    total, senders = torch.zeros_like(chunks).flatten(1), torch.zeros_like(chunks).flatten(1)
    for index, sent in zip(indices, values, strict=True):
        total.scatter_add_(1, index, sent.view_as(index))
        senders.scatter_add_(1, index, torch.ones_like(index, dtype=total.dtype))
    return total.div_(senders.clamp_(min=1)).view_as(chunks)
