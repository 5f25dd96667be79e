"""What the workers of test_ddp.py run."""

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 4))


def batches(steps: int, rank: int, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    truth = torch.randn(12, 4, generator=torch.Generator().manual_seed(9))
    return [(x, x @ truth) for x in torch.randn(steps, rows, 12, generator=generator)]


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in module.parameters()])


def train(ddp: nn.Module, data: list[tuple[Tensor, Tensor]], lr: float = 0.02) -> list[float]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = (ddp(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def buckets(count: int) -> float:
    """A bucket size, in MB, that cuts `model()` into about as many buckets."""
    return {1: 25.0, 2: 0.006, 6: 0.0005}[count]


def laws(spelling: str, grain: str, bucket_count: int, overlap: bool, steps: int = 6) -> dict[str, Any]:
    """Train a little and return what the laws speak of."""
    rank = dist.get_rank()
    seen: list[Tensor] = []
    ddp = thinwire.wrap(
        model(),
        thinwire.parse(spelling),
        grain=grain,
        overlap=overlap,
        bucket_cap_mb=buckets(bucket_count),
    )
    handle = thinwire.handle(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    totals: list[Tensor] = []
    for x, y in batches(steps, rank):
        reference = model()
        reference.load_state_dict(ddp.module.state_dict())
        (reference(x) - y).square().mean().backward()
        seen.append(torch.cat([p.grad.flatten().double() for p in reference.parameters()]))
        optimizer.zero_grad()
        (ddp(x) - y).square().mean().backward()
        totals.append(torch.cat([p.grad.flatten().double() for p in ddp.parameters()]))
        optimizer.step()
    residual = torch.zeros_like(seen[0])
    names = [n for n, _ in ddp.module.named_parameters()]
    for group in handle.state_dict()["groups"]:
        state = group["state"] or {}
        for name, tensor in (state.get("residual") or state.get("r") or {}).items():
            at = sum(p.numel() for n, p in list(ddp.module.named_parameters())[: names.index(name)])
            residual[at : at + tensor.numel()] = tensor.flatten().double()
    return {
        "gradients": torch.stack(seen).sum(0),
        "applied": torch.stack(totals).sum(0),
        "residual": residual,
        "weights": flat(ddp.module),
        "metrics": handle.metrics(),
        "buckets": len(handle.buckets.last),
    }


def many_laws(cases: list[tuple[str, str, int, bool]]) -> list[dict[str, Any]]:
    return [laws(*case) for case in cases]


def dense_equals_ddp(steps: int, bucket_count: int, grain: str | None, half: bool = False) -> tuple[Tensor, Tensor]:
    data = batches(steps, dist.get_rank())
    plain = DDP(model(), bucket_cap_mb=buckets(bucket_count))
    train(plain, data)
    ours = thinwire.wrap(model(), thinwire.Dense(), grain=grain, bucket_cap_mb=buckets(bucket_count))
    train(ours, data)
    return flat(plain.module), flat(ours.module)


def resumed(
    spelling: str, grain: str, folder: str, first: int, steps: int, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    """Weights after `steps`, straight through and with a stop and a fresh start after `first` of them."""
    rank = dist.get_rank()
    data = batches(steps, rank)

    def fresh() -> tuple[DDP, torch.optim.Optimizer]:
        ddp = thinwire.wrap(model(), thinwire.parse(spelling), grain=grain, overlap=overlap, bucket_cap_mb=buckets(2))
        return ddp, torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)

    def go(ddp: DDP, optimizer: torch.optim.Optimizer, part: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in part:
            optimizer.zero_grad()
            (ddp(x) - y).square().mean().backward()
            optimizer.step()

    straight, optimizer = fresh()
    go(straight, optimizer, data)

    stopped, optimizer = fresh()
    go(stopped, optimizer, data[:first])
    kept = io.BytesIO()
    torch.save({"model": stopped.module.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    thinwire.handle(stopped).save(f"{folder}/{spelling}-{grain}")
    dist.barrier()

    again, optimizer = fresh()
    kept.seek(0)
    saved = torch.load(kept, weights_only=True)
    again.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    thinwire.handle(again).load(f"{folder}/{spelling}-{grain}")
    go(again, optimizer, data[first:])
    return flat(straight.module), flat(again.module)
