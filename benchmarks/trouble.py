"""Training over links in trouble: does it get to its end, are the replicas equal, and how much time is lost?

    python benchmarks/trouble.py
    python benchmarks/trouble.py --methods "DDP;Dense()" --steps 60 --links "100mbit, 40ms, 5% loss"

Every worker is a process behind an emulated link (root, /dev/net/tun). The first link has no trouble, for comparison.
A link that goes down is down for all workers at once. It fails if a run does not end or its replicas differ.
"""

import argparse
import hashlib
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
from thinwire.lab.run.loop import judge, told
from thinwire.lab.run.meeting import join_group, meet
from thinwire.lab.run.methods import wrap_model
from thinwire.lab.run.processes import start
from thinwire.lab.tasks import load_task

LINKS = {
    "no trouble": "100mbit, 40ms",
    "1 % of packets lost": "100mbit, 40ms, 1% loss",
    "20 up, 100 down": "20mbit up 100mbit down, 40ms",
    "one worker ten times as far": "100mbit, 40ms; worker 1: 400ms",
    "down for 20 s": "100mbit, 40ms, then down after 8s, then up after 28s",
}
METHODS = ["DDP", "Dense()", "ErrorFeedback(TopK(0.01))", "ErrorFeedback(ExDyna(0.01))", "ErrorFeedback(PowerSGD(4))"]


def worker(order: dict[str, Any], out: Path) -> None:
    torch.set_num_threads(1)
    task = load_task("digits", None, Path("."))  # first, since a link's time begins with its first packet
    join_group("gloo", *meet())
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {}
    for method in order["methods"]:
        torch.manual_seed(0)
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)
        run: Any = SimpleNamespace(method=method, grain=None, overlap=None)
        wrapped = wrap_model(model, optimizer, run, world)
        times = []
        for step in range(order["steps"]):
            x, y = task.data.train(0, step, rank, world, task.batch)
            began = time.perf_counter()
            optimizer.zero_grad()
            task.loss(wrapped.net(x), y).backward()
            optimizer.step()
            times.append(time.perf_counter() - began)
        wrapped.finish()
        bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        everybody: list[Any] = [None] * world
        dist.all_gather_object(everybody, bits)
        accuracy = told(judge(model, task, torch.device("cpu"), "validation"), "validation")["validation_accuracy"]
        results[method] = {"times": times, "equal": len(set(everybody)) == 1, "accuracy": accuracy}
    if rank == 0:
        out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def measure(link: Link, methods: list[str], options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        order = {"methods": methods, "steps": options.steps}
        (Path(folder) / "order.json").write_text(json.dumps(order))
        start("benchmarks.trouble", ["--worker", folder], options.workers, Path(folder), links=link)
        return json.loads((Path(folder) / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", action="append", help="a link's spelling; repeatable")
    parser.add_argument("--methods", default=";".join(METHODS), help="spellings, separated by semicolons")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads((options.worker / "order.json").read_text()), options.worker / "result.json")
        return
    links = {link: link for link in options.links} if options.links else LINKS
    methods, failed = options.methods.split(";"), []
    for name, spelled in links.items():
        link = Link.parse(spelled)
        if why := missing_rights(link):
            sys.exit(why)
        print(f"\n{name}: {spelled}; {options.workers} workers, digits, {options.steps} steps", flush=True)
        print(f"{'method':34} {'ms a step':>10} {'longest, s':>11} {'all, s':>8} {'accuracy':>9}  replicas")
        # An outage is met by one method: time goes on from the first packet that passes.
        for some in [methods] if len(link.timeline(None)) == 1 else [[method] for method in methods]:
            for method, row in measure(link, some, options).items():
                times, equal = row["times"], "equal" if row["equal"] else "DIFFER"
                line = f"{1e3 * statistics.median(times):10.1f} {max(times):11.2f} {sum(times):8.1f}"
                print(f"{method:34} {line} {100 * row['accuracy']:8.1f}%  {equal}", flush=True)
                failed += [] if row["equal"] else [f"{name}, {method}"]
    if failed:
        sys.exit(f"replicas differ: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
