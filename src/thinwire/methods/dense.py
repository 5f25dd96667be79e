"""Everything, exactly: the baseline."""

from dataclasses import dataclass

from torch import Tensor

from thinwire import exchange
from thinwire.comm import Comm
from thinwire.core.reducer import Layout, Reducer


@dataclass(frozen=True)
class Dense(Reducer[Tensor, None]):
    """The mean of all gradients, as DDP computes it: every entry, every step."""

    def init(self, layout: Layout, /) -> None:
        return None

    def reduce(self, x: Tensor, state: None, comm: Comm, out: Tensor, /) -> None:
        exchange.dense(x, comm, out)
