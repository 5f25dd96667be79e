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

import torch
import torch.distributed as dist

from thinwire.comm.base import MESSAGES
from thinwire.lab import LabError
from thinwire.lab.launch import WorkerFailed, already_launched, start
from thinwire.lab.loop import make_optimizer, this_device
from thinwire.lab.record import Run, write_json
from thinwire.lab.tasks import load_task
from thinwire.lab.worker import end_with_launcher
from thinwire.plan import Network


@dataclass(frozen=True)
class Probed:
    workers: int
    rtt: float  # seconds
    rate: float  # bits a second that one worker's link carried
    compute: float | None  # seconds of a step without any exchange


def probe(workers: int, links: Network | None, task: str | None, model: str | None, data: Path) -> Probed | None:
    """On `workers` processes of this machine; under torchrun, on those that are there (None but on the first)."""
    if already_launched():
        return measure(task, model, data)
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch, "answer.json")
        arguments = [str(answer), task or "", model or "", str(data)]
        try:
            start("thinwire.lab.probe", arguments, workers, Path(scratch), links=links)
        except WorkerFailed as failure:
            raise LabError(f"the probe failed: {str(failure).strip().splitlines()[-1]}") from failure
        return Probed(**json.loads(answer.read_text()))


def measure(task: str | None, model: str | None, data: Path) -> Probed | None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = this_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
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
    compute = _compute(task, model, data, device) if task else None
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    rounds = MESSAGES["all_mean"](world) or 1
    return Probed(world, 2 * small / rounds, rate, compute) if first else None


def _compute(name: str, model: str | None, data: Path, device: torch.device) -> float:
    task = load_task(name, model, data)
    net = task.model().to(device)
    optimizer = make_optimizer(net.parameters(), Run("", name, optimizer=task.optimizer, lr=task.lr))
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
