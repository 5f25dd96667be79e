"""Top-k: the k entries largest in magnitude, each worker choosing its own.

Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017. Two readings are in
use and give different models; both conserve mass:

- `agree=False`: each worker sends its own pairs of index and value, which are added up.
- `agree=True`: the workers' indices are united, and every worker contributes its value at each of them.
"""

from dataclasses import dataclass, field

from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core.reducer import Layout, Reducer, check_density, count
from thinwire.exchange import MessageRoom


@dataclass
class TopKState:
    room: MessageRoom = field(default_factory=MessageRoom)


@dataclass(frozen=True)
class TopK(Reducer[Tensor, TopKState]):
    """The largest entries of each worker, a share `density` of all.

    Each worker sends its own pairs of position and value. With `agree` it sends its values at all positions that any
    worker has chosen.
    """

    density: float
    agree: bool = False

    def __post_init__(self) -> None:
        check_density(self.density)

    def init(self, layout: Layout, /) -> TopKState:
        return TopKState()

    def reduce(self, x: Tensor, state: TopKState, comm: Comm, out: Tensor, /) -> None:
        index = kernels.top_k(x, count(self.density, x.numel()))
        if self.agree:
            exchange.gather_union(x, index, comm, out, state.room)
        else:
            exchange.gather_pairs(x, index, comm, out, state.room)

    @property
    def needs_memory(self) -> bool:
        return True
