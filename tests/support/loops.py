"""Training loops as people write them around DDP: how gradients are made, cleared, added up and used.

A loop is a generator: it yields, after every step, the modules whose parameters are looked at. `kit` makes what is
compared: plain DDP, thinwire's, or a bare model with local steps. Models of other shapes are in `loops_of_models`.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDE = 24
Batch = tuple[Tensor, Tensor]
Loop = Iterator[nn.Module]


def net(seed: int = 0, inputs: int = 6, outputs: int = 3, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, WIDE),
        nn.LayerNorm(WIDE),
        nn.Tanh(),
        nn.Linear(WIDE, WIDE),
        nn.Tanh(),
        nn.Linear(WIDE, outputs),
    ).to(dtype)


def data(steps: int = 5, seed: int = 0, rows: int = 2) -> list[Batch]:
    """Few rows, so that gradients have a rank that PowerSGD(8) carries."""
    generator = torch.Generator().manual_seed(100 + 10 * seed + dist.get_rank())
    return [(x, x[:, :3].roll(1, 0).sin()) for x in torch.randn(steps, rows, 6, generator=generator)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **options)


# ── clearing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain(kit: Any, set_to_none: bool = True, **options: Any) -> Loop:
    model = kit.wrap(net(), **options)
    optimizer = kit.follow(model, sgd(model))
    for batch in data():
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, batch).backward()
        optimizer.step()
        yield model


def cleared_after_the_forward_pass(kit: Any, **options: Any) -> Loop:
    model = kit.wrap(net(), **options)
    optimizer = kit.follow(model, sgd(model))
    for batch in data():
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield model


def cleared_by_the_model_after_the_step(kit: Any) -> Loop:
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for batch in data():
        loss_of(model, batch).backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)
        yield model


def never_cleared(kit: Any) -> Loop:
    """A momentum of 1, as some build it by hand."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model, 0.01))
    for batch in data():
        loss_of(model, batch).backward()
        optimizer.step()
        yield model


# ── optimizers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def momentum_and_schedule(kit: Any) -> Loop:
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model, momentum=0.9, nesterov=True, weight_decay=1e-2))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for batch in data():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        schedule.step()
        yield model


def adamw(kit: Any) -> Loop:
    model = kit.wrap(net())
    optimizer = kit.follow(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    for batch in data():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        yield model


def several_optimizers(kit: Any) -> Loop:
    model = kit.wrap(net())
    first, second = kit.bare(model)[:3], kit.bare(model)[3:]
    one, other = kit.follow(model, sgd(first, 0.1), sgd(second, 0.05, momentum=0.5))
    for batch in data():
        one.zero_grad()
        other.zero_grad()
        loss_of(model, batch).backward()
        one.step()
        other.step()
        yield model


def a_group_added_later(kit: Any) -> Loop:
    model = kit.wrap(net())
    optimizer = kit.follow(model, torch.optim.SGD(kit.bare(model)[3:].parameters(), lr=0.1))
    for step, batch in enumerate(data()):
        if step == 2:
            optimizer.add_param_group({"params": list(kit.bare(model)[:3].parameters()), "lr": 0.05})
        model.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        yield model


def closures(kit: Any, **options: Any) -> Loop:
    """LBFGS calls its closure several times a step."""
    model = kit.wrap(net(), **options)
    optimizer = kit.follow(model, torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=3))
    for batch in data(4):

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            value = loss.detach()
            dist.all_reduce(value)  # LBFGS looks at it, so ranks must see the same
            return value / dist.get_world_size()

        optimizer.step(closure)
        yield model


def a_closure_of_sgd(kit: Any) -> Loop:
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for batch in data():

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
        yield model


def a_step_in_the_backward_pass(kit: Any) -> Loop:
    """Each parameter takes its step when its gradient is there: before DDP has averaged it, so replicas differ."""
    model = kit.wrap(net())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for batch in data():
        model.zero_grad()
        loss_of(model, batch).backward()
        yield model


# ── adding up ────────────────────────────────────────────────────────────────────────────────────────────────────────


def accumulated(kit: Any, silent: bool, parts: int = 2, **options: Any) -> Loop:
    model = kit.wrap(net(), **options)
    optimizer = kit.follow(model, sgd(model))
    for step in range(4):
        optimizer.zero_grad()
        batches = data(parts, seed=step + 1)
        for batch in batches[:-1]:
            with kit.no_sync(model, silent):
                (loss_of(model, batch) / parts).backward()
        (loss_of(model, batches[-1]) / parts).backward()
        optimizer.step()
        yield model


def backward_again_after_the_step(kit: Any) -> Loop:
    """Two backward passes a step, the second with what the first left."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model, 0.05))
    for first, second in zip(data(5), data(5, seed=1)):
        optimizer.zero_grad()
        loss_of(model, first).backward()
        optimizer.step()
        loss_of(model, second).backward()
        optimizer.step()
        yield model


def losses_of_one_graph(kit: Any) -> Loop:
    """Two losses of one forward pass. DDP averages the first alone: the rest of the second stays a rank's own."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for x, y in data():
        optimizer.zero_grad()
        out = model(x)
        (out - y).square().mean().backward(retain_graph=True)
        (0.1 * out.abs().mean()).backward()
        optimizer.step()
        yield model


def losses_of_two_passes(kit: Any) -> Loop:
    """Siamese: two forward passes, one backward pass."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for first, second in zip(data(5), data(5, seed=1)):
        optimizer.zero_grad()
        (loss_of(model, first) + 0.5 * (model(first[0]) - model(second[0])).square().mean()).backward()
        optimizer.step()
        yield model


# ── using ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def clipped(kit: Any, how: str) -> Loop:
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for batch in data():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if how == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        else:
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        yield model


def edited_gradients(kit: Any) -> Loop:
    """Halved in one layer, and decay added by hand."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for batch in data():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.01)
        kit.bare(model)[0].weight.grad *= 0.5
        optimizer.step()
        yield model


def a_skipped_spike(kit: Any) -> Loop:
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for step, batch in enumerate(data(7)):
        optimizer.zero_grad()
        (loss_of(model, batch) * (1e6 if step in (2, 4) else 1.0)).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if norm < 1e4:
            optimizer.step()
        yield model


def gradients_thrown_away(kit: Any) -> Loop:
    """A backward pass for a figure, whose gradients nobody uses."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for batch, other in zip(data(5), data(5, seed=1)):
        (100 * loss_of(model, other)).backward()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        yield model


def a_mean_over_the_world_of_weights(kit: Any) -> Loop:
    """An average of the weights beside the model, which replaces them once."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    slow = copy.deepcopy(kit.bare(model)).requires_grad_(False)
    for step, batch in enumerate(data(6)):
        optimizer.zero_grad()
        target = slow(batch[0])
        (loss_of(model, batch) + 0.1 * (model(batch[0]) - target).square().mean()).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(slow.parameters(), kit.bare(model).parameters()):
                mine.lerp_(theirs, 0.3)
        if step == 3:
            kit.bare(model).load_state_dict(slow.state_dict())
            kit.restart()
        yield model
