"""A word, when workers join over a link with latency, if a method will be slower there than what torch brings along."""

import warnings
from typing import Any

from torch import nn

from thinwire.comm import Comm
from thinwire.core.reducer import Layout, MethodWarning, Reducer
from thinwire.exchange.price import Cost, Network, price


def warn_if_slower(model: nn.Module, reducer: Reducer[Any, Any], comm: Comm, stacklevel: int) -> None:
    """Compare the method's exchange, by a dry run, with DDP's fp16 hook on the link that the workers have measured."""
    if comm.link is None or not comm.far:
        return
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layout = Layout(tuple(trained), tuple(p.shape for p in trained.values()))
    ours = price(reducer, layout, comm.world, steps=3, until_steady=True)
    fp16 = Cost("fp16", (("all_mean", 2 * layout.numel),), 0.0, 0, rings=True)
    network = Network(comm.link.rate, comm.world, comm.link.rtt)
    seconds, simple = ours.local + ours.exchange(network), fp16.exchange(network)
    if seconds > simple:
        warnings.warn(
            f"{reducer!r} will take about {1e3 * seconds:.0f} ms an exchange on this link "
            f"({1e3 * comm.link.rtt:.0f} ms round trip, {ours.trips(network):.0f} trips), and DDP's fp16 hook "
            f"{1e3 * simple:.0f} ms: use a method with fewer trips, or exchange less often with thinwire.local(...)",
            MethodWarning,
            stacklevel=stacklevel,
        )
