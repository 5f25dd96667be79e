"""What a task is: a model, its data in a fixed order, and how well it does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.core.draws import mix64
from thinwire.lab import LabError

Batch = tuple[Tensor, Tensor]
SPLITS = ("validation", "test")


class Data(Protocol):
    """Training batches that depend on nothing but these numbers, and held-out batches that never change."""

    def train(self, seed: int, step: int, rank: int, world: int, size: int) -> Batch: ...
    def held_out(self, split: str) -> Iterator[Batch]: ...


class Later:
    """Data that is read when a batch is first asked for: a plan needs the model alone."""

    def __init__(self, read: Callable[[], Data]):
        self._read = read

    @cached_property
    def _data(self) -> Data:
        return self._read()

    def train(self, seed: int, step: int, rank: int, world: int, size: int) -> Batch:
        return self._data.train(seed, step, rank, world, size)

    def held_out(self, split: str) -> Iterator[Batch]:
        return self._data.held_out(split)


@dataclass(frozen=True)
class Task:
    name: str
    model: Callable[[], nn.Module]  # its weights come from torch's generator, which the loop seeds
    data: Data
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy  # outputs, targets -> mean over the batch
    metric: str = "accuracy"  # "accuracy" (more is better) or "loss" (less is better)
    optimizer: str = "sgd"
    lr: float = 0.1
    batch: int = 32  # samples a worker takes a step
    steps: int = 300

    def __post_init__(self) -> None:
        if self.metric not in ("accuracy", "loss"):
            raise LabError(f"a task's metric is 'accuracy' or 'loss', not {self.metric!r}")

    def better(self, a: float, b: float) -> bool:
        """Whether a is at least as good as b."""
        return a >= b if self.metric == "accuracy" else a <= b


@dataclass(frozen=True)
class Arrays:
    """Samples that lie in memory, or in a file mapped into it; each split is a list of rows.

    `prepare` turns stored samples into what the model reads. `augment` gets a prepared training batch and a
    generator of its own.
    """

    x: Tensor
    y: Tensor
    rows: dict[str, Tensor]
    prepare: Callable[[Tensor], Tensor] = lambda x: x
    augment: Callable[[Tensor, torch.Generator], Tensor] = lambda x, _: x

    def train(self, seed: int, step: int, rank: int, world: int, size: int) -> Batch:
        rows = self.rows["train"]
        in_epoch = len(rows) // (world * size)
        if in_epoch == 0:
            raise LabError(f"{world} workers x {size} samples are more than {len(rows)}: take a smaller --batch")
        epoch, at = divmod(step, in_epoch)
        start = (at * world + rank) * size
        chosen = rows[_order(len(rows), seed, epoch)[start : start + size]]
        own = torch.Generator().manual_seed(mix64(seed, step, rank, 1) >> 1)
        return self.augment(self.prepare(self.x[chosen]), own), self.y[chosen]

    def held_out(self, split: str) -> Iterator[Batch]:
        for rows in self.rows[split].split(250):
            yield self.prepare(self.x[rows]), self.y[rows]

    @staticmethod
    def split(x: Tensor, y: Tensor, tested_from: int | None = None, **how: Callable[..., Tensor]) -> "Arrays":
        """A tenth is held out for validation; rows from `tested_from` on are the test, or another tenth."""
        total = len(y) if tested_from is None else tested_from
        order, tenth = _order(total, 0, 0), total // 10
        if tested_from is None:
            test, order = order[:tenth], order[tenth:]
        else:
            test = torch.arange(tested_from, len(y))
        return Arrays(x, y, {"train": order[tenth:], "validation": order[:tenth], "test": test}, **how)


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of one epoch: the same for every method, worker and machine."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mix64(seed, epoch) >> 1))
