"""What the worker processes of test_far.py and test_random_steps.py run."""

import random
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.comm.gauge import Gauge
from thinwire.comm.link import Link


def wrapped() -> dict[str, Any]:
    """As if a link with latency joined these processes: which method is used, what its metrics say, and equal bits."""
    told: dict[str, Any] = {}
    # So fast a link that bytes cost nothing, and a method whose work alone takes longer than a ring's trips.
    with mock.patch.object(Gauge, "_join", return_value=Link(1e15, 0.003)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mock.patch("thinwire.doors.far._work_of_all", return_value=1.0):
            for when in ("fall_back", "keep"):
                torch.manual_seed(0)
                net = nn.Linear(20, 10)
                model = thinwire.wrap(net, "TopK(0.1)", when_far=when)  # type: ignore[arg-type]
                handle = thinwire.handle(model)
                for _ in range(3):
                    model(torch.randn(4, 20)).sum().backward()
                same = bool(handle.capture.comm.all_gather(net.weight.grad).diff(dim=0).eq(0).all())
                told[when] = repr(handle.reducer), handle.metrics()["fell_back"], same
    return told


def random_steps(method: str, count: int, seed: int = 0) -> dict[str, Any]:
    """Steps drawn at random over direct exchanges, beside a twin whose messages go by the backend.

    Some bring a value that is not finite, some fail on one worker, some accumulate first, and all have messages of
    other lengths. What is counted: how often each came, and where the twins' gradients differ.
    """
    draw, rank, world = random.Random(seed), dist.get_rank(), dist.get_world_size()
    nets = [nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    with mock.patch.object(Gauge, "_join", return_value=Link(1e9, 0.02)):
        far = thinwire.wrap(nets[0], method, when_far="keep")
    near = thinwire.wrap(nets[1], method)
    comm = thinwire.handle(far).capture.comm
    assert comm.far and not thinwire.handle(near).capture.comm.far
    counts, wrong = dict.fromkeys(("plain", "not finite", "error", "no_sync"), 0), list[str]()
    for step in range(count):
        kind = draw.choices(list(counts), [12, 2, 1, 3])[0] if step > 2 else "plain"
        counts[kind] += 1
        victim, scale, rows = draw.randrange(world), 10 ** draw.uniform(-1.5, 1.5), draw.randint(1, 6)
        x = torch.randn(2, rows, 30, generator=torch.Generator().manual_seed(1000 * step + rank))
        if kind == "not finite" and rank == victim:
            x[1] = torch.nan
        if kind == "error":
            _fails(far, x[1], comm, rank == victim)
            far.zero_grad()
            continue
        for model in (far, near):
            model.zero_grad()
            if kind == "no_sync":
                with model.no_sync():
                    (scale * model(x[0])).square().sum().backward()
            (scale * model(x[1])).square().sum().backward()
        for (name, one), other in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            mine, theirs = one.grad.nan_to_num(7.0), other.grad.nan_to_num(7.0)
            # A ring adds up in another order: more than that must not differ.
            if not torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max())):
                wrong.append(f"{kind} {step} {name}")
            with torch.no_grad():  # so that what came out counts as used
                one.mul_(0.999), other.mul_(0.999)
    return {"counts": counts, "wrong": wrong}


def _fails(model: nn.Module, x: torch.Tensor, comm: Any, here: bool) -> None:
    """A step in which one worker's wire breaks before it has sent anything; it must raise on every worker."""
    broken = mock.patch.object(comm.transport, "way", side_effect=RuntimeError("the wire broke here"))
    with broken if here else nullcontext():
        try:
            model(x).square().sum().backward()
        except RuntimeError:
            return
    raise AssertionError("a step that failed on one worker was taken by this one")
