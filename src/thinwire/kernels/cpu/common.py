"""What the CPU kernels share: how they are compiled, and how they see torch's memory."""

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

compiled: Any = njit(nogil=True, cache=True)
NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}


def covers(*vectors: Tensor) -> bool:
    """Whether these kernels take such vectors; the rest is the reference's."""
    return len({x.dtype for x in vectors}) == 1 and all(
        x.device.type == "cpu" and x.is_contiguous() and (x.dtype in NUMPY or not x.dtype.is_floating_point)
        for x in vectors
    )


def view(x: Tensor) -> Any:
    return x.detach().contiguous().numpy()


def tensor(array: Any) -> Tensor:
    """The same memory; an empty array would hand on a stride of zero, which torch refuses to view otherwise."""
    return torch.from_numpy(array if array.size else np.empty(0, array.dtype))


def inside(index: Tensor, numel: int) -> Any:
    """The positions, after making sure that none leads outside: compiled code would follow it."""
    places = view(index)
    if len(places) and not (places.min() >= 0 and places.max() < numel):
        raise IndexError(f"an index lies outside a vector of {numel} entries")
    return places
