"""What a gradient's singular values tell of training: how many directions it has, and whether workers share them.

Everything is computed from factors, deltas.T @ inputs, whose product is never formed.
"""

import torch
from torch import Tensor


def energy(inputs: Tensor, deltas: Tensor) -> Tensor:
    """The squared length of deltas.T @ inputs."""
    return ((inputs @ inputs.T) * (deltas @ deltas.T)).sum().clamp(min=0)


def numerical_rank(spectrum: Tensor, tolerance: float = 1e-3) -> int:
    """How many singular values lie above `tolerance` times the largest."""
    return int((spectrum > tolerance * spectrum.max()).sum()) if spectrum.numel() else 0


def stable_rank(spectrum: Tensor, total: float | None = None) -> float:
    """The energy (`total`, or the spectrum's) over that of the largest direction; small changes change it little."""
    squares = spectrum.double().square()
    largest = float(squares.max()) if squares.numel() else 0.0
    return (float(squares.sum()) if total is None else total) / largest if largest else 0.0


def entropy_rank(spectrum: Tensor) -> float:
    """How many equal directions would be as spread out: the exponential of the energies' entropy."""
    squares = spectrum.double().square()
    total = squares.sum()
    if not total > 0:
        return 0.0
    shares = squares / total
    return float(torch.special.entr(shares).sum().exp())


def directions_for(spectrum: Tensor, share: float) -> int:
    """How many directions hold `share` of the energy."""
    squares = spectrum.double().sort(descending=True).values.square()
    if not squares.sum() > 0:
        return 0
    return int((squares.cumsum(0) < share * squares.sum() * (1 - 1e-12)).sum()) + 1


def overlap(bases: Tensor) -> Tensor:
    """How far workers' directions agree, from 0 (none shared) to 1 (the same space), on average over pairs.

    `bases` is [workers, directions, size], rows orthogonal; a row of zeros is no direction.
    """
    workers, directions, size = bases.shape
    units = torch.nn.functional.normalize(bases, dim=2).reshape(-1, size)
    squares = (units @ units.T).square().view(workers, directions, workers, directions).sum((1, 3))
    held = squares.diagonal().round()  # how many directions each worker has
    fewest = torch.minimum(held[:, None], held[None, :]).clamp(min=1)
    pairs = ~torch.eye(workers, dtype=torch.bool, device=bases.device)
    return (squares / fewest)[pairs].mean() if workers > 1 else squares.new_ones(())


def told(spectrum: Tensor, total: float, agreement: float, tolerance: float) -> dict[str, float]:
    """What the singular values that were sent tell, with the gradient's energy and workers' overlap, if not nan."""
    known = total == total
    found = {
        "rank": float(numerical_rank(spectrum, tolerance)),
        "stable_rank": stable_rank(spectrum, total if known else None),
        "entropy_rank": entropy_rank(spectrum),
    }
    if agreement == agreement:
        found["overlap"] = agreement
    if known and total > 0:
        found["captured"] = min(1.0, float(spectrum.square().sum()) / total)
    return found | {f"spectrum_{i}": float(value) for i, value in enumerate(spectrum)}
