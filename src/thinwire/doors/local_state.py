"""What a worker with local steps goes on from: picked out of saved states, and looked at whole before it is used."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.capture.changes.changes import Changes
from thinwire.doors.optimizers import check_optimizers
from thinwire.step.checkpoints import CheckpointError, check_form
from thinwire.wrappers.anchored import leads

COUNTS = ("steps", "start", "width", "position")
_KEYS = {"counts", "parameters", "buffers", "kept", "flight"}  # of a state's own part


@dataclass
class Chosen:
    optimizers: list[dict[str, Any]]
    counts: dict[str, int]
    values: list[tuple[Tensor, Tensor]]  # where each goes, and what
    flight: dict[str, Any] | None


def choose(given: list[dict[str, Any]], changes: Changes) -> Chosen:
    """This worker's own, or what it starts from after another number of workers; refuses what does not fit."""
    try:
        _check(given, changes)
        return _choose(given, changes)
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, ArithmeticError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint does not fit this model: {error}") from error


def _choose(given: list[dict[str, Any]], changes: Changes) -> Chosen:
    comm = changes.comm
    lost = any(state.get("lost") for state in given)
    if lost:
        given = [_at_departure(state) if "stands_in" in state else state for state in given]
    resized = lost or given[0]["world"] != comm.world
    mine = [state for state in given if resized or state["rank"] == comm.rank] or given
    parts = [state["local"] for state in sorted(mine, key=lambda state: state["rank"])]
    own = parts[comm.rank % len(parts)]
    optimizers = own["optimizers"] if "optimizers" in own else [own.get("optimizer")]  # 0.1 had one
    check_optimizers(changes.optimizers, optimizers, own.get("kinds"))
    values = _pairs(changes.parameters, _mean([_parameters(state, resized) for state in mine]))
    values += _pairs(changes.all_buffers(), _mean([part["buffers"] for part in parts]))
    values += _pairs(changes.kept, _mean([part["kept"] for part in parts]))
    flight = own["flight"]
    if flight is not None:
        flight = flight | {"left": _mean([part["flight"]["left"] for part in parts])}
    return Chosen(optimizers, {key: int(own["counts"][key]) for key in COUNTS}, values, flight)


def _check(given: list[dict[str, Any]], changes: Changes) -> None:
    """Refuse states that are none of local steps, or of another model."""
    names = [list(group.layout.names) for group in changes.groups]
    shapes = {name: p.shape for name, p in [*changes.parameters.items(), *changes.all_buffers().items()]}
    for state in given:
        if not isinstance(state, dict) or "local" not in state:
            raise CheckpointError("this is no state of local steps: handle.state_dict() makes one")
        check_form(state)
        if [group["names"] for group in state["groups"]] != names:
            raise CheckpointError("the checkpoint's parameters are others, or in another order")
        if missing := _KEYS - state["local"].keys():
            raise CheckpointError(f"the checkpoint is not whole: its local steps lack {min(missing)}")
        for name, tensor in [*state["local"]["parameters"].items(), *state["local"]["buffers"].items()]:
            if shapes.get(name) != tensor.shape:
                raise CheckpointError(
                    f"the checkpoint's {name} has shape {tuple(tensor.shape)}, the model's is {shapes.get(name)}"
                )


def copies(tensors: Any) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def _pairs(places: Any, values: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    if lacking := places.keys() - values.keys():
        raise CheckpointError(f"the checkpoint has nothing for {min(lacking)}")
    return [(places[name], value.expand(places[name].shape)) for name, value in values.items()]


def _parameters(state: dict[str, Any], resized: bool) -> dict[str, Tensor]:
    """A worker's parameters; for another number of workers, as if it had left from the anchor, as all of them will."""
    parameters = dict(state["local"]["parameters"])
    if not resized or state["local"]["flight"]:  # what is under way lands from the anchor
        return parameters
    for saved in (group["state"] for group in state["groups"] if group["state"]["share"]):
        unsent = saved["inner"]["residual"]
        for name, by in zip(unsent, leads(saved["share"], saved.get("gain", []), len(unsent)), strict=True):
            parameters[name] = (parameters[name] - by * unsent[name]).to(unsent[name].dtype)
    return parameters


def _at_departure(state: dict[str, Any]) -> dict[str, Any]:
    """For a worker whose state is lost: it has taken no step since the last exchange."""
    local = state["local"]
    if local["flight"] is not None:
        raise CheckpointError(
            "an exchange was under way when this set was saved, so that no rank's file can be done without: take a set "
            "that is whole, or one saved without a delay"
        )
    anchors = {name: anchor for group in state["groups"] for name, anchor in group["state"]["anchor"].items()}
    parameters = {name: anchors[name].to(value.dtype) for name, value in local["parameters"].items()}
    return state | {"local": local | {"parameters": parameters}}


def _mean(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Entry by entry; what is no floating-point number is taken from the first."""
    means = {}
    for name, first in parts[0].items():
        if len(parts) > 1 and first.is_floating_point():
            means[name] = torch.stack([part[name].double() for part in parts]).mean(0).to(first.dtype)
        else:
            means[name] = first
    return means
