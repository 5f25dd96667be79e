"""Random-k: k entries drawn anew each step, all equally likely.

Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018 (recalled); the scheme and its variants
are those of Foroutan Eghlidi and Jaggi, Sparse Communication for Training Deep Networks, arXiv 2009.09271.

Every worker can work out what any other one draws, so no index is ever sent.
"""

from dataclasses import dataclass

from torch import Tensor

from thinwire import exchange, kernels, memory
from thinwire.comm import Comm
from thinwire.reducer import Layout, Reducer, check_density, count, group_key, mix64


@dataclass
class RandomKState:
    group: int = memory.derived()  # a number for this layout, so that layouts draw apart
    step: int = memory.shared(0)


@dataclass(frozen=True)
class RandomK(Reducer[Tensor, RandomKState]):
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

    def init(self, layout: Layout, /) -> RandomKState:
        return RandomKState(group_key(layout))

    def reduce(self, x: Tensor, state: RandomKState, comm: Comm, out: Tensor, /) -> None:
        n, k = x.numel(), count(self.density, x.numel())
        step, state.step = state.step, state.step + 1
        if k == n:
            return exchange.dense(x, comm, out)
        if not self.agree and k * comm.world > 2 * n:  # a ring carries everything for less than all gathered
            return exchange.fall_back(x, comm, out)

        def drawn(*rank: int) -> Tensor:
            return kernels.random_k(n, k, mix64(self.seed, step, state.group, *rank), x.device)

        unbias = n / k if self.rescale else 1.0
        if self.agree:
            index = drawn()
            values = comm.all_mean(exchange.take(x, index, comm))
            kernels.fill_sparse(out, [(index, values)], unbias)
        else:
            sent = comm.all_gather(exchange.take(x, drawn(comm.rank), comm))
            kernels.fill_sparse(out, [(drawn(r), values) for r, values in enumerate(sent)], unbias / comm.world)

    @property
    def conserves(self) -> bool:
        return not self.rescale
