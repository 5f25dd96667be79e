"""What the workers of test_ddp.py run. Each case is a function; `many` runs a list of them in one set of processes."""

import traceback
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from states import unsent_in
from thinwire.comm import Comm
from thinwire.comm.torch import TorchComm

BUCKETS = {1: 25.0, 2: 0.006, 6: 0.0005}  # bucket_cap_mb that cuts `net()` into as many buckets


@dataclass
class Failed:
    error: str


def many(calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The results of several cases; an error in one is its result."""
    results: list[Any] = []
    for name, arguments in calls:
        try:
            results.append(globals()[name](**arguments))
        except Exception:
            results.append(Failed(traceback.format_exc()))
    return results


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 4))


def batches(steps: int, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    truth = torch.randn(12, 4, generator=torch.Generator().manual_seed(9))
    return [(x, x @ truth) for x in torch.randn(steps, rows, 12, generator=generator)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in module.parameters()])


def gradient(module: nn.Module) -> Tensor:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return torch.cat([part.detach().flatten().double() for part in parts])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def wrapped(spelling: str, model: nn.Module | None = None, cuts: int = 1, **options: Any) -> DDP:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", thinwire.MethodWarning)
        return thinwire.wrap(model or net(), spelling, bucket_cap_mb=BUCKETS[cuts], **options)


def unsent(ddp: DDP) -> Tensor:
    """What this rank was handed and has not sent, in the order of the parameters."""
    groups = thinwire.handle(ddp).state_dict()["groups"]
    return unsent_in(groups, dict(ddp.module.named_parameters()), dist.get_rank(), dist.get_world_size())


# ── the laws ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def laws(spelling: str, steps: int = 6, **options: Any) -> dict[str, Any]:
    ddp = wrapped(spelling, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    handed, applied, twin = torch.zeros_like(weights(ddp)), torch.zeros_like(weights(ddp)), net()
    for batch in batches(steps):
        twin.load_state_dict(ddp.module.state_dict())
        twin.zero_grad()
        loss_of(twin, batch).backward()
        handed += gradient(twin)
        optimizer.zero_grad()
        loss_of(ddp, batch).backward()
        applied += gradient(ddp)
        optimizer.step()
    return {
        "handed": handed,
        "applied": applied,
        "unsent": unsent(ddp),
        "weights": weights(ddp),
        "metrics": thinwire.handle(ddp).metrics(),
    }


def reduced(spelling: str, steps: int = 4) -> list[Tensor]:
    """What the method alone makes of vectors that only the rank and the step decide."""
    return reductions(thinwire.parse(spelling), TorchComm(group_of_all()), steps)


@cache
def group_of_all() -> dist.ProcessGroup:
    """One for all cases that need one: to connect everybody with everybody takes longer than a case."""
    return dist.new_group()


def reductions(method: thinwire.Reducer[Any, Any], comm: Comm, steps: int = 4) -> list[Tensor]:
    layout = thinwire.Layout(("w", "b"), (torch.Size([30, 20]), torch.Size([20])))
    state, results = method.init(layout), []
    for step in range(steps):
        x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1000 * step + comm.rank))
        out = torch.empty_like(x)
        method.reduce(x, state, comm, out)
        results.append(out)
    return results


def dense_equals_ddp(steps: int, cuts: int, grain: str | None) -> bool:
    plain = DDP(net(), bucket_cap_mb=BUCKETS[cuts])
    ours = wrapped("Dense()", cuts=cuts, grain=grain)
    for model in (plain, ours):
        train(model, torch.optim.SGD(model.parameters(), lr=0.02), batches(steps))
    return torch.equal(weights(plain), weights(ours))


def long_run(spelling: str, steps: int, cuts: int) -> tuple[float, float]:
    ddp = wrapped(spelling, cuts=cuts)
    data = batches(steps)
    first = loss_of(ddp, data[0]).item()
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.02), data)
    return first, loss_of(ddp, data[0]).item()


# ── restarts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def resumed(spelling: str, grain: str, folder: str, overlap: bool = False, first: int = 5, steps: int = 9) -> bool:
    """Whether a run that is stopped and started anew goes on to the same bits."""
    data, place = batches(steps), f"{folder}/{abs(hash((spelling, grain, overlap)))}"

    def fresh() -> tuple[DDP, torch.optim.Optimizer]:
        ddp = wrapped(spelling, cuts=2, grain=grain, overlap=overlap)
        return ddp, torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)

    straight, optimizer = fresh()
    train(straight, optimizer, data)
    stopped, optimizer = fresh()
    train(stopped, optimizer, data[:first])
    thinwire.handle(stopped).save(place)
    dist.barrier()
    again, into = fresh()
    again.module.load_state_dict(stopped.module.state_dict())
    into.load_state_dict(optimizer.state_dict())
    thinwire.handle(again).load(place)
    train(again, into, data[first:])
    return torch.equal(weights(straight), weights(again))


def save_after(spelling: str, folder: str, steps: int = 5) -> Tensor:
    ddp = wrapped(spelling)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.02), batches(steps))
    thinwire.handle(ddp).save(folder)
    return unsent(ddp)


def load_from(spelling: str, folder: str) -> tuple[Tensor, Tensor]:
    """What is unsent right after loading, and the weights after going on for a while."""
    ddp = wrapped(spelling)
    thinwire.handle(ddp).load(folder)
    loaded = unsent(ddp)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.02), batches(3))
    return loaded, weights(ddp)


def killed_while_saving(spelling: str, folder: str) -> str:
    """Save, go on, and save again, where rank 1 dies when its second file is half on its way."""
    import os
    import signal

    ddp = wrapped(spelling)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    train(ddp, optimizer, batches(3))
    thinwire.handle(ddp).save(folder)
    train(ddp, optimizer, batches(2))
    if dist.get_rank() == 1:
        os.fsync = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    thinwire.handle(ddp).save(folder)
    return "saved"


def load_without(spelling: str, folder: str) -> tuple[int, Tensor]:
    """The step and what is unsent, where files may be lost; and training goes on."""
    ddp = wrapped(spelling)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", thinwire.MethodWarning)
        thinwire.handle(ddp).load(folder, missing="drop")
    step, left = thinwire.handle(ddp).capture.step, unsent(ddp)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.02), batches(3))
    thinwire.handle(ddp).save(folder)
    return step, left


def until_killed(spelling: str, grain: str, folder: str, steps: int, die_at: int | None) -> Tensor:
    """Train with a checkpoint every other step, from the last one if there is one; one rank may die without a word."""
    import os
    import signal

    rank = dist.get_rank()
    ddp = wrapped(spelling, cuts=2, grain=grain)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    done = [int(name) for name in sorted(os.listdir(folder)) if os.path.exists(f"{folder}/{name}/whole")]
    start = max(done, default=0)
    if start:
        kept = torch.load(f"{folder}/{start:03d}/model-{rank}.pt", weights_only=True)
        ddp.module.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        thinwire.handle(ddp).load(f"{folder}/{start:03d}")
    for step, batch in list(enumerate(batches(steps)))[start:]:
        if step == die_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train(ddp, optimizer, [batch])
        if (step + 1) % 2 == 0:
            place = f"{folder}/{step + 1:03d}"
            thinwire.handle(ddp).save(place)
            torch.save(
                {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, f"{place}/model-{rank}.pt"
            )
            dist.barrier()
            if rank == 0:
                open(f"{place}/whole", "w").close()
            dist.barrier()
    return weights(ddp)


# ── bad steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Spoil(torch.autograd.Function):
    """Passes on what it gets, and multiplies what comes back."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, delta):
        return delta * ctx.factor, None


class Spike(nn.Module):
    """A net whose gradients, all or from a layer downwards, can be spoiled on one rank at one step."""

    def __init__(self, layer: int = 6) -> None:
        super().__init__()
        self.net, self.layer, self.value = net(), layer, 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[: self.layer](x)
        return self.net[self.layer :](Spoil.apply(x, self.value))


def bad_step(spelling: str, value: float, layer: int = 6, **options: Any) -> dict[str, Any]:
    """Rank 1 meets `value` at step 4; the optimizer is guarded by a GradScaler."""
    spiked = wrapped(spelling, Spike(layer), **options)
    handle = thinwire.handle(spiked)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    handle.buckets.steps.scaler = scaler
    optimizer = torch.optim.SGD(spiked.parameters(), lr=0.02)
    told: dict[str, Any] = {}
    for step, batch in enumerate(batches(8)):
        before = weights(spiked), handle.state_dict()["groups"]
        spiked.module.value = value if step == 4 and dist.get_rank() == 1 else 1.0
        optimizer.zero_grad()
        scaler.scale(loss_of(spiked, batch)).backward()
        if step == 4:
            told["non-finite"] = not torch.isfinite(gradient(spiked)).all().item()
        scaler.step(optimizer)
        scaler.update()
        if step == 4:
            told["weights kept"] = torch.equal(before[0], weights(spiked))
            told["state kept"] = same(before[1], handle.state_dict()["groups"])
    told["finite"] = torch.isfinite(weights(spiked)).all().item()
    told["weights"] = weights(spiked)
    told["scale"] = scaler.get_scale()
    return told


def same(a: Any, b: Any) -> bool:
    """Whether two trees of tensors are equal to the bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def follows_the_scale(spelling: str) -> Tensor:
    """The unsent gradient in unscaled units, after the loss scale has doubled twice."""
    ddp = wrapped(spelling)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    thinwire.handle(ddp).buckets.steps.scaler = scaler
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    for batch in batches(8):
        optimizer.zero_grad()
        scale = scaler.get_scale()
        scaler.scale(loss_of(ddp, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    return unsent(ddp) / scale


# ── disagreement ─────────────────────────────────────────────────────────────────────────────────────────────────────


def disagree(spellings: tuple[str, ...], widths: tuple[int, ...] = (4, 4), **options: tuple[Any, ...]) -> str:
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, widths[rank]))
    mine = {key: values[rank] for key, values in options.items()}
    try:
        thinwire.wrap(model, thinwire.parse(spellings[rank]), **mine)
    except thinwire.Disagreement as error:
        return str(error)
    return "no error"


def lost_step(spelling: str) -> str:
    """Rank 1 believes that it is a step further."""
    ddp = wrapped(spelling)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.02), batches(3))
    thinwire.handle(ddp).buckets.steps.step += dist.get_rank()
    try:
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.02), batches(1))
    except Exception as error:
        return str(error)
    return "no error"


def diverged(spelling: str) -> str:
    ddp = wrapped(spelling, check_every=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    train(ddp, optimizer, batches(3))
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(ddp.parameters()).view(-1)[3] += 1e-6
    try:
        train(ddp, optimizer, batches(4))
    except Exception as error:
        return str(error)
    return "no error"


# ── models of all kinds ──────────────────────────────────────────────────────────────────────────────────────────────


class Odd(nn.Module):
    """A layer used twice, tied weights, a frozen one, one that is not used, a scalar, two dtypes."""

    def __init__(self, unused: bool, half: bool):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.again, self.tied = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.tied.weight = self.first.weight
        self.frozen, self.scale = nn.Linear(12, 12).requires_grad_(False), nn.Parameter(torch.tensor(1.0))
        self.idle = nn.Linear(12, 12) if unused else nn.Identity()
        self.last = nn.Linear(12, 4).to(torch.bfloat16 if half else torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.again(self.first(x))))
        x = self.scale * self.frozen(self.tied(x))
        return self.last(x.to(self.last.weight.dtype)).float()


def odd_model(spelling: str, unused: bool, half: bool, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Weights before, after training, and after training the same with plain DDP."""
    start = weights(Odd(unused, half))
    ours = wrapped(spelling, Odd(unused, half), find_unused_parameters=unused, **options)
    for_ddp = {key: value for key, value in options.items() if key not in ("grain", "overlap")}
    plain = DDP(Odd(unused, half), find_unused_parameters=unused, **for_ddp)
    for model in (ours, plain):
        train(model, torch.optim.SGD(model.parameters(), lr=0.02), batches(8))
    return start, weights(ours), weights(plain)


def accumulated(spelling: str, no_sync: bool, view: bool) -> Tensor:
    """Gradient after two micro-batches, the third time round."""
    ddp = wrapped(spelling, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    data = batches(6)
    for one, other in zip(data[::2], data[1::2]):
        optimizer.zero_grad()
        if no_sync:
            with ddp.no_sync():
                loss_of(ddp, one).backward()
        else:
            loss_of(ddp, one).backward()
        loss_of(ddp, other).backward()
        total = gradient(ddp)
        optimizer.step()
    return total


def cleared_after_forward(spelling: str) -> tuple[Tensor, Tensor]:
    """Weights after some steps, clearing the gradients before the forward pass and after it."""
    found = []
    for late in (False, True):
        ddp = wrapped(spelling)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
        for batch in batches(6):
            if not late:
                optimizer.zero_grad()
            loss = loss_of(ddp, batch)
            if late:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(weights(ddp))
    return found[0], found[1]


def let_go(spelling: str) -> bool:
    """Whether a model that nobody holds any more is gone."""
    import gc
    import weakref

    ddp = wrapped(spelling)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.02), batches(3))
    seen = weakref.ref(ddp)
    del ddp
    gc.collect()
    return seen() is None


def conserved_when_accumulating(spelling: str) -> tuple[Tensor, Tensor]:
    """Handed in, and applied plus unsent, over steps of two micro-batches without `no_sync`."""
    ddp, twin = wrapped(spelling), net()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)  # gradients that no step follows would be taken back
    handed, applied = torch.zeros_like(weights(ddp)), torch.zeros_like(weights(ddp))
    data = batches(8)
    for one, other in zip(data[::2], data[1::2]):
        ddp.zero_grad()
        twin.zero_grad()
        for batch in (one, other):
            loss_of(ddp, batch).backward()
            loss_of(twin, batch).backward()
        handed += gradient(twin)
        applied += gradient(ddp)
        optimizer.step()
    return handed, applied + unsent(ddp)


def silent_hook() -> list[str]:
    ddp = wrapped("ErrorFeedback(TopK(0.1))")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches(6):
            loss_of(ddp, batch)  # a training step whose backward never comes
    return [str(w.message) for w in caught if w.category is thinwire.MethodWarning]


def bad_checkpoints(folder: str) -> dict[str, str]:
    rank = dist.get_rank()
    ddp = wrapped("ErrorFeedback(TopK(0.1))")
    handle = thinwire.handle(ddp)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.02), batches(4))
    path, before = handle.save(f"{folder}/good"), handle.state_dict()
    raw, damaged = path.read_bytes(), f"{folder}/damaged{rank}"
    Path(damaged).mkdir()
    (Path(damaged) / path.name).write_bytes(raw[: len(raw) // 2])
    dist.barrier()
    other = torch.load(path.parent / path.name.replace(f"0000{rank}-of", f"0000{1 - rank}-of"), weights_only=True)
    another = thinwire.handle(wrapped("ErrorFeedback(TopK(0.2))")).state_dict()
    told = {}
    for what, attempt in {
        "truncated": lambda: handle.load(damaged),
        "another rank": lambda: handle.load_state_dict(other),
        "another method": lambda: handle.load_state_dict(another),
        "empty folder": lambda: handle.load(f"{folder}/nothing here"),
        "not a state": lambda: handle.load_state_dict({"weights": 1}),
        "other world, one file": lambda: handle.load_state_dict(before | {"world": 7}),
    }.items():
        try:
            attempt()
            told[what] = "no error"
        except thinwire.CheckpointError as error:
            told[what] = str(error)
    told["unchanged"] = str(same(before, handle.state_dict()))
    return told
