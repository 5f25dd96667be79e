"""Strom's threshold: a quantum of fixed size, with its sign, for each entry that has gathered more than that.

Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015 (recalled). For each
entry: r += gradient; if |r| > tau, send the sign, which stands for a quantum of tau, and keep the rest in r.
"""

import math
from dataclasses import dataclass, field

from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer
from thinwire.exchange import MessageRoom
from thinwire.exchange import bytes as wire


@dataclass
class StromState:
    r: Tensor = memory.unsent()  # gradients that were not sent yet
    unit: float = memory.alike(1.0, degree=1)  # what 1 in gradient units is now, under a loss scale
    room: MessageRoom = field(default_factory=MessageRoom)


@dataclass(frozen=True)
class Strom(Reducer[Tensor, StromState]):
    """Sends plus or minus `tau` for each entry whose unsent gradients add up to more than that.

    At most once for an entry in a step. Tune `tau` to the size of the gradients.
    """

    tau: float

    def __post_init__(self) -> None:
        check_quantum(self.tau)

    def init(self, layout: Layout, /) -> StromState:
        return StromState(layout.zeros())

    def reduce(self, x: Tensor, state: StromState, comm: Comm, out: Tensor, /) -> None:
        kernels.accumulate(state.r, x)
        exchange.empty(x, out)
        quantum = self.tau * state.unit
        loud = kernels.select(state.r, quantum)
        loud = loud[state.r[loud].abs() > quantum]
        send_quanta(state.r, loud, quantum, comm, out, state.room)


def send_quanta(r: Tensor, index: Tensor, quantum: float, comm: Comm, out: Tensor, room: MessageRoom) -> None:
    """Move a quantum, with its sign, from each entry of `r` at `index` into the mean."""
    # The sign is the lowest bit of a position among twice as many: one bit more for each gap between positions.
    places = 2 * index.long() + (r[index] < 0)
    message = wire.encode_index(places, 2 * r.numel())
    messages = exchange.gather_bytes(message, comm, room, limit=exchange.dense_bytes(r, comm))
    if messages is None:
        return exchange.fall_back_at(r, *_quanta(places, quantum, r), comm, out)
    sent = [_quanta(wire.decode_index(m, 2 * r.numel()).long(), quantum, r) for m in messages]
    comm.ledger.picked += index.numel()
    kernels.scatter_add(r, *sent[comm.rank], -1.0)
    kernels.fill_sparse(out, sent, 1 / comm.world)


def _quanta(places: Tensor, quantum: float, r: Tensor) -> tuple[Tensor, Tensor]:
    index = places >> 1
    if bool((index.diff() == 0).any()):
        raise wire.WireError("the message sends an entry both up and down")
    return index, (1 - 2 * (places & 1)).to(r.dtype) * quantum


def check_quantum(tau: float) -> None:
    if not 0 < tau < math.inf:
        raise ValueError(f"tau must be a magnitude above 0, not {tau}")
