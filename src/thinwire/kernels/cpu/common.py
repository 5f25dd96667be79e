"""What the CPU kernels share: how they are compiled, and how they see torch's memory."""

import logging
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import config, njit
from torch import Tensor

_LOG = logging.getLogger("thinwire")
NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}


def compiled(function: Callable[..., Any]) -> Any:
    """Compiled once a machine, if there is a folder for it: the package's, numba's, or one of the user's own."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "locator" not in str(error):
            raise
    folder = config.CACHE_DIR = _own_folder()  # type: ignore[attr-defined]
    return njit(nogil=True, cache=bool(folder))(function)


@cache
def _own_folder() -> str:
    """A temporary folder that nobody else can write to, since what lies there is run; nothing if there is none."""
    folder = Path(tempfile.gettempdir()) / f"thinwire-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return str(folder)
    except OSError:
        pass
    _LOG.warning("there is no folder to keep compiled kernels in: every run compiles them (set NUMBA_CACHE_DIR)")
    return ""


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
