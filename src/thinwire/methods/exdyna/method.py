"""ExDyna: each worker chooses in its own part of the gradient, so choices never overlap and traffic does not grow.

Yoon and Oh, Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning,
CCGrid 2024. Of the paper the abstract was read; the rules were read in the authors' code, whose decisions
`ExDyna.official` reproduces, its mistakes included (`published`).

A step, on worker r of n:

1. the entries are cut into blocks, and the blocks dealt out in n contiguous partitions (`partitions`);
2. the worker looks at partition (t + r) mod n, so that each sees every entry once in n steps;
3. it picks what reaches a threshold that all share, and tells the others where (`picks`);
4. all workers average their values at all picks: no index appears twice, so nothing builds up;
5. from the counts, which all have seen, blocks move and the threshold is scaled (`thresholds`).

What differs from the code that was read: a worker has slots for its fair share of indices and sends its largest, so
that a message has a size that all know, a step is two collectives, and neither a jump of the gradients nor a batch
with large ones floods the wire; the threshold starts from a measured quantile, is scaled by how steeply the count
depends on it, and lies low enough to fill the slots; boundaries are cut where the loads of blocks are equal.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from thinwire import exchange
from thinwire.comm import Comm
from thinwire.comm.table import wire_bytes
from thinwire.core.reducer import Layout, Reducer, check_density, count
from thinwire.exchange import slots
from thinwire.methods.exdyna import partitions
from thinwire.methods.exdyna.partitions import Blocks, Topology
from thinwire.methods.exdyna.picks import REPORT, FastControl
from thinwire.methods.exdyna.published import TOPOLOGY as PUBLISHED_TOPOLOGY
from thinwire.methods.exdyna.published import PublishedControl
from thinwire.methods.exdyna.state import ExDynaState, Report

TOPOLOGIES: dict[str, Topology] = {
    "recut": partitions.RECUT,
    "pairwise": partitions.PAIRWISE,
    "official": PUBLISHED_TOPOLOGY,
    "static": partitions.STATIC,
}
CONTROLS: dict[str, FastControl | PublishedControl] = {"fast": FastControl(), "official": PublishedControl()}
SPARE = 1.01  # slots for each pick that is wanted


@dataclass(frozen=True)
class ExDyna(Reducer[Tensor, ExDynaState]):
    """The largest entries, a share `density` of all; each worker searches only its own part of the gradient.

    `topology` says how the boundaries of the parts move, so that all workers find about as many entries: `recut` at
    equal loads of blocks, `pairwise` between neighbours, `official` as the published code, `static` not at all.
    `control` scales the threshold: `fast`, or `official`. `blocks` is how many blocks the gradient is cut into, by
    default 1024, or 64 for each worker if that is more.
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
        state = ExDynaState(layout.numel, count(self.density, layout.numel))
        CONTROLS[self.control].begin(state)
        return state

    def reduce(self, x: Tensor, state: ExDynaState, comm: Comm, out: Tensor, /) -> None:
        control = CONTROLS[self.control]
        self.prepare(state, comm.world)
        if not self.pays(state, comm.wire_dtype(x.dtype).itemsize, comm.world):
            state.picks, state.fullest, state.moved = [], 0.0, 0
            return exchange.fall_back(x, comm, out)
        if state.control.threshold is None:
            self.start(state, control.measure(x, self.density, comm))

        mine = self.pick(x, state, comm.rank)
        reports = control.tell(mine, state, self.message(state), comm)
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
        told = wire_bytes("all_gather", self.message(state), workers)
        return told < wire_bytes("all_mean", itemsize * (state.numel - state.target), workers)

    def start(self, state: ExDynaState, measured: list[float]) -> None:
        """The first threshold, from what the workers measured."""
        CONTROLS[self.control].start(state, measured)

    def pick(self, x: Tensor, state: ExDynaState, rank: int) -> Report:
        """Parts 2 and 3: what reaches the threshold in the partition that is this worker's at this step."""
        edges, part = self._edges(state), (state.step + rank) % len(state.shares)
        most = self._slots(state)[rank]
        return CONTROLS[self.control].pick(x, state, edges[part], edges[part + 1], most, self.density)

    def union(self, state: ExDynaState, reports: list[Report]) -> Tensor:
        """All picks, in the order of the partitions and so sorted. No two are the same."""
        return torch.cat([reports[(part - state.step) % len(reports)].index for part in range(len(reports))])

    def learn(self, state: ExDynaState, reports: list[Report], index: Tensor) -> None:
        """Part 5: what all workers conclude from what all have told."""
        control = CONTROLS[self.control]
        state.picks = [report.index.numel() for report in reports]
        loads = [reports[(part - state.step) % len(reports)].above for part in range(len(reports))]
        total, before = sum(loads), state.shares
        room = sum(self._slots(state))
        if not control.is_flood(total, state):
            state.fullest = max(loads) * state.target / total if total else 0.0
            blocks, move = self._blocks(state.numel, len(before)), TOPOLOGIES[self.topology].move
            state.shares, state.loads = move(before, state.loads, loads, index, blocks)
        state.moved = partitions.moves(before, state.shares)
        control.scale(state, reports, room)
        state.step += 1

    def _blocks(self, numel: int, workers: int) -> Blocks:
        return TOPOLOGIES[self.topology].cut(numel, workers, self.blocks)

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
