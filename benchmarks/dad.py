"""Distributed auto-differentiation: errors of few columns on layers in training, and bytes by layer.

python benchmarks/dad.py            # a minute on one core; figures, not times
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire import DAD, AutoDAD, RankDAD
from thinwire.capture.layers.factors.capture import Layers
from thinwire.comm.dry import DryComm
from thinwire.core.factors import Factors
from thinwire.methods.dad.dad import FactorReducer
from thinwire.methods.dad.rank_dad import EXTRA, compress
from thinwire.step.lanes import Inline

ROWS = 32
SEEDS = 10


class Recurrent(nn.Module):
    """A GRU over the rows of a digit."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.cell, self.head = nn.GRU(8, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.view(len(x), 8, 8))[0][:, -1])


class Attending(nn.Module):
    """A small transformer over the rows of a digit, with attention written out as Linear layers."""

    def __init__(self, width: int = 96):
        super().__init__()
        self.embed, self.mix, self.out = nn.Linear(8, width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(len(x), 8, 8))
        q, k, v = self.mix(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(x.mean(1))


def mlp(*widths: int) -> nn.Module:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(64, 512, 256, 10),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(576, 256), nn.ReLU(), nn.Linear(256, 10),
    ),
    "gru": Recurrent,
    "transformer": Attending,
}  # fmt: skip


def digits() -> tuple[Tensor, Tensor]:
    inputs, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    return torch.tensor(inputs, dtype=torch.float32)[order] / 16, torch.tensor(targets)[order]


@dataclass
class Names:
    names: list[str]


class Watch(FactorReducer[Names]):
    """dAD that keeps a copy of each weight's factors."""

    unroll = True

    def __init__(self) -> None:
        self.seen: dict[str, Factors] = {}

    def init(self, layout, /):
        return Names(list(layout.names))

    def reduce(self, local, state, comm, out, /):
        for weight, name in enumerate(state.names):
            uses = [use for use in local.uses if use.weight == weight]
            for use in uses:
                use.weight = 0
            self.seen[name] = Factors((local.shapes[weight],), uses)
            self.seen[name].multiply(0, out.split([s.numel() for s in local.shapes])[weight].view(local.shapes[weight]))

    def ways(self, local, state, comm, working, /):
        return []


def errors() -> None:
    """Relative errors of 2, 4 and 8 columns of layers before, during and after training on the digits."""
    inputs, targets = digits()
    worst: dict[str, float] = {}
    print("relative error of a layer's gradient, 32 rows, mean of ten starts; all deliver as many columns")
    print(
        f"{'layer':28}{'step':>5}{'columns':>8}{'optimum':>9}{'1 it.':>8}{'2 it.':>8}{'published 1, 2, 5, 10 it.':>36}"
    )
    for net, make in NETS.items():
        torch.manual_seed(0)
        model, watch = make(), Watch()
        Layers(model, watch, DryComm(1), lane=Inline()).install(model)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for step in range(201):
            chosen = torch.arange(step * ROWS, (step + 1) * ROWS) % len(targets)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
            if step in (0, 20, 200):
                for name, local in watch.seen.items():
                    for columns in (2, 4, 8):
                        if min(local.shapes[0][0], local.shapes[0][1:].numel()) > columns:
                            _error(f"{net} {name}", step, local, columns, worst)
    for what, value in worst.items():
        print(f"largest {what}: {value:.3f}")


def _error(name: str, step: int, local: Factors, columns: int, worst: dict[str, float]) -> None:
    gradient = torch.empty(local.shapes[0])
    local.multiply(0, gradient)
    gradient = gradient.flatten(1).double()
    values = torch.linalg.svdvals(gradient)
    optimum = float(values[columns:].norm() / values.norm())
    if optimum < 1e-4:
        return  # the gradient has no more directions than that: all find them

    def of(found: list[Tensor]) -> list[float]:
        return [float((gradient - f.double()).norm() / gradient.norm()) for f in found]

    def ours(iterations: int) -> list[float]:
        found = []
        for seed in range(SEEDS):
            width = min(columns + EXTRA, *gradient.shape)
            start = torch.randn(gradient.shape[1], width, generator=torch.Generator().manual_seed(seed))
            thin = compress(lambda p: local.right(0, p), lambda q: local.left(0, q), start, columns, iterations, 0.0)
            found.append(thin.left @ thin.right.T)
        return of(found)

    def published(iterations: int) -> list[float]:
        method = RankDAD.published(columns + 1, iterations)  # so that it delivers as many columns
        starts = [torch.Generator().manual_seed(seed) for seed in range(SEEDS)]
        pairs = [method.columns(local, 0, start, torch.empty(0)) for start in starts]
        return of([left @ right.T for left, right in pairs])

    one, two = ours(1), ours(2)
    theirs = [published(k) for k in (1, 2, 5, 10)]
    reached = {
        "error with 1 iteration, any start": max(one),
        "error with 1 iteration over the optimum, any start": max(one) / optimum,
        "error with 2 iterations over the optimum, any start": max(two) / optimum,
        "error as published with 1 iteration, any start": max(theirs[0]),
    }
    for what, value in reached.items():
        worst[what] = max(worst.get(what, 0.0), value)
    told = "".join(f"{mean(error):9.3f}" for error in theirs)
    print(f"{name:28}{step:5}{columns:8}{optimum:9.3f}{mean(one):8.3f}{mean(two):8.3f}{told}")


def wire_bytes(
    make: Callable[[], nn.Module], reducer: FactorReducer, world: int, rows: int
) -> tuple[float, float, str]:
    """Bytes that a link carries in one step: by the ledger, with biases and sizes; those of dense; the modes."""
    torch.manual_seed(0)
    model, comm = make(), DryComm(world)
    layers = Layers(model, reducer, comm, lane=Inline())
    layers.install(model)
    width = 64 if not isinstance(model, nn.Sequential) or not isinstance(model[0], nn.Linear) else model[0].in_features
    for _ in range(2):
        before = comm.ledger.wire
        model(torch.randn(rows, width)).sum().backward()
    for name, parameter in model.named_parameters():
        if name not in layers.ignored:
            comm.all_mean(parameter.grad)
    dense = 2 * (world - 1) / world * 4 * sum(p.numel() for p in model.parameters())
    return comm.ledger.wire - before, dense, " ".join(row["mode"][0] for row in layers.plan()[::-1])


def bytes_by_choice() -> None:
    print("\nkB that a link carries in a step, by the ledger, all parameters; d(ense), f(actors), r(ank) by layer")
    print(
        f"{'net':13}{'rows':>5}{'workers':>8}{'dense':>10}{'factors':>10}{'AutoDAD':>10}{'over best':>10}"
        f"{'lossy':>10}  ways"
    )
    largest = 0.0
    for net, make in NETS.items():
        for rows in (8, 32):
            for world in (2, 4, 8, 16):
                factors, dense, _ = wire_bytes(make, DAD(unroll=True), world, rows)
                chosen, _, modes = wire_bytes(make, AutoDAD(unroll=True), world, rows)
                lossy, _, _ = wire_bytes(make, AutoDAD(exact=False, unroll=True), world, rows)
                over = chosen / min(dense, factors) - 1
                largest = max(largest, over)
                cells = "".join(f"{x / 1e3:10.1f}" for x in (dense, factors, chosen))
                print(f"{net:13}{rows:5}{world:8}{cells}{over:10.2%}{lossy / 1e3:10.1f}  {modes}")
    print(f"AutoDAD over the best fixed choice: at most {largest:.2%}")


def wide() -> None:
    print("\na wide MLP, 1024-4096-4096-10, 4 workers, 32 rows each")
    for reducer in (DAD(), AutoDAD(), AutoDAD(exact=False)):
        sent, dense, _ = wire_bytes(lambda: mlp(1024, 4096, 4096, 10), reducer, 4, 32)
        print(f"{reducer!r:60} {sent / 1e6:8.2f} MB, dense {dense / 1e6:8.2f} MB: {dense / sent:.1f} times fewer")


def ranks() -> None:
    """How many directions a layer's gradient has as training goes on."""
    inputs, targets = digits()
    print("\nentropy rank and share captured by 8 columns, MLP on the digits, by epoch")
    torch.manual_seed(0)
    model = NETS["mlp"]()
    layers = Layers(model, RankDAD(8, feedback=False), DryComm(1), lane=Inline())
    layers.install(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(6):
        sums: dict[str, float] = {}
        steps = len(targets) // ROWS
        for step in range(steps):
            chosen = slice(step * ROWS, (step + 1) * ROWS)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
            for key, value in layers.metrics().items():
                sums[key] = sums.get(key, 0.0) + value / steps
        told = [
            f"{n}: {sums[f'{n}/entropy_rank']:.2f}, {sums[f'{n}/captured']:.3f}"
            for n in ("0.weight", "2.weight", "4.weight")
        ]
        print(f"epoch {epoch}   " + "   ".join(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    errors()
    bytes_by_choice()
    wide()
    ranks()
