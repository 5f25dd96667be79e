"""The time of one training step: thinwire's methods, plain DDP, DDP's fp16 hook and no exchange at all, side by side.

    python benchmarks/step.py                                    # loopback, 2 workers, the 0.8M GPT
    python benchmarks/step.py --size 10M --workers 4 --links loopback,100mbit,10mbit --json step.json

All contenders live in the same processes and take turns, a few steps each, round after round, so that what else the
machine does meets all of them alike. Medians of one rank's step times, and their ratios to plain DDP and no exchange.
Links are emulated in network namespaces (needs the rights of root); loopback is not shaped.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from thinwire.lab.run.links.emulated import missing_rights
from thinwire.lab.run.links.spelling import Link
from thinwire.lab.run.meeting import join_group, meet
from thinwire.lab.run.methods import wrap_model
from thinwire.lab.run.processes import start
from thinwire.lab.studies.compare import DEFAULT
from thinwire.lab.tasks import load_task

# What `thinwire compare` compares at every step, and the floor, the exact method and the bar of the README beside it.
METHODS = [
    "no-exchange",
    *(m for m in DEFAULT if not m.startswith("LocalSteps")),
    "Dense()",
    "ErrorFeedback(ExDyna(0.001))",
]


def worker(order: dict[str, Any], out: Path) -> None:
    torch.set_num_threads(1)
    join_group("gloo", *meet())
    rank, world = dist.get_rank(), dist.get_world_size()
    task = load_task("stdlib", order["size"], Path("."))
    contenders = {}
    for method in order["methods"]:
        torch.manual_seed(0)
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        spelled, _, grain = method.partition(" @")  # without one, what a user gets by default
        run: Any = SimpleNamespace(method=spelled, grain=grain or None, overlap=grain == "bucket" if grain else None)
        contenders[method] = wrap_model(model, optimizer, run, world), optimizer
    times: dict[str, list[float]] = {method: [] for method in contenders}
    costs: dict[str, dict[str, float]] = {}
    turn = 0
    for round_ in range(order["rounds"] + 1):  # the first round warms up: buckets are rebuilt, kernels compiled
        for method, (wrapped, optimizer) in contenders.items():
            for _ in range(order["warm"] if round_ == 0 else order["steps"]):
                x, y = task.data.train(0, turn, rank, world, task.batch)
                turn += 1
                dist.barrier()
                begin = time.perf_counter()
                optimizer.zero_grad()
                task.loss(wrapped.net(x), y).backward()
                optimizer.step()
                if round_:
                    times[method].append(time.perf_counter() - begin)
                costs[method] = wrapped.metrics()  # of all since it was last asked: of this step
    if rank == 0:
        out.write_text(json.dumps({"times": times, "costs": costs}))
    dist.barrier()
    dist.destroy_process_group()


def measure(link: str, options: argparse.Namespace) -> dict[str, Any]:
    asked = None if link == "loopback" else Link.parse(link)
    methods = options.methods.split(";") if options.methods else METHODS
    order = {
        "size": options.size,
        "methods": methods,
        "rounds": options.rounds,
        "steps": options.steps,
        "warm": options.warm,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "order.json").write_text(json.dumps(order))
        start("benchmarks.step", ["--worker", folder], options.workers, Path(folder), links=asked)
        return json.loads((Path(folder) / "result.json").read_text())


def show(link: str, result: dict[str, Any], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    medians = {method: statistics.median(times) for method, times in result["times"].items()}
    print(f"\n{link}, {options.workers} workers, GPT {options.size}, {options.rounds * options.steps} steps each")
    print(f"{'method':42} {'ms a step':>10} {'/ DDP':>7} {'/ none':>7} {'kB on the wire':>15}")
    rows = {}
    for method, median in medians.items():
        cost = result["costs"][method]
        to_ddp = median / medians["DDP"] if "DDP" in medians else float("nan")
        to_none = median / medians["no-exchange"] if "no-exchange" in medians else float("nan")
        wire = cost.get("wire_bytes", 0.0)
        print(f"{method:42} {1e3 * median:10.1f} {to_ddp:7.2f} {to_none:7.2f} {wire / 1e3:15.1f}")
        rows[method] = {"seconds": median, "to_ddp": to_ddp, "to_none": to_none, "wire_bytes": wire}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="loopback")
    parser.add_argument("--size", default="0.8M")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps a contender takes in one round")
    parser.add_argument("--warm", type=int, default=2, help="steps before; what methods send settles over the first 20")
    parser.add_argument("--methods", help="spellings, separated by semicolons; TopK(0.01) @bucket sets the grain")
    parser.add_argument("--json", type=Path, help="write the ratios here")
    parser.add_argument("--against", type=Path, help="fail if a ratio to DDP is a quarter above the one recorded here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads((options.worker / "order.json").read_text()), options.worker / "result.json")
        return
    rows = {}
    for link in options.links.split(","):
        if link != "loopback" and (why := missing_rights(Link.parse(link))):
            sys.exit(why)
        rows[link] = show(link, measure(link, options), options)
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "links": rows}, indent=1) + "\n")
    if options.against:
        from _ratio import check  # beside this file, where the workers, who import it as a module, do not look

        recorded = json.loads(options.against.read_text())["links"]
        check(_to_ddp(rows), _to_ddp(recorded))


def _to_ddp(links: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    return {f"{method}, {link}": row["to_ddp"] for link, rows in links.items() for method, row in rows.items()}


if __name__ == "__main__":
    main()
