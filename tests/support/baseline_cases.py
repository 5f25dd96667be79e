"""Torch's own hooks as the lab runs them: what the workers of test_baselines.py run."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.lab.run.methods import wrap_model


def trained(method: str) -> Tensor:
    """The parameters of a net that DDP cuts into several buckets, after the hook has begun to compress."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)), nn.Linear(256, 4))
    run: Any = SimpleNamespace(method=method, grain=None, overlap=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    net = wrap_model(model, optimizer, run, 2).net
    for _ in range(14):
        optimizer.zero_grad()
        net(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])
