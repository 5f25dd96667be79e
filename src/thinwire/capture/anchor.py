"""Parameters that left from one anchor, made one again: local steps as a reducer around a reducer.

All workers leave from one anchor. At an exchange the change since then goes through a reducer as a gradient would,
an outer optimizer moves the anchor by the mean change, and everybody goes on from there.

A method that sends little leaves the anchor behind: what all workers have found out and nobody has sent is missing in
it, and gradients are those of a model many steps old. No worker knows what the others hold back, but their findings
are alike. So a worker may go on *ahead* of the anchor, by the share of its own unsent change that it expects the mean
of all to be. What was sent tells which share that is: there a worker sees its own part and the mean of all.

Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; Douillard et al., DiLoCo, arXiv 2311.08105. Both
recalled; looking ahead follows no paper that was read. Every property claimed here is tested.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import memory
from thinwire.comm import Comm
from thinwire.feedback import ErrorFeedback
from thinwire.reducer import Layout, Reducer

FOLLOWS = 0.1  # how fast a share follows what is seen in one exchange


@dataclass(frozen=True)
class Outer:
    """How the anchor follows the mean change: all the way by default, which averages the workers' parameters.

    Outer(0.7, momentum=0.9, nesterov=True) is DiLoCo's. Momentum is that of torch.optim.SGD, without dampening.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"the outer lr must lie above 0, not {self.lr}: 1 goes all the way to the mean")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"the outer momentum must lie at 0 or above and below 1, not {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov looks ahead along the momentum: give one, 0.9 say")

    def move(self, anchor: Tensor, change: Tensor, velocity: Tensor | None) -> None:
        if velocity is None:
            anchor.add_(change, alpha=self.lr)
            return
        velocity.mul_(self.momentum).add_(change)
        if self.nesterov:
            anchor.add_(change, alpha=self.lr).add_(velocity, alpha=self.lr * self.momentum)
        else:
            anchor.add_(velocity, alpha=self.lr)


@dataclass
class AnchorState:
    anchor: Tensor = memory.entries(merge="mean", degree=0)  # what all workers have in common
    velocity: Tensor | None = memory.entries(merge="mean", degree=0)  # the outer momentum; None without one
    dtype: torch.dtype = memory.derived()  # of the parameters, which leave from the anchor rounded to it
    inner: Any = None
    share: float = memory.per_world(float)  # of what this worker has not sent, by which it is ahead of the anchor

    @property
    def departure(self) -> Tensor:
        """Where this worker left from."""
        return torch.add(self.anchor, self.inner.residual, alpha=self.share) if self.share else self.anchor


@dataclass(frozen=True)
class Anchored(Reducer[Tensor, AnchorState]):
    """Parameters in, parameters out: the change since departure through `inner`, the anchor moved by `outer`.

    With `ahead`, which needs an ErrorFeedback right inside, a worker goes on from where it expects all to be.
    """

    inner: Reducer[Tensor, Any]
    outer: Outer = Outer()
    ahead: bool = False

    def __post_init__(self) -> None:
        if self.ahead and not isinstance(self.inner, ErrorFeedback):
            raise TypeError(f"ahead needs to know what was not sent: ErrorFeedback({self.inner!r}), not {self.inner!r}")
        if self.ahead and self.outer != Outer():
            raise ValueError(f"ahead expects the anchor to follow the mean change all the way, not by {self.outer!r}")

    def init(self, layout: Layout, /) -> AnchorState:
        velocity = layout.zeros() if self.outer.momentum else None
        return AnchorState(layout.zeros(), velocity, layout.dtype, self.inner.init(layout))

    def reduce(self, x: Tensor, state: AnchorState, comm: Comm, out: Tensor, /) -> None:
        x.sub_(state.departure.to(state.dtype))
        held = state.inner.residual + x if self.ahead else None
        self.inner.reduce(x, state.inner, comm, out)
        if held is not None:
            state.share = followed(state.share, held.sub_(state.inner.residual), out)
        self.outer.move(state.anchor, out, state.velocity)
        out.copy_(state.departure)

    def metrics(self, state: AnchorState, /) -> dict[str, float]:
        return self.inner.metrics(state.inner) | ({"ahead": state.share} if self.ahead else {})

    @property
    def conserves(self) -> bool:
        return False  # of changes it does, if `inner` does and the outer step is plain; parameters are no mass


def followed(share: float, sent: Tensor, mean: Tensor) -> float:
    """The share, after one more look at what this worker sent, and what all did: the slope of the one over the other.

    Entries are sent because they are large, which does not bend a slope.
    """
    own = float(sent.dot(sent))
    if own == 0:
        return share
    slope = min(max(float(sent.dot(mean)) / own, 0.0), 1.0)
    return share + FOLLOWS * (slope - share) if share else slope
