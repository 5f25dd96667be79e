"""Momentum before a method, with the entries that had waited masked."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer
from thinwire.wrappers.feedback import ErrorFeedback, check_takes_gradients

_PIECE = 2**16  # entries looked at at once, so that what is worked out on the way stays in the cache


@dataclass
class MomentumState:
    velocity: Tensor = memory.averaged()  # u
    waited: Tensor = memory.derived()  # room for what was there before a step; empty without masking
    inner: Any = None


@dataclass(frozen=True)
class Momentum(Reducer[Tensor, MomentumState]):
    """Momentum before the method: u = mu u + g on each worker, and u is what is handed on.

    The optimizer that applies the result has no momentum of its own. With `masking` the velocity is forgotten
    where an entry that had waited was sent, since it points where the model was when it was picked up. This is
    the correction of deep gradient compression (Lin et al., ICLR 2018, recalled) but for one thing: an entry
    that is sent every step is never stale and keeps its momentum, so at density 1 this is SGD with momentum.
    Masking looks at an ErrorFeedback right inside; with anything between the two, nothing is masked.

    Gradients are not conserved, velocities are: sum of all u = sum of results + residual.
    """

    inner: Reducer[Tensor, Any]
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie between 0 and 1, not {self.momentum}")
        check_takes_gradients(self.inner, "Momentum")

    def init(self, layout: Layout, /) -> MomentumState:
        room = layout.numel if self._masks else 0
        waited = torch.empty(room, dtype=torch.bfloat16, device=layout.device)  # roughly is enough
        return MomentumState(layout.zeros(), waited, self.inner.init(layout))

    def reduce(self, x: Tensor, state: MomentumState, comm: Comm, out: Tensor, /) -> None:
        if self.nesterov:
            state.velocity.add_(x).mul_(self.momentum)
            x.add_(state.velocity)
        else:
            state.velocity.mul_(self.momentum).add_(x)
            x.copy_(state.velocity)
        if not self._masks:
            return self.inner.reduce(x, state.inner, comm, out)
        state.waited.copy_(state.inner.residual)
        self.inner.reduce(x, state.inner, comm, out)
        vectors = (state.velocity, state.waited, state.inner.residual)
        for velocity, waited, left in zip(*(v.split(_PIECE) for v in vectors), strict=True):
            # Less than a 64th of what waited is left: it was sent, in full or rounded to the wire's precision.
            velocity.masked_fill_(left.abs().mul_(64) < waited.abs_(), 0)

    @property
    def _masks(self) -> bool:
        return self.masking and isinstance(self.inner, ErrorFeedback)

    def metrics(self, state: MomentumState, /) -> dict[str, float]:
        return self.inner.metrics(state.inner)

    @property
    def conserves(self) -> bool:
        return False
