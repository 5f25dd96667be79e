"""ExDyna: each worker chooses in its own part of the gradient, so choices never overlap and traffic does not grow.

Yoon and Oh, Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning,
CCGrid 2024. Of the paper the abstract was read; the rules were read in the authors' code, whose decisions
`ExDyna.official` reproduces, its mistakes included.

A step, on worker r of n:

1. the entries are cut into blocks, and the blocks dealt out in n contiguous partitions (`partitions`);
2. the worker looks at partition (t + r) mod n, so that each sees every entry once in n steps;
3. it picks what reaches a threshold that all share, and tells the others where;
4. all workers average their values at all picks: no index appears twice, so nothing builds up;
5. from the counts, which all have seen, blocks move and the threshold is scaled (`thresholds`).

What differs from the code that was read: indices travel in slots of a fixed number, which makes a step two
collectives and keeps a sudden jump of the gradients from flooding the wire (a worker with more picks than slots
sends its largest); boundaries are cut where the loads of blocks are equal; the threshold starts from a measured
quantile and is scaled by how steeply the count depends on it.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from thinwire import exchange, kernels, memory, wire
from thinwire.comm import Comm
from thinwire.exchange import Room
from thinwire.methods import partitions, slots, thresholds
from thinwire.methods.partitions import Blocks
from thinwire.methods.thresholds import Control, Counted
from thinwire.reducer import Layout, Reducer, check_density, count

TOPOLOGIES = ("recut", "pairwise", "official", "static")
CONTROLS = ("fast", "official")
REPORT = 24  # bytes before a worker's indices: two counts and a magnitude


@dataclass
class ExDynaState:
    numel: int = memory.derived()
    target: int = memory.derived()  # k: how many entries should be sent, at the density of the last step
    control: Control = field(default_factory=Control)
    room: Room = field(default_factory=Room)
    step: int = memory.per_world(int)
    shares: list[int] = memory.per_world(list)  # blocks of each partition
    loads: list[float] = memory.per_world(list)  # smoothed picks of each partition, or of each block
    fullest: float = memory.per_world(float)  # picks to expect in the fullest partition; 0: nothing is known
    picks: list[int] = memory.per_world(list)  # what each worker sent at the last step
    moved: int = memory.per_world(int)  # blocks that changed hands after the last step


@dataclass(frozen=True)
class Report:
    """What one worker tells the others about its partition."""

    above: int
    far_above: int
    measured: float
    index: Tensor


@dataclass(frozen=True)
class ExDyna(Reducer[Tensor, ExDynaState]):
    """A `density` of the entries, each worker choosing in a part of its own; the parts follow the load.

    `topology` says how: `recut` at equal loads of blocks, `pairwise` between neighbours, `official` as the
    published code, `static` not at all. `control` scales the threshold: `fast`, or `official`. `blocks` is how
    many there are, by default 1024 or 64 for each worker.
    """

    density: float
    topology: Literal["recut", "pairwise", "official", "static"] = "recut"
    control: Literal["fast", "official"] = "fast"
    blocks: int | None = None

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.topology not in TOPOLOGIES:
            raise ValueError(f"topology must be one of {', '.join(TOPOLOGIES)}, not {self.topology!r}")
        if self.control not in CONTROLS:
            raise ValueError(f"control must be fast or official, not {self.control!r}")
        if self.blocks is not None and self.blocks < 1:
            raise ValueError(f"blocks must be 1 or more, not {self.blocks}")

    @classmethod
    def official(cls, density: float) -> "ExDyna":
        """The published code's decisions: its start, its scaling, its rule for neighbours, its forced picks."""
        return cls(density, topology="official", control="official")

    def init(self, layout: Layout, /) -> ExDynaState:
        return ExDynaState(layout.numel, count(self.density, layout.numel))

    def reduce(self, x: Tensor, state: ExDynaState, comm: Comm, out: Tensor, /) -> None:
        state.target = count(self.density, x.numel())
        if not state.shares:
            state.shares = partitions.fair_shares(self.cut(x.numel(), comm.world).count, comm.world)
        most = self._most(state, comm.world)
        room = slots.size(most, self._widest(state, comm.world))
        if not _pays(x, most, REPORT + room, comm):
            state.picks, state.fullest, state.moved = [], 0.0, 0
            return exchange.fall_back(x, comm, out)
        if self.control == "official":
            reports = self._tell_all(x, state, comm)
        else:
            reports = self._tell_most(x, state, comm, most, room)

        by_part = [reports[(part - state.step) % comm.world] for part in range(comm.world)]
        index = torch.cat([report.index for report in by_part])  # in the order of partitions, so sorted
        exchange.mean_at(x, index, comm, out)

        state.picks = [report.index.numel() for report in reports]
        self._rebalance(state, by_part, index, comm.world)
        self._rescale(state, reports)
        state.step += 1

    def cut(self, numel: int, workers: int) -> Blocks:
        """Part 1: the blocks."""
        if self.topology == "static":
            return Blocks(numel, numel, 1)
        if self.topology == "official":
            return partitions.cut_as_published(numel, workers)
        return partitions.cut(numel, workers, self.blocks)

    def _edges(self, state: ExDynaState, workers: int) -> list[int]:
        return partitions.bounds(self.cut(state.numel, workers), state.shares)

    def _own(self, state: ExDynaState, comm: Comm) -> tuple[int, int]:
        """Part 2: where this worker looks at this step."""
        edges, part = self._edges(state, comm.world), (state.step + comm.rank) % comm.world
        return edges[part], edges[part + 1]

    def _widest(self, state: ExDynaState, workers: int) -> int:
        return max(end - start for start, end in pairwise(self._edges(state, workers)))

    def _most(self, state: ExDynaState, workers: int) -> int:
        """How many picks a worker may send: what the fullest partition should have, and what chance adds to it."""
        fair = state.target / workers
        expected = max(fair, state.fullest) if state.fullest else 2 * fair
        return math.ceil(1.1 * expected + 4 * math.sqrt(expected)) + 2

    def _tell_most(self, x: Tensor, state: ExDynaState, comm: Comm, most: int, room: int) -> list[Report]:
        """Part 3: pick, and exchange reports and indices in one message of a size that all know."""
        control = state.control
        if control.threshold is None:
            control.set(_mean(kernels.quantile(x, self.density), comm))
        assert control.threshold is not None
        index = kernels.select(x, control.threshold, *self._own(state, comm))
        values = x[index]
        far_above = kernels.select(values, control.threshold * math.exp(control.reach)).numel()
        measured = kernels.quantile(x, self.density) if control.lost else 0.0
        sent = index if index.numel() <= most else index[kernels.top_k(values, most)]

        counts = torch.tensor([index.numel(), far_above]).view(torch.uint8)
        magnitude = torch.tensor([measured], dtype=torch.float64).view(torch.uint8)
        report = torch.cat([counts, magnitude]).to(x.device)
        message = torch.cat([report, slots.fill(sent, x.numel(), room)])
        return [_read(row, x.numel()) for row in comm.all_gather(message)]

    def _tell_all(self, x: Tensor, state: ExDynaState, comm: Comm) -> list[Report]:
        """Part 3 as published: all that reaches the threshold, and one forced pick where nothing does."""
        control = state.control
        if control.threshold is None:
            control.set(thresholds.start_as_published(state.target))
        assert control.threshold is not None
        low, high = self._own(state, comm)
        index = kernels.select(x, control.threshold, low, high)
        if not index.numel() and high > low:
            index = index.new_tensor([low + state.step % (high - low)])
        messages = exchange.gather_bytes(wire.encode_index(index, x.numel()), comm, state.room)
        assert messages is not None  # there was no limit to exceed
        indices = [wire.decode_index(message, x.numel()) for message in messages]
        return [Report(index.numel(), 0, 0.0, index) for index in indices]

    def _rebalance(self, state: ExDynaState, by_part: list[Report], index: Tensor, workers: int) -> None:
        blocks, before = self.cut(state.numel, workers), state.shares
        loads = [report.above for report in by_part]
        total = sum(loads)
        state.fullest = max(loads) * state.target / total if total else 0.0
        if self.topology == "pairwise":
            state.loads = partitions.smoothed(state.loads, loads)
            state.shares, state.loads = partitions.move_pairwise(before, state.loads)
        elif self.topology == "recut":
            state.loads = partitions.smoothed(state.loads, blocks.loads(index).tolist())
            state.shares = partitions.recut(before, torch.tensor(state.loads, dtype=torch.float64))
        elif self.topology == "official":
            state.shares = partitions.move_as_published(before, loads, blocks)
        state.moved = partitions.moves(before, state.shares)

    def _rescale(self, state: ExDynaState, reports: list[Report]) -> None:
        """Part 4: the threshold of the next step."""
        sent = sum(state.picks)
        if self.control == "official":
            return thresholds.scale_as_published(state.control, sent, state.target)
        above, far_above = (sum(r.above for r in reports), sum(r.far_above for r in reports))
        measured = sum(r.measured for r in reports) / len(reports)
        seen = Counted(sent, above, far_above, measured)
        thresholds.scale_fast(state.control, seen, state.target, len(reports))

    def metrics(self, state: ExDynaState, /) -> dict[str, float]:
        sent = sum(state.picks) if state.picks else state.numel  # no picks: all was sent
        workers, most = len(state.picks), max(state.picks, default=0)
        return {
            "density": sent / max(1, state.numel),
            "build_up": sent / max(1, state.target),
            "imbalance": workers * most / sent if state.picks and sent else 1.0,
            "threshold": state.control.threshold or 0.0,
            "picks": sent,
            "block_moves": state.moved,
        }

    @property
    def needs_memory(self) -> bool:
        return True


def _read(message: Tensor, numel: int) -> Report:
    report = message[:REPORT].clone().cpu()  # a copy, because the bytes may begin at any address
    above, far_above = report[:16].view(torch.int64).tolist()
    measured = float(report[16:].view(torch.float64))
    return Report(above, far_above, measured, slots.read(message[REPORT:], numel))


def _pays(x: Tensor, most: int, message: int, comm: Comm) -> bool:
    """The byte test: whether a link carries less for indices and values of what is wanted than for everything.

    All workers know both sides beforehand. A link of one worker carries nothing for either.
    """
    others, each = comm.world - 1, (comm.carries or x.dtype).itemsize
    picks = min(most * comm.world, x.numel())
    sparse = others * message + 2 * others / comm.world * picks * each
    return sparse < 2 * others / comm.world * x.numel() * each


def _mean(value: float, comm: Comm) -> float:
    """The mean over the workers, whole: as bytes, which no cast of values touches."""
    bits = torch.tensor([value], dtype=torch.float64).view(torch.uint8)
    return float(comm.all_gather(bits).view(torch.float64).mean())
