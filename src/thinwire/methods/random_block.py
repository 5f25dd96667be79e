"""Random block: one contiguous window of the gradient, at a place drawn anew each step.

Foroutan Eghlidi and Jaggi, Sparse Communication for Training Deep Networks, arXiv 2009.09271. Of the paper the
abstract was read; the rules below are derived from it and from public implementations, and every property
claimed here is tested.

The window is circular: each entry is in it with probability k/n exactly, the first and the last included. A
window is one or two slices, so nothing is gathered, scattered or sorted, and no index is sent.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire import exchange
from thinwire.comm import Comm
from thinwire.core.draws import group_key, mix64
from thinwire.core.reducer import Layout, Reducer, check_density, count
from thinwire.methods.random_k import DrawState, sends_all


@dataclass(frozen=True)
class RandomBlock(Reducer[Tensor, DrawState]):
    """A window that holds a `density` of the entries, at a new random place each step.

    With `agree` all workers share the window and average it: p workers then do what one would on the mean
    gradient. Without, each has its own, and overlapping windows add up. `order="round_robin"` lets the window
    advance by its own length instead, so that no entry waits for more than ceil(n/k) steps. `rescale` makes
    the result an unbiased estimate, to be used without memory. Without either, the mean step is the dense one times
    the density: slow, and stable at the dense learning rate. With error feedback the stable learning rate
    shrinks in proportion to the density.
    """

    density: float
    agree: bool = True
    order: Literal["random", "round_robin"] = "random"
    rescale: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.order not in ("random", "round_robin"):
            raise ValueError(f"order must be 'random' or 'round_robin', not {self.order!r}")
        if self.rescale and self.order != "random":
            raise ValueError("rescale makes a random window unbiased; one that goes round in order is not random")

    def init(self, layout: Layout, /) -> DrawState:
        return DrawState(group_key(layout))

    def reduce(self, x: Tensor, state: DrawState, comm: Comm, out: Tensor, /) -> None:
        n, k, step = x.numel(), count(self.density, x.numel()), state.next()
        if sends_all(x, k, self.agree, comm, out):
            return

        def window(vector: Tensor, rank: int = 0) -> list[Tensor]:
            start = self._start(step, state.group, rank, n, k)
            return [vector[start : start + k], vector[: max(0, start + k - n)]]

        mine = window(x, comm.rank)
        values = exchange.rounded(torch.cat(mine), comm)
        comm.ledger.picked += k
        _add(mine, values, -1.0)

        unbias = n / k if self.rescale else 1.0
        if self.agree:
            mean, rest = exchange.mean_of_rounded(values, comm)
            sent = [mean]
            if rest is not None:
                _add(mine, rest, 1.0)
        else:
            sent = list(comm.all_gather(values))
        out.zero_()
        for rank, part in enumerate(sent):
            _add(window(out, rank), part, unbias / len(sent))

    def _start(self, step: int, group: int, rank: int, n: int, k: int) -> int:
        if self.order == "round_robin":
            blocks = step if self.agree else step + rank  # own windows lie side by side
            return (mix64(self.seed, group) + blocks * k) % n
        return mix64(self.seed, step, group, *(() if self.agree else (rank,))) % n

    @property
    def conserves(self) -> bool:
        return not self.rescale


def _add(window: list[Tensor], values: Tensor, scale: float) -> None:
    for view, part in zip(window, values.split([len(view) for view in window]), strict=True):
        view.add_(part, alpha=scale)
