"""Training loops for `soak_wrap`: a function each, which takes a step with two batches and a factor of the loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[Tensor, float], None]


def net(seed: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _loss(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3]).square().mean()


def _use(model: Any, optimizer: Any) -> None:
    """Take the step, unless the gradients are not finite, which all ranks see alike."""
    if all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
        optimizer.step()


def plain(model: Any, optimizer: Any, wrap: Any) -> Step:
    def step(batches: Tensor, factor: float) -> None:
        optimizer.zero_grad()
        (factor * _loss(model, batches[0])).backward()
        _use(model, optimizer)

    return step


def accumulate(model: Any, optimizer: Any, wrap: Any) -> Step:
    def step(batches: Tensor, factor: float) -> None:
        optimizer.zero_grad(set_to_none=False)
        for x in batches:
            (factor * _loss(model, x)).backward()
        _use(model, optimizer)

    return step


def silent(model: Any, optimizer: Any, wrap: Any) -> Step:
    def step(batches: Tensor, factor: float) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            (factor * _loss(model, batches[0])).backward()
        _loss(model, batches[1]).backward()
        _use(model, optimizer)

    return step


def skip(model: Any, optimizer: Any, wrap: Any) -> Step:
    def step(batches: Tensor, factor: float) -> None:
        (100 * _loss(model, batches[1])).backward()
        optimizer.zero_grad()  # thrown away
        (factor * _loss(model, batches[0])).backward()
        _use(model, optimizer)

    return step


def closure(model: Any, optimizer: Any, wrap: Any) -> Step:
    def step(batches: Tensor, factor: float) -> None:
        def again() -> Tensor:
            optimizer.zero_grad()
            loss = factor * _loss(model, batches[0])
            loss.backward()
            for parameter in model.parameters():
                if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                    parameter.grad.zero_()
            return loss.detach()

        optimizer.step(again)

    return step


def penalty(model: Any, optimizer: Any, wrap: Any) -> Step:
    def step(batches: Tensor, factor: float) -> None:
        optimizer.zero_grad()
        at = batches[1].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
        (factor * _loss(model, batches[0]) + 0.1 * slope.square().mean()).backward()
        _use(model, optimizer)

    return step


def adversary(model: Any, optimizer: Any, wrap: Any) -> Step:
    """The model judges; who makes what it judges is wrapped too, and goes through it."""
    made = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.linspace(-0.3, 0.3 + 0.01 * number, parameter.numel()).view(parameter.shape))
    maker = wrap(made)
    makes = torch.optim.SGD(maker.parameters(), 0.05)

    def step(batches: Tensor, factor: float) -> None:
        optimizer.zero_grad()
        (factor * (_loss(model, batches[0]) - 0.1 * model(maker(batches[1]).detach()).tanh().mean())).backward()
        _use(model, optimizer)
        makes.zero_grad()
        model(maker(batches[1])).tanh().mean().backward()
        _use(maker, makes)

    return step


LOOPS = {
    "plain": plain,
    "accumulate": accumulate,
    "no_sync": silent,
    "skip": skip,
    "closure": closure,
    "penalty": penalty,
    "adversary": adversary,
}
