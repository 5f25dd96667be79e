"""What the workers of test_moments.py run under real DDP."""

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import thinwire
from thinwire.capture.layers.squares.second_moments import SecondMoments
from thinwire.core.reducer import Layout, Moments, Reducer

SMALL = 0.0001  # bucket_cap_mb that gives nearly every parameter a bucket of its own


class Net(nn.Module):
    """A tied weight, a layer used twice, a sequence, a checkpointed block, and more than one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + checkpoint(self.block, x, use_reentrant=False)
        x = x + self.block(self.norm(x))
        return self.head(self.norm(x))


def loss_of(output: Tensor) -> Tensor:
    return (output.sin() + 0.1 * output**2).mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(0, 11, (4, 3), generator=generator)


def brute_force(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Squares from one backward pass a sample."""
    model = copy.deepcopy(model)
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for sample in ids.split(1):
        model.zero_grad()
        (loss_of(model(sample)) / len(ids)).backward()
        for name, p in model.named_parameters():
            squares[name] += p.grad**2
    return squares


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted)


def seen_by_the_comm_hook(steps: int) -> tuple[list[float], list[int]]:
    """Per step, how wrong the squares are at the moment when DDP hands a parameter's bucket out; and the buckets."""
    twin, model = net(), net()
    watch = SecondMoments(model)
    ddp = DDP(model, bucket_cap_mb=SMALL)
    names = {p: name for name, p in model.named_parameters()}
    found: dict[str, Tensor] = {}
    count = 0

    def hook(state: Any, bucket: Any) -> Any:
        nonlocal count
        count += 1
        found.update({names[p]: watch.squares(names[p]).clone() for p in bucket.parameters()})
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    hook.__annotations__ = {}
    ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    errors, buckets = [], []
    for step in range(steps):
        count = 0
        twin.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        loss_of(ddp(batch(step))).backward()
        errors.append(worst(found, brute_force(twin, batch(step))))
        buckets.append(count)
        assert watch.estimated == {}
        watch.clear()
        found.clear()
        optimizer.step()
    return errors, buckets


@dataclass
class Shown:
    squares: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Recorder(Reducer[Moments, Shown]):
    """Averages everything, and keeps the squares it was shown."""

    wants: ClassVar[type] = Moments

    def init(self, layout: Layout, /) -> Shown:
        return Shown()

    def reduce(self, local: Moments, state: Shown, comm: Any, out: Tensor, /) -> None:
        state.squares.append(local.square.clone())
        out.copy_(comm.all_mean(local.mean.clone()))


def seen_by_the_method(steps: int, parts: int, **options: Any) -> list[float]:
    """Per step that reaches the method, how wrong its squares are; gradients are accumulated over `parts`."""
    twin, model = net(), net()
    ddp = thinwire.wrap(model, Recorder(), bucket_cap_mb=SMALL, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    errors = []
    for step in range(steps):
        twin.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        micro = batch(step).chunk(parts)
        for ids in micro[:-1]:
            with ddp.no_sync():
                (loss_of(ddp(ids)) / parts).backward()
        (loss_of(ddp(micro[-1])) / parts).backward()
        optimizer.step()
        groups = thinwire.handle(ddp).capture.groups
        if not groups:  # not settled yet: dense
            continue
        found: dict[str, Tensor] = {}
        for group in groups:
            found |= dict(zip(group.layout.names, group.layout.views(group.state.squares[-1]), strict=True))
        errors.append(worst(found, brute_force(twin, batch(step))))
    return errors


OPTIONS: tuple[dict[str, Any], ...] = ({"grain": "model"}, {"grain": "bucket", "overlap": True})


def everything(steps: int) -> dict[str, Any]:
    """All of the above in one set of processes, because starting them is what takes long."""
    methods = [seen_by_the_method(steps, parts, **options) for parts in (1, 4) for options in OPTIONS]
    return {"hook": seen_by_the_comm_hook(steps), "methods": methods}
