"""Branches that all workers use by turns: what the workers of test_unused.py run."""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire

RATE, TURNS, FLUSH = 0.5, 12, 60


class Branches(nn.Module):
    """Two vectors of which a call uses one, the other, or both; its gradients do not depend on what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.zeros(20)), nn.Parameter(torch.zeros(20))

    def forward(self, x: Tensor, which: str) -> Tensor:
        parts = [getattr(self, name) @ row for name, row in zip(("left", "right"), x) if name in which]
        return torch.stack(parts).sum()


def by_turns(spelling: str, overlap: bool) -> tuple[Tensor, Tensor]:
    """Where the parameters end, and where the mean of all gradients leads, once nothing is unsent any more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", thinwire.MethodWarning)
        model = thinwire.wrap(Branches(), spelling, find_unused_parameters=True, overlap=overlap, grain="model")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    draw = torch.Generator().manual_seed(7 + dist.get_rank())
    total = torch.zeros(2, 20)
    for turn in range(TURNS + FLUSH):
        which = ("left", "right", "left right")[turn % 3] if turn < TURNS else "left right"
        x = torch.randn(2, 20, generator=draw) if turn < TURNS else torch.zeros(2, 20)
        total += torch.stack([x[i] * (name in which) for i, name in enumerate(("left", "right"))])
        optimizer.zero_grad()
        model(x, which).backward()
        optimizer.step()
    dist.all_reduce(total)
    ended = torch.cat([p.detach() for p in model.parameters()])
    thinwire.handle(model).detach()
    return ended, -RATE * total.flatten() / dist.get_world_size()
