"""Adam before a method: what travels is each worker's own update."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer
from thinwire.wrappers.feedback import check_takes_gradients


@dataclass
class AdamState:
    first: Tensor = memory.averaged()  # m
    second: Tensor = memory.averaged(degree=2)  # v
    step: int = memory.alike(0)
    unit: float = memory.alike(1.0, degree=1)  # what 1 in gradient units is now, under a loss scale
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
