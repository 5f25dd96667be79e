"""A matrix as few columns: what rank-dAD computes, apart from the exchange.

With G, which need not be formed, and a thin P: L = orthonormal(G P), P = G.T L, again and again. L P.T = L L.T G is a
projection of G. A few columns more are looked for than are wanted, and the best are kept (Halko, Martinsson and
Tropp, SIAM Review 2011).
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.factors import Factors, Form, Use
from thinwire.core.products import PRODUCT
from thinwire.methods.dad import spectrum as introspect

Apply = Callable[[Tensor], Tensor]


class Thin(NamedTuple):
    """left @ right.T, its singular values, and where to start next time."""

    left: Tensor
    right: Tensor
    spectrum: Tensor
    start: Tensor


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


class Turned(NamedTuple):
    """A basis with its columns in the order of their singular values, and those."""

    basis: Tensor
    spectrum: Tensor


def largest_first(basis: Tensor, coordinates: Tensor) -> Turned:
    """The same space as `basis`, orthonormal, turned so that coordinates @ basis.T has its largest direction first."""
    core = torch.linalg.qr(coordinates).R
    broken = ~core.isfinite().all()
    _, spectrum, vh = torch.linalg.svd(torch.where(broken, torch.zeros_like(core), core))
    return Turned(basis @ vh.T, torch.where(broken, torch.full_like(spectrum, torch.nan), spectrum))


def replaced(local: Factors, thin: dict[int, Thin]) -> Factors:
    """The same factors, with some weights' in the place of their thin products: as many rows as columns were found."""
    kept = without(local, thin)
    uses = [Use(weight, PRODUCT, found.right.T, found.left.T) for weight, found in thin.items()]
    forms = [Form.like(use.inputs, use.deltas) for use in uses]
    return replace(kept, uses=[*kept.uses, *uses], forms=[*(kept.forms or ()), *forms])


def without(local: Factors, weights: Collection[int]) -> Factors:
    """The same factors, with nothing for some weights."""
    assert local.forms is not None
    pairs = [(use, form) for use, form in zip(local.uses, local.forms, strict=True) if use.weight not in weights]
    formed = {weight: part for weight, part in local.formed.items() if weight not in weights}
    return replace(local, uses=[use for use, _ in pairs], forms=[form for _, form in pairs], formed=formed)


def sizes(shape: torch.Size) -> tuple[int, int]:
    """A weight's two sizes as a matrix."""
    return shape[0], shape.numel() // shape[0]


def energy(local: Factors, weight: int, out: Tensor) -> Tensor:
    """The squared length of a weight's gradient, where that costs next to nothing; else nan."""
    uses = [use for use in local.uses if use.weight == weight]
    rows, (height, width) = sum(len(use.inputs) for use in uses), sizes(local.shapes[weight])
    products, the_gradients_own = rows * rows * (height + width), rows * height * width
    dear = products > max(the_gradients_own / 10, 2**23) or local.formed.get(weight) is not None
    if dear or any(use.rule is not PRODUCT for use in uses):
        return out.new_full((), torch.nan)
    inputs, deltas = (torch.cat([getattr(use, side).to(out.dtype) for use in uses]) for side in ("inputs", "deltas"))
    return introspect.energy(inputs, deltas)


def as_in(given: Factors, whole: Factors, weights: Collection[int]) -> Factors:
    """`given`, with what was kept back of some weights, which are about to be averaged."""
    formed = given.formed | {weight: whole.formed[weight] for weight in weights}
    return Factors(given.shapes, given.uses, formed, given.forms, given.chain)


def is_tall(shape: torch.Size) -> bool:
    height, width = sizes(shape)
    return height > width


def across(whole: Factors, weight: int, y: Tensor) -> Tensor:
    """What a weight's gradient makes of vectors along its longer side."""
    return whole.left(weight, y) if is_tall(whole.shapes[weight]) else whole.right(weight, y)


def along(whole: Factors, weight: int, x: Tensor) -> Tensor:
    """And of vectors along its shorter one."""
    return whole.right(weight, x) if is_tall(whole.shapes[weight]) else whole.left(weight, x)
