"""What a saved state holds of gradients that were handed in and not sent."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def unsent_in(groups: list[dict[str, Any]], parameters: Mapping[str, Tensor], rank: int, world: int) -> Tensor:
    """In the order of the parameters, so that its mean over the workers is what has not arrived.

    Zeros if workers keep nothing of their own: what owners keep is then not all that is missing.
    """
    by_name = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    kept = False

    def collect(state: dict[str, Any] | None, names: list[str]) -> None:
        nonlocal kept
        for key, value in (state or {}).items():
            if key in ("residual", "r") and isinstance(value, dict):
                kept = True
                for name, tensor in value.items():
                    by_name[name] += tensor.double()
            elif key == "owned" and value["part"] is not None:  # of the mean itself: as much for each worker
                whole = torch.zeros(world, value["part"].numel(), dtype=torch.float64)
                whole[rank] = value["part"].double() * world
                sizes = [by_name[name].numel() for name in names]
                for name, part in zip(names, whole.flatten()[: sum(sizes)].split(sizes), strict=True):
                    by_name[name] += part.view_as(by_name[name])
            elif isinstance(value, dict):
                collect(value, names)

    for group in groups:
        collect(group["state"], group["names"])
    return torch.cat([tensor.flatten() for tensor in by_name.values()]) * kept
