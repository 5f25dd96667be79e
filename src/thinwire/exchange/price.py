"""What a method costs on a network, from a dry run of the method itself.

There is no second formula for bytes: the method runs on a gradient of the model's shape, against a comm that answers
for the other workers and keeps the ledger. `comm.link` has the formula of the seconds, by which the workers choose
their ways as well; the seconds of a method's own work are measured.
"""

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.dry import DryComm
from thinwire.comm.link import Link
from thinwire.comm.table import TABLE, WIRE
from thinwire.core.factors import PRODUCT, Factors, Use
from thinwire.core.reducer import Layout, Moments, Reducer

BACKWARD = 2 / 3  # the part of a step's compute that plain DDP can exchange beside
ROLL_CALL = 24  # bytes by which the workers agree on a step before its memory is touched: step, finite, mark

Entries = Iterable[tuple[str, int]]  # collectives, each with the bytes that every worker puts in


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

    @property
    def link(self) -> Link:
        return Link(self.rate, self.rtt)

    def seconds(self, entries: Entries, rings: bool = False) -> float:
        """How long collectives take, one after another; with `rings` by the backend's own algorithms."""
        ways = ((op, size, self._way(op, size, rings)) for op, size in entries)
        return sum(self.link.seconds(op, size, self.workers, way) for op, size, way in ways)

    def trips(self, entries: Entries, rings: bool = False) -> int:
        """How many messages wait for one another: each takes a round trip."""
        return sum(int(TABLE[op][self._way(op, size, rings)].trips(self.workers)) for op, size in entries)

    def _way(self, op: str, size: int, rings: bool) -> str:
        return next(iter(TABLE[op])) if rings else self.link.way(op, size, self.workers)


@dataclass(frozen=True)
class Cost:
    """What one step of a method takes from one worker."""

    method: str
    entries: tuple[tuple[str, int], ...]  # collectives of an exchange, with the bytes put in
    local: float  # seconds of its own work
    memory: int  # bytes it keeps between steps
    hidden: bool = False  # whether the exchange goes beside the backward pass
    every: int = 1  # steps that share an exchange
    called: bool = False  # whether the first of the entries is the roll call
    rings: bool = False  # whether it goes by the backend's own algorithms, whatever the link

    @property
    def payload(self) -> float:
        return sum(size for _, size in self.entries) / self.every

    def wire(self, workers: int) -> float:
        return sum(WIRE[op](workers) * size for op, size in self.entries) / self.every

    def exchange(self, network: Network) -> float:
        return network.seconds(self._sent(network), self.rings) / self.every

    def trips(self, network: Network) -> float:
        return network.trips(self._sent(network), self.rings) / self.every

    def _sent(self, network: Network) -> Entries:
        """The collectives as they go there: where trips cost much, the roll call rides with the first message."""
        call, *others = self.entries or (("", 0),)
        rides = network.link.far and self.called and bool(others) and others[0][0] != "shift"
        return (("riding", call[1]), *others) if rides else self.entries

    def step(self, network: Network, compute: float) -> float:
        exchange = self.exchange(network)
        if self.hidden:
            return max(compute, (1 - BACKWARD) * compute + exchange) + self.local
        return compute + self.local + exchange


def price(
    reducer: Reducer[Any, Any],
    layout: Layout,
    world: int,
    *,
    steps: int = 6,
    rows: int = 32,
    seed: int = 0,
    until_steady: bool = False,
    link: Link | None = None,
) -> Cost:
    """Run the method alone on `steps` made-up gradients; its dearest exchange once it is under way.

    A worker alone sees too little of methods in which each worker sends another part: their bytes swing from step to
    step, and the largest are those that come true. until_steady: no further than to two steps that send the same.
    link: what joins the workers, for methods that save trips where these cost much.
    """
    how: Any = {"steps": steps, "rows": rows, "seed": seed, "until_steady": until_steady, "link": link}
    return prices(reducer, layout, [world], **how)[0]


def prices(
    reducer: Reducer[Any, Any],
    layout: Layout,
    worlds: Sequence[int],
    *,
    steps: int = 6,
    rows: int = 32,
    seed: int = 0,
    until_steady: bool = False,
    link: Link | None = None,
) -> list[Cost]:
    """The same among several numbers of workers: each a dry run of its own, since a method may ask how many there are.

    They share the memory for the gradient and the mean, which for a large model costs much to take from the system anew
    at every step.
    """
    part = _factored(layout) if reducer.wants is Factors else layout
    room, out = part.zeros(), part.zeros()
    costs = []
    for world in worlds:
        state, comm = reducer.init(part), DryComm(world, link=link)
        times, sent = [], []
        for step in range(steps):
            local = _made_up(reducer.wants, part, rows, seed + step, room)
            comm.ledger.clear()
            began = time.perf_counter()
            reducer.reduce(local, state, comm, out)
            times.append(time.perf_counter() - began)
            sent.append(list(comm.ledger.entries))
            if until_steady and len(sent) > 1 and math.isclose(*(_on_wire(e, world) for e in sent[-2:]), rel_tol=0.01):
                break
        # How often a message of unknown length needs a second piece is not for a plan to know.
        usual = sent[len(sent) // 2 :]
        usual = [entries for entries in usual if len(entries) == min(map(len, usual))]
        entries = max(usual, key=lambda entries: _on_wire(entries, world))
        rest = 4 * (layout.numel - part.numel)
        if rest:  # what has no factors is averaged, beside the factors where trips cost much
            beside = link is not None and link.far and link.rides(rest, world)
            entries.append(("riding" if beside else "all_mean", rest))
        hidden = reducer.wants is Tensor and state is None  # averages that keep nothing go beside the backward pass
        called = state is not None or reducer.wants is Factors
        if called:  # factors tell their sizes as well
            sizes = 4 * 7 * len(part.shapes) if reducer.wants is Factors else 0
            entries.insert(0, ("all_gather", ROLL_CALL + sizes))
        own = statistics.median(times[1:] or times)
        costs.append(Cost(repr(reducer), tuple(entries), own, _bytes(state), hidden, called=called))
        del state, local  # the next one's memory takes their place
        out.zero_()
    return costs


def _on_wire(entries: Entries, world: int) -> float:
    return sum(WIRE[op](world) * size for op, size in entries)


def _factored(layout: Layout) -> Layout:
    """The weights whose gradients are products of a layer's inputs and deltas, taken as Linear layers."""
    matrices = [(name, shape) for name, shape in zip(layout.names, layout.shapes, strict=True) if len(shape) == 2]
    return Layout(tuple(name for name, _ in matrices), tuple(shape for _, shape in matrices))


def _made_up(wants: type, layout: Layout, rows: int, seed: int, room: Tensor | None = None) -> Any:
    """Gradients whose entries spread over orders of magnitude, alike in all parts, as a dry run has but one worker."""
    if wants is Factors:
        draw, shapes = torch.Generator().manual_seed(seed), enumerate(layout.shapes)
        uses = [Use(i, PRODUCT, *(torch.randn(rows, side, generator=draw) for side in reversed(s))) for i, s in shapes]
        return Factors(layout.shapes, uses, forms=[use.form() for use in uses])  # agreed before a method is called
    spread = _spread(layout.numel, seed)
    flat = spread.clone() if room is None else room.copy_(spread)
    if wants is Moments:
        draw = torch.Generator().manual_seed(seed)
        return Moments(flat, flat.square() * 10 ** torch.rand(layout.numel, generator=draw))
    return flat


@lru_cache(maxsize=8)  # the steps of one dry run, for all methods and numbers of workers
def _spread(numel: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=draw) * torch.exp(torch.randn(numel, generator=draw))


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if is_dataclass(state):
        return sum(_bytes(getattr(state, f.name)) for f in fields(state))
    if isinstance(state, (list, tuple)):
        return sum(_bytes(part) for part in state)
    return sum(_bytes(part) for part in state.values()) if isinstance(state, dict) else 0
