"""Hard threshold: every entry above a magnitude that never changes.

Sahu, Dutta, Abdelmoniem, Banerjee, Canini and Kalnis, Rethinking gradient sparsification as total error
minimization, NeurIPS 2021. The rule for the threshold was read in an implementation that others compare with.

The density is whatever comes out: it follows the scale of the gradients. The default rule suits entries of
about a thousandth, so tune the threshold to the model, or take a method that controls its density.
"""

import math
from dataclasses import dataclass, field

from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer, check_density, count
from thinwire.exchange import MessageRoom


@dataclass
class ThresholdState:
    unit: float = memory.alike(1.0, degree=1)  # what 1 in gradient units is now, under a loss scale
    room: MessageRoom = field(default_factory=MessageRoom)


@dataclass(frozen=True)
class Threshold(Reducer[Tensor, ThresholdState]):
    """The entries of magnitude `threshold` or more.

    With `density` instead, the threshold is 1 / (2 sqrt k), where k is that share of the entries.

    Each worker sends its own pairs of position and value. With `agree` it sends its values at all positions that any
    worker has chosen.
    """

    threshold: float | None = None
    density: float | None = None
    agree: bool = False

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.density is None):
            raise ValueError("give either a threshold or the density from which to derive one")
        if self.density is not None:
            check_density(self.density)
        if self.threshold is not None and not 0 < self.threshold < math.inf:
            raise ValueError(f"threshold must be a magnitude above 0, not {self.threshold}")

    def init(self, layout: Layout, /) -> ThresholdState:
        return ThresholdState()

    def reduce(self, x: Tensor, state: ThresholdState, comm: Comm, out: Tensor, /) -> None:
        index = kernels.select(x, self._magnitude(x.numel()) * state.unit)
        if self.agree:
            exchange.gather_union(x, index, comm, out, state.room)
        else:
            exchange.gather_pairs(x, index, comm, out, state.room)

    def _magnitude(self, numel: int) -> float:
        if self.threshold is not None:
            return self.threshold
        assert self.density is not None  # __post_init__ saw to it
        return 1 / (2 * math.sqrt(max(1, count(self.density, numel))))

    @property
    def needs_memory(self) -> bool:
        return True
