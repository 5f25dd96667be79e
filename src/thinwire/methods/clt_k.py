"""CLT-k: the workers take turns in choosing for all.

Chen et al., ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed Training,
NeurIPS 2020. The choice by turns was read in an implementation that others compare with; the filter is recalled.
The original chooses chunk by chunk in each layer; here the top k are exact, over whatever vector is handed in.

With residual m and gradient g, the leader of the step chooses the k largest of its m + g, and all average theirs
there. What was sent is subtracted from a residual that moves only by the part `beta` of each change:

    m = (1 - beta) m + beta (m + g - sent)

`beta` = 1 is error feedback. Less makes the residuals of the workers more alike, on which this method relies, and
drops 1 - beta of every gradient that is not sent at once: mass is then not conserved.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.comm.table import wire_bytes
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer, check_density, count
from thinwire.exchange import slots


@dataclass
class CLTKState:
    residual: Tensor = memory.unsent()  # m
    step: int = memory.alike(0)


@dataclass(frozen=True)
class CLTK(Reducer[Tensor, CLTKState]):
    """The `density` largest entries of one worker, another at each step; every worker sends its values there.

    It keeps its own memory, filtered by `beta`: use it without ErrorFeedback. The authors take beta = 1, and about
    0.1 for large batches (recalled).
    """

    density: float
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_density(self.density)
        if not 0 < self.beta <= 1:
            raise ValueError(f"beta must lie above 0 and at most at 1, not {self.beta}: 1 does not filter")

    def init(self, layout: Layout, /) -> CLTKState:
        return CLTKState(layout.zeros())

    def reduce(self, x: Tensor, state: CLTKState, comm: Comm, out: Tensor, /) -> None:
        m, k = state.residual, count(self.density, x.numel())
        leader, state.step = state.step % comm.world, state.step + 1
        room = slots.size(k, x.numel())
        if k == x.numel() or not self._pays(room, k, x, comm):
            kernels.accumulate(m, x)
            exchange.empty(x, out)
            return exchange.fall_back(m, comm, out)

        if comm.rank == leader:
            mine = kernels.top_k(m + x, k)
        else:  # holds the place of what comes
            mine = torch.arange(k, dtype=kernels.index_dtype(x.numel()), device=x.device)
        message = comm.broadcast(slots.fill(mine, x.numel(), room), leader)
        index = slots.read(message, x.numel())

        kept = (1 - self.beta) * m[index]
        values = m[index] + x[index]
        sent = exchange.rounded(values, comm)
        m.add_(x, alpha=self.beta)
        m[index] = kept + self.beta * (values - sent)
        exchange.empty(x, out)
        comm.ledger.picked += k
        kernels.fill_sparse(out, [(index, comm.all_mean(sent))])

    def _pays(self, room: int, k: int, x: Tensor, comm: Comm) -> bool:
        """Whether the leader's indices and all workers' values there are fewer bytes than everything."""
        values = wire_bytes("all_mean", comm.value_bytes(k, x.dtype), comm.world)
        return wire_bytes("broadcast", room, comm.world) + values <= exchange.dense_price(x, comm)

    @property
    def conserves(self) -> bool:
        return self.beta == 1
