"""What rank-dAD remembers: what was not sent, where the iteration begins next time, and what the metrics tell."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.core.draws import mix64
from thinwire.core.factors import Factors
from thinwire.methods.dad import spectrum
from thinwire.methods.dad.columns import Thin, energy, sizes
from thinwire.methods.dad.dad import split


def _nothing() -> None:
    """Not known yet."""


@dataclass
class RankDADState:
    names: list[str] = memory.derived()
    shapes: tuple[torch.Size, ...] = memory.derived()
    limits: list[int] = memory.derived()  # as how many columns each weight may be sent
    key: int = memory.derived()
    residual: Tensor | None = memory.unsent()  # None until something was kept back
    ranks: list[int] = memory.alike()  # and as how many it is
    kept_back: list[bool] = memory.alike()  # weights of which something may be in the residual
    step: int = memory.alike(0)
    start: Tensor | None = memory.per_world(_nothing)  # P of the last step, of all weights, one after the other
    spectra: Tensor | None = memory.per_world(_nothing, degree=1)  # [weights, rank]: singular values sent last
    energies: Tensor | None = memory.per_world(_nothing, degree=2)  # squared lengths of what they are of, if known
    overlaps: Tensor | None = memory.per_world(_nothing)
    shared: bool | None = memory.per_world(_nothing)  # whether the workers share a basis, once that is settled

    # ── error feedback ─────────────────────────────────────────────────────────────────────────────────────────────

    def with_residual(self, local: Factors) -> Factors:
        """The gradient with what was kept back of it, as far as there is any."""
        if self.residual is None:
            return local
        formed = dict(local.formed)
        for weight, kept in enumerate(split(self.residual, local.shapes)):
            if self.kept_back[weight]:
                mine = formed.get(weight)
                formed[weight] = kept if mine is None else kept + mine
        return Factors(local.shapes, local.uses, formed, local.forms, local.chain)

    def keep(self, given: Factors, sent: dict[int, Thin], averaged: Collection[int], like: Tensor) -> None:
        """residual += gradient - what was sent. Nowhere else is a gradient formed."""
        if self.residual is None:
            self.residual = torch.zeros_like(like)
        for weight, kept in enumerate(split(self.residual, given.shapes)):
            if weight in sent:
                given.add(weight, kept)
                kept.view(len(kept), -1).addmm_(sent[weight].left, sent[weight].right.T, alpha=-1)
                self.kept_back[weight] = True
            elif weight in averaged and self.kept_back[weight]:
                kept.zero_()
                self.kept_back[weight] = False

    # ── where the iteration begins ─────────────────────────────────────────────────────────────────────────────────

    def starts(self, extra: int, seed: int, like: Tensor) -> list[Tensor]:
        """For every weight, where the last step ended; with a basis of all its own, or one that all share."""
        if self.start is None:
            return self.random(extra, seed, like)
        shapes = self._thin_shapes(extra)
        parts = self.start.split([m * r for m, r in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def random(self, extra: int, seed: int, like: Tensor) -> list[Tensor]:
        found = []
        for weight, shape in enumerate(self._thin_shapes(extra)):
            generator = torch.Generator().manual_seed(mix64(seed, self.key, weight, self.step) >> 1)
            found.append(torch.randn(*shape, generator=generator, dtype=like.dtype).to(like.device))
        return found

    def start_from(self, found: dict[int, Thin], extra: int, seed: int, like: Tensor) -> None:
        """Begin the next step where this one ended; weights that were not thinned begin anywhere."""
        fresh = self.random(extra, seed, like)
        starts = [found[weight].start if weight in found else one for weight, one in enumerate(fresh)]
        self.start = torch.cat([start.flatten() for start in starts])

    def _thin_shapes(self, extra: int) -> list[tuple[int, int]]:
        """Of the matrices that the iteration begins with; without `extra` columns they span the longer side."""
        pairs = [(sizes(shape), limit) for shape, limit in zip(self.shapes, self.limits, strict=True)]
        return [(size[1] if extra else max(size), min(limit + extra, *size)) for size, limit in pairs]

    def adapt_ranks(self, seen: dict[int, Thin], share: float) -> None:
        """As many columns as held this share of the energy, and one more, to see whether it is worth it."""
        for weight, one in seen.items():
            holds = spectrum.directions_for(one.spectrum, share)
            self.ranks[weight] = max(1, min(holds + 1, self.limits[weight]))

    # ── what the metrics tell ──────────────────────────────────────────────────────────────────────────────────────

    def note(self, whole: Factors, sent: dict[int, Thin], like: Tensor) -> None:
        """The singular values that were sent, and how long the gradients were that they are of."""
        weights = len(whole.shapes)
        self.spectra = like.new_full((weights, max(self.limits)), torch.nan)
        self.energies, self.overlaps = like.new_full((2, weights), torch.nan)
        residuals = None if self.residual is None else split(self.residual, whole.shapes)
        for weight, one in sent.items():
            self.spectra[weight, : len(one.spectrum)] = one.spectrum
            if residuals is None:
                self.energies[weight] = energy(whole, weight, like)
            else:  # what was sent is a projection, so the squares of the two parts add up
                left_out = torch.linalg.vector_norm(residuals[weight]).square()
                self.energies[weight] = left_out + one.spectrum.square().sum()

    def note_overlaps(self, seen: dict[int, Thin], world: int) -> None:
        """How far the workers' own directions agree."""
        assert self.overlaps is not None
        for weight, one in seen.items():
            self.overlaps[weight] = spectrum.overlap(one.left.view(world, -1, one.left.shape[1]))

    def told(self, tolerance: float) -> dict[str, float]:
        """What was noted, by layer."""
        found: dict[str, float] = {}
        if self.spectra is None or self.energies is None or self.overlaps is None:
            return found
        lines = zip(self.names, self.spectra, self.energies.tolist(), self.overlaps.tolist(), strict=True)
        for name, values, total, agreement in lines:
            sent = values[~values.isnan()].double().cpu()
            if len(sent):
                about = spectrum.told(sent, total, agreement, tolerance)
                found |= {f"{name}/{key}": value for key, value in about.items()}
        return found
