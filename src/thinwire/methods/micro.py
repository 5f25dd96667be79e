"""MiCRO: ExDyna with partitions that never move.

Yoon and Oh, MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN Training,
HiPC 2023. The rules were read in the authors' code; its threshold scaling has the same mistake as ExDyna's, which
`control="official"` reproduces.

The entries are cut once into as many equal contiguous partitions as there are workers, which look at them in turn.
Where layers differ in magnitude the fullest partition decides how many slots every worker fills.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from thinwire.comm import Comm
from thinwire.core.reducer import Layout, Reducer
from thinwire.methods.exdyna.method import ExDyna
from thinwire.methods.exdyna.state import ExDynaState


@dataclass(frozen=True)
class MiCRO(Reducer[Tensor, ExDynaState]):
    """A `density` of the entries, each worker choosing in an equal part; `control` scales the threshold as ExDyna's."""

    density: float
    control: Literal["fast", "official"] = "fast"

    def __post_init__(self) -> None:
        self._exdyna()

    def _exdyna(self) -> ExDyna:
        return ExDyna(self.density, topology="static", control=self.control)

    def init(self, layout: Layout, /) -> ExDynaState:
        return self._exdyna().init(layout)

    def reduce(self, x: Tensor, state: ExDynaState, comm: Comm, out: Tensor, /) -> None:
        self._exdyna().reduce(x, state, comm, out)

    def metrics(self, state: ExDynaState, /) -> dict[str, float]:
        return self._exdyna().metrics(state)

    @property
    def needs_memory(self) -> bool:
        return True
