"""Each layer the cheapest way: its gradient, its factors, or (if not `exact`) a few columns.

Factors cost in proportion to the rows of all workers, the gradient does not: the two are level where the pooled rows
reach the harmonic mean of the layer's sizes. Choosing by layer between the two is Poseidon's hybrid communication
(Zhang et al., arXiv 1706.03292). The choice follows from sizes that all workers have agreed on, so it needs no message.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.factor_reducer import FactorReducer, LayerPlan, check_options, dense_plan, factor_plan
from thinwire.core.factors import Factors
from thinwire.core.reducer import Layout, Reducer
from thinwire.exchange import factors
from thinwire.methods.dad.rank_dad import RankDAD
from thinwire.methods.dad.rank_dad_state import RankDADState

REPLAN = 0.25  # how far rows may move before the choice is made again


@dataclass
class AutoDADState:
    thin: RankDADState
    modes: list[str] = memory.per_world(list)
    rows: list[int] = memory.per_world(list)  # every worker's, when the choice was made


@dataclass(frozen=True)
class AutoDAD(FactorReducer[AutoDADState]):
    """Dense, factors or, if not `exact`, `rank` columns: by layer, whichever puts the fewest bytes on a link."""

    exact: bool = True
    rank: int = 4
    iterations: int = 1
    unroll: bool = False
    rest: Reducer[Any, Any] | None = None
    inputs: Literal["sent", "kept"] | None = None
    bits: Literal[16, 8, 4] | None = None

    def __post_init__(self) -> None:
        check_options(self.rest, self.inputs, self.bits)

    @property
    def thin(self) -> RankDAD:
        return RankDAD(self.rank, self.iterations, bits=self.bits)

    @property
    def conserves(self) -> bool:
        return self.bits is None

    def init(self, layout: Layout, /) -> AutoDADState:
        return AutoDADState(self.thin.init(layout))

    def reduce(self, local: Factors, state: AutoDADState, comm: Comm, out: Tensor, /) -> None:
        given = factors.agreed(local, comm)
        modes = self._plan(given, state, comm, out.dtype)
        thinned = [weight for weight, mode in enumerate(modes) if mode == "rank"]
        averaged = [weight for weight, mode in enumerate(modes) if mode == "dense"]
        self.thin.exchange(local, given, thinned, averaged, state.thin, comm, out)

    def _plan(self, local: Factors, state: AutoDADState, comm: Comm, working: torch.dtype) -> list[str]:
        """How each weight goes: as last time, unless its rows have moved; dense where a gradient is formed already."""
        rows = [local.rows(weight) for weight in range(len(local.shapes))]
        if not state.modes:
            state.modes, state.rows = ["dense"] * len(rows), [-1] * len(rows)
        for weight, (now, then) in enumerate(zip(rows, state.rows, strict=True)):
            if then < 0 or abs(now - then) > REPLAN * then:
                state.modes[weight], state.rows[weight] = self._cheapest(local, weight, state, comm, working), now
        # Factors cannot say what is formed already, nor what was kept back.
        modes = list(state.modes)
        for weight, kept in enumerate(state.thin.kept_back):
            if modes[weight] == "factors" and (kept or weight in local.formed):
                modes[weight] = "rank" if kept else "dense"
        return modes

    def _cheapest(self, local: Factors, weight: int, state: AutoDADState, comm: Comm, working: torch.dtype) -> str:
        dense, raw = (
            dense_plan(local, weight, comm, working).wire,
            factor_plan(local, weight, factors.in_bits(comm, self.bits)).wire,
        )
        columns = self.thin.way(local, weight, state.thin, comm, working).wire
        if not self.exact and columns < dense and 2 * columns <= raw:  # half of the bytes, or it is not worth it
            return "rank"
        return "factors" if raw < dense else "dense"

    def ways(self, local: Factors, state: AutoDADState, comm: Comm, working: torch.dtype, /) -> list[LayerPlan]:
        modes = self._plan(local, state, comm, working)
        return [
            {
                "dense": dense_plan(local, weight, comm, working),
                "factors": factor_plan(local, weight, factors.in_bits(comm, self.bits)),
                "rank": self.thin.way(local, weight, state.thin, comm, working),
            }[mode]
            for weight, mode in enumerate(modes)
        ]

    def metrics(self, state: AutoDADState, /) -> dict[str, float]:
        return self.thin.metrics(state.thin)
