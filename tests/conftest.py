"""Before any test: one thread, and kernels compiled once, so that worker processes find them in the cache."""

import signal

import pytest
import torch

from thinwire import kernels


@pytest.fixture(scope="session", autouse=True)
def _settled_machine() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it
    for dtype in (torch.float32, torch.float64):
        kernels.warm(dtype)
