"""The optimizers beside a model: those that local steps hook onto, and those that came back without thinwire."""

import warnings
from collections.abc import Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.core.reducer import MethodWarning
from thinwire.step import checkpoints

_NEW: "WeakSet[Any]" = WeakSet()  # handles whose model no optimizer has changed yet
_NEW_LOCK = Lock()  # one thread may attach a handle while an optimizer of another takes a step


def check_optimizers(optimizers: Sequence[Optimizer], saved: Sequence[Any], kinds: Sequence[str] | None) -> None:
    """Refuse a state that does not fit, before anything is touched: torch would take AdamW's into Adam in silence."""
    if len(saved) != len(optimizers):
        raise checkpoints.CheckpointError(f"the checkpoint has {len(saved)} optimizers, local() has {len(optimizers)}")
    for number, (optimizer, state) in enumerate(zip(optimizers, saved, strict=True)):
        kind = type(optimizer).__name__
        if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
            raise checkpoints.CheckpointError(f"the checkpoint holds no state for {kind}")
        if not isinstance(state["state"], dict) or not all(isinstance(one, dict) for one in state["state"].values()):
            raise checkpoints.CheckpointError(f"the checkpoint's state for {kind} is damaged: take an earlier one")
        here = optimizer.state_dict()["param_groups"]
        was = kinds[number] if kinds is not None else kind  # 0.1 did not say
        if was != kind:
            raise checkpoints.CheckpointError(f"the checkpoint was made with {was}, this run has {kind}: use the same")
        if [len(g["params"]) for g in state["param_groups"]] != [len(g["params"]) for g in here]:
            raise checkpoints.CheckpointError(f"the checkpoint's optimizer has other parameter groups than this {kind}")
        settings, kept = set(here[0]) - {"initial_lr"}, set(state["param_groups"][0]) - {"initial_lr"}
        if settings != kept:
            odd = ", ".join(sorted(settings ^ kept))
            raise checkpoints.CheckpointError(
                f"the checkpoint was made with another optimizer than {kind} (they differ in {odd}): use the same one"
            )


def optimizer_inside(optimizer: Any) -> Optimizer:
    """The optimizer that takes the steps, in whatever a framework put around it."""
    while not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        if not hasattr(optimizer, "optimizer"):
            raise TypeError(f"local() wants a torch optimizer, or several in a list, not {type(optimizer).__name__}")
        optimizer = optimizer.optimizer
    return optimizer


def warn_if_left_behind(handle: Any) -> None:
    """At the first step of the optimizer that trains a handle's model: has it taken others, which the handle missed?"""
    with _NEW_LOCK:
        _NEW.add(handle)


def _look(optimizer: Optimizer, *_: Any) -> None:
    with _NEW_LOCK:
        new = list(_NEW)
    for handle in new:
        ours = {id(parameter) for parameter in handle.capture.parameters.values()}
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in ours]
        if mine:
            with _NEW_LOCK:
                _NEW.discard(handle)
            if any(_has_stepped(optimizer.state.get(p)) for p in mine):
                left_behind(handle, "The optimizer has taken steps already, thinwire none", stacklevel=5)


def left_behind(handle: Any, what: str, stacklevel: int = 3) -> None:
    """Say, once, what it costs that a run goes on without thinwire's state."""
    if handle.resumed or not handle.remembers():
        return
    handle.resumed = True
    method = getattr(handle, "reducer", handle.capture.reducer)
    entries = sum(parameter.numel() for parameter in handle.capture.parameters.values())
    warnings.warn(
        f"{what}: {method!r} begins with an empty memory. If this run goes on from a checkpoint, the "
        f"gradients that each rank had not sent yet (its residual, up to {entries:,} entries a rank) are lost, and the "
        "resumed run is not the one that was saved: save and load thinwire's state beside the model "
        "(handle.save and handle.load, or your framework's adapter). If compression only begins here, all is well.",
        MethodWarning,
        stacklevel=stacklevel,
    )


def _has_stepped(state: Any) -> bool:
    """Whether a parameter's state is that of an optimizer that has taken steps; some make one before the first."""
    if not state or all(value is None for value in state.values()):
        return False
    return "step" not in state or float(state["step"]) > 0


register_optimizer_step_pre_hook(_look)  # once, as torch forbids to come and go while another thread takes a step
