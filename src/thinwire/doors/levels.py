"""What lies around a model: a DDP in a framework's wrappers, which local steps must not meet on the same level."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

_NOTHING_LEFT = (
    "a DDP module averages over all ranks in every step already: there is nothing left to exchange. Train the plain "
    "model with local(); or give DDP the ranks of one node, and local() a process_group across nodes"
)


class NotInsideDDP:
    """A forward hook that refuses a DDP around the model which averages over everybody in every step."""

    def __init__(self, world: int = 0):
        self.world = world

    def __call__(self, module: Any, arguments: Any) -> None:
        ddp = DDP._active_ddp_module
        if ddp is not None and self.world > 1 and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            inside = dist.get_world_size(ddp.process_group)
            if inside == dist.get_world_size() == self.world:
                raise ValueError(_NOTHING_LEFT)

    def __reduce__(self) -> Any:
        return NotInsideDDP, ()


def check_levels(model: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    if not dist.is_initialized():
        raise RuntimeError("there are no other workers: call torch.distributed.init_process_group() before local()")
    if isinstance(model, DDP) and process_group is None and model.require_backward_grad_sync:
        inside = dist.get_world_size(model.process_group)
        if inside == dist.get_world_size() > 1:
            raise ValueError(_NOTHING_LEFT)


def ddp_inside(module: Any) -> DDP | None:
    """The DDP module in what torch.compile or a framework put around it."""
    while not isinstance(module, DDP):
        around = (getattr(module, name, None) for name in ("_orig_mod", "_forward_module", "module"))
        module = next((inside for inside in around if isinstance(inside, nn.Module)), None)
        if module is None:
            return None
    return module


def silence(ddp: DDP) -> DDP:
    """Let a DDP that a framework insists on average nothing, neither gradients nor buffers: local steps will."""
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
    return ddp
