"""What was not sent is not lost: memories that stand before a method."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer


@dataclass
class FeedbackState:
    residual: Tensor = memory.unsent()  # e: all that was ever handed in and is not sent yet
    inner: Any = None


@dataclass(frozen=True)
class ErrorFeedback(Reducer[Tensor, FeedbackState]):
    """Adds what was not sent to the next gradient, so that every method's error is made good later.

    The residual is this worker's own compression error, in units of the gradient, so no learning rate is in it.
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


def check_takes_gradients(inner: Reducer[Any, Any], outer: str) -> None:
    if inner.wants is not Tensor:
        wanted = inner.wants.__name__
        raise TypeError(f"{outer} hands on gradients, and {type(inner).__name__} wants {wanted}: use it alone")
