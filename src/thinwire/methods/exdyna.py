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
from thinwire.methods import partitions, thresholds
from thinwire.methods.partitions import Blocks
from thinwire.methods.thresholds import Control, Counted
from thinwire.reducer import Layout, Reducer, check_density, count

TOPOLOGIES = ("recut", "pairwise", "official", "static")
CONTROLS = ("fast", "official")
REPORT = 32  # bytes before a worker's indices: three counts and a magnitude


@dataclass
class ExDynaState:
    numel: int = memory.derived()
    target: int = memory.derived()  # k: how many entries should be sent, at the density of the last step
    control: Control = field(default_factory=Control)
    room: Room = field(default_factory=Room)
    step: int = memory.per_world(int)
    shares: list[int] = memory.per_world(list)  # blocks of each partition
    loads: list[float] = memory.per_world(list)  # smoothed picks of each partition, or of each block
    widest: float = memory.per_world(float)  # picks to expect in the fullest partition; 0: nothing is known
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
        slots, room = self._slots(state, comm.world)
        if not _pays(x, slots, room, comm):
            state.picks, state.widest, state.moved = [], 0.0, 0
            return exchange.fall_back(x, comm, out)
        if self.control == "official":
            reports = self._tell_all(x, state, comm)
        else:
            reports = self._tell_slots(x, state, comm, slots, room)

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

    def _own(self, state: ExDynaState, comm: Comm) -> tuple[int, int]:
        """Part 2: where this worker looks at this step."""
        edges = partitions.bounds(self.cut(state.numel, comm.world), state.shares)
        part = (state.step + comm.rank) % comm.world
        return edges[part], edges[part + 1]

    def _slots(self, state: ExDynaState, workers: int) -> tuple[int, int]:
        """How many picks a worker may send, and the bytes that their indices take at most."""
        fair = state.target / workers
        # Chance makes counts differ by their square root; twice the fair share as long as nothing is known.
        expected = max(fair, state.widest) if state.widest else 2 * fair
        slots = math.ceil(1.1 * expected + 4 * math.sqrt(expected)) + 2
        edges = partitions.bounds(self.cut(state.numel, workers), state.shares)
        return slots, longest(slots, max(end - start for start, end in pairwise(edges)))

    def _tell_slots(self, x: Tensor, state: ExDynaState, comm: Comm, slots: int, room: int) -> list[Report]:
        """Part 3: pick, and exchange reports and indices in one message of a size that all know."""
        control = state.control
        if control.threshold is None:
            control.set(_mean(kernels.quantile(x, self.density), comm))
        assert control.threshold is not None
        index = kernels.select(x, control.threshold, *self._own(state, comm))
        values = x[index]
        far_above = kernels.select(values, control.threshold * math.exp(control.reach)).numel()
        measured = kernels.quantile(x, self.density) if control.lost else 0.0
        above = index.numel()
        if above > slots:
            index = index[kernels.top_k(values, slots)]

        body = wire.encode_index(index, x.numel())
        message = body.new_zeros(REPORT + room)
        message[:24] = torch.tensor([above, far_above, body.numel()]).view(torch.uint8)
        message[24:REPORT] = torch.tensor([measured], dtype=torch.float64).view(torch.uint8)
        message[REPORT : REPORT + body.numel()] = body
        reports = []
        for row in comm.all_gather(message):
            above, far_above, length = row[:24].clone().view(torch.int64).tolist()
            measured = float(row[24:REPORT].clone().view(torch.float64))
            indices = wire.decode_index(row[REPORT : REPORT + length], x.numel())
            reports.append(Report(above, far_above, measured, indices))
        return reports

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
        state.widest = max(loads) * state.target / total if total else 0.0
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


def longest(picks: int, span: int) -> int:
    """The most bytes that `wire.encode_index` takes for so many indices that lie within `span` entries.

    Rice's code with its best parameter takes at most 2 + log2(mean gap) bits a gap, whatever the gaps are.
    """
    picks = min(picks, span)
    bits = min(span, picks * (2 + math.log2(span / picks))) if picks else 0
    return wire.HEADER + math.ceil(bits / 8) + 1


def _pays(x: Tensor, slots: int, room: int, comm: Comm) -> bool:
    """The byte test: whether a link carries less for indices and values of what is wanted than for everything.

    All workers know both sides beforehand. A link of one worker carries nothing for either.
    """
    others, each = comm.world - 1, (comm.carries or x.dtype).itemsize
    picks = min(slots * comm.world, x.numel())
    sparse = others * (REPORT + room) + 2 * others / comm.world * picks * each
    return sparse < 2 * others / comm.world * x.numel() * each


def _mean(value: float, comm: Comm) -> float:
    """The mean over the workers, whole: as bytes, which no cast of values touches."""
    bits = torch.tensor([value], dtype=torch.float64).view(torch.uint8)
    return float(comm.all_gather(bits).view(torch.float64).mean())
