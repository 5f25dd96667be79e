"""A training step between sites: what it takes on a link with latency, how many trips, and what `plan` predicted.

    python benchmarks/sites.py --link "100mbit, 40ms" --workers 4      # emulated: needs the rights of root
    python benchmarks/sites.py --grid --json sites.json                 # 10 and 100 Mbit/s by 1, 40 and 100 ms
    torchrun ... benchmarks/sites.py --link "100mbit, 40ms"             # on machines that such a link joins

An MLP of 427 000 parameters, or with --gpt the 0.8M GPT. All contenders live in the same processes and take turns, so
that what else the machines do meets all of them alike. The slowest rank's step, the median over the rounds; beside
it the prediction by the formula of `comm.link`, from the rate and round trip of --link, and what the step takes above
computing in one-way trips. --grid goes on where its file ends, and prints measured / predicted of all cells.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire import plan, spelling
from thinwire.core.reducer import Moments
from thinwire.lab.run.launch import start
from thinwire.lab.run.links.spelling import Link
from thinwire.lab.run.methods import wrap_model
from thinwire.lab.tasks import load_task
from thinwire.wrappers.local_steps import LocalSteps

GRID = [f"{rate}, {rtt}" for rtt in ("1ms", "40ms", "100ms") for rate in ("10mbit", "100mbit")]
CONTENDERS = [
    "no-exchange",
    "DDP",
    "DDP-fp16",
    "Dense()",
    "LowBit()",
    "ErrorFeedback(TopK(0.01))",
    "ErrorFeedback(ExDyna(0.01))",
    "ErrorFeedback(PowerSGD(4))",
    "RandomBlock(0.1)",
    "Variance()",
    "RankDAD(4)",
    "LocalSteps(ErrorFeedback(PowerSGD(4)), every=5)",
]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))


def make_task(gpt: bool) -> tuple[Callable[[], nn.Module], Callable[[nn.Module, int, int, int], torch.Tensor]]:
    """How to make the model, and the loss of a worker's batch at some step."""
    if not gpt:
        return mlp, lambda net, step, rank, world: nn.functional.cross_entropy(
            net(torch.randn(32, 256)), torch.randint(64, (32,))
        )
    task = load_task("stdlib", "0.8M", Path("."))

    def loss(net: nn.Module, step: int, rank: int, world: int) -> torch.Tensor:
        x, y = task.data.train(0, step, rank, world, task.batch)
        return task.loss(net(x), y)

    return task.model, loss


def worker(order: dict[str, Any]) -> dict[str, Any]:
    """All contenders by turns; by name, the median step, its costs, and the seconds of its own work."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    make, loss = make_task(order["gpt"])
    contenders, times, costs = {}, {}, {}
    for method in order["methods"]:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run: Any = SimpleNamespace(method=method, grain=None, overlap=None)
        contenders[method] = wrap_model(model, optimizer, run, world), optimizer
        times[method], costs[method] = [], []
    torch.manual_seed(rank)
    for round_ in range(order["rounds"] + 1):  # the first round warms up: buckets are rebuilt, kernels compiled
        for method, (wrapped, optimizer) in contenders.items():
            dist.barrier()
            # Workers leave a barrier at other times, and TCP begins slowly after a pause: neither is the method's.
            before = 10 if round_ == 0 else max(2, _every(method))
            for turn in range(before + (order["steps"] if round_ else 0)):
                begin = time.perf_counter()
                optimizer.zero_grad()
                loss(wrapped.net, turn, rank, world).backward()
                optimizer.step()
                if turn >= before:
                    times[method].append(time.perf_counter() - begin)
                    costs[method].append(wrapped.metrics())
                else:
                    wrapped.metrics()
    mine = torch.tensor([_middle(took, order["steps"]) for took in times.values()], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    dist.barrier()
    dist.destroy_process_group()
    rows = {}
    for method, seconds in zip(times, mine.tolist()):
        mean = {key: statistics.fmean(cost.get(key) or 0.0 for cost in costs[method]) for key in costs[method][0]}
        rows[method] = {"seconds": seconds, **mean}
    return rows if rank == 0 else {}


def _every(method: str) -> int:
    """Steps from one exchange to the next, of a method in local steps."""
    parsed = None if method in ("no-exchange", "DDP", "DDP-fp16") else spelling.parse(method)
    return int(parsed.every) if isinstance(parsed, LocalSteps) else 0


def _middle(times: list[float], steps: int) -> float:
    """The median over the rounds of a round's mean step: local steps exchange only now and then."""
    return statistics.median(statistics.fmean(times[i : i + steps]) for i in range(0, len(times), steps))


def predicted(method: str, layout: plan.Layout, network: plan.Network, rows: dict[str, Any]) -> float | None:
    """What `thinwire plan` says of a step, with the computing that was measured here."""
    compute = rows["no-exchange"]["seconds"]
    if method == "no-exchange":
        return compute
    if method in ("DDP", "DDP-fp16"):
        return plan.dense(layout, 4 if method == "DDP" else 2, method).step(network, compute)
    parsed = spelling.parse(method)
    if isinstance(parsed, LocalSteps):
        cost = plan.local_steps(parsed.inner, layout, network.workers, int(parsed.every), network.link)
    elif parsed.wants is Moments:
        return None  # what it sends depends on the samples
    else:
        cost = plan.dry_run(parsed, layout, network.workers, link=network.link)
    return cost.step(network, compute)


def show(rows: dict[str, Any], options: argparse.Namespace, workers: int, link: str) -> dict[str, Any]:
    network = Link.parse(link).network(workers)
    layout = plan.layout_of(make_task(options.gpt)[0]())
    compute, ddp = rows["no-exchange"]["seconds"], rows.get("DDP", {}).get("seconds")
    print(f"\n{link}, {workers} workers, {layout.numel:,} parameters, {options.rounds * options.steps} steps each")
    print(f"{'method':50} {'ms a step':>9} {'/ DDP':>6} {'plan':>7} {'one-ways':>8} {'trips':>6} {'kB':>8}")
    for method, row in rows.items():
        row["plan"] = predicted(method, layout, network, rows)
        row["one_ways"] = 2 * (row["seconds"] - compute) / network.rtt if network.rtt else None
        row["wire_bytes"] = row.get("wire_bytes", 0.0)
        told = [
            f"{1e3 * row['seconds']:9.0f}",
            f"{row['seconds'] / ddp:6.2f}" if ddp else f"{'-':>6}",
            f"{1e3 * row['plan']:7.0f}" if row["plan"] is not None else f"{'-':>7}",
            f"{row['one_ways']:8.1f}" if row["one_ways"] is not None else f"{'-':>8}",
            f"{row['trips']:6.1f}" if "trips" in row else f"{'-':>6}",
            f"{row['wire_bytes'] / 1e3:8.1f}",
        ]
        print(f"{method:50} {' '.join(told)}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit, 40ms")
    parser.add_argument("--grid", action="store_true", help="all cells of the grid, one after another")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gpt", action="store_true", help="the 0.8M GPT in place of the MLP")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="steps a contender takes in one round")
    parser.add_argument("--methods", help="spellings, separated by semicolons")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    methods = options.methods.split(";") if options.methods else CONTENDERS
    order = {"gpt": options.gpt, "rounds": options.rounds, "steps": options.steps, "methods": methods}
    if options.worker:
        order = json.loads((options.worker / "order.json").read_text())
        rows = worker(order)
        if rows:
            (options.worker / "result.json").write_text(json.dumps(rows))
        return
    if "RANK" in os.environ:
        rows = worker(order)
        workers = int(os.environ["WORLD_SIZE"])
    elif options.grid:
        return whole_grid(order, options)
    else:
        workers = options.workers
        rows = measured(options.link, order, workers)
    if rows:
        rows = show(rows, options, workers, options.link)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))


def measured(link: str, order: dict[str, Any], workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "order.json").write_text(json.dumps(order))
        links = Link.parse(link).check(workers)
        start("benchmarks.sites", ["--worker", folder], workers, Path(folder), links=links)
        return json.loads((Path(folder) / "result.json").read_text())


def whole_grid(order: dict[str, Any], options: argparse.Namespace) -> None:
    """Every cell that the file does not hold yet; then, for each method, measured / predicted in all of them."""
    file = options.json or Path("sites.json")
    cells: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for link in GRID:
        if link not in cells or set(order["methods"]) - set(cells[link]):
            cells[link] = show(measured(link, order, options.workers), options, options.workers, link)
            file.write_text(json.dumps(cells, indent=1))  # after each, so that nothing is measured twice
    print(
        f"\nmeasured / predicted step, {options.workers} workers\n{'method':50} " + " ".join(f"{c:>15}" for c in GRID)
    )
    for method in order["methods"]:
        rows = [cells[link][method] for link in GRID]
        told = [f"{row['seconds'] / row['plan']:15.2f}" if row["plan"] else f"{'-':>15}" for row in rows]
        print(f"{method:50} {' '.join(told)}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
