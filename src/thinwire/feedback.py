"""What was not sent is not lost: memories that stand before a method."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import exchange, kernels, memory
from thinwire.comm import Comm
from thinwire.reducer import Layout, Reducer

_PIECE = 2**16  # entries looked at at once, so that what is worked out on the way stays in the cache


@dataclass
class FeedbackState:
    residual: Tensor = memory.entries()  # e: all that was ever handed in and is not sent yet
    inner: Any = None


@dataclass(frozen=True)
class ErrorFeedback(Reducer[Tensor, FeedbackState]):
    """Adds what was not sent to the next gradient, so that every method's error is made good later.

    The residual is this worker's own compression error, in gradient units: no learning rate inside.
    `decay` below 1 forgets it slowly, and then mass is not conserved. Seide et al., Interspeech 2014;
    Karimireddy et al., ICML 2019.
    """

    inner: Reducer[Tensor, Any]
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must lie above 0 and at most at 1, not {self.decay}: 1 keeps all of the residual")
        check_takes_gradients(self.inner, "ErrorFeedback")

    def init(self, layout: Layout, /) -> FeedbackState:
        return FeedbackState(layout.zeros(), self.inner.init(layout))

    def reduce(self, x: Tensor, state: FeedbackState, comm: Comm, out: Tensor, /) -> None:
        if self.decay != 1:
            state.residual.mul_(self.decay)
        kernels.accumulate(state.residual, x)
        exchange.empty(x, out)
        self.inner.reduce(state.residual, state.inner, comm, out)

    def metrics(self, state: FeedbackState, /) -> dict[str, float]:
        return self.inner.metrics(state.inner)

    @property
    def conserves(self) -> bool:
        return self.decay == 1 and self.inner.conserves


@dataclass
class MomentumState:
    velocity: Tensor = memory.entries(merge="mean")  # u
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


@dataclass
class AdamState:
    first: Tensor = memory.entries(merge="mean")  # m
    second: Tensor = memory.entries(merge="mean", degree=2)  # v
    step: int = memory.shared(0)
    unit: float = memory.shared(1.0, degree=1)  # what 1 in gradient units is now, under a loss scale
    inner: Any = None


@dataclass(frozen=True)
class Adam(Reducer[Tensor, AdamState]):
    """Adam before the method: each worker turns its gradient into its own Adam update and hands that on.

    Plain SGD applies the result, with Adam's learning rate (and, as in AdamW, its weight decay). A residual then
    holds updates that were not made. Under AdamW it would hold gradients, which arrive in bursts that Adam's
    scaling was not made for. Each worker scales by its own second moment, which is noisier than that of the
    mean gradient, so updates come out somewhat smaller. Kingma and Ba, ICLR 2015.

    Gradients are not conserved, updates are: sum of all updates = sum of results + residual.
    """

    inner: Reducer[Tensor, Any]
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, not {self.betas}")
        if not self.eps > 0:
            raise ValueError(f"eps must be above 0, not {self.eps}")
        check_takes_gradients(self.inner, "Adam")

    def init(self, layout: Layout, /) -> AdamState:
        return AdamState(layout.zeros(), layout.zeros(), inner=self.inner.init(layout))

    def reduce(self, x: Tensor, state: AdamState, comm: Comm, out: Tensor, /) -> None:
        state.step += 1
        first_beta, second_beta = self.betas
        state.first.lerp_(x, 1 - first_beta)
        state.second.mul_(second_beta).addcmul_(x, x, value=1 - second_beta)

        # An update has no unit. It is handed on in the unit of gradients, so that a loss scale comes out again.
        torch.sqrt(state.second, out=x)
        x.div_(math.sqrt(1 - second_beta**state.step)).add_(self.eps * state.unit)
        torch.div(state.first, x, out=x)
        x.mul_(state.unit / (1 - first_beta**state.step))
        self.inner.reduce(x, state.inner, comm, out)

    def metrics(self, state: AdamState, /) -> dict[str, float]:
        return self.inner.metrics(state.inner)

    @property
    def conserves(self) -> bool:
        return False


def check_takes_gradients(inner: Reducer[Any, Any], outer: str) -> None:
    if inner.wants is not Tensor:
        wanted = inner.wants.__name__
        raise TypeError(f"{outer} hands on gradients, and {type(inner).__name__} wants {wanted}: use it alone")
