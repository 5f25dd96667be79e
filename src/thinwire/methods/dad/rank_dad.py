"""rank-dAD: each worker's gradient of a layer as a few columns, found from its factors by subspace iteration.

Baker et al., arXiv 2102.09631 (abstracts read; the rest from the authors' public code, whose procedure `published()`
keeps for comparison). With G = deltas.T @ inputs and a thin P:

    L = orthonormal(G P); P = G.T L;   repeated `iterations` times, P orthonormal in between

so L P.T = L L.T G is a projection of G: one iteration is enough for it never to be worse than sending nothing, and
nothing is counted twice. Where the factors themselves are no larger they go as they are, exactly; biases go densely.

Two things are ours. What was not sent is kept, whole, and added to the next gradient (error feedback, as PowerSGD's).
And the workers may share a basis, found in the mean of their gradients by the same iteration, with a mean in the place
of every product: a link's bytes then do not grow with the number of workers, as PowerSGD's, which stops half a turn
earlier. With bases of their own the workers gather, in one message, `rank` columns of each.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from thinwire import exchange
from thinwire.comm import Comm
from thinwire.comm.table import wire_bytes
from thinwire.core.draws import group_key
from thinwire.core.factor_reducer import FactorReducer, LayerPlan, check_options, factor_plan
from thinwire.core.factors import Factors, Use
from thinwire.core.products import PRODUCT
from thinwire.core.reducer import Layout, Reducer
from thinwire.exchange import factors
from thinwire.methods.dad.columns import (
    Thin,
    across,
    along,
    as_in,
    compress,
    is_tall,
    largest_first,
    replaced,
    sizes,
    without,
)
from thinwire.methods.dad.dad import exact, split
from thinwire.methods.dad.published import PublishedRankDAD
from thinwire.methods.dad.rank_dad_state import RankDADState

Columns = tuple[dict[int, Thin], dict[int, Thin]]  # by weight: what this worker sent, and what all did together
EXTRA = 4  # columns looked for beyond those sent: with one iteration, errors within about twice the optimum


class Work(NamedTuple):
    """What one step exchanges. Weights that are neither thinned nor averaged go as their factors."""

    given: Factors  # this step's gradients
    whole: Factors  # the same with what was kept back of them
    thinned: Collection[int]  # weights that go as columns
    averaged: Collection[int]  # weights whose gradients are formed

    def with_kept_back(self, state: RankDADState) -> Factors:
        """The given factors, and of weights that are averaged also what was kept back."""
        return as_in(self.given, self.whole, [weight for weight in self.averaged if state.kept_back[weight]])


@dataclass(frozen=True)
class RankDAD(FactorReducer[RankDADState]):
    """Every weight's gradient as at most `rank` columns; what they leave out is sent later.

    `feedback` keeps what was not sent, one value for each entry of the weights, and adds it to the next gradient.
    `basis`: the workers' "own" columns are gathered; a "shared" basis makes the bytes independent of their number;
    "auto" takes the one with fewer bytes, their own at a tie; between sites, where a shared basis costs three trips and
    their own one, the faster. `energy` below 1 sends only as many columns as held this
    share of the last step's. `warm_start` begins where the last step ended. Singular values below `tolerance`
    times the largest are left out. What is gathered may go in 16, 8 or 4 `bits` a value; means go whole. `unroll`,
    `rest`, `inputs`: as in `DAD`.
    """

    rank: int = 4
    iterations: int = 1
    tolerance: float = 1e-3
    warm_start: bool = True
    feedback: bool = True
    seed: int = 0
    unroll: bool = False
    basis: Literal["auto", "own", "shared"] = "auto"
    energy: float = 1.0
    rest: Reducer[Any, Any] | None = None
    inputs: Literal["sent", "kept"] | None = None
    bits: Literal[16, 8, 4] | None = None

    def __post_init__(self) -> None:
        check_options(self.rest, self.inputs, self.bits)
        for what in ("rank", "iterations"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} must be at least 1, not {getattr(self, what)}")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must lie at 0 or above and below 1, not {self.tolerance}")
        if not 0 < self.energy <= 1:
            raise ValueError(f"energy must lie above 0 and at most at 1, not {self.energy}: 1 sends all columns")
        if self.basis not in ("auto", "own", "shared"):
            raise ValueError(f"basis must be 'auto', 'own' or 'shared', not {self.basis!r}")

    @property
    def conserves(self) -> bool:
        return self.bits is None  # of factors that go as they are, what rounding takes is nobody's

    @property
    def sends_inputs(self) -> bool:
        return False  # but for layers with fewer rows than columns

    @staticmethod
    def published(rank: int = 10, iterations: int = 1, tolerance: float = 1e-3) -> PublishedRankDAD:
        """The sequential iteration of the authors' public code, for comparison."""
        return PublishedRankDAD(rank, iterations, tolerance)

    def init(self, layout: Layout, /) -> RankDADState:
        limits = [min(self.rank, *sizes(shape)) for shape in layout.shapes]
        weights, key = len(layout.shapes), group_key(layout)
        return RankDADState(list(layout.names), layout.shapes, limits, key, None, list(limits), [False] * weights)

    def reduce(self, local: Factors, state: RankDADState, comm: Comm, out: Tensor, /) -> None:
        given = factors.agreed(local, comm)
        thinned = [weight for weight in range(len(given.shapes)) if self.thins(given, weight, state, comm, out.dtype)]
        self.exchange(local, given, thinned, (), state, comm, out)

    def exchange(
        self,
        local: Factors,
        given: Factors,
        thinned: Collection[int],
        averaged: Collection[int],
        state: RankDADState,
        comm: Comm,
        out: Tensor,
    ) -> None:
        """Some weights as columns, some averaged, the others' factors as they are.

        What columns miss goes into the residual, or without feedback stays in `local`.
        """
        work, shares = Work(given, state.with_residual(given), thinned, averaged), self._shares(state, comm)
        send = self._by_shared_basis if shares else self._by_own_bases
        sent, seen = send(work, state, comm, out)
        if thinned or any(state.kept_back):
            # All workers have the same `seen`, so all of them commit this step, or none does.
            finite = all(bool(one.spectrum.isfinite().all()) for one in seen.values()) and bool(out.isfinite().all())
            if finite:
                if self.feedback:
                    state.keep(given, sent, averaged, out)
                if self.warm_start:
                    state.start_from(seen if shares else sent, 0 if shares else EXTRA, self.seed, out)
                state.note(work.whole, sent, out)
                if not shares:
                    state.note_overlaps(seen, comm.world)
                if self.energy < 1:
                    state.adapt_ranks(seen, self.energy)
            state.step += 1
        local.uses[:] = [] if self.feedback else [use for use in given.uses if use.weight in sent]
        local.formed = {} if self.feedback else {w: part for w, part in given.formed.items() if w in sent}
        if not self.feedback:
            local.uses += [Use(weight, PRODUCT, -one.right.T, one.left.T) for weight, one in sent.items()]

    def _by_own_bases(self, work: Work, state: RankDADState, comm: Comm, out: Tensor) -> Columns:
        """Every worker's best columns, gathered: what this worker sent of each weight, and what all did."""
        starts, thin = self._starts(state, EXTRA, out), {}
        for weight in work.thinned:
            right, left = partial(work.whole.right, weight), partial(work.whole.left, weight)
            rank = state.ranks[weight]
            thin[weight] = compress(right, left, starts[weight], rank, self.iterations, self.tolerance)
        pooled = exact(replaced(work.with_kept_back(state), thin), work.averaged, comm, out, self.bits)
        sent, seen = {}, {}
        for use in pooled.uses:
            if use.weight in thin:
                found, lefts, rights = thin[use.weight], use.deltas.to(out.dtype), use.inputs.to(out.dtype)
                here = slice(comm.rank * len(found.spectrum), (comm.rank + 1) * len(found.spectrum))
                sent[use.weight] = Thin(lefts[here].T, rights[here].T, found.spectrum, found.start)
                each = torch.linalg.vector_norm(lefts, dim=1).view(comm.world, -1)
                seen[use.weight] = Thin(lefts, rights, each.amax(0), found.start)
        return sent, seen

    def _by_shared_basis(self, work: Work, state: RankDADState, comm: Comm, out: Tensor) -> Columns:
        """One basis for all workers, found in the mean of what they see: three means, whatever their number.

        The basis Y spans the longer side of a weight, since the other one travels twice: X = orthonormal(mean(G Y)),
        Y = orthonormal(mean(G.T X)), and then mean(G Y) is what is sent.
        """
        whole, thinned, starts = work.whole, work.thinned, self._starts(state, 0, out)
        broad = [starts[weight][:, : state.ranks[weight]] for weight in thinned]
        for _ in range(self.iterations):
            narrow = exchange.mean_of([across(whole, w, y) for w, y in zip(thinned, broad, strict=True)], comm)
            narrow = [torch.linalg.qr(x).Q for x in narrow]
            broad = exchange.mean_of([along(whole, w, x) for w, x in zip(thinned, narrow, strict=True)], comm)
            broad = [torch.linalg.qr(y).Q for y in broad]
        own = [exchange.rounded(across(whole, w, y), comm) for w, y in zip(thinned, broad, strict=True)]
        means = exchange.mean_of([x.clone() for x in own], comm)
        comm.ledger.picked += sum(
            y.numel() + (1 + self.iterations) * x.numel() for x, y in zip(own, broad, strict=True)
        )
        exact(without(work.with_kept_back(state), thinned), work.averaged, comm, out, self.bits)
        sent, seen, views = {}, {}, split(out, whole.shapes)
        for weight, y, mine, mean in zip(thinned, broad, own, means, strict=True):
            found = largest_first(y, mean)
            start = torch.cat([found.basis, starts[weight][:, y.shape[1] :]], 1)
            sides = [(y, mine), (y, mean)] if is_tall(whole.shapes[weight]) else [(mine, y), (mean, y)]
            views[weight].view(len(views[weight]), -1).copy_(sides[1][0] @ sides[1][1].T)
            sent[weight] = Thin(*sides[0], torch.linalg.vector_norm(mine, dim=0), start)
            seen[weight] = Thin(*sides[1], found.spectrum, start)
        return sent, seen

    def _shares(self, state: RankDADState, comm: Comm) -> bool:
        """Whether the workers share a basis; the same answer on all of them, and at all steps."""
        if self.basis != "auto":
            return self.basis == "shared"
        if state.shared is None:
            state.shared = self._sharing_pays(state, comm)
        return state.shared

    def _sharing_pays(self, state: RankDADState, comm: Comm) -> bool:
        if comm.far and comm.link is not None:
            pairs = [(limit, *sorted(sizes(shape))) for limit, shape in zip(state.limits, state.shapes, strict=True)]
            short, long = (comm.value_bytes(sum(p[0] * p[i] for p in pairs), torch.float32) for i in (1, 2))
            means = [short, *(long, short) * self.iterations]
            shared = sum(comm.link.seconds("all_mean", size, comm.world) for size in means)
            return shared < comm.link.seconds("all_gather", short + long, comm.world)
        return (0.5 + self.iterations) * wire_bytes("all_mean", 1, comm.world) < wire_bytes("all_gather", 1, comm.world)

    def thins(self, local: Factors, weight: int, state: RankDADState, comm: Comm, working: torch.dtype) -> bool:
        """Whether columns are fewer bytes than the factors, which are exact; the same answer on all workers."""
        if state.kept_back[weight] or weight in local.formed:
            return True
        columns = self._nbytes(local, weight, state, comm, working)
        rows = local.nbytes(weight, factors.in_bits(comm, self.bits))
        pair = max(2, comm.world)  # one worker sends nothing either way, and does what two would
        return wire_bytes(self._collective(state, comm), columns, pair) < wire_bytes("all_gather", rows, pair)

    def ways(self, local: Factors, state: RankDADState, comm: Comm, working: torch.dtype, /) -> list[LayerPlan]:
        return [
            self.way(local, weight, state, comm, working)
            if self.thins(local, weight, state, comm, working)
            else factor_plan(local, weight, factors.in_bits(comm, self.bits))
            for weight in range(len(local.shapes))
        ]

    def way(self, local: Factors, weight: int, state: RankDADState, comm: Comm, working: torch.dtype) -> LayerPlan:
        size = self._nbytes(local, weight, state, comm, working)
        return LayerPlan(f"rank {state.ranks[weight]}", wire_bytes(self._collective(state, comm), size, comm.world))

    def _collective(self, state: RankDADState, comm: Comm) -> str:
        return "all_mean" if self._shares(state, comm) else "all_gather"

    def _nbytes(self, local: Factors, weight: int, state: RankDADState, comm: Comm, working: torch.dtype) -> int:
        short, long = sorted(sizes(local.shapes[weight]))
        values = self.iterations * (short + long) + short if self._shares(state, comm) else short + long
        wire = comm if self._shares(state, comm) else factors.in_bits(comm, self.bits)
        return wire.value_bytes(state.ranks[weight] * values, working)

    def _starts(self, state: RankDADState, extra: int, out: Tensor) -> list[Tensor]:
        """Where the iteration begins, for every weight."""
        return state.starts(extra, self.seed, out) if self.warm_start else state.random(extra, self.seed, out)

    def metrics(self, state: RankDADState, /) -> dict[str, float]:
        """By layer: ranks of what was sent, the share of the gradient in it, and how far workers' directions agree."""
        return state.told(self.tolerance)
