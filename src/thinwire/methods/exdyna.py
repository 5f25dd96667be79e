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

What differs from the code that was read: a worker has slots for its fair share of indices and sends its largest, so
that a message has a size that all know, a step is two collectives, and neither a jump of the gradients nor a batch
with large ones floods the wire; the threshold starts from a measured quantile, is scaled by how steeply the count
depends on it, and lies low enough to fill the slots; boundaries are cut where the loads of blocks are equal.
"""

import math
import statistics
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
SPARE = 1.01  # slots for each pick that is wanted
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
        self.prepare(state, comm.world)
        if not self.pays(state, (comm.carries or x.dtype).itemsize, comm.world):
            state.picks, state.fullest, state.moved = [], 0.0, 0
            return exchange.fall_back(x, comm, out)
        if state.control.threshold is None:
            self.start(state, [] if self._as_published else _all_told(kernels.quantile(x, self.density), x, comm))

        mine = self.pick(x, state, comm.rank)
        reports = self._tell_all(mine, state, comm) if self._as_published else self._tell(mine, state, comm)
        index = self.union(state, reports)
        exchange.mean_at(x, index, comm, out)
        self.learn(state, reports, index)

    def prepare(self, state: ExDynaState, workers: int) -> None:
        """Part 1: blocks, dealt out evenly as long as nothing is known."""
        state.target = count(self.density, state.numel)
        if not state.shares:
            state.shares = partitions.fair_shares(self._blocks(state.numel, workers).count, workers)

    def message(self, state: ExDynaState) -> int:
        """How many bytes each worker tells the others: all know before anybody has picked."""
        widest = max(end - start for start, end in pairwise(self._edges(state)))
        return REPORT + slots.size(self._slots(state)[0], widest)

    def pays(self, state: ExDynaState, itemsize: int, workers: int) -> bool:
        """The byte test: whether a link carries less for the messages and the values wanted than for everything.

        A link of one worker carries nothing for either.
        """
        values = 2 * (workers - 1) / workers * itemsize
        return (workers - 1) * self.message(state) < values * (state.numel - state.target)

    def start(self, state: ExDynaState, measured: list[float]) -> None:
        """The first threshold: the median of what the workers measured, since one of them may be far off."""
        published = thresholds.start_as_published(state.target)
        state.control.set(published if self._as_published else statistics.median(measured))

    def pick(self, x: Tensor, state: ExDynaState, rank: int) -> Report:
        """Parts 2 and 3: what reaches the threshold in the partition that is this worker's at this step."""
        control, edges = state.control, self._edges(state)
        assert control.threshold is not None
        part = (state.step + rank) % len(state.shares)
        low, high = edges[part], edges[part + 1]
        index = kernels.select(x, control.threshold, low, high)
        above = index.numel()
        if self._as_published:  # all of it, and one entry by force where there is nothing
            if not above and high > low:
                index = index.new_tensor([low + state.step % (high - low)])
            return Report(index.numel(), 0, 0.0, index)
        values, most = x[index], self._slots(state)[rank]
        far_above = kernels.select(values, control.threshold * math.exp(control.reach)).numel()
        measured = kernels.quantile(x, self.density) if control.lost else 0.0
        return Report(above, far_above, measured, index if above <= most else index[kernels.top_k(values, most)])

    def union(self, state: ExDynaState, reports: list[Report]) -> Tensor:
        """All picks, in the order of the partitions and so sorted. No two are the same."""
        return torch.cat([reports[(part - state.step) % len(reports)].index for part in range(len(reports))])

    def learn(self, state: ExDynaState, reports: list[Report], index: Tensor) -> None:
        """What all workers conclude from what all have told."""
        state.picks = [report.index.numel() for report in reports]
        loads = [reports[(part - state.step) % len(reports)].above for part in range(len(reports))]
        total, before = sum(loads), state.shares
        room = sum(self._slots(state))
        flood = thresholds.LOST * state.target * state.control.margin  # tells nothing about the loads
        if self._as_published or total <= flood:
            state.fullest = max(loads) * state.target / total if total else 0.0
            self._rebalance(state, loads, index)
        state.moved = partitions.moves(before, state.shares)
        self._rescale(state, reports, room)
        state.step += 1

    @property
    def _as_published(self) -> bool:
        return self.control == "official"

    def _blocks(self, numel: int, workers: int) -> Blocks:
        if self.topology == "static":
            return Blocks(numel, numel, 1)
        if self.topology == "official":
            return partitions.cut_as_published(numel, workers)
        return partitions.cut(numel, workers, self.blocks)

    def _edges(self, state: ExDynaState) -> list[int]:
        return partitions.bounds(self._blocks(state.numel, len(state.shares)), state.shares)

    def _slots(self, state: ExDynaState) -> list[int]:
        """How many picks each worker may send, the first no fewer than the others.

        Little more than its fair share, which then all workers send at every step, because partitions follow the
        load. Where they do not, what the fullest should have, and what chance adds to it.
        """
        workers = len(state.shares)
        if self.topology != "static":
            return partitions.fair_shares(math.ceil(SPARE * state.target), workers)
        fair = state.target / workers
        expected = max(fair, state.fullest) if state.fullest else 2 * fair
        return [math.ceil(1.1 * expected + 3 * math.sqrt(expected)) + 2] * workers

    def _tell(self, mine: Report, state: ExDynaState, comm: Comm) -> list[Report]:
        """Everybody's report, in one collective."""
        counts = torch.tensor([mine.above, mine.far_above]).view(torch.uint8)
        magnitude = torch.tensor([mine.measured], dtype=torch.float64).view(torch.uint8)
        report = torch.cat([counts, magnitude]).to(mine.index.device)
        indices = slots.fill(mine.index, state.numel, self.message(state) - REPORT)
        return [_read(row, state.numel) for row in comm.all_gather(torch.cat([report, indices]))]

    def _tell_all(self, mine: Report, state: ExDynaState, comm: Comm) -> list[Report]:
        """As published: however many there are."""
        messages = exchange.gather_bytes(wire.encode_index(mine.index, state.numel), comm, state.room)
        assert messages is not None  # there was no limit to exceed
        indices = [wire.decode_index(message, state.numel) for message in messages]
        return [Report(index.numel(), 0, 0.0, index) for index in indices]

    def _rebalance(self, state: ExDynaState, loads: list[int], index: Tensor) -> None:
        """Part 2: the partitions of the next step."""
        blocks = self._blocks(state.numel, len(state.shares))
        if self.topology == "pairwise":
            state.loads = partitions.smoothed(state.loads, loads)
            state.shares, state.loads = partitions.move_pairwise(state.shares, state.loads)
        elif self.topology == "recut":
            # What did not fit into the slots is missing in the index, but not in the load of its partition.
            seen = partitions.scaled(blocks.loads(index), state.shares, loads)
            state.loads = partitions.smoothed(state.loads, seen)
            state.shares = partitions.recut(state.shares, state.loads)
        elif self.topology == "official":
            state.shares = partitions.move_as_published(state.shares, loads, blocks)

    def _rescale(self, state: ExDynaState, reports: list[Report], room: int) -> None:
        """Part 4: the threshold of the next step."""
        sent = sum(state.picks)
        if self._as_published:
            return thresholds.scale_as_published(state.control, sent, state.target)
        far_above, measured = sum(r.far_above for r in reports), statistics.median(r.measured for r in reports)
        seen = Counted(sent, room, [r.above for r in reports], far_above, measured)
        thresholds.scale_fast(state.control, seen, state.target)

    def metrics(self, state: ExDynaState, /) -> dict[str, float]:
        sent = sum(state.picks) if state.picks else state.numel  # no picks: all was sent
        workers, most = len(state.picks), max(state.picks, default=0)
        return {
            "build_up": sent / max(1, state.target),
            "imbalance": workers * most / sent if state.picks and sent else 1.0,
            "load_imbalance": workers * state.fullest / state.target if state.picks and state.fullest else 1.0,
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


def _all_told(value: float, x: Tensor, comm: Comm) -> list[float]:
    """Every worker's number, as bytes, which no cast of values touches."""
    bits = torch.tensor([value], dtype=torch.float64).view(torch.uint8).to(x.device)
    return comm.all_gather(bits).cpu().view(torch.float64).flatten().tolist()
