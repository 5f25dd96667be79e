"""Whether ExDyna meets its density while something is trained: a CNN on the digits, a transformer on Python's library.

    python benchmarks/exdyna_training.py [--workers 4] [--steps 500] [--densities 0.1 0.01 0.001]
    python benchmarks/exdyna_training.py --records FOLDER ...       # of runs that the lab has made with ExDyna

All workers in one process (a rehearsal of the lab), SGD with momentum. Deviations from the target: of the mean of 20
steps at step 100, of the worst mean of 20 in steps 200 to 1000, of the mean of those; the highest single step; and the
loss. Batches differ in scale here, and late on the digits by orders of magnitude, because the CNN comes to
know them by heart: the loss beside the figures says when.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from thinwire.lab.records.record import Run
from thinwire.lab.records.summary import Records
from thinwire.lab.run.rehearsal import rehearse
from thinwire.lab.tasks import Task, load_task


def train(task: Task, name: str, density: float, workers: int, steps: int) -> None:
    kind, model = name.split("/")
    run = Run(f"ErrorFeedback(ExDyna({density}))", kind, model, task.metric, workers, steps, task.batch, lr=0.05)
    with tempfile.TemporaryDirectory() as folder:
        run.write(Path(folder))
        rehearse(run, task, Path(folder))
        tell_records(Path(folder))


def tell(label: str, ratios: Tensor, losses: list[float]) -> None:
    means = ratios.unfold(0, 20, 1).mean(1) - 1
    print(f"{label:60s}{float(means[80].abs()):10.3f}{float(means[181:].abs().max()):10.3f}", end="")
    print(f"{float((ratios[200:].mean() - 1).abs()):10.4f}{float(ratios.max()):10.2f}", end="")
    print(f"   {losses[0]:.3f} to {sum(losses[-20:]) / 20:.3f}", flush=True)


def tell_records(folder: Path) -> None:
    records = Records.read(folder)
    run, steps = records.run, [line for line in records.steps if "build_up" in line][1:]  # the first one is dense
    label = f"{run.task}/{run.model}, {run.workers} workers, {run.method}, {run.optimizer}, seed {run.seed}"
    tell(label, torch.tensor([line["build_up"] for line in steps[:1000]]), [line["loss"] for line in steps])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.01, 0.001])
    parser.add_argument("--tasks", nargs="+", default=["digits/cnn", "stdlib/0.8M"])
    parser.add_argument("--records", type=Path, nargs="+", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':60s}{'at 100':>10s}{'20 steps':>10s}{'mean':>10s}{'highest':>10s}   loss")
    for folder in args.records:
        tell_records(folder)
    for name in [] if args.records else args.tasks:
        task = load_task(*name.split("/"), Path("data"))
        for density in args.densities:
            train(task, name, density, args.workers, args.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
