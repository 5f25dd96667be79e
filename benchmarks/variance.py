"""Accuracy and bytes of variance-based compression on handwritten digits, with workers that are threads.

    python benchmarks/variance.py [--optimizer sgd] [--seeds 4] ["Variance(1.5)" "Strom(0.01)" ...]

Eight workers of 16 samples train an MLP (64-128-64-10) for 600 steps; 360 of 1 797 digits are held out. `bytes` is the
dense payload over that of the method, `entries` all entries over those sent, which papers count.
"""

import argparse
import statistics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from thinwire import Layout, Reducer, parse
from thinwire.capture.layers.squares.second_moments import SecondMoments
from thinwire.comm import Comm
from thinwire.comm.threads import in_threads
from thinwire.core.reducer import Moments
from thinwire.lab.tasks.models import mlp

WORLD, BATCH, STEPS, HELD_OUT = 8, 16, 600, 360
DEFAULT = ["Dense()", "Variance(1.0)", "Variance(1.5)", "Variance(2.0)", "Variance(4.0)"]
DEFAULT += ["Variance(2.0, packing='words')", "VarianceStrom(2.0, tau=0.1)", "Strom(0.1)", "QSGD(4)"]
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.003),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


class Trained(NamedTuple):
    accuracy: float
    payload: float  # bytes a step
    picked: float  # entries a step
    entries: int


def reduced(
    method: Reducer[Any, Any], model: nn.Module, watch: SecondMoments, state: Any, comm: Comm, out: Tensor
) -> None:
    """One exchange, from gradients in the model to their mean in it."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    local = mean = torch.cat([p.grad.flatten() for p in parameters])
    if method.wants is Moments:
        local = Moments(mean, torch.cat([watch.squares(name).flatten() for name in names]))
    watch.clear()
    method.reduce(local, state, comm, out)
    for p, part in zip(parameters, out.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(part.view_as(p))


def train(method: Reducer[Any, Any], optimizer: str, seed: int) -> Trained:
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16 - 0.3, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    drawn = torch.randint(0, len(train), (STEPS, WORLD, BATCH), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    start = mlp(64, 128, 64, 10).state_dict()

    def work(comm: Comm) -> Trained:
        model = mlp(64, 128, 64, 10)
        model.load_state_dict(start)
        watch = SecondMoments(model)
        names, parameters = zip(*model.named_parameters(), strict=True)
        layout = Layout(names, tuple(p.shape for p in parameters))
        state, out, update = method.init(layout), layout.zeros(), OPTIMIZERS[optimizer](model.parameters())
        for step in range(STEPS):
            rows = train[drawn[step, comm.rank]]
            update.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            reduced(method, model, watch, state, comm, out)
            update.step()
        with torch.no_grad():
            accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
        return Trained(100 * accuracy, comm.ledger.payload / STEPS, comm.ledger.picked / STEPS, layout.numel)

    workers = in_threads(WORLD, work)
    payload, picked = (statistics.mean(w[i] for w in workers) for i in (1, 2))
    return workers[0]._replace(payload=payload, picked=picked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=DEFAULT)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--seeds", type=int, default=4)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'method, ' + chosen.optimizer:34} {'accuracy':>8} {'spread':>7} {'bytes':>8} {'entries':>8}")
    for spelling in chosen.methods:
        runs = [train(parse(spelling), chosen.optimizer, seed) for seed in range(chosen.seeds)]
        accuracies = [run.accuracy for run in runs]
        saved = statistics.mean(4 * run.entries / run.payload for run in runs)
        fewer = statistics.mean(run.entries / run.picked for run in runs)
        spread = max(accuracies) - min(accuracies)
        print(f"{spelling:34} {statistics.mean(accuracies):8.2f} {spread:7.2f} {saved:8.1f} {fewer:8.1f}", flush=True)


if __name__ == "__main__":
    main()
