"""Models that are wrapped, trained and let go, one after the other: what the workers of test_let_go.py run."""

import gc
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn

import thinwire


def _trained(spelling: str, detached: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    called = model if spelling == "local" else thinwire.wrap(model, spelling)
    handle = thinwire.local(model, optimizer, "Dense()", every=1) if called is model else thinwire.handle(called)
    for _ in range(2):
        called(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    if detached:
        handle.detach()


def open_files(spelling: str, detached: bool) -> tuple[int, int]:
    """How many files and connections are open after two models, and after six."""
    counts = []
    for _ in range(6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", thinwire.MethodWarning)
            _trained(spelling, detached)
        gc.collect()
        dist.barrier()  # the others' connections are closed as well
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[1], counts[5]
