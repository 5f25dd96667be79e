"""A model that exchanges, by whatever a run was told to exchange with."""

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.comm.ledger import Ledger
from thinwire.comm.table import MESSAGES, WIRE
from thinwire.doors.ddp import Handle, handle, wrap
from thinwire.doors.local import LocalHandle, local
from thinwire.lab.records.record import Run
from thinwire.lab.records.spellings import DDP, method_of
from thinwire.plan import FRAMING
from thinwire.wrappers.local_steps import LocalSteps

DENSE_STEPS = 2  # of torch's PowerSGD hook, which needs as many before it may begin
_SYNC_BUFFERS = next(  # newer versions of torch have another name for it
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


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
    method = method_of(run.method)
    if isinstance(method, DDP):
        return _baseline(model, method, world, ddp)
    if isinstance(method, LocalSteps):
        own = take_local_steps(model, optimizer, method)
        return Wrapped(model, _Told(own), own.state_dict, own.load_state_dict, own.anchored, own.finish)
    net = wrap(model, method, grain=run.grain, overlap=run.overlap, when_far="keep", **ddp)  # type: ignore[arg-type]
    ours = handle(net)
    return Wrapped(net, _Told(ours), ours.state_dict, ours.load_state_dict)


def take_local_steps(model: nn.Module, optimizer: Optimizer, steps: LocalSteps, **more: Any) -> LocalHandle:
    how: Any = {"outer": steps.outer, "ahead": steps.ahead, "fragments": steps.fragments, "delay": steps.delay}
    return local(model, optimizer, steps.inner, steps.every, **how, **more)


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
        "trips": now.trips - before.trips,
    }


def _baseline(model: nn.Module, method: DDP, world: int, ddp: dict[str, Any]) -> Wrapped:
    if method.hook == "powersgd":
        # In one bucket: with several its exchanges meet in any order on gloo, and hang.
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        net = DistributedDataParallel(model, **ddp, bucket_cap_mb=size / 2**20 + 1)
        state = PowerSGDState(None, matrix_approximation_rank=method.rank, start_powerSGD_iter=DENSE_STEPS)
        net.register_comm_hook(state, powerSGD_hook)
    else:
        net = DistributedDataParallel(model, **ddp)
        if method.hook != "plain":
            net.register_comm_hook(None, _HOOKS[method.hook])
    return Wrapped(net, _BaselineCost(model, method, world), dict, lambda _: None)


class _BaselineCost:
    """What torch's own exchange put on the wire in the step that is asked about, as they are asked about in turn."""

    def __init__(self, model: nn.Module, method: DDP, world: int) -> None:
        self.method, self.world, self.steps = method, world, 0
        self.shapes = [p.shape for p in model.parameters() if p.requires_grad]

    def __call__(self) -> dict[str, float]:
        self.steps += 1
        entries, messages = sum(shape.numel() for shape in self.shapes), 1
        if self.method.hook == "powersgd" and self.steps > DENSE_STEPS:
            entries, messages = sum(_factored(shape, self.method.rank) for shape in self.shapes), 3
        payload = {"plain": 4, "fp16": 2, "bf16": 2, "powersgd": 4, "none": 0}[self.method.hook] * entries
        frames = FRAMING * messages * MESSAGES["all_mean"](self.world) if payload else 0  # of one bucket, about
        return {"payload_bytes": payload, "wire_bytes": WIRE["all_mean"](self.world) * payload + frames}


def _factored(shape: torch.Size, rank: int) -> int:
    """Entries that torch's PowerSGD hook sends for a tensor: two factors, where they are half as many or fewer."""
    if len(shape) < 2:
        return shape.numel()
    rows, columns = shape[0], shape.numel() // shape[0]
    rank = min(rank, rows, columns)
    return rank * (rows + columns) if 2 * rank * (rows + columns) < rows * columns else shape.numel()


def _keep(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations by identity
    done: Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _bf16(_, bucket):  # type: ignore[no-untyped-def]  # by its own name torch takes the hook on GPUs only
    return bf16_compress_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


_HOOKS = {"fp16": fp16_compress_hook, "bf16": _bf16, "none": _keep}
