"""Measures what the planner needs: how long a message takes, how much the link carries, how long a step computes."""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.comm.direct import Direct
from thinwire.comm.groups import Members
from thinwire.comm.table import MESSAGES
from thinwire.lab import LabError
from thinwire.lab.records.record import Run, write_json
from thinwire.lab.run.links.spelling import Link
from thinwire.lab.run.loop import this_device
from thinwire.lab.run.meeting import already_launched, join_group, meet
from thinwire.lab.run.optimizers import make_optimizer
from thinwire.lab.run.processes import WorkerFailed, start
from thinwire.lab.run.worker import end_with_launcher
from thinwire.lab.tasks import load_task


@dataclass(frozen=True)
class Probed:
    workers: int
    rtt: float  # seconds
    rate: float  # bits a second that one worker's link carried
    compute: float | None  # seconds of a step without any exchange
    up: list[float] | None = None  # bits a second that each worker sends to all others at once; on CPUs
    down: list[float] | None = None  # and that it receives from all others at once
    ring: float | None = None  # seconds of gathering 30 kB from every worker by the backend's own ring
    direct: float | None = None  # and straight from everybody at once


def probe(workers: int, links: Link | None, task: str | None, model: str | None, data: Path) -> Probed | None:
    """On `workers` processes of this machine; under torchrun, on those that are there (None but on the first)."""
    if already_launched():
        return measure(task, model, data)
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch, "answer.json")
        arguments = [str(answer), task or "", model or "", str(data)]
        try:
            start("thinwire.lab.run.probe", arguments, workers, Path(scratch), links=links)
        except WorkerFailed as failure:
            raise LabError(f"the probe failed: {str(failure).strip().splitlines()[-1]}") from failure
        return Probed(**json.loads(answer.read_text()))


def measure(task: str | None, model: str | None, data: Path) -> Probed | None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = this_device()
    join_group("nccl" if device.type == "cuda" else "gloo", *meet())
    world = dist.get_world_size()
    small = _middle(lambda: dist.all_reduce(torch.zeros(1, device=device)), 30)
    size = 1 << 18
    while True:  # until an exchange takes long enough to be timed
        took = _middle(lambda size=size: dist.all_reduce(torch.zeros(size // 4, device=device)), 3)  # type: ignore[misc]
        agreed = torch.tensor([took], dtype=torch.float64, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        if agreed.item() > 0.5 or size >= 1 << 26:
            break
        size *= 4
    carried = 2 * (world - 1) / world * size
    rate = 8 * carried / max(1e-9, agreed.item() - small)
    rtt = 2 * small / (MESSAGES["all_mean"](world) or 1)
    ways: dict[str, Any] = {}
    if device.type == "cpu" and world > 1:
        direct = Direct(Members(None))
        rtt = _slowest(_middle(lambda: direct.all_gather(torch.zeros(1, dtype=torch.uint8)), 10))
        rate = 1 / _slowest(1 / rate)  # each has timed it for itself
        ways = _exchanges(direct) | _rates(world, rate, rtt)
    compute = _compute(task, model, data, device) if task else None
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return Probed(world, rtt, rate, compute, **ways) if first else None


def _exchanges(direct: Direct) -> dict[str, float]:
    """The same gathering twice: around the ring, and to everybody at once."""
    mine = torch.zeros(30_000, dtype=torch.uint8)
    rows = [torch.zeros_like(mine) for _ in range(direct.world)]
    ring = _slowest(_middle(lambda: dist.all_gather(rows, mine), 5))
    return {"ring": ring, "direct": _slowest(_middle(lambda: direct.all_gather(mine), 5))}


def _rates(world: int, rate: float, rtt: float) -> dict[str, list[float]]:
    """Worker after worker: how fast it sends to all others at once, and receives from them."""
    rank = dist.get_rank()
    size = int(min(1 << 24, max(1 << 16, 0.4 * rate / 8)) / (world - 1))
    others = [one for one in range(world) if one != rank]
    rows = torch.zeros(world, size, dtype=torch.uint8)
    found: dict[str, list[float]] = {"up": [], "down": []}
    for one in range(world):
        for way, rates in found.items():
            sends = (rank == one) == (way == "up")
            partners = others if rank == one else [one]
            dist.barrier()
            began = time.perf_counter()
            call = dist.isend if sends else dist.irecv
            for work in [call(rows[partner], partner) for partner in partners]:
                assert work is not None  # everybody is in this group
                work.wait()
            took = _slowest(time.perf_counter() - began)
            rates.append(8 * size * (world - 1) / max(1e-9, took - rtt))
    return found


def _slowest(seconds: float) -> float:
    """The longest time that any worker has seen, on all of them."""
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told.item())


def _compute(name: str, model: str | None, data: Path, device: torch.device) -> float:
    task = load_task(name, model, data)
    net = task.model().to(device)
    optimizer = make_optimizer(net, Run("", name, optimizer=task.optimizer, lr=task.lr))
    step = 0

    def one() -> None:
        nonlocal step
        x, y = task.data.train(0, step, dist.get_rank(), dist.get_world_size(), task.batch)
        step += 1
        optimizer.zero_grad()
        task.loss(net(x.to(device)), y.to(device)).backward()
        optimizer.step()

    return _middle(one, 5)


def _middle(work: Callable[[], object], times: int) -> float:
    """The median of some timings, after one that does not count."""
    work()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    end_with_launcher()
    answer, task, model, data = sys.argv[1:]
    found = measure(task or None, model or None, Path(data))
    if found:
        write_json(Path(answer), vars(found))


if __name__ == "__main__":
    main()
