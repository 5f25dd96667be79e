"""Variance-based compression with Strom's quanta: an entry must be both loud and unambiguous.

Tsuzuku, Imachi and Akiba (arXiv 1802.06058), their hybrid; recalled, like the method itself (see `variance`). For
each entry, with r and v as there:

    if |r| > tau and r^2 > alpha v: send the sign; v = max(v - 2 |r| tau + tau^2, 0); r -= sign(r) tau
    else: v *= zeta

The correction of v takes |r| from before the subtraction: then r^2 and v lose the same amount, so that what is left
is as unambiguous as before. Whether the paper means that or |r| from after it is not known here.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Moments, Reducer
from thinwire.exchange import MessageRoom
from thinwire.methods.strom import check_quantum, send_quanta
from thinwire.methods.variance.variance import check_noise


@dataclass
class VarianceStromState:
    r: Tensor = memory.unsent()  # gradients that were not sent yet
    v: Tensor = memory.summed(degree=2)  # their noise
    unit: float = memory.alike(1.0, degree=1)  # what 1 in gradient units is now, under a loss scale
    room: MessageRoom = field(default_factory=MessageRoom)


@dataclass(frozen=True)
class VarianceStrom(Reducer[Moments, VarianceStromState]):
    """Sends plus or minus `tau` for each entry whose unsent gradients add up to more, clearly above their noise.

    Clearly above is as in `Variance`: r^2 > `alpha` v. Tune `tau` to the size of the gradients.
    """

    wants: ClassVar[type] = Moments
    alpha: float = 2.0
    zeta: float = 0.999
    tau: float = 0.1

    def __post_init__(self) -> None:
        check_quantum(self.tau)
        check_noise(self.alpha, self.zeta)

    def init(self, layout: Layout, /) -> VarianceStromState:
        return VarianceStromState(layout.zeros(), layout.zeros())

    def reduce(self, local: Moments, state: VarianceStromState, comm: Comm, out: Tensor, /) -> None:
        r, v, quantum = state.r, state.v, self.tau * state.unit
        sure = kernels.variance_step(r, v, local.mean, local.square, self.alpha, self.zeta)
        exchange.empty(local.mean, out)
        loud = r[sure].abs() > quantum
        quiet, index = sure[~loud], sure[loud]
        v[quiet] *= self.zeta
        v[index] = (v[index] - 2 * quantum * r[index].abs() + quantum**2).clamp_(min=0)
        send_quanta(r, index, quantum, comm, out, state.room)
