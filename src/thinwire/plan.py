"""The page of a plan: what methods will cost on a network beside plain DDP, and which one to use.

The costs themselves, by a dry run of each method, are `exchange.price`'s.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from thinwire.capture.changes.exchanges import ROLL_CALL as ROUND_CALL
from thinwire.comm.link import FRAMING as FRAMING
from thinwire.comm.link import Link
from thinwire.core.reducer import Layout, Reducer
from thinwire.exchange.price import ROLL_CALL, Network, prices
from thinwire.exchange.price import Cost as Cost
from thinwire.exchange.price import price as dry_run
from thinwire.wrappers.anchored import Anchored
from thinwire.wrappers.local_steps import LocalSteps

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g|t)?bit(?:/s|ps)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", re.IGNORECASE)

GAIN = 1.1  # a compression that saves less than a tenth of a step is not worth its risk


@dataclass(frozen=True)
class Prediction:
    """A method on a network, beside averaging in bfloat16."""

    cost: Cost
    step: float  # seconds
    exchange: float
    payload: float
    wire: float
    break_even: float  # bits a second, below which it beats bfloat16; 0: never, inf: always
    trips: float = 0.0  # messages that wait for one another, each for a round trip


def dense(layout: Layout, bytes_an_entry: int, name: str) -> Cost:
    """What plain DDP does, and what it does in half precision: the baselines to beat."""
    return Cost(name, (("all_mean", bytes_an_entry * layout.numel),), 0.0, 0, hidden=True, rings=True)


def layout_of(model: nn.Module) -> Layout:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("the model has no parameter that is trained: there is nothing to exchange")
    return Layout(tuple(trained), tuple(p.shape for p in trained.values()))


def local_steps(
    reducer: Reducer[Tensor, Any], layout: Layout, world: int, every: int, link: Link | None = None
) -> Cost:
    """The same for an exchange of what `every` local steps have changed, spread over these steps."""
    cost = dry_run(Anchored(reducer), layout, world, link=link)
    name = repr(LocalSteps(reducer, every))
    exchanged = [entry for entry in cost.entries if entry != ("all_gather", ROLL_CALL)]
    entries = (("all_gather", ROUND_CALL), *exchanged)
    return replace(cost, method=name, entries=entries, local=cost.local / every, every=every)


def predict(costs: Sequence[Cost], layout: Layout, network: Network, compute: float) -> list[Prediction]:
    """Every method on the network, fastest first; plain DDP and bfloat16 are among them."""
    half = dense(layout, 2, "bf16 all-reduce")
    everyone = [dense(layout, 4, "plain DDP"), half, *costs]
    told = [
        Prediction(
            cost,
            cost.step(network, compute),
            cost.exchange(network),
            cost.payload,
            cost.wire(network.workers),
            break_even(cost, half, network, compute),
            cost.trips(network),
        )
        for cost in everyone
    ]
    return sorted(told, key=lambda p: p.step)


def break_even(cost: Cost, against: Cost, network: Network, compute: float) -> float:
    """The rate at which both take the same time; below it, `cost` is the faster."""

    def faster(rate: float) -> bool:
        at = Network(rate, network.workers, network.rtt)
        return cost.step(at, compute) < against.step(at, compute)

    low, high = 1e3, 1e14
    if not faster(low):
        return 0.0
    if faster(high):
        return math.inf
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if faster(middle) else (low, middle)
    return low


def recommend(predictions: Sequence[Prediction], network: Network, compute: float) -> str:
    """One sentence that says what to use, and says so when that is nothing."""
    by_name = {p.cost.method: p for p in predictions}
    plain, half = by_name["plain DDP"], by_name["bf16 all-reduce"]
    methods = [p for p in predictions if p not in (plain, half)]
    best = methods[0] if methods else None
    if min(half.step, best.step if best else math.inf) * GAIN > plain.step:
        return f"Do not compress: plain DDP takes {_ms(plain.step)} a step, and nothing here is a tenth faster."
    if best is None or best.step * GAIN > half.step:
        return (
            f"Do not compress: averaging in bfloat16 takes {_ms(half.step)} a step (plain DDP {_ms(plain.step)}), "
            "and no method is a tenth faster than that."
        )
    said = (
        f"Use {best.cost.method}: {_ms(best.step)} a step, {plain.step / best.step:.1f} times faster than plain DDP, "
        f"{half.step / best.step:.1f} times faster than bfloat16. It pays on links below "
        f"{spell_rate(best.break_even)}. Check what it does to the loss with `thinwire compare`."
    )
    waits = best.trips * network.rtt
    if waits > 0.5 * best.exchange and waits > 0.1 * best.step:
        said += (
            f" Its limit is the link's latency, not the rate: {_ms(waits)} of {_ms(best.exchange)} are "
            "round trips. Compressing further will not help: exchange less often (`--every 10`)."
        )
    if compute > 0:
        enough = math.ceil(half.exchange / (0.1 * compute))
        said += f" Or use bfloat16 and accumulate gradients over {enough} backward passes: that hides the link, too."
    return said


def scaling(
    reducers: Sequence[Reducer[Any, Any]], layout: Layout, network: Network, workers: Sequence[int], rows: int = 32
) -> dict[str, list[float]]:
    """For each method, the seconds of its exchange among so many workers; beside them plain DDP's ring and bf16's."""
    networks = [Network(network.rate, count, network.rtt) for count in workers]
    table = {
        name: [dense(layout, size, name).exchange(at) for at in networks]
        for name, size in (("plain DDP", 4), ("bf16 all-reduce", 2))
    }
    for reducer in reducers:
        costs = prices(reducer, layout, workers, rows=rows, until_steady=True, link=network.link)
        table[repr(reducer)] = [cost.exchange(at) for at, cost in zip(networks, costs)]
    return table


def smallest_ratio(workers: int, bits: int = 32) -> float:
    """How much a method that gathers must compress before it beats a ring all-reduce in words of `bits`.

    A ring moves 2 (p-1)/p words an entry, a gather (p-1)/c: it pays above c = p/2, and above c = p against
    half precision. (The cost model of variance-based compression.)
    """
    return workers / 2 * 32 / bits


def parse_rate(text: str) -> float:
    """Bits a second: '100mbit', '1gbit', '2.5 Gbit/s'."""
    found = _RATE.fullmatch(text.strip())
    if not found or float(found[1]) == 0:
        raise ValueError(f"{text!r} is no link rate: write 10mbit, 100mbit, 1gbit, ...")
    return float(found[1]) * {None: 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[found[2] and found[2].lower()]


def parse_seconds(text: str) -> float:
    """Seconds: '200us', '1ms', '0.04s'."""
    found = _TIME.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no time: write 200us, 1ms, 0.04s, ...")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2].lower()]


def spell_rate(rate: float, digits: int = 4) -> str:
    """The rate as a person writes it: 1e8 is '100mbit'."""
    if not 0 < rate < math.inf:
        return "any rate" if rate else "no rate"
    for size, unit in ((1e9, "gbit"), (1e6, "mbit"), (1e3, "kbit")):
        if rate >= size:
            return f"{rate / size:.{digits}g}{unit}"
    return f"{rate:.{digits}g}bit"


def _ms(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"
