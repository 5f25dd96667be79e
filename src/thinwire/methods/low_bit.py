"""LowBit: every entry of the matrices in 1 to 8 bits, coded by the workers and again by the owners of the means.

Dense codes of few bits with feedback at both ends. The parts are known: levels for normal entries (Max, Quantizing for
Minimum Distortion, 1960; recalled), error feedback on workers and on a server (Tang, Lian, Yu, Zhang and Liu,
DoubleSqueeze, ICML 2019; recalled), owners of parts in place of a server as in a reduce-scatter. What is here in
particular: a scale of 16 bits for every block, fitted by least squares, so that what a code leaves of a block is always
smaller than the block.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.memory import Owned
from thinwire.core.reducer import Layout, Reducer

Spans = tuple[tuple[int, int], ...]


@dataclass
class LowBitState:
    spans: Spans = memory.derived()  # of the matrices, each [start, stop)
    vectors: Tensor = memory.derived()  # the positions of all others
    owned: Owned = field(kw_only=True)


@dataclass(frozen=True)
class LowBit(Reducer[Tensor, LowBitState]):
    """Every entry in `bits` (1, 1.6, 2, 3, 4 or 8), with one scale for each `block` entries of a tensor.

    1.6 bits are three levels, five entries to a byte. Tensors with fewer than two dimensions or fewer than `smallest`
    entries are few, and are sent whole. With `two_way` a link carries the coded gradient twice, however many workers
    there are, and what the owner of a part rounds away is kept by the owner; without, all workers send to all.
    For use under ErrorFeedback, and on what local steps changed: an adaptive optimizer fed with coded gradients learns
    little.
    """

    bits: int | float = 2
    block: int = 512
    two_way: bool = True
    smallest: int = 1024

    def __post_init__(self) -> None:
        if self.bits not in kernels.BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, kernels.BITS))}, not {self.bits}")
        if not 1 <= self.block <= kernels.LARGEST_BLOCK:
            raise ValueError(f"block must lie between 1 and {kernels.LARGEST_BLOCK} entries, not {self.block}")
        if self.smallest < 0:
            raise ValueError(f"smallest must be a number of entries, not {self.smallest}")

    def init(self, layout: Layout, /) -> LowBitState:
        spans, vectors, start = [], [torch.empty(0, dtype=torch.int64)], 0
        for shape, size in zip(layout.shapes, layout.sizes, strict=True):
            if len(shape) < 2 or size < self.smallest:
                vectors.append(torch.arange(start, start + size))
            elif size:
                spans.append((start, start + size))
            start += size
        return LowBitState(tuple(spans), torch.cat(vectors).to(layout.device), owned=Owned(layout.numel))

    def reduce(self, x: Tensor, state: LowBitState, comm: Comm, out: Tensor, /) -> None:
        taken = exchange.take(x, state.vectors, comm)
        vectors = comm.all_mean_later(taken) if state.vectors.numel() else lambda: taken
        if state.spans:
            code = BlockCode(self.bits, self.block, state.spans)
            if self.two_way:
                exchange.mean_two_ways(x, code, comm, out, state.owned)
            else:
                exchange.gather_coded(x, code, comm, out)
        out[state.vectors] = vectors()

    @property
    def needs_memory(self) -> bool:
        return True


@dataclass(frozen=True)
class BlockCode:
    """Blocks of a few bits an entry that cover some spans of a vector, and say nothing about the rest of it."""

    bits: float
    block: int
    spans: Spans

    def _blocks(self, start: int, stop: int, device: torch.device) -> kernels.Blocks:
        cut = ((max(a, start) - start, min(b, stop) - start) for a, b in self.spans if a < stop and b > start)
        return kernels.blocks_of(tuple(cut), self.bits, self.block, device)

    def nbytes(self, start: int, stop: int) -> int:
        return self._blocks(start, stop, torch.device("cpu")).nbytes

    def encode(self, x: Tensor, start: int, message: Tensor) -> None:
        kernels.encode_blocks(x, self._blocks(start, start + x.numel(), x.device), message)

    def decode(self, messages: Tensor, start: int, out: Tensor, scale: float, add: bool) -> None:
        kernels.decode_blocks(messages, self._blocks(start, start + out.numel(), out.device), out, scale, add)
