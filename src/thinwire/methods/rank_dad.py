"""rank-dAD: each worker's gradient of a layer as a few columns, found from its factors by subspace iteration.

Baker et al., arXiv 2102.09631 (abstracts read; the rest from the authors' public code, whose procedure `published()`
keeps for comparison). Here the columns are found together. With G = deltas.T @ inputs, never formed, and a thin P:

    L = orthonormal(G P); P = G.T L;   repeated `iterations` times, P orthonormal in between

so L P.T = L L.T G is a projection of G: one iteration is enough for it never to be worse than sending nothing, and
nothing is counted twice. A few columns more are looked for than are sent, and the best are sent (Halko, Martinsson
and Tropp, SIAM Review 2011): no bytes more, and most of the distance to the best possible. Where the factors
themselves are no larger they go as they are, exactly. Each worker has a basis of its own, and the mean is the exact
sum of what was sent; biases go densely, exactly.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import factors, introspect, memory
from thinwire.comm import Comm
from thinwire.comm.base import WIRE
from thinwire.factors import Factors, Form, Use
from thinwire.methods.dad import FactorReducer, Way, exact, factor_way
from thinwire.methods.rank_dad_published import PublishedRankDAD
from thinwire.reducer import Layout, group_key, mix64
from thinwire.rules import PRODUCT

EXTRA = 4  # columns looked for beyond those sent: with one iteration, errors within about twice the optimum


def own(*, degree: int = 0, unsent: bool = False) -> Any:
    """This worker's own, and nothing that could be summed over workers: it starts anew with their number.

    unsent: mass is in it, and is lost then, which is said.
    """
    return field(default=None, metadata={"kind": "per_world", "degree": degree, "unsent": unsent})


@dataclass
class RankDADState:
    names: list[str] = memory.derived()
    ranks: list[int] = memory.derived()  # how many columns each weight is sent as
    widths: list[int] = memory.derived()  # and how many are looked for
    key: int = memory.derived()
    step: int = memory.shared(0)
    start: Tensor | None = own()  # P of the last step, of all weights, one after the other
    left: Tensor | None = own()  # what was not sent, as thin as what is sent: left @ right.T
    right: Tensor | None = own(degree=1, unsent=True)
    spectra: Tensor | None = own(degree=1)  # [weights, rank]: singular values sent in the last step
    energies: Tensor | None = own(degree=2)  # squared lengths of the last gradients; nan where too dear to find
    overlaps: Tensor | None = own()


Apply = Callable[[Tensor], Tensor]


class Thin(NamedTuple):
    """left @ right.T, its singular values, and where to start next time."""

    left: Tensor
    right: Tensor
    spectrum: Tensor
    start: Tensor


@dataclass(frozen=True)
class RankDAD(FactorReducer[RankDADState]):
    """Every worker's gradient as `rank` columns; singular values below `tolerance` times the largest are left out.

    `warm_start` begins where the last step ended. `feedback` keeps what was not sent, again as `rank` columns, and
    adds it to the next gradient; what does not fit there is dropped. `unroll` runs RNN, GRU and LSTM as cells.
    """

    rank: int = 4
    iterations: int = 1
    tolerance: float = 1e-3
    warm_start: bool = True
    feedback: bool = False
    seed: int = 0
    unroll: bool = False

    def __post_init__(self) -> None:
        for what in ("rank", "iterations"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} must be at least 1, not {getattr(self, what)}")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must lie at 0 or above and below 1, not {self.tolerance}")

    @staticmethod
    def published(rank: int = 10, iterations: int = 1, tolerance: float = 1e-3) -> PublishedRankDAD:
        """The sequential iteration of the authors' public code, for comparison."""
        return PublishedRankDAD(rank, iterations, tolerance)

    @property
    def conserves(self) -> bool:
        return not self.feedback

    def init(self, layout: Layout, /) -> RankDADState:
        ranks = [min(self.rank, *_sizes(shape)) for shape in layout.shapes]
        widths = [min(self.rank + EXTRA, *_sizes(shape)) for shape in layout.shapes]
        return RankDADState(list(layout.names), ranks, widths, group_key(layout))

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
        """Some weights as columns, some averaged, the others' factors as they are; `local` keeps what columns miss."""
        whole = self._with_memory(given, thinned, state)
        thin = {weight: self._compress(whole, weight, state, out) for weight in thinned}
        pooled = exact(replaced(given, thin), averaged, comm, out)
        if thin:
            self._remember(whole, thin, pooled, state, comm, out)
        local.uses[:] = [use for use in given.uses if use.weight in thin]
        local.uses += [Use(weight, PRODUCT, -t.right.T, t.left.T) for weight, t in thin.items()]
        local.formed = {weight: part for weight, part in given.formed.items() if weight in thin}

    def thins(self, local: Factors, weight: int, state: RankDADState, comm: Comm, working: torch.dtype) -> bool:
        """Whether columns are fewer bytes than the factors, which are exact; the same answer on all workers."""
        if self.feedback or weight in local.formed:
            return True
        return self._nbytes(local, weight, state, comm, working) < local.nbytes(weight, comm.carries)

    def ways(self, local: Factors, state: RankDADState, comm: Comm, working: torch.dtype, /) -> list[Way]:
        return [
            self.way(local, weight, state, comm, working)
            if self.thins(local, weight, state, comm, working)
            else factor_way(local, weight, comm)
            for weight in range(len(local.shapes))
        ]

    def way(self, local: Factors, weight: int, state: RankDADState, comm: Comm, working: torch.dtype) -> Way:
        wire = WIRE["all_gather"](comm.world) * self._nbytes(local, weight, state, comm, working)
        return Way(f"rank {state.ranks[weight]}", wire)

    def _nbytes(self, local: Factors, weight: int, state: RankDADState, comm: Comm, working: torch.dtype) -> int:
        values = state.ranks[weight] * sum(_sizes(local.shapes[weight]))
        return values * factors.carried(working, comm.carries).itemsize

    def _with_memory(self, local: Factors, thinned: Collection[int], state: RankDADState) -> Factors:
        """The factors, with what was kept from earlier steps as rows of their own."""
        if not self.feedback or state.left is None or state.right is None:
            return local
        lefts, rights = (
            _matrices(local, flat, state.ranks, side) for side, flat in enumerate((state.left, state.right))
        )
        kept = [Use(weight, PRODUCT, rights[weight].T, lefts[weight].T) for weight in thinned]
        return replace(local, uses=[*local.uses, *kept], forms=None)

    def _compress(self, local: Factors, weight: int, state: RankDADState, out: Tensor) -> Thin:
        start = None
        if self.warm_start and state.start is not None:
            start = _matrices(local, state.start, state.widths, 1)[weight]
        if start is None:
            start = self._random(local.shapes[weight], weight, state, out)
        right, left = (lambda p: local.right(weight, p)), (lambda q: local.left(weight, q))
        return compress(right, left, start, state.ranks[weight], self.iterations, self.tolerance)

    def _random(self, shape: torch.Size, weight: int, state: RankDADState, out: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(mix64(self.seed, state.key, weight, state.step) >> 1)
        return torch.randn(_sizes(shape)[1], state.widths[weight], generator=generator, dtype=out.dtype).to(out.device)

    def _remember(
        self, whole: Factors, thin: dict[int, Thin], pooled: Factors, state: RankDADState, comm: Comm, out: Tensor
    ) -> None:
        """What the next step and the metrics want; a step with a non-finite value anywhere leaves no trace."""
        weights = range(len(whole.shapes))
        finite = torch.stack([side.isfinite().all() for use in pooled.uses for side in (use.inputs, use.deltas)]).all()
        state.step += 1

        def kept(new: list[Tensor], old: Tensor | None) -> Tensor:
            flat = torch.cat([part.flatten() for part in new])
            return torch.where(finite, flat, torch.zeros_like(flat) if old is None else old)

        if self.warm_start:
            starts = [thin[w].start if w in thin else self._random(whole.shapes[w], w, state, out) for w in weights]
            state.start = kept(starts, state.start)
        if self.feedback:
            rests = [self._rest(whole, weight, thin[weight], state, out) for weight in weights]
            state.left = kept([rest.left for rest in rests], state.left)
            state.right = kept([rest.right for rest in rests], state.right)
        state.spectra = out.new_full((len(weights), max(state.ranks)), torch.nan)
        state.energies, state.overlaps = out.new_full((2, len(weights)), torch.nan)
        for weight, found in thin.items():
            state.spectra[weight, : len(found.spectrum)] = found.spectrum
            state.energies[weight] = _energy(whole, weight, out)
            lefts = torch.cat([use.deltas for use in pooled.uses if use.weight == weight])
            state.overlaps[weight] = introspect.overlap(lefts.view(comm.world, -1, lefts.shape[1]).to(out.dtype))

    def _rest(self, whole: Factors, weight: int, sent: Thin, state: RankDADState, out: Tensor) -> Thin:
        """What was not sent, as `rank` columns too."""
        start = self._random(whole.shapes[weight], weight, state, out)
        right = lambda p: whole.right(weight, p) - sent.left @ (sent.right.T @ p)
        left = lambda q: whole.left(weight, q) - sent.right @ (sent.left.T @ q)
        return compress(right, left, start, state.ranks[weight], iterations=2, tolerance=0.0)

    def metrics(self, state: RankDADState, /) -> dict[str, float]:
        """By layer: ranks of what was sent, the share of the gradient in it, and how far workers' directions agree."""
        found: dict[str, float] = {}
        if state.spectra is None or state.energies is None or state.overlaps is None:
            return found
        lines = zip(state.names, state.spectra, state.energies.tolist(), state.overlaps.tolist(), strict=True)
        for name, spectrum, total, agreement in lines:
            spectrum = spectrum[~spectrum.isnan()].double().cpu()
            if not len(spectrum):
                continue
            known = total == total
            found[f"{name}/rank"] = introspect.numerical_rank(spectrum, self.tolerance)
            found[f"{name}/stable_rank"] = introspect.stable_rank(spectrum, total if known else None)
            found[f"{name}/entropy_rank"] = introspect.entropy_rank(spectrum)
            found[f"{name}/overlap"] = agreement
            if known and total > 0:
                found[f"{name}/captured"] = min(1.0, float(spectrum.square().sum()) / total)
            found |= {f"{name}/spectrum_{i}": float(value) for i, value in enumerate(spectrum)}
        return found


def compress(right: Apply, left: Apply, start: Tensor, rank: int, iterations: int, tolerance: float) -> Thin:
    """The `rank` best columns of what a matrix shows `start`; `right` and `left` apply it and its transpose."""
    p = start
    for turn in range(iterations):
        basis = torch.linalg.qr(right(p)).Q
        p = left(basis)
        if turn < iterations - 1:
            p = torch.linalg.qr(p).Q
    start, core = torch.linalg.qr(p)
    # A singular value decomposition of nan raises, on this worker alone: send nan instead, and all will know.
    broken = ~core.isfinite().all()
    u, spectrum, vh = torch.linalg.svd(torch.where(broken, torch.zeros_like(core), core))
    kept = torch.where(spectrum > tolerance * spectrum.max(), spectrum, torch.zeros_like(spectrum))
    kept = torch.where(broken, torch.full_like(kept, torch.nan), kept)[:rank]
    return Thin((basis @ vh.T[:, :rank]) * kept, start @ u[:, :rank], kept, start)


def replaced(local: Factors, thin: dict[int, Thin]) -> Factors:
    """The same factors, with some weights' in the place of their thin products: as many rows as columns were found."""
    assert local.forms is not None
    pairs = [(use, form) for use, form in zip(local.uses, local.forms, strict=True) if use.weight not in thin]
    for weight, found in thin.items():
        use = Use(weight, PRODUCT, found.right.T, found.left.T)
        pairs.append((use, Form.like(use.inputs, use.deltas)))
    formed = {weight: part for weight, part in local.formed.items() if weight not in thin}
    return replace(local, uses=[use for use, _ in pairs], forms=[form for _, form in pairs], formed=formed)


def _sizes(shape: torch.Size) -> tuple[int, int]:
    """A weight's two sizes as a matrix."""
    return shape[0], shape.numel() // shape[0]


def _matrices(local: Factors, flat: Tensor, columns: list[int], side: int) -> list[Tensor]:
    """Thin matrices of all weights, out of one vector."""
    sizes = [(_sizes(shape)[side], width) for shape, width in zip(local.shapes, columns, strict=True)]
    return [part.view(size) for part, size in zip(flat.split([m * r for m, r in sizes]), sizes, strict=True)]


def _energy(local: Factors, weight: int, out: Tensor) -> Tensor:
    """The squared length of a weight's gradient, where that costs next to nothing; else nan."""
    uses = [use for use in local.uses if use.weight == weight]
    rows, (height, width) = sum(len(use.inputs) for use in uses), _sizes(local.shapes[weight])
    products, the_gradients_own = rows * rows * (height + width), rows * height * width
    dear = products > max(the_gradients_own / 10, 2**23) or local.formed.get(weight) is not None
    if dear or any(use.rule is not PRODUCT for use in uses):
        return out.new_full((), torch.nan)
    inputs, deltas = (torch.cat([getattr(use, side).to(out.dtype) for use in uses]) for side in ("inputs", "deltas"))
    return introspect.energy(inputs, deltas)
