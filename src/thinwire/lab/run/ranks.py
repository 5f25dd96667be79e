"""ExDyna on hundreds of workers, in one process and one thread.

Threads (`thinwire.comm.threads`) run any method on some dozens of workers. What ExDyna's workers decide follows from a
state that all hold alike, so here there is one of it, and the workers are rows of a matrix of residuals. Each makes
its picks with the method's own code; only the exchange is left out, and entered on a ledger as if it had been.
"""

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm import Ledger
from thinwire.core.reducer import Layout
from thinwire.methods.exdyna.method import ExDyna


class Ranks:
    """All workers of `ErrorFeedback(method)`."""

    def __init__(self, method: ExDyna, workers: int, numel: int):
        layout = Layout(("all",), (torch.Size([numel]),))
        self.method, self.workers = method, workers
        self.state = method.init(layout)
        self.residuals = torch.zeros(workers, numel)
        self.values = torch.zeros(0)  # the means that were sent at the last step
        self.ledger = Ledger(workers)

    def step(self, gradients: Tensor) -> Tensor:
        """Take [workers, entries]; the positions that were sent."""
        method, state, x = self.method, self.state, self.residuals
        x += gradients
        method.prepare(state, self.workers)
        if not method.pays(state, x.element_size(), self.workers):
            raise ValueError("at this density everything would be sent: there is nothing to simulate")
        if state.control.threshold is None:
            self.ledger.enter_bytes("all_gather", 8)
            method.start(state, [kernels.quantile(row, method.density) for row in x])
        self.ledger.enter_bytes("all_gather", method.message(state))
        reports = [method.pick(x[rank], state, rank) for rank in range(self.workers)]
        index = method.union(state, reports)
        self.ledger.enter_bytes("all_mean", index.numel() * x.element_size())
        self.values = x[:, index.long()].mean(0)
        x[:, index.long()] = 0
        method.learn(state, reports, index)
        return index
