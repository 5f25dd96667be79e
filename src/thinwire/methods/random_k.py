"""Random-k: k entries drawn anew each step, all equally likely.

Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018 (recalled); the scheme and its variants
are those of Foroutan Eghlidi and Jaggi, Sparse Communication for Training Deep Networks, arXiv 2009.09271.

Every worker can work out what any other one draws, so no index is ever sent.
"""

from dataclasses import dataclass

from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.draws import group_key, mix64
from thinwire.core.reducer import Layout, Reducer, check_density, count


@dataclass
class DrawState:
    """Where a worker is in the sequence of draws that all of them can work out."""

    group: int = memory.derived()  # a number for this layout, so that layouts draw apart
    step: int = memory.alike(0)

    def next(self) -> int:
        """The number of this step, after which the next one's is another."""
        self.step += 1
        return self.step - 1


@dataclass(frozen=True)
class RandomK(Reducer[Tensor, DrawState]):
    """A random `density` of the entries, new ones each step.

    With `agree` all workers draw the same ones and average them; without, each draws its own, and what no one
    else drew counts as zero. `rescale` makes the result an unbiased estimate, to be used without memory.
    With error feedback the stable learning rate shrinks in proportion to the density.
    """

    density: float
    agree: bool = True
    rescale: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_density(self.density)

    def init(self, layout: Layout, /) -> DrawState:
        return DrawState(group_key(layout))

    def reduce(self, x: Tensor, state: DrawState, comm: Comm, out: Tensor, /) -> None:
        k, step = count(self.density, x.numel()), state.next()
        if sends_all(x, k, self.agree, comm, out):
            return

        def drawn(*rank: int) -> Tensor:
            return kernels.random_k(x.numel(), k, mix64(self.seed, step, state.group, *rank), x.device)

        unbias = x.numel() / k if self.rescale else 1.0
        if self.agree:
            index = drawn()
            values, rest = exchange.mean_of_rounded(exchange.take(x, index, comm), comm)
            if rest is not None:
                kernels.scatter_add(x, index, rest)
            kernels.fill_sparse(out, [(index, values)], unbias)
        else:
            sent = comm.all_gather(exchange.take(x, drawn(comm.rank), comm))
            kernels.fill_sparse(out, [(drawn(r), values) for r, values in enumerate(sent)], unbias / comm.world)

    @property
    def conserves(self) -> bool:
        return not self.rescale


def sends_all(x: Tensor, k: int, agree: bool, comm: Comm, out: Tensor) -> bool:
    """Average everything where k values of each worker would be everything, or cost more; whether that was so."""
    if k == x.numel():
        exchange.dense(x, comm, out)
    elif not agree and comm.value_bytes(k, x.dtype) > exchange.dense_bytes(x, comm):
        exchange.fall_back(x, comm, out)
    else:
        return False
    return True
