"""Training loops of the second kind: several models, odd models, wrappers around them, other numbers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loops import WIDE, Loop, data, loss_of, net, sgd

SEVERAL = 0.002  # bucket_cap_mb that cuts `net` into a few buckets

# ── several models ───────────────────────────────────────────────────────────────────────────────────────────────────


def adversaries(kit: Any, through: str, **options: Any) -> Loop:
    """A GAN. The generator's step goes through the wrapped discriminator, or through the bare module."""
    maker, judge = kit.wrap(net(1, 6, 6), **options), kit.wrap(net(2, 6, 1), **options)
    makes, judges = kit.follow(maker, sgd(maker)), kit.follow(judge, sgd(judge))
    for real, noise in zip(data(5), data(5, seed=1)):
        judges.zero_grad()
        with torch.no_grad():
            fake = maker(noise[0])
        (judge(real[0]).sigmoid().mean() - judge(fake).sigmoid().mean()).backward()
        judges.step()
        makes.zero_grad()
        critic = judge if through == "wrapped" else kit.bare(judge)
        (3 * critic(maker(noise[0])).sigmoid().mean()).backward()
        makes.step()
        yield nn.ModuleList([maker, judge])


def a_teacher(kit: Any) -> Loop:
    """Distilled from a frozen copy of what it was."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    teacher = copy.deepcopy(kit.bare(model)).requires_grad_(False).eval()
    for x, y in data():
        optimizer.zero_grad()
        out = model(x)
        ((out - y).square().mean() + 0.1 * (out - teacher(x)).abs().mean()).backward()
        optimizer.step()
        yield model


# ── penalties ────────────────────────────────────────────────────────────────────────────────────────────────────────


def gradient_penalty(kit: Any, through: str) -> Loop:
    """The gradient by the input, made small; in the same backward pass."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for x, y in data():
        optimizer.zero_grad()
        at = x.clone().requires_grad_()
        out = (model if through == "wrapped" else kit.bare(model))(at)
        (slope,) = torch.autograd.grad(out.sum(), at, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        (loss_of(model, (x, y)) + 0.3 * penalty).backward()
        optimizer.step()
        yield model


def a_penalty_before(kit: Any) -> Loop:
    """Through the bare module, and backward before the wrapped forward: `.grad` holds what is this rank's own."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for batch, other in zip(data(5), data(5, seed=1)):
        optimizer.zero_grad()
        (0.1 * kit.bare(model)(other[0]).square().mean()).backward()
        loss_of(model, batch).backward()
        optimizer.step()
        yield model


def weights_in_the_loss(kit: Any) -> Loop:
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for batch in data():
        optimizer.zero_grad()
        decay = sum(p.square().sum() for p in model.parameters())
        (loss_of(model, batch) + 1e-3 * decay).backward()
        optimizer.step()
        yield model


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem, self.left, self.right = nn.Linear(6, WIDE), nn.Linear(WIDE, 3), nn.Linear(WIDE, 3)
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.left if self.turn % 2 else self.right)(self.stem(x).tanh())


def branches_by_turns(kit: Any, late: bool, apart: bool = False, **options: Any) -> Loop:
    """One branch a step. `late`: cleared after the forward pass. `apart`: each rank has its own turn."""
    model = kit.wrap(Branches(), find_unused_parameters=True, **options)
    optimizer = kit.follow(model, sgd(model))
    for step, batch in enumerate(data(6)):
        kit.bare(model).turn = step // 2 + (kit.rank if apart else 0)
        if not late:
            optimizer.zero_grad()
        loss = loss_of(model, batch)
        if late:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield model


class Shared(nn.Module):
    """A layer used twice, and a weight in two layers."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.again, self.last = nn.Linear(6, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)
        self.other = nn.Linear(WIDE, WIDE)
        if tied:
            self.other.weight = self.again.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.again(self.first(x).tanh()).tanh()).tanh()
        return self.last(self.other(x))


def trained(kit: Any, model: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> Loop:
    """The plain loop with a model of another kind."""
    model = kit.wrap(model, **options)
    optimizer = kit.follow(model, sgd(model))
    for x, y in data():
        optimizer.zero_grad()
        loss_of(model, (x.to(dtype), y.to(dtype))).backward()
        optimizer.step()
        yield model


def shared(kit: Any, tied: bool) -> Loop:
    return trained(kit, Shared(tied))


def frozen(kit: Any) -> Loop:
    model = net()
    model[0].requires_grad_(False)
    return trained(kit, model)


def double(kit: Any) -> Loop:
    return trained(kit, net(dtype=torch.float64), torch.float64)


def two_precisions(kit: Any) -> Loop:
    model = net()
    model[5].double()
    model[4] = nn.Sequential(nn.Tanh(), Double())
    return trained(kit, model)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def unfrozen_by_a_new_wrap(kit: Any, drop: bool) -> Loop:
    """A head first, then all: the model is wrapped anew, and the old wrap dropped, or left lying about."""
    bare = net()
    bare[:5].requires_grad_(False)
    model = kit.wrap(bare)
    optimizer = kit.follow(model, sgd(model))
    for step, batch in enumerate(data(6)):
        if step == 3:
            bare.requires_grad_(True)
            kit.drop(model if drop else None)
            model = kit.wrap(bare)
            optimizer = kit.follow(model, sgd(model))
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        yield model


def wrapped_anew(kit: Any) -> Loop:
    """In every epoch, by a function that sets everything up."""
    bare = net()
    for epoch in range(3):
        model = kit.wrap(bare)
        optimizer = kit.follow(model, sgd(model))
        for batch in data(3, seed=epoch):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            yield model
        kit.drop(None)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(6, WIDE), nn.BatchNorm1d(WIDE), nn.Tanh(), nn.Linear(WIDE, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.cat([x, x.flip(0) + 1]))[: len(x)]


def batch_norm(kit: Any) -> Loop:
    return trained(kit, Normed())


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.words, self.head = nn.Embedding(20, WIDE, sparse=sparse), nn.Linear(WIDE, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words((x * 5).long().abs() % 20).mean(1))


def words(kit: Any, sparse: bool) -> Loop:
    return trained(kit, Words(sparse))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.cells, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x.view(-1, 3, 2))[0][:, -1])


def recurrent(kit: Any) -> Loop:
    return trained(kit, Recurrent())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.parts, self.reentrant = net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[:3](x)
        x = checkpoint(self.parts[3:5], x, use_reentrant=self.reentrant)
        return checkpoint(self.parts[5], x, use_reentrant=self.reentrant)


def checkpointed(kit: Any, reentrant: bool, **options: Any) -> Loop:
    return trained(kit, Checkpointed(reentrant), **options)


# ── around and beside ────────────────────────────────────────────────────────────────────────────────────────────────


def compiled(kit: Any, first: bool) -> Loop:
    model: Any = torch.compile(net(), backend="eager") if first else net()
    model = kit.wrap(model)
    optimizer = kit.follow(model, sgd(model))
    called = model if first else torch.compile(model, backend="eager")
    for batch in data():
        optimizer.zero_grad()
        loss_of(called, batch).backward()
        optimizer.step()
        yield model


def scaled(kit: Any, overflow: bool) -> Loop:
    """A GradScaler; `overflow`: one rank meets inf in one step, so all skip it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    model = kit.wrap(net(), scaler=scaler)
    optimizer = kit.follow(model, sgd(model))
    for step, batch in enumerate(data(7)):
        optimizer.zero_grad()
        loss = loss_of(model, batch) * (float("inf") if overflow and step == 3 and kit.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield model


def autocast(kit: Any) -> Loop:
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for batch in data():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        yield model


def looked_at_in_between(kit: Any, graded: bool) -> Loop:
    """Evaluation on the wrapped module; `graded`: nobody thought of no_grad."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    for batch, other in zip(data(6), data(6, seed=1)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        model.eval()
        with torch.set_grad_enabled(graded):
            loss_of(model, other)
        model.train()
        yield model


def hooks_on_gradients(kit: Any) -> Loop:
    """Registered on parameters before the model is wrapped."""
    bare = net()
    for parameter in bare[3].parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return trained(kit, bare)


def joined(kit: Any) -> Loop:
    """Uneven inputs: rank 1 has two batches fewer."""
    model = kit.wrap(net())
    optimizer = kit.follow(model, sgd(model))
    with model.join():
        for batch in data(5 - 2 * kit.rank):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    yield model
