"""What a method will cost on a network, from a dry run of the method itself.

There is no second formula for bytes here: the method runs on a gradient of the model's shape, against a comm that
answers for the other workers and keeps the ledger. The ledger, the rate and the round-trip time give the seconds of
the exchange; the seconds of the local work are measured.
"""

import math
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.capture.anchor import Anchored
from thinwire.capture.rounds import ROLL_CALL
from thinwire.comm.base import MESSAGES, WIRE
from thinwire.comm.dry import DryComm
from thinwire.factors import PRODUCT, Factors, Use
from thinwire.reducer import Layout, Moments, Reducer
from thinwire.spelling import spell

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g|t)?bit(?:/s|ps)?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", re.IGNORECASE)

# Bytes on the wire beside a message's own: gloo's handshake, headers of TCP and IP, acknowledgements. Measured on
# interfaces, with 2 and 4 workers: 730 to 870 for every message from 16 bytes to 100 kB, and 0.2 % above that.
FRAMING = 800
BACKWARD = 2 / 3  # the part of a step's compute that plain DDP can exchange beside
GAIN = 1.1  # a compression that saves less than a tenth of a step is not worth its risk


@dataclass(frozen=True)
class Network:
    """`workers` machines, each on a full-duplex link of `rate` bits a second; `rtt` seconds for a round trip."""

    rate: float
    workers: int
    rtt: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"a link carries more than 0 bits a second, not {self.rate}")
        if self.workers < 1:
            raise ValueError(f"there is at least 1 worker, not {self.workers}")
        if not self.rtt >= 0:
            raise ValueError(f"a round trip takes 0 seconds or more, not {self.rtt}")

    def seconds(self, entries: Iterable[tuple[str, int]]) -> float:
        """How long collectives take, one after another: bytes over the rate, and half a round trip a message."""
        return sum(
            8 * WIRE[op](self.workers) * size / self.rate
            + MESSAGES[op](self.workers) * (8 * FRAMING / self.rate + self.rtt / 2)
            for op, size in entries
        )


@dataclass(frozen=True)
class Cost:
    """What one step of a method takes from one worker."""

    method: str
    entries: tuple[tuple[str, int], ...]  # collectives of an exchange, with the bytes put in
    local: float  # seconds of its own work
    memory: int  # bytes it keeps between steps
    hidden: bool = False  # whether the exchange goes beside the backward pass
    every: int = 1  # steps that share an exchange

    @property
    def payload(self) -> float:
        return sum(size for _, size in self.entries) / self.every

    def wire(self, workers: int) -> float:
        return sum(WIRE[op](workers) * size for op, size in self.entries) / self.every

    def exchange(self, network: Network) -> float:
        return network.seconds(self.entries) / self.every

    def step(self, network: Network, compute: float) -> float:
        exchange = self.exchange(network)
        if self.hidden:
            return max(compute, (1 - BACKWARD) * compute + exchange) + self.local
        return compute + self.local + exchange


@dataclass(frozen=True)
class Prediction:
    """A method on a network, beside averaging in bfloat16."""

    cost: Cost
    step: float  # seconds
    exchange: float
    payload: float
    wire: float
    break_even: float  # bits a second, below which it beats bfloat16; 0: never, inf: always


def dense(layout: Layout, bytes_an_entry: int, name: str) -> Cost:
    """What plain DDP does, and what it does in half precision: the baselines to beat."""
    return Cost(name, (("all_mean", bytes_an_entry * layout.numel),), 0.0, 0, hidden=True)


def layout_of(model: nn.Module) -> Layout:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("the model has no parameter that is trained: there is nothing to exchange")
    return Layout(tuple(trained), tuple(p.shape for p in trained.values()))


def dry_run(
    reducer: Reducer[Any, Any], layout: Layout, world: int, *, steps: int = 6, rows: int = 32, seed: int = 0
) -> Cost:
    """Run the method alone on `steps` made-up gradients; its dearest exchange once it is under way.

    A worker alone sees too little of methods in which each worker sends another part: their bytes swing from step to
    step, and the largest are those that come true.
    """
    draw = torch.Generator().manual_seed(seed)
    part = _factored(layout) if reducer.wants is Factors else layout
    state = reducer.init(part)
    comm, out = DryComm(world), part.zeros()
    times, sent = [], []
    for _ in range(steps):
        local = _made_up(reducer.wants, part, rows, draw)
        comm.ledger.clear()
        began = time.perf_counter()
        reducer.reduce(local, state, comm, out)
        times.append(time.perf_counter() - began)
        sent.append(list(comm.ledger.entries))
    entries = max(sent[steps // 2 :], key=lambda step: sum(WIRE[op](world) * size for op, size in step))
    if layout.numel > part.numel:
        entries.append(("all_mean", 4 * (layout.numel - part.numel)))  # what has no factors is averaged
    hidden = reducer.wants is Tensor and state is None  # averages that keep nothing go beside the backward pass
    return Cost(spell(reducer), tuple(entries), statistics.median(times[1:] or times), _bytes(state), hidden)


def local_steps(reducer: Reducer[Tensor, Any], layout: Layout, world: int, every: int) -> Cost:
    """The same for an exchange of what `every` local steps have changed, spread over these steps."""
    cost = dry_run(Anchored(reducer), layout, world)
    name = f"{spell(reducer)} every {every} steps"
    entries = (*cost.entries, ("all_gather", ROLL_CALL))
    return replace(cost, method=name, entries=entries, local=cost.local / every, every=every)


def _factored(layout: Layout) -> Layout:
    """The weights whose gradients are products of a layer's inputs and deltas, taken as Linear layers."""
    matrices = [(name, shape) for name, shape in zip(layout.names, layout.shapes, strict=True) if len(shape) == 2]
    return Layout(tuple(name for name, _ in matrices), tuple(shape for _, shape in matrices))


def _made_up(wants: type, layout: Layout, rows: int, draw: torch.Generator) -> Any:
    """Gradients whose entries spread over orders of magnitude, alike in all parts, as a dry run has but one worker."""
    if wants is Factors:
        shapes = enumerate(layout.shapes)
        uses = [Use(i, PRODUCT, *(torch.randn(rows, side, generator=draw) for side in reversed(s))) for i, s in shapes]
        return Factors(layout.shapes, uses)
    flat = torch.randn(layout.numel, generator=draw) * torch.exp(torch.randn(layout.numel, generator=draw))
    if wants is Moments:
        return Moments(flat, flat.square() * 10 ** torch.rand(layout.numel, generator=draw))
    return flat


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if is_dataclass(state):
        return sum(_bytes(getattr(state, f.name)) for f in fields(state))
    if isinstance(state, (list, tuple)):
        return sum(_bytes(part) for part in state)
    return sum(_bytes(part) for part in state.values()) if isinstance(state, dict) else 0


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
        f"{half.step / best.step:.1f} times than bfloat16; it pays below {spell_rate(best.break_even)}. "
        "Check what it does to the loss with `thinwire compare`."
    )
    if compute > 0:
        enough = math.ceil(half.exchange / (0.1 * compute))
        said += f" Or stay with bfloat16 and exchange once in {enough} backward passes: that too hides the link."
    return said


def scaling(
    reducers: Sequence[Reducer[Any, Any]], layout: Layout, network: Network, workers: Sequence[int], rows: int = 32
) -> dict[str, list[float]]:
    """For each method, the seconds of its exchange among so many workers; beside them plain DDP's ring and bf16's."""
    networks = [Network(network.rate, count, network.rtt) for count in workers]
    table = {
        name: [at.seconds(dense(layout, size, name).entries) for at in networks]
        for name, size in (("plain DDP", 4), ("bf16 all-reduce", 2))
    }
    for reducer in reducers:
        costs = [dry_run(reducer, layout, at.workers, rows=rows) for at in networks]
        table[spell(reducer)] = [at.seconds(cost.entries) for at, cost in zip(networks, costs)]
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


def spell_rate(rate: float) -> str:
    """The rate as a person writes it: 1e8 is '100mbit'."""
    if not 0 < rate < math.inf:
        return "any rate" if rate else "no rate"
    for size, unit in ((1e9, "gbit"), (1e6, "mbit"), (1e3, "kbit")):
        if rate >= size:
            return f"{rate / size:.4g}{unit}"
    return f"{rate:.4g}bit"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
