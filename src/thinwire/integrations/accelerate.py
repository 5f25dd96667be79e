"""Accelerate: `attach(accelerator, method)` before `accelerator.prepare(...)`; `local(accelerator, ...)` after it."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from thinwire.capture.gradients.arrived import Grain
from thinwire.core.factor_reducer import FactorReducer
from thinwire.core.reducer import Reducer
from thinwire.doors.ddp import attach as attach_to_ddp
from thinwire.doors.ddp import averages_everything
from thinwire.doors.handle import Handle
from thinwire.doors.levels import ddp_inside, silence
from thinwire.doors.local import LocalHandle
from thinwire.doors.local import local as local_steps
from thinwire.doors.optimizers import left_behind
from thinwire.integrations import DEFAULT
from thinwire.spelling import reducer_of
from thinwire.wrappers.local_steps import Every, LocalSteps

FOLDER = "thinwire"  # of our state in a checkpoint's folder
_WHOLE = 2**20  # megabytes that no model has: one bucket for all, so that the gradient lies in one vector
_NOT_FOR_DDP = ("comm_hook", "comm_wrapper", "comm_state_option")


@dataclass
class ThinwireKwargs(DistributedDataParallelKwargs):  # type: ignore[misc, unused-ignore]
    """What `Accelerator` makes its DDP models from, with `reducer` as their communication hook.

    Assign it, `accelerator.ddp_handler = ThinwireKwargs(...)`: `kwargs_handlers` takes no subclasses. `attach` does
    that, and sees to checkpoints as well.
    """

    reducer: Any = DEFAULT
    options: dict[str, Any] = field(default_factory=dict)  # of thinwire.attach
    handles: list[Handle] = field(default_factory=list)  # one for each model that was prepared

    def to_dict(self, ignore_keys: tuple[str, ...] = _NOT_FOR_DDP) -> dict[str, Any]:
        """What is DDP's own."""
        own = [f.name for f in fields(DistributedDataParallelKwargs) if f.name not in ignore_keys]
        return {name: getattr(self, name) for name in own}

    def register_comm_hook(self, model: DDP) -> None:
        self.handles.append(attach_to_ddp(model, self.reducer, **self.options))


def attach(
    accelerator: Accelerator,
    reducer: Reducer[Any, Any] | str = DEFAULT,
    *,
    grain: Grain | None = None,
    overlap: bool | None = None,
    check_every: int = 100,
) -> ThinwireKwargs:
    """Put `reducer` in place of the all-reduce of all models that `accelerator` will prepare. Options as for `wrap`.

    From now on `accelerator.save_state` and `load_state` keep thinwire's state too. One process alone has no DDP model,
    and nothing is attached.
    """
    reducer = reducer_of(reducer)
    if isinstance(reducer, FactorReducer):
        raise TypeError(
            f"{type(reducer).__name__} replaces layers before DDP sees them, and Accelerate makes the DDP itself: use "
            "thinwire.wrap(model, ...) in place of accelerator.prepare(model), or a method that takes gradients"
        )
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"this accelerator makes no DDP models but {accelerator.distributed_type} ones: use plain DDP")
    if accelerator._models:
        raise RuntimeError("this accelerator has prepared its model already: call attach before prepare")
    before = accelerator.ddp_handler or DistributedDataParallelKwargs()
    if isinstance(before, ThinwireKwargs):
        raise RuntimeError("this accelerator has a thinwire method already")
    if before.comm_hook != DistributedDataParallelKwargs.comm_hook:
        raise ValueError(f"thinwire is DDP's communication hook: leave out comm_hook={before.comm_hook}")
    given = {f.name: getattr(before, f.name) for f in fields(DistributedDataParallelKwargs)}
    if grain is None and not averages_everything(reducer):
        given["bucket_cap_mb"] = _WHOLE
    options = {"grain": grain, "overlap": overlap, "check_every": check_every, "scaler": accelerator.scaler}
    made = ThinwireKwargs(**given, reducer=reducer, options=options)
    accelerator.ddp_handler = made
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: save(made.handles, folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: load(made.handles, folder))
    return made


def local(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    reducer: Reducer[Any, Any] | LocalSteps | str,
    every: Every | None = None,
    **options: Any,
) -> LocalHandle:
    """`thinwire.local` for a model and an optimizer that `accelerator.prepare` gave back, which exchange nothing else.

    `accelerator.save_state` and `load_state` keep every rank's own parameters, optimizer and residual from now on. Call
    `finish()` on what this returns after the last step.
    """
    ddp = ddp_inside(model)
    plain = accelerator.unwrap_model(model) if ddp is None else silence(ddp)
    handle = local_steps(plain, optimizer, reducer, every, **options)
    accelerator.register_for_checkpointing(handle.gathered())  # loaded last, after rank 0's model and optimizer
    return handle


def save(handles: list[Handle], folder: Any) -> None:
    for number, handle in enumerate(handles):
        handle.save(_place(folder, number), keep=1)


def load(handles: list[Handle], folder: Any) -> None:
    """Go on from what `save` left in a checkpoint's folder; or say what it costs that there is nothing."""
    for number, handle in enumerate(handles):
        place = _place(folder, number)
        here = torch.tensor([place.is_dir()], device=handle.capture.device)
        if bool(handle.capture.comm.all_gather(here).any()):  # together, as disks may differ
            handle.load(place)
        else:
            left_behind(handle, f"The checkpoint {folder} has no state of thinwire's")


def _place(folder: Any, number: int) -> Path:
    return Path(folder) / (f"{FOLDER}-{number}" if number else FOLDER)
