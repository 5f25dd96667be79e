"""What a run can be told to exchange with: a reducer's spelling, or one of the baselines beside them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from thinwire.comm.base import WIRE
from thinwire.ddp import handle, wrap
from thinwire.lab import LabError
from thinwire.spelling import parse, spell

# Plain DDP, DDP with its fp16 hook, and DDP that exchanges nothing: the floor of every step time.
BASELINES = {"DDP": 4, "DDP-fp16": 2, "no-exchange": 0}  # bytes an entry
_SYNC_BUFFERS = next(  # newer versions of torch have another name for it
    name for name in ("forward_sync_buffers", "broadcast_buffers") if name in inspect.signature(DDP.__init__).parameters
)


def canonical(method: str) -> str:
    """The one spelling of a method; an unknown one is refused."""
    if method in BASELINES:
        return method
    try:
        return spell(parse(method))
    except ValueError as error:
        raise LabError(f"{error}; baselines are {', '.join(BASELINES)}") from error


@dataclass
class Wrapped:
    """A model under DDP, what its last step cost, and its method's state."""

    net: DDP
    metrics: Callable[[], dict[str, float]]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


def wrap_model(model: nn.Module, method: str, world: int, grain: str | None, overlap: bool | None) -> Wrapped:
    # The seed made the replicas equal, so nobody needs rank 0's copy; running statistics are averaged by the loop.
    ddp = {"init_sync": False, _SYNC_BUFFERS: False}
    if method in BASELINES:
        return _baseline(model, method, world, ddp)
    net = wrap(model, parse(method), grain=grain, overlap=overlap, **ddp)  # type: ignore[arg-type]
    ours = handle(net)
    return Wrapped(net, ours.metrics, ours.state_dict, ours.load_state_dict)


def _baseline(model: nn.Module, method: str, world: int, ddp: dict[str, Any]) -> Wrapped:
    net = DDP(model, **ddp)
    if method == "DDP-fp16":
        net.register_comm_hook(None, fp16_compress_hook)
    if method == "no-exchange":
        net.register_comm_hook(None, _keep)
    payload = BASELINES[method] * sum(p.numel() for p in model.parameters() if p.requires_grad)
    cost = {"payload_bytes": payload, "wire_bytes": WIRE["all_mean"](world) * payload}
    return Wrapped(net, lambda: cost, dict, lambda _: None)


def _keep(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations by identity
    done: Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
