"""The optimizers of a run, and their learning rates over time."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from thinwire.lab import LabError
from thinwire.lab.records.run import Run
from thinwire.lab.run.muon import Muon


def make_optimizer(model: nn.Module, run: Run) -> Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if run.optimizer == "sgd":
        made: Optimizer = SGD(trained, run.lr, run.momentum, weight_decay=run.weight_decay)
    elif run.optimizer == "adamw":
        made = AdamW(trained, run.lr, (0.9, run.beta2), weight_decay=run.weight_decay)
    else:
        made = MuonAndAdamW(model, run)
    for group in made.param_groups:
        group["initial_lr"] = group["lr"]
    return made


class MuonAndAdamW(Optimizer):
    """Muon for the matrices inside a model, AdamW for all else, as one optimizer with one state.

    Muon makes a matrix's update orthogonal. That suits hidden layers; the first and the last layer, embeddings,
    convolutions and vectors are AdamW's.
    """

    def __init__(self, model: nn.Module, run: Run) -> None:
        inside = inner_matrices(model)
        if not inside:
            raise LabError("muon is for matrices inside a model, and this one has none: take --optimizer adamw")
        mine = {id(p) for p in inside}
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in mine]
        super().__init__(inside + rest, {})
        self.muon = Muon(inside, run.muon_lr, weight_decay=run.weight_decay)
        self.adamw = AdamW(rest, run.lr, (0.9, run.beta2), weight_decay=run.weight_decay)
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]
        self._share()

    def _share(self) -> None:
        """One state and one list of groups for all three, also after others were put in their place."""
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self.muon.state = self.adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.muon.step()
        self.adamw.step()
        return loss


def inner_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights with two dimensions, but for embeddings and those of the first and of the last layer."""
    layers = [m for m in model.modules() if any(p.dim() > 1 for p in m.parameters(recurse=False))]
    outside = [*layers[:1], *layers[-1:], *(m for m in layers if isinstance(m, nn.Embedding))]
    skipped = {id(p) for layer in outside for p in layer.parameters(recurse=False)}
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in skipped]


def set_rate(optimizer: Optimizer, step: int, run: Run) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * rate_at(step, run)


def rate_at(step: int, run: Run) -> float:
    """The learning rate's factor: constant, or up over a twentieth, then a cosine to a tenth or a line to zero."""
    if run.schedule == "constant":
        return 1.0
    warm = max(1, run.steps // 20)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, run.steps - warm)
    return 0.55 + 0.45 * math.cos(math.pi * done) if run.schedule == "cosine" else 1 - done


def clip(model: nn.Module, run: Run) -> None:
    if run.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
