"""What the worker processes of test_rivals.py run."""

import torch
from torch import Tensor, nn

import thinwire
from thinwire.comm.torch import TorchComm


def reduce_all(spellings: list[str], grads: Tensor) -> dict[str, Tensor]:
    """The result of each method for [steps, workers, entries], over gloo."""
    comm, results = TorchComm(), {}
    layout = thinwire.Layout(("a", "b"), (torch.Size([40, 30]), torch.Size([grads.shape[-1] - 1200])))
    for spelling in spellings:
        method = thinwire.parse(spelling)
        state, outs = method.init(layout), torch.zeros(len(grads), grads.shape[-1])
        for out, gradient in zip(outs, grads):
            method.reduce(gradient[comm.rank].clone(), state, comm, out)
        results[spelling] = outs
    return results


def train_all(spellings: list[str], steps: int) -> list[tuple[Tensor, float, float]]:
    return [train(spelling, steps) for spelling in spellings]


def train(spelling: str, steps: int) -> tuple[Tensor, float, float]:
    """The weights after `steps` of DDP, the last loss, and the density of the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 120), nn.Tanh(), nn.Linear(120, 120), nn.Tanh(), nn.Linear(120, 5))
    ddp = thinwire.wrap(model, thinwire.parse(spelling))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    truth = torch.randn(20, 5, generator=torch.Generator().manual_seed(9))
    generator, loss = torch.Generator().manual_seed(100 + TorchComm().rank), torch.tensor(0.0)
    for _ in range(steps):
        x = torch.randn(32, 20, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(x) - (x @ truth).tanh()).square().mean()
        loss.backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, float(loss.detach()), thinwire.handle(ddp).metrics().get("density", 1.0)
