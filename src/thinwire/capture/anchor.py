"""Parameters that left from one anchor, made one again: local steps as a reducer around a reducer.

All workers leave from one anchor. At an exchange the change since then goes through a reducer as a gradient would,
an outer optimizer moves the anchor by the mean change, and everybody goes on from there.

Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; Douillard et al., DiLoCo, arXiv 2311.08105. Both
recalled; every property claimed here is tested.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import memory
from thinwire.comm import Comm
from thinwire.reducer import Layout, Reducer


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
    anchor: Tensor = memory.entries(merge="mean", degree=0)  # where all workers left from
    velocity: Tensor | None = memory.entries(merge="mean", degree=0)  # the outer momentum; None without one
    dtype: torch.dtype = memory.derived()  # of the parameters, which leave from the anchor rounded to it
    inner: Any = None


@dataclass(frozen=True)
class Anchored(Reducer[Tensor, AnchorState]):
    """Parameters in, parameters out: the change since the anchor through `inner`, the anchor moved by `outer`."""

    inner: Reducer[Tensor, Any]
    outer: Outer = Outer()

    def init(self, layout: Layout, /) -> AnchorState:
        velocity = layout.zeros() if self.outer.momentum else None
        return AnchorState(layout.zeros(), velocity, layout.dtype, self.inner.init(layout))

    def reduce(self, x: Tensor, state: AnchorState, comm: Comm, out: Tensor, /) -> None:
        x.sub_(state.anchor.to(state.dtype))
        self.inner.reduce(x, state.inner, comm, out)
        self.outer.move(state.anchor, out, state.velocity)
        out.copy_(state.anchor)

    def metrics(self, state: AnchorState, /) -> dict[str, float]:
        return self.inner.metrics(state.inner)

    @property
    def conserves(self) -> bool:
        return False  # of changes it does, if `inner` does and the outer step is plain; parameters are no mass
