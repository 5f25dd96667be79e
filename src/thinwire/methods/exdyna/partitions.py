"""Who looks where: blocks of entries, contiguous partitions of blocks, and the rules that move blocks between them.

Parts 1 and 2 of ExDyna, apart from the method so that each rule can be read and tested by itself. All of it is
worked out by every worker from integers that all have seen, in operations that round alike everywhere.

A partition is known by its share: how many blocks it has. Partition j begins where the shares before it end.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

MEMORY = 0.8  # how much of the smoothed load stays each step: about 9 steps of counts are averaged
STEPS_SEEN = (1 + MEMORY) / (1 - MEMORY)
# A difference must be this many times what chance explains: between two neighbours, and for the heaviest of all.
SIGMAS, SIGMAS_OF_MANY = 3.0, 4.0


@dataclass(frozen=True)
class Blocks:
    """`count` blocks of `size` entries, but for the last, which takes what is left: less, or more."""

    numel: int
    count: int
    size: int

    def start(self, block: int) -> int:
        return self.numel if block >= self.count else block * self.size

    def loads(self, index: Tensor) -> list[int]:
        """How many of these positions lie in each block."""
        block = torch.div(index, self.size, rounding_mode="floor").clamp_(max=self.count - 1)
        return torch.bincount(block, minlength=self.count).tolist()


class Topology(NamedTuple):
    """How entries are cut into blocks, and which partitions come next when the loads of these are known."""

    cut: Callable[[int, int, int | None], Blocks]  # so many entries, for so many workers, into as many as are wanted
    # From shares, smoothed loads, the loads now, all picks and the blocks: the next shares and smoothed loads.
    move: Callable[[list[int], list[float], list[int], Tensor, Blocks], tuple[list[int], list[float]]]


def cut(numel: int, workers: int, wanted: int | None = None) -> Blocks:
    """`wanted` blocks or near it: no block under 32 entries, unless that left fewer than 4 for each worker.

    By default 1024, and more from 17 workers on, because a block is the smallest load that can move: with 64 for
    each worker it is under two hundredths of a fair share.
    """
    most = wanted or max(1024, 64 * workers)
    count = max(min(most, numel // 32), min(4 * workers, numel), 1)
    size = max(1, math.ceil(numel / count))
    if size > 32:
        size += -size % 32
    return Blocks(numel, max(1, math.ceil(numel / size)), size)


def fair_shares(blocks: int, workers: int) -> list[int]:
    """As equal as whole blocks allow, the first ones larger."""
    return [blocks // workers + (part < blocks % workers) for part in range(workers)]


def bounds(blocks: Blocks, shares: list[int]) -> list[int]:
    """Where the partitions begin, and where the last one ends."""
    return [blocks.start(block) for block in (0, *accumulate(shares))]


def scaled(counts: list[int], shares: list[int], loads: list[int]) -> list[float]:
    """Counts of blocks, blown up so that in each partition they add up to its load."""
    edges = [0, *accumulate(shares)]
    factors = [load / max(1, sum(counts[a:b])) for load, (a, b) in zip(loads, pairwise(edges), strict=True)]
    return [count * factor for factor, (a, b) in zip(factors, pairwise(edges)) for count in counts[a:b]]


def smoothed(loads: list[float], seen: Sequence[float]) -> list[float]:
    """The running mean of a load, which begins with the first one seen."""
    if not loads:
        return [float(count) for count in seen]
    return [MEMORY * load + (1 - MEMORY) * count for load, count in zip(loads, seen, strict=True)]


def moves(before: list[int], after: list[int]) -> int:
    """How many blocks changed hands."""
    return sum(abs(a - b) for a, b in zip(accumulate(before), accumulate(after), strict=True))


def move_pairwise(shares: list[int], loads: list[float]) -> tuple[list[int], list[float]]:
    """Between neighbours, blocks from the heavier to the lighter: half of what would make them equal.

    Their loads must differ by more than one block's, or the block would only change sides, and by more than
    chance explains in smoothed counts. The published rule asks in addition that the mean lies between the two,
    and so never moves a block of three partitions with loads 1.5, 1.0 and 0.5.
    """
    shares, loads = list(shares), list(loads)
    for left in range(len(shares) - 1):
        right = left + 1
        heavy, light = (left, right) if loads[left] > loads[right] else (right, left)
        gap, block = loads[heavy] - loads[light], loads[heavy] / shares[heavy]
        if gap <= max(block, SIGMAS * _noise(loads[heavy] + loads[light])):
            continue
        moved = min(max(1, int(gap / (4 * block))), shares[heavy] - 1)
        shares[heavy] -= moved
        shares[light] += moved
        loads[heavy] -= moved * block
        loads[light] += moved * block
    return shares, loads


def recut(shares: list[int], loads: list[float]) -> list[int]:
    """All boundaries anew, at equal sums of the blocks' smoothed loads, when that lowers the heaviest load.

    Far loads reach each other in one step, and blocks of unlike load are told apart; the price is a count for
    each block instead of one for each partition.
    """
    workers, sums = len(shares), [0.0, *accumulate(loads)]
    total = sums[-1]
    ends = [0]
    for part in range(1, workers):
        goal = total * part / workers
        end = bisect_left(sums, goal)
        if end and goal - sums[end - 1] < sums[end] - goal:
            end -= 1
        ends.append(min(max(end, ends[-1] + 1), len(loads) - workers + part))  # at least one block for each
    ends.append(len(loads))
    new = [end - start for start, end in pairwise(ends)]
    gain = _heaviest(shares, sums) - _heaviest(new, sums)
    return new if gain > SIGMAS_OF_MANY * _noise(total / workers) else shares


def _heaviest(shares: list[int], sums: list[float]) -> float:
    return max(sums[end] - sums[start] for start, end in pairwise([0, *accumulate(shares)]))


def _noise(load: float) -> float:
    """How far counts of this size, smoothed, stray if only chance moves them."""
    return math.sqrt(load / STEPS_SEEN)


def _recut(
    shares: list[int], smooth: list[float], loads: list[int], index: Tensor, blocks: Blocks
) -> tuple[list[int], list[float]]:
    # What did not fit into the slots is missing in the index, but not in the load of its partition.
    smooth = smoothed(smooth, scaled(blocks.loads(index), shares, loads))
    return recut(shares, smooth), smooth


RECUT = Topology(cut, _recut)
PAIRWISE = Topology(cut, lambda shares, smooth, loads, *_: move_pairwise(shares, smoothed(smooth, loads)))
STATIC = Topology(lambda numel, *_: Blocks(numel, numel, 1), lambda shares, smooth, *_: (shares, smooth))
