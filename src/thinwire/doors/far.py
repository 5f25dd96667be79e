"""When workers join over a link with latency: is a method slower there than what torch brings along?

Then `Cast(Dense())` takes its place, with a word, unless the user insists. It is thinwire's mean in 16 bits, which is
never slower than DDP's fp16 hook: the same bytes, and at most as many trips.
"""

import statistics
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from thinwire.comm import Comm
from thinwire.core.reducer import Layout, MethodWarning, Reducer
from thinwire.exchange.price import Cost, Network, price
from thinwire.methods.dense import Dense
from thinwire.wrappers.cast import Cast

WhenFar = Literal["fall_back", "keep"]


@dataclass(frozen=True)
class Chosen:
    """The method that is used, which is the one that was asked for unless it is slower than torch's own."""

    reducer: Reducer[Any, Any]
    times_fp16: float | None = None  # what an exchange of the method asked for takes, by that of DDP's fp16 hook
    fell_back: bool = False

    def metrics(self) -> dict[str, float]:
        if self.times_fp16 is None:
            return {}
        return {"times_fp16": self.times_fp16, "fell_back": float(self.fell_back)}


def choose(
    model: nn.Module, reducer: Reducer[Any, Any], comm: Comm, when_far: WhenFar = "fall_back", stacklevel: int = 2
) -> Chosen:
    """Compare the method's exchange, by a dry run, with DDP's fp16 hook on the link that the workers have measured.

    All workers call this, and choose alike: the link is what they have agreed on, and so is the time of the work.
    """
    if when_far not in ("fall_back", "keep"):
        raise ValueError(f"when_far must be 'fall_back' or 'keep', not {when_far!r}")
    if comm.link is None or not comm.far:
        return Chosen(reducer)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layout = Layout(tuple(trained), tuple(p.shape for p in trained.values()))
    ours = price(reducer, layout, comm.world, steps=3, until_steady=True, link=comm.link)
    fp16 = Cost("fp16", (("all_mean", 2 * layout.numel),), 0.0, 0, rings=True)
    network = Network(comm.link.rate, comm.world, comm.link.rtt)
    seconds, simple = _work_of_all(ours.local, comm) + ours.exchange(network), fp16.exchange(network)
    plain = Cast(Dense())
    if seconds <= simple or repr(reducer) in (repr(plain), repr(Dense())):  # Dense is exact: that is why it is used
        return Chosen(reducer, seconds / simple)
    falls = when_far == "fall_back"
    does = (
        f"So {plain!r} is used instead; when_far='keep' insists." if falls else "It is kept, as when_far='keep' says."
    )
    warnings.warn(
        f"{reducer!r} would take about {1e3 * seconds:.0f} ms an exchange on this link "
        f"({1e3 * comm.link.rtt:.0f} ms round trip, {ours.trips(network):.0f} trips), and DDP's fp16 hook "
        f"{1e3 * simple:.0f} ms. {does} Use a method with fewer trips, or exchange less often with thinwire.local(...)",
        MethodWarning,
        stacklevel=stacklevel + 1,
    )
    return Chosen(plain if falls else reducer, seconds / simple, falls)


def _work_of_all(seconds: float, comm: Comm) -> float:
    """The median of what the workers have measured, since each of them has measured something else."""
    mine = torch.tensor([seconds], dtype=torch.float64).view(torch.uint8)
    return statistics.median(comm.all_gather(mine).view(torch.float64).flatten().tolist())
