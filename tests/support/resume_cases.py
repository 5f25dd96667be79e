"""Workers of tests/integrations/test_torch.py: what needs torch alone."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from framework_cases import BATCHES, LOSSY, STEPS, Heard, batch, flat, launched, loss_of, network, optimizer_for


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    rank, world = launched()
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, *batch(step, rank, world)).backward()
        optimizer.step()


def compiled() -> dict[str, Any]:
    """Before wrap, after it, not at all: parameters, names, and whether the handle is found through it."""
    launched()
    found = {}
    for when in ("never", "before", "after"):
        net = network()
        inner = torch.compile(net, backend="eager") if when == "before" else net
        model: Any = thinwire.wrap(inner, LOSSY)
        outer = torch.compile(model, backend="eager") if when == "after" else model
        assert thinwire.handle(outer) is thinwire.handle(model)
        train(outer, optimizer_for(net), range(STEPS))
        handle = thinwire.handle(outer)
        found[when] = (flat(net), list(handle.capture.parameters), handle.residual_norm())
    attached = thinwire.attach(torch.compile(DDP(network()), backend="eager"), LOSSY)
    found["attached"] = list(attached.capture.parameters)
    return found


def compiled_local_steps() -> tuple[torch.Tensor, torch.Tensor]:
    """Local steps of a compiled model, and the second half of them again with one that is not compiled."""
    launched()
    found: list[torch.Tensor] = []
    halfway: Any = None
    for compiled in (True, False):
        net = nn.Sequential(network(), nn.BatchNorm1d(4))
        optimizer = optimizer_for(net)
        model: Any = torch.compile(net, backend="eager") if compiled else net
        handle = thinwire.local(model, optimizer, "ErrorFeedback(TopK(0.1))", every=1, ahead=True)
        if compiled:
            train(model, optimizer, range(BATCHES))
            halfway = torch.load(_bytes(handle.state_dict()), weights_only=True)
        else:
            handle.load_state_dict(halfway)
        train(model, optimizer, range(BATCHES, STEPS))
        found.append(torch.cat([t.detach().double().flatten() for t in net.state_dict().values()]))
    return found[0], found[1]


class Prepared(torch.optim.Optimizer):
    """As a framework puts one of its own around an optimizer: no hooks, only the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


def company() -> dict[str, Any]:
    """What frameworks do around thinwire: another DDP, a DDP beside local steps, the same data everywhere."""
    launched()
    found: dict[str, Any] = {}
    net, alone = network(), network()
    for case, outer, optimizer in (
        ("DDP around wrap", DDP(thinwire.wrap(net, LOSSY)), optimizer_for(net)),
        ("DDP around local's model", DDP(alone), optimizer_for(alone)),
    ):
        if case == "DDP around local's model":
            thinwire.local(alone, optimizer, LOSSY, every=1)
        try:
            train(outer, optimizer, range(1))
        except (RuntimeError, ValueError) as error:
            found[case] = str(error)
    for case, world in (("the same data", 0), ("its own data", 1)):
        net = network()
        prepared = Prepared(optimizer_for(net))
        handle = thinwire.local(net, prepared, LOSSY, every=1)
        with Heard() as words:
            rank, ranks = launched()
            for step in range(BATCHES):
                prepared.zero_grad()
                loss_of(net, *batch(step, rank * world, ranks)).backward()
                prepared.step()
        found[case] = (words, handle.steps)
    return found


def python_reducer() -> str:
    launched()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        try:
            thinwire.wrap(network(), LOSSY)
        except RuntimeError as error:
            return str(error)
    return ""


def resumes(folder: str) -> dict[str, Any]:
    """Half a run, through torch.distributed.checkpoint to the end; and again with thinwire's state left behind."""
    launched()
    found: dict[str, Any] = {}
    saved: Any = None
    for way in ("straight", "whole", "left behind"):
        net = network()
        model, optimizer = thinwire.wrap(net, LOSSY), optimizer_for(net)
        handle = thinwire.handle(model)
        if way == "straight":
            train(model, optimizer, range(BATCHES))
            dcp.save({"thinwire": handle.gathered()}, checkpoint_id=Path(folder) / "dcp")
            saved = ({n: t.clone() for n, t in net.state_dict().items()}, optimizer.state_dict())
            saved = torch.load(_bytes(saved), weights_only=True)
        else:
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(torch.load(_bytes(saved[1]), weights_only=True))
        if way == "whole":
            dcp.load({"thinwire": handle.gathered()}, checkpoint_id=Path(folder) / "dcp")
        with Heard() as words:
            train(model, optimizer, range(BATCHES, STEPS))
        found[way] = (flat(net), handle.residual_norm(), words)
    return found


def _bytes(thing: Any) -> Any:
    import io

    out = io.BytesIO()
    torch.save(thing, out)
    out.seek(0)
    return out
