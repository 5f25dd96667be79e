"""Cases of local steps that run alike on threads (`in_threads`) and in processes: each takes the worker it runs on."""

import io
import os
import signal
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

import thinwire
from states import unsent_in
from thinwire import Dense, ErrorFeedback, LocalHandle, Outer, Reducer
from thinwire.comm import Comm
from thinwire.comm.torch import TorchComm
from thinwire.core.reducer import inner_reducers

Data = list[tuple[Tensor, Tensor]]


def net(norm: bool = False, seed: int = 0) -> nn.Module:
    """A small net with weights that depend on nothing but the seed: threads share the global generator."""
    layers = [nn.Linear(6, 10), nn.BatchNorm1d(10) if norm else nn.LayerNorm(10), nn.ReLU(), nn.Linear(10, 3)]
    model = nn.Sequential(*layers)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw))
    return model


def batches(steps: int, rank: int, rows: int = 8) -> Data:
    draw = torch.Generator().manual_seed(100 + rank)
    truth = torch.randn(6, 3, generator=torch.Generator().manual_seed(9))
    return [(x, x @ truth) for x in torch.randn(steps, rows, 6, generator=draw)]


def step(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    (model(batch[0]) - batch[1]).square().mean().backward()
    optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def quiet(*arguments: Any, **options: Any) -> LocalHandle:
    """`local` for methods that are better used with memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", thinwire.MethodWarning)
        return thinwire.local(*arguments, **options)


def remembering(reducer: Reducer[Any, Any]) -> Reducer[Any, Any]:
    """Within error feedback, unless the method has a memory of its own."""
    states = [part.init(thinwire.Layout((), ())) for part in inner_reducers(reducer)]
    alone = not any(hasattr(state, "residual") or hasattr(state, "r") for state in states)
    return ErrorFeedback(reducer) if alone and reducer.conserves else reducer


def unsent(handle: LocalHandle) -> Tensor:
    """What the method still holds, in the order of the parameters."""
    state = handle.state_dict()
    return unsent_in(state["groups"], handle.changes.parameters, state["rank"], state["world"])


def anchors(handle: LocalHandle) -> Tensor:
    with handle.anchored():
        return torch.cat([p.detach().flatten() for p in handle.changes.parameters.values()])


def reloaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def watch_steps(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """What each step of the optimizer changes; to be called before `local`, whose hook then comes later."""
    before: list[Tensor] = []
    changed: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: before.append(flat(model).double()))
    optimizer.register_step_post_hook(lambda *_: changed.append(flat(model).double() - before.pop()))
    return changed


def laws(comm: Comm, spelling: str, fragments: int, every: int = 4, steps: int = 6, **options: Any) -> dict[str, Any]:
    """Train, stop in the middle of a round, go on from what was saved, and tell all that the laws speak of."""
    reducer = remembering(thinwire.parse(spelling))
    data = batches(steps + 1, comm.rank)
    model = net()
    optimizer = adamw(model)
    changed = watch_steps(model, optimizer)
    handle = quiet(model, optimizer, reducer, every, fragments=fragments, comm=comm, **options)
    start, weights, saved = anchors(handle), [], None
    for number, batch in enumerate(data[:steps]):
        step(model, optimizer, batch)
        weights.append(flat(model))
        if number == steps - 2:
            saved = reloaded(handle.state_dict())
    middle = {
        "change": torch.stack(changed).sum(0),
        "moved": anchors(handle).double() - start.double(),
        "unsent": unsent(handle),
        "pending": flat(model).double() - anchors(handle).double(),
    }
    handle.finish()
    finished = flat(model)
    step(model, optimizer, data[-1])
    handle.detach()

    again = net(seed=5)
    optimizer = adamw(again)
    handle = quiet(again, optimizer, reducer, every, fragments=fragments, comm=comm, **options)
    handle.load_state_dict(saved)
    step(again, optimizer, data[steps - 1])
    handle.finish()
    resumed = flat(again)
    step(again, optimizer, data[-1])
    handle.detach()
    return {
        "weights": weights,
        "middle": middle,
        "finished": finished,
        "resumed": resumed,
        "last": (flat(model), flat(again)),
        "conserves": reducer.conserves,
    }


def average_twin(comm: Comm, optimizer: str, steps: int = 50) -> float:
    """How far H = 1 with Dense is from averaging the parameters, in float64, after each step."""
    make = {
        "SGD": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
        "AdamW": lambda model: AdamW(model.parameters(), lr=5e-3),
    }[optimizer]
    ours, twin = net(), net()
    inner, outer = make(ours), make(twin)
    handle = thinwire.local(ours, inner, Dense(), 1, comm=comm)
    for batch in batches(steps, comm.rank):
        step(ours, inner, batch)
        step(twin, outer, batch)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.copy_(comm.all_mean(parameter.detach().double()))
    handle.detach()
    return float((flat(ours) - flat(twin)).abs().max())


def save_midway(comm: Comm, folder: str, spelling: str, every: int, steps: int, fragments: int = 1) -> dict[str, Any]:
    """Go `steps` far, save, and tell what the run would have become."""
    model = net(norm=True)
    optimizer = adamw(model)
    handle = thinwire.local(model, optimizer, thinwire.parse(spelling), every, fragments=fragments, comm=comm)
    data = batches(2 * steps, comm.rank)
    for batch in data[:steps]:
        step(model, optimizer, batch)
    handle.save(folder)
    change, left = flat(model).double() - anchors(handle).double(), unsent(handle)
    for batch in data[steps:]:
        step(model, optimizer, batch)
    handle.detach()
    return {"change": change, "unsent": left, "end": flat(model), "mean": model[1].running_mean.clone()}


def load_midway(comm: Comm, folder: str, spelling: str, every: int, steps: int, fragments: int = 1) -> dict[str, Any]:
    """Go on from `save_midway`, in a model that knows nothing yet."""
    model = net(norm=True, seed=1)
    optimizer = adamw(model)
    handle = thinwire.local(model, optimizer, thinwire.parse(spelling), every, fragments=fragments, comm=comm)
    handle.load(folder)
    change, left = flat(model).double() - anchors(handle).double(), unsent(handle)
    for batch in batches(2 * steps, comm.rank)[steps:]:
        step(model, optimizer, batch)
    handle.detach()
    return {"change": change, "unsent": left, "end": flat(model), "mean": model[1].running_mean.clone()}


def until_killed(folder: str, spelling: str, every: int, steps: int, save_at: int, die_at: int | None) -> Tensor:
    """Train from what `folder` holds, if anything, and save into it on the way; rank 1 may die without a word."""
    rank = dist.get_rank()
    model = net(norm=True)
    optimizer = adamw(model)
    handle = thinwire.local(model, optimizer, thinwire.parse(spelling), every)
    start = save_at if Path(folder).exists() else 0
    if start:
        handle.load(folder)
    for number, batch in list(enumerate(batches(steps, rank)))[start:]:
        if number == die_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer, batch)
        if number + 1 == save_at:
            handle.save(folder)
    return torch.cat([flat(model), model[1].running_mean])


def error_of(work: Any) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def sharded() -> list[str]:
    """What wrap and local say to a model that FSDP2 has cut."""
    model = net()
    fully_shard(model)
    doors = (lambda: thinwire.wrap(model, Dense()), lambda: thinwire.local(model, adamw(model), Dense(), 2))
    return [error_of(door) for door in doors]


def disagreements(comm: Comm) -> dict[str, str]:
    """What each rank hears when rank 1 does something else."""
    odd = comm.rank == 1

    def start(**other: Any) -> LocalHandle:
        model = net()
        settings = {"reducer": Dense(), "every": 2, "comm": comm} | (other if odd else {})
        return thinwire.local(model, SGD(model.parameters(), 0.1), **settings)

    def run(every: Any) -> None:
        model = net()
        optimizer = SGD(model.parameters(), 0.1)
        thinwire.local(model, optimizer, Dense(), every, comm=comm)
        for batch in batches(6, comm.rank):
            step(model, optimizer, batch)

    return {
        "every": error_of(lambda: start(every=3)),
        "method": error_of(lambda: start(reducer=thinwire.parse("ErrorFeedback(TopK(0.1))"))),
        "outer": error_of(lambda: start(outer=Outer(0.7, 0.9, True))),
        "function": error_of(lambda: run(lambda steps: 2 + odd)),
        "edit": error_of(lambda: edited(comm, odd)),
    }


def edited(comm: Comm, odd: bool, steps: int = 4, **options: Any) -> Tensor:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    handle = thinwire.local(model, optimizer, Dense(), 4, comm=comm, **options)
    for number, batch in enumerate(batches(steps, comm.rank)):
        if number == 2 and odd:
            model[0].weight.data.clamp_(-0.1, 0.1)
        step(model, optimizer, batch)
    handle.detach()
    return flat(model)


# ── what only processes do ─────────────────────────────────────────────────────────────────────────────────────────


def many(calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The results of several cases, over one process group; an error in one is its result, and the end."""
    results: list[Any] = []
    comm = TorchComm(dist.new_group())
    for name, arguments in calls:
        try:
            case = globals()[name]
            results.append(case(**arguments) if name in ALONE else case(comm, **arguments))
        except Exception:
            return [*results, *([traceback.format_exc()] * (len(calls) - len(results)))]
    return results


def equals_ddp(steps: int = 20) -> tuple[Tensor, Tensor]:
    """H = 1 with SGD without momentum, beside DDP."""
    data = batches(steps, dist.get_rank())
    plain, ours = DDP(net()), net(seed=dist.get_rank())
    if dist.get_rank() == 0:
        ours = net()
    first, second = SGD(plain.parameters(), 0.1), SGD(ours.parameters(), 0.1)
    handle = thinwire.local(ours, second, Dense(), every=1)
    for batch in data:
        step(plain, first, batch)
        step(ours, second, batch)
    handle.finish()
    handle.detach()
    return flat(plain.module), flat(ours)


def two_levels(steps: int = 6) -> dict[str, Any]:
    """Four ranks as two nodes: DDP inside, local steps across."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    ddp = DDP(net(), process_group=inside)
    optimizer = adamw(ddp)
    reducer = thinwire.parse("ErrorFeedback(TopK(0.2))")
    handle = thinwire.local(ddp, optimizer, reducer, every=3, process_group=across)
    weights = []
    for batch in batches(steps, rank):
        step(ddp, optimizer, batch)
        weights.append(flat(ddp))
    handle.detach()
    refused = error_of(lambda: thinwire.local(everyone := DDP(net()), adamw(everyone), Dense(), 2))
    return {"weights": weights, "refused": refused}


def overlapped(comm: Comm, delay: int, steps: int = 9) -> Tensor:
    model = net()
    optimizer = adamw(model)
    handle = thinwire.local(model, optimizer, thinwire.parse("ErrorFeedback(TopK(0.3))"), 4, delay=delay, comm=comm)
    for batch in batches(steps, comm.rank):
        step(model, optimizer, batch)
    handle.finish()
    handle.detach()
    return flat(model)


ALONE = ("equals_ddp", "two_levels")
