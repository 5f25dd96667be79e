"""What a run can be told to exchange with: a reducer's spelling, or one of the baselines beside them.

`ErrorFeedback(TopK(0.01))` exchanges gradients at every step; `ErrorFeedback(TopK(0.1)) every 10` exchanges what ten
local steps have changed, and `Dense() every 50 outer 0.7 0.9` follows the mean change with DiLoCo's outer step: a
learning rate of 0.7 and a Nesterov momentum of 0.9. `ErrorFeedback(ExDyna(0.01)) every 1 ahead` lets workers go on
ahead of what they have in common.
"""

import copy
import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from thinwire.capture.anchor import Anchored
from thinwire.comm.base import MESSAGES, WIRE, Ledger
from thinwire.ddp import Handle, handle, wrap
from thinwire.lab import LabError
from thinwire.lab.record import Run
from thinwire.local import PLAIN, Outer, local
from thinwire.plan import FRAMING
from thinwire.spelling import parse, spell

# Plain DDP, DDP with its fp16 hook, and DDP that exchanges nothing: the floor of every step time.
_EVERY = re.compile(r"(.*\S)\s+every\s+([1-9]\d*)(\s+ahead)?(?:\s+outer\s+(\S+)\s+(\S+))?")
BASELINES = {"DDP": 4, "DDP-fp16": 2, "no-exchange": 0}  # bytes an entry
_SYNC_BUFFERS = next(  # newer versions of torch have another name for it
    name for name in ("forward_sync_buffers", "broadcast_buffers") if name in inspect.signature(DDP.__init__).parameters
)


class Timed(NamedTuple):
    """A reducer's spelling, and when it exchanges."""

    reducer: str
    every: int = 0  # local steps between exchanges; 0: gradients, at every step
    outer: Outer = PLAIN
    ahead: bool = False

    def __str__(self) -> str:
        if not self.every:
            return self.reducer
        outer = "" if self.outer == PLAIN else f" outer {self.outer.lr:g} {self.outer.momentum:g}"
        return f"{self.reducer} every {self.every}{' ahead' if self.ahead else ''}{outer}"


def canonical(method: str) -> str:
    """The one spelling of a method; an unknown one is refused."""
    if method in BASELINES:
        return method
    try:
        timed = split(method)
        reducer = parse(timed.reducer)
        Anchored(reducer, timed.outer, timed.ahead)  # refuses what cannot go ahead
        return str(timed._replace(reducer=spell(reducer)))
    except (TypeError, ValueError) as error:
        raise LabError(f"{error}; baselines are {', '.join(BASELINES)}") from error


def split(method: str) -> Timed:
    found = _EVERY.fullmatch(method)
    if not found:
        return Timed(method)
    reducer, every, ahead, *numbers = found.groups()
    timed = Timed(reducer, int(every), ahead=ahead is not None)
    if numbers == [None, None]:
        return timed
    try:
        rate, momentum = map(float, numbers)
    except ValueError as error:
        raise ValueError(
            f"an outer step is a learning rate and a momentum, outer 0.7 0.9, not {' '.join(numbers)}"
        ) from error
    return timed._replace(outer=Outer(rate, momentum, nesterov=momentum > 0))


@dataclass
class Wrapped:
    """A model that exchanges: what its last step cost, its method's state, how to judge and how to end it."""

    net: nn.Module
    metrics: Callable[[], dict[str, float]]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
    judged: Callable[[], AbstractContextManager[None]] = nullcontext  # what the workers have in common, in its place
    finish: Callable[[], None] = lambda: None


def wrap_model(model: nn.Module, optimizer: Optimizer, run: Run, world: int) -> Wrapped:
    # The seed made the replicas equal, so nobody needs rank 0's copy; running statistics are averaged by the loop.
    ddp = {"init_sync": False, _SYNC_BUFFERS: False}
    if run.method in BASELINES:
        return _baseline(model, run.method, world, ddp)
    method, every, outer, ahead = split(run.method)
    if every:
        own = local(model, optimizer, parse(method), every, outer=outer, ahead=ahead)
        return Wrapped(model, _Told(own), own.state_dict, own.load_state_dict, own.anchored, own.finish)
    net = wrap(model, parse(method), grain=run.grain, overlap=run.overlap, **ddp)  # type: ignore[arg-type]
    ours = handle(net)
    return Wrapped(net, _Told(ours), ours.state_dict, ours.load_state_dict)


class _Told:
    """A handle's metrics, with all that the ledger has seen since the last ask, and the frames around messages."""

    def __init__(self, told: Handle) -> None:
        self.handle, self.before = told, copy.copy(told.ledger)

    def __call__(self) -> dict[str, float]:
        metrics, now, before = self.handle.metrics(), copy.copy(self.handle.ledger), self.before
        self.before = now
        return metrics | sent_between(before, now)


def sent_between(before: Ledger, now: Ledger) -> dict[str, float]:
    return {
        "payload_bytes": now.payload - before.payload,
        "wire_bytes": now.wire - before.wire + FRAMING * (now.messages - before.messages),
        "collectives": now.collectives - before.collectives,
    }


def _baseline(model: nn.Module, method: str, world: int, ddp: dict[str, Any]) -> Wrapped:
    net = DDP(model, **ddp)
    if method == "DDP-fp16":
        net.register_comm_hook(None, fp16_compress_hook)
    if method == "no-exchange":
        net.register_comm_hook(None, _keep)
    payload = BASELINES[method] * sum(p.numel() for p in model.parameters() if p.requires_grad)
    frames = FRAMING * MESSAGES["all_mean"](world) if payload else 0  # of one bucket; what more there are is little
    cost = {"payload_bytes": payload, "wire_bytes": WIRE["all_mean"](world) * payload + frames}
    return Wrapped(net, lambda: cost, dict, lambda _: None)


def _keep(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations by identity
    done: Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
