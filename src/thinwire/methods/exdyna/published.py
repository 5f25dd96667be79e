"""What the authors' code decides otherwise than ExDyna here does, its mistakes included.

Kept to be compared with, and not to be trained with: `ExDyna.official(density)`. Part by part:

1. blocks are cut so that the last one may be far larger than the others;
2. a block moves only between neighbours of which one lies above the mean and the other below it;
3. a worker sends however much it finds, and one entry by force where it finds nothing;
4. the threshold starts from a formula, whatever the gradients are, and moves by half a per cent a step. Near the target
   the test reads x > 0 where x > 1 was meant, so that densities settle some six per cent below it.
"""

import math

from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.exchange import bytes as wire
from thinwire.methods.exdyna import partitions
from thinwire.methods.exdyna.partitions import Blocks, Topology
from thinwire.methods.exdyna.state import ExDynaState, Report
from thinwire.methods.exdyna.thresholds import Control


def cut(numel: int, workers: int, wanted: int | None = None) -> Blocks:
    """1024 blocks of a multiple of 32 entries, the last one with all the rest: up to 32767 entries more.

    Under 32768 entries these blocks are empty and the authors' code fails: there the cut is ours.
    """
    size = numel // 1024 // 32 * 32
    return Blocks(numel, 1024, size) if size and workers <= 1024 else partitions.cut(numel, workers)


def move(shares: list[int], picks: list[int], blocks: Blocks) -> list[int]:
    """One block between neighbours if one of them is 5 % above the mean and the other 5 % below it.

    Sweeps from the left, with the mean and a block's load rounded down, and leaves no partition less than a
    quarter of its fair share.
    """
    shares, picks, workers = list(shares), list(picks), len(shares)
    high, low, fewest = 1.05, 0.95238, blocks.count / (4 * workers)
    mean, block = sum(picks) // workers, blocks.size * sum(picks) // blocks.numel
    for left in range(workers - 1 if mean else 0):
        right = left + 1
        for giver, taker in ((left, right), (right, left)):
            above, below = picks[giver] / mean > high, picks[taker] / mean < low
            if above and below and shares[giver] - 1 >= fewest:
                shares[giver] -= 1
                shares[taker] += 1
                picks[giver] -= block
                picks[taker] += block
    return shares


TOPOLOGY = Topology(cut, lambda shares, smooth, loads, index, blocks: (move(shares, loads, blocks), smooth))


def scale(control: Control, sent: int, target: int) -> None:
    """Half a per cent at a time, an eighth of one within ten per cent of the target."""
    assert control.threshold is not None
    x = sent / target
    if x > 1.1:
        factor = 1.005
    elif x > 0.909:
        factor = 1.00125 if x > 0 else 0.9987
    else:
        factor = 0.995
    control.set(control.threshold * factor)


class PublishedControl:
    """In the place of `picks.FastControl`."""

    def begin(self, state: ExDynaState) -> None:
        """The first threshold is a constant: it is set before the first step, so that it follows the loss scale."""
        state.control.set(1 / (2 * math.sqrt(max(1, state.target))))

    def measure(self, x: Tensor, density: float, comm: Comm) -> list[float]:
        return []

    def start(self, state: ExDynaState, measured: list[float]) -> None:
        self.begin(state)

    def pick(self, x: Tensor, state: ExDynaState, low: int, high: int, most: int, density: float) -> Report:
        assert state.control.threshold is not None
        index = kernels.select(x, state.control.threshold, low, high)
        if not index.numel() and high > low:
            index = index.new_tensor([low + state.step % (high - low)])
        return Report(index.numel(), 0, 0.0, index)

    def tell(self, mine: Report, state: ExDynaState, size: int, comm: Comm) -> list[Report]:
        messages = exchange.gather_bytes(wire.encode_index(mine.index, state.numel), comm, state.room)
        assert messages is not None  # there was no limit to exceed
        indices = [wire.decode_index(message, state.numel) for message in messages]
        return [Report(index.numel(), 0, 0.0, index) for index in indices]

    def is_flood(self, above: int, state: ExDynaState) -> bool:
        return False

    def scale(self, state: ExDynaState, reports: list[Report], room: int) -> None:
        scale(state.control, sum(state.picks), state.target)
