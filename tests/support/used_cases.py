"""Exchanges of whose gradients only some are used, or all in a way that hardly shows: the workers of test_used.py."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire


class Two(nn.Module):
    """Two layers, which users train by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def numbers(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def wrapped(spelling: str, model: nn.Module, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", thinwire.MethodWarning)
        return thinwire.wrap(model, spelling, **options)


def batches(count: int, width: int = 20) -> list[Tensor]:
    return list(torch.randn(count, 8, width, generator=torch.Generator().manual_seed(dist.get_rank())))


def one_part_thrown_away(spelling: str) -> float:
    """How far a layer moves without a loss, after steps whose gradients for it were cleared unused."""
    torch.manual_seed(0)
    model = wrapped(spelling, Two())
    first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in model.module.children())
    for x in batches(5):
        model.zero_grad()
        model(x).square().mean().backward()
        first.step()
    before = numbers(model.module.second)
    for x in batches(12):
        model.zero_grad()
        (0 * model(x).square().mean()).backward()
        second.step()
    thinwire.handle(model).detach()
    return float((numbers(model.module.second) - before).abs().max())


class Vectors(nn.Module):
    """Their gradients do not depend on what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(20)), nn.Parameter(torch.zeros(20))

    def forward(self, x: Tensor) -> Tensor:
        return self.first @ x[0] + self.second @ x[1]


def one_part_adds_up(spelling: str, thrown: bool) -> tuple[Tensor, Tensor]:
    """Where vectors end, and where the means of what was used lead, when the second takes a step every third time.

    thrown: what has added up for it is cleared unused, every other time.
    """
    model = wrapped(spelling, Vectors())
    first, second = (torch.optim.SGD([p], 0.5) for p in model.parameters())
    total, waiting = torch.zeros(2, 20), torch.zeros(20)
    for turn in range(60):
        x = batches(60)[turn][:2] if turn < 12 else torch.zeros(2, 20)
        model(x).backward()
        first.step()
        first.zero_grad()
        total[0] += x[0]
        waiting += x[1]
        if turn % 3 == 2:
            if thrown and turn in (2, 8):
                waiting.zero_()
            else:
                second.step()
            second.zero_grad()
            total[1] += waiting
            waiting.zero_()
    dist.all_reduce(total)
    thinwire.handle(model).detach()
    return numbers(model.module), -0.5 * total.flatten() / dist.get_world_size()


def frozen_by_turns(spelling: str | None) -> Tensor:
    """Parameters of two layers, of which every step trains one; without a spelling, those of plain DDP."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"find_unused_parameters": True}
    model = DDP(Two(), **options) if spelling is None else wrapped(spelling, Two(), **options)
    parts = list(model.module.children())
    trains = [torch.optim.SGD(part.parameters(), 0.1) for part in parts]
    for number, x in enumerate(batches(8)):
        for which, part in enumerate(parts):
            part.requires_grad_(which == number % 2)
        loss = model(x).square().mean()
        model.module.requires_grad_(True)
        trains[number % 2].zero_grad()
        loss.backward()
        trains[number % 2].step()
    return numbers(model.module)


def by_hand(model: nn.Module) -> None:
    """Leaves no trace in the versions of the parameters."""
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad.data


def written_into_data(spelling: str) -> tuple[Tensor, Tensor]:
    """Parameters after steps of torch's SGD, and after the same steps written into `.data`."""
    found = []
    for hand in (False, True):
        torch.manual_seed(0)
        model = wrapped(spelling, nn.Linear(100, 80))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step: Callable[[], None] = (lambda model=model: by_hand(model)) if hand else optimizer.step
        for x in batches(12, width=100):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()
        found.append(numbers(model))
        thinwire.handle(model).detach()
    return found[0], found[1]


def saved_before_they_were_thrown_away(spelling: str, folder: str) -> tuple[Tensor, Tensor]:
    """A model that judges another one's work, after eight steps; and after four, a save, a load, and four more."""
    found = []
    for resumed in (False, True):
        torch.manual_seed(0)
        judge, maker = Two(), Two()
        trains = [torch.optim.SGD(module.parameters(), 0.1) for module in (judge, maker)]
        model = wrapped(spelling, judge)
        data = batches(8)
        for number, x in enumerate(data):
            if resumed and number == 4:
                thinwire.handle(model).save(folder)
                thinwire.handle(model).detach()
                model = wrapped(spelling, judge)
                trains[0].zero_grad()
                thinwire.handle(model).load(folder)
            trains[0].zero_grad()
            model(x).square().mean().backward()
            trains[0].step()
            trains[1].zero_grad()
            model(maker(x)).tanh().mean().backward()  # goes through the judge, who does not learn from it
            trains[1].step()
        found.append(numbers(judge))
        thinwire.handle(model).detach()
    return found[0], found[1]


def unscaled_after_scaled(spelling: str, folder: str) -> tuple[float, float]:
    """What is unsent when a run under a GradScaler is saved, and in the first step of one without."""
    norms = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=2.0**12), None):
        torch.manual_seed(0)
        model = wrapped(spelling, Two(), scaler=scaler)
        handle, optimizer = thinwire.handle(model), torch.optim.SGD(model.parameters(), 0.01)
        if scaler is None:
            handle.load(folder)
        for x in batches(4 if scaler else 1):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        norms.append(handle.residual_norm() / (scaler.get_scale() if scaler else 1))
        if scaler:
            handle.save(folder)
        handle.detach()
    return norms[0], norms[1]


def overflows(spelling: str, value: float) -> list[bool]:
    """Whether gradients are finite, step by step; in the third one worker's loss is multiplied by `value`."""
    torch.manual_seed(0)
    model = wrapped(spelling, Two())
    fine = []
    for number, x in enumerate(batches(4)):
        model.zero_grad()
        (model(x).square().mean() * (value if number == 2 and dist.get_rank() == 1 else 1.0)).backward()
        fine.append(all(bool(p.grad.isfinite().all()) for p in model.parameters()))
    thinwire.handle(model).detach()
    return fine


def one_layer_alone(spelling: str) -> tuple[Tensor, Tensor]:
    """Gradients of a model that is a layer itself: their mean, and what came of them."""
    torch.manual_seed(0)
    model = wrapped(spelling, nn.Linear(20, 20))
    x = batches(1)[0]
    copies = [p.detach().clone().requires_grad_() for p in model.module.parameters()]
    expected = torch.autograd.grad(nn.functional.linear(x, *copies).square().mean(), copies)
    mean = torch.cat([g.flatten() for g in expected]) / dist.get_world_size()
    dist.all_reduce(mean)
    model(x).square().mean().backward()
    thinwire.handle(model).detach()
    return mean, torch.cat([p.grad.flatten() for p in model.parameters()])
