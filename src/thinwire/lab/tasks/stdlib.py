"""A byte-level GPT on the source of the Python that runs it: real text that every machine has."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.core.draws import mix64
from thinwire.lab.tasks.base import Batch, Later, Task
from thinwire.lab.tasks.models import GPT

CONTEXT = 128
SIZES = {  # name: width, layers, heads, batch, learning rate
    "0.1M": (64, 2, 2, 8, 8e-3),  # for studies of many runs
    "0.8M": (128, 4, 4, 8, 2e-3),
    "10M": (384, 6, 6, 4, 1e-3),
    "25M": (512, 8, 8, 4, 6e-4),
}


@dataclass(frozen=True)
class Text:
    """Long strings of bytes; a sample is a window, its target the window one byte later."""

    training: Tensor
    validation: Tensor
    test: Tensor
    windows: int = 256  # held-out windows, spread evenly

    def train(self, seed: int, step: int, rank: int, world: int, size: int) -> Batch:
        shared = torch.Generator().manual_seed(mix64(seed, step) >> 1)
        starts = torch.randint(len(self.training) - CONTEXT, (world, size), generator=shared)
        return _windows(self.training, starts[rank])

    def held_out(self, split: str) -> Iterator[Batch]:
        text = {"validation": self.validation, "test": self.test}[split]
        for starts in torch.linspace(0, len(text) - CONTEXT - 1, self.windows).long().split(16):
            yield _windows(text, starts)


def _windows(text: Tensor, starts: Tensor) -> Batch:
    at = starts[:, None] + torch.arange(CONTEXT + 1)
    taken = text[at].long()
    return taken[:, :-1], taken[:, 1:]


def read_library(root: Path) -> Text:
    """The library's own modules (no tests, no installed packages), whole files held out by their number."""
    skipped = {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "encodings",
    }
    files = [f for f in sorted(root.rglob("*.py")) if not skipped & set(f.relative_to(root).parts)]
    parts: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    for i, file in enumerate(files):
        parts[{7: 1, 13: 2}.get(i % 20, 0)].append(file.read_bytes())
    training, validation, test = (
        torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts.values()
    )
    return Text(training, validation, test)


def per_byte(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def make_task(size: str, data: Path) -> Task:
    width, layers, heads, batch, lr = SIZES[size]
    return Task(
        name=f"stdlib/{size}",
        model=lambda: GPT(width, layers, heads, CONTEXT),
        data=Later(lambda: read_library(Path(sysconfig.get_path("stdlib")))),
        loss=per_byte,
        metric="loss",
        optimizer="adamw",
        lr=lr,
        batch=batch,
        steps=400,
    )
