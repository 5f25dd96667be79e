"""What the worker processes of test_dad.py run."""

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from dad_worker import VOCABULARY, Recurrent, Tied

MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 5)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.Flatten(), nn.Linear(24, 5)
    ),
    "gru": lambda: Recurrent(nn.GRU(6, 8, batch_first=True), 8),
    "transformer": lambda: Tied(),
}
SHAPES = {"mlp": (12,), "cnn": (1, 7, 7), "gru": (5, 6)}


def data(name: str, step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    if name == "transformer":
        tokens = torch.randint(VOCABULARY, (rows, 7), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    return torch.randn(rows, *SHAPES[name], generator=generator), torch.randint(3, (rows,), generator=generator)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out.flatten(0, -2), batch[1].flatten())


def fresh(name: str) -> nn.Module:
    torch.manual_seed(5 + dist.get_rank())  # rank 0's weights must reach everybody
    return MODELS[name]()


def train(model: nn.Module, name: str, steps: int, rows: int, clip: float | None, micro: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            model.require_backward_grad_sync = part == micro - 1
            loss = loss_of(model, data(name, step * micro + part, rows))
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def against_ddp(method: str, rows: list[int], clip: float | None = None, micro: int = 1) -> dict[str, Any]:
    """How far parameters lie apart after twenty steps with plain DDP and with a method, by model."""
    found = {}
    for name in MODELS:
        start = fresh(name)
        plain = DDP(copy.deepcopy(start))
        ours = thinwire.wrap(start, thinwire.parse(method))
        mine = rows[dist.get_rank()]
        expected = train(plain, name, 20, mine, clip, micro)
        losses = train(ours, name, 20, mine, clip, micro)
        pairs = zip(plain.parameters(), ours.parameters(), strict=True)
        apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
        weights = torch.cat([p.detach().flatten() for p in ours.parameters()])
        found[name] = {
            "apart": apart,
            "losses": max(abs(a - b) for a, b in zip(expected, losses, strict=True)),
            "weights": weights,
            "plan": thinwire.handle(ours).plan(),
            "metrics": thinwire.handle(ours).metrics(),
            "sent": thinwire.handle(ours).ledger.payload,
        }
    return found


def scaled(method: str) -> dict[str, Any]:
    """A GradScaler skips a step that overflows on one rank, on both; the others are as with plain DDP."""
    found = {}
    start = fresh("mlp")
    for kind in ("plain", "ours"):
        model: Any = DDP(copy.deepcopy(start)) if kind == "plain" else thinwire.wrap(start, thinwire.parse(method))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            inputs, targets = data("mlp", step)
            if step == 2 and dist.get_rank() == 1:
                inputs[0, 0] = torch.inf
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(inputs).float(), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        found[kind] = (scales, torch.cat([p.detach().flatten() for p in model.parameters()]))
    return found


def diverged() -> str:
    """A factored weight that changes on one rank alone is noticed."""
    model = thinwire.wrap(fresh("mlp"), thinwire.DAD(inputs="sent"), check_every=1)
    try:
        for step in range(4):
            loss_of(model, data("mlp", step)).backward()
            if step == 2 and dist.get_rank() == 1:
                with torch.no_grad():
                    model.module[0].weight[0, 0] += 1e-6
    except thinwire.Disagreement as error:
        return str(error)
    return "nothing"


def unused() -> dict[str, Any]:
    """A branch that one rank leaves out, with DDP looking for unused parameters."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            x = self.stem(x)
            return self.left(x) + (self.right(x) if both else 0)

    torch.manual_seed(0)
    start = Two()
    found = {}
    for kind in ("plain", "ours"):
        options: Any = {"find_unused_parameters": True}
        model: Any = (
            DDP(copy.deepcopy(start), **options)
            if kind == "plain"
            else thinwire.wrap(copy.deepcopy(start), thinwire.DAD(inputs="sent"), **options)
        )
        for step in range(3):
            model.zero_grad()
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step + dist.get_rank()))
            model(x, dist.get_rank() == 0).square().sum().backward()
        found[kind] = {n: p.grad.clone() for n, p in model.module.named_parameters()}
    return found


def saved(method: str, folder: str) -> tuple[Tensor, Tensor]:
    """Weights after a run in one piece, and after one that was stopped, saved and loaded."""

    def steps(model: Any, first: int, last: int) -> None:
        for step in range(first, last):
            model.zero_grad()
            loss_of(model, data("mlp", step, 24)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad

    flat = lambda model: torch.cat([p.detach().flatten() for p in model.parameters()])
    whole = thinwire.wrap(fresh("mlp"), thinwire.parse(method))
    steps(whole, 0, 6)
    first = thinwire.wrap(fresh("mlp"), thinwire.parse(method))
    steps(first, 0, 3)
    thinwire.handle(first).save(folder)
    second = thinwire.wrap(copy.deepcopy(first.module), thinwire.parse(method))
    thinwire.handle(second).load(folder)
    steps(second, 3, 6)
    return flat(whole), flat(second)


def others_than_factors() -> dict[str, Any]:
    """What goes by another method than the factors, and what the metrics make of the two."""
    model = thinwire.wrap(fresh("cnn"), "RankDAD(1, rest=ErrorFeedback(TopK(0.2)))")
    for step in range(4):
        loss_of(model, data("cnn", step)).backward()
    handle = thinwire.handle(model)
    told = handle.metrics()
    kept = [group.state.residual for group in handle.layers.exchange.groups]
    beside = [group.state.residual for group in handle.capture.groups]
    try:
        model.join()
        joined = "it may"
    except RuntimeError as error:
        joined = str(error)
    return {
        "rest": repr(handle.capture.reducer),
        "density": told["density"],
        "residual": (told["residual_norm"], float(torch.cat([*kept, *beside]).norm())),
        "joined": joined,
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "gradients": torch.cat([p.grad.flatten() for p in model.parameters()]),
    }


class Unknown(nn.Linear):
    """A layer that does more than its kind."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def warned() -> dict[str, list[str]]:
    """What is said when most of a model has no factors, when raw data are sent, and when they are kept."""
    found = {}
    for name, method in {"unknown": "RankDAD(2)", "sent": "DAD()", "kept": "DAD(inputs='kept')"}.items():
        torch.manual_seed(0)
        layers = [Unknown(12, 32), nn.Linear(32, 5)] if name == "unknown" else [nn.Linear(12, 32), nn.Linear(32, 5)]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", thinwire.MethodWarning)
            model = thinwire.wrap(nn.Sequential(*layers), method)
            for step in range(2):
                loss_of(model, data("mlp", step)).backward()
        found[name] = [str(w.message) for w in seen if w.category is thinwire.MethodWarning]
        found[f"{name} modes"] = [f"{row['layer']} {row['mode']}" for row in thinwire.handle(model).plan()]
    model = thinwire.wrap(nn.Linear(12, 5), "ErrorFeedback(TopK(0.1))")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", thinwire.MethodWarning)
        loss_of(model, data("mlp", 0)).backward()
        for _ in range(5):
            model.eval()(data("mlp", 1)[0])  # with gradients on, and nobody asks for them
    found["looked at"] = [str(w.message) for w in seen]
    try:
        thinwire.wrap(nn.Sequential(nn.ReLU()), thinwire.Dense())
    except ValueError as error:
        found["nothing"] = [str(error)]
    return found


def everything(folder: str) -> dict[str, Any]:
    warnings.simplefilter("error", thinwire.MethodWarning)
    warnings.filterwarnings("ignore", ".* does not know GRU as layers, unless unroll=True")
    return {
        "equal": against_ddp("DAD(unroll=True, inputs='sent')", [4, 4]),
        "clipped, accumulated": against_ddp("AutoDAD(unroll=True, inputs='sent')", [4, 4], clip=0.5, micro=2),
        "unequal": against_ddp("DAD(inputs='sent')", [2, 5]),
        "scaled": scaled("DAD(inputs='sent')"),
        "scaled thin": scaled("RankDAD(8)"),
        "diverged": diverged(),
        "unused": unused(),
        "others": others_than_factors(),
        "warned": warned(),
        "saved": saved("RankDAD(2)", folder),
    }
