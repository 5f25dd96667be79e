"""The form of one rank's state: by parameter name, for as many workers as there are next time.

A state is this rank's own. Loading another rank's is refused, since every rank would then send the same residual. Going
to another number of workers takes the files of all ranks: sums (residuals) are conserved as sums, what all ranks hold
alike is kept, and what makes no sense for another number of workers starts anew.
"""

from collections.abc import Sequence
from typing import Any

from thinwire import spelling
from thinwire.core import memory
from thinwire.core.reducer import Reducer
from thinwire.step.groups import Group, layout_of
from thinwire.step.step import Steps

FORMAT = 1
_KEYS = {"format", "method", "grain", "rank", "world", "step", "scale", "groups", "layers"}


class CheckpointError(ValueError):
    """A checkpoint cannot be used here; the message says why and what to do. Nothing was changed."""


def state_dict(reducer: Reducer[Any, Any], steps: Steps, layers: Any) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "method": repr(reducer),
        "grain": steps.grain,
        "rank": steps.comm.rank,
        "world": steps.comm.world,
        "step": steps.step,
        "scale": steps.scale,
        "groups": [
            {"names": list(group.layout.names), "state": memory.save(state, group.layout)}
            for group, state in zip(steps.groups, steps.states(), strict=True)
        ],
        "layers": None if layers is None else layers.state_dict(),
    }


def load_state_dict(
    reducer: Reducer[Any, Any],
    steps: Steps,
    layers: Any,
    states: dict[str, Any] | list[dict[str, Any]],
) -> None:
    rank, world = steps.comm.rank, steps.comm.world
    given = states if isinstance(states, list) else [states]
    if not given:
        raise CheckpointError("there is no state in this list: give the states of all ranks")
    for state in given:
        _check(state, reducer, steps)
    steps_told = sorted({state["step"] for state in given})
    if len(steps_told) > 1 or len({state["world"] for state in given}) > 1:
        raise CheckpointError(
            f"these states are of different runs or steps (steps {', '.join(map(str, steps_told))}): they must be one "
            "set, which all ranks saved after the same step"
        )
    of = given[0]["world"]
    if of == world and not any(state.get("lost") for state in given):
        mine = [state for state in given if state["rank"] == rank]
        if not mine:
            raise CheckpointError(
                f"this is the state of rank {given[0]['rank']}, this is rank {rank}: every rank saves and loads its own"
            )
        chosen = mine[:1]
    else:
        if sorted(state["rank"] for state in given) != list(range(of)):
            raise CheckpointError(
                f"the run had {of} workers and this one has {world}: give load_state_dict the states of all {of} "
                "ranks, as a list, or use handle.save(folder) and handle.load(folder), which see to it"
            )
        chosen = sorted(given, key=lambda s: s["rank"])
    try:
        groups = [_group(position, chosen, steps) for position in range(len(given[0]["groups"]))]
        covered = {name for group in groups for name in group.layout.names}
        if lacking := [name for name in steps.parameters if name not in covered] if groups else []:
            raise CheckpointError(
                f"the checkpoint has nothing for {lacking[0]} ({len(lacking)} parameters): was it frozen when the "
                "checkpoint was made? Freeze it again, or start without the checkpoint's method state"
            )
        if layers is not None:
            layers.load_state_dict([state["layers"] for state in chosen])  # looks at everything first, too
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the checkpoint does not fit this model and method: {error}") from error
    # Only now, when nothing can fail any more.
    steps.groups[:] = groups
    steps.step, steps.scale = chosen[0]["step"], chosen[0]["scale"]


def _group(position: int, chosen: list[dict[str, Any]], steps: Steps) -> Group:
    rank, world = steps.comm.rank, steps.comm.world
    layout = layout_of(chosen[0]["groups"][position]["names"], steps.parameters)
    state = steps.reducer.init(layout)
    parts = [one["groups"][position]["state"] for one in chosen]
    same = chosen[0]["world"] == world and not any(one.get("lost") for one in chosen)
    memory.load(state, parts[0] if same else memory.new_world(parts, state, rank, world), layout, same_world=same)
    return Group(layout, state)


def with_stand_ins(
    states: list[dict[str, Any]], lost: Sequence[int], steps: Steps, layers: Any
) -> list[dict[str, Any]]:
    """All ranks' states, where those of `lost` ranks are not to be had: these have nothing to send.

    What holds for one number of workers alone, and may name the lost, starts anew on every rank.
    """
    if not lost:
        return states
    for state in states:
        check_form(state)
    like = states[0]
    try:
        made = [
            {"names": one["names"], "state": memory.nothing_unsent(one["state"], _fresh(one["names"], steps))}
            for one in like["groups"]
        ]
        factors = like["layers"]
        if layers is not None:
            fresh = [layers.reducer.init(group.layout) for group in layers.exchange.groups]
            parts = zip(factors["groups"], fresh, strict=True)
            factors = factors | {"groups": [p | {"state": memory.nothing_unsent(p["state"], f)} for p, f in parts]}
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint does not fit this model and method: {error}") from error
    stand_in = like | {"groups": made, "layers": factors, "stands_in": True}
    everyone = states + [stand_in | {"rank": rank} for rank in lost]
    anew = [state | {"lost": True} for state in sorted(everyone, key=lambda state: state["rank"])]
    if layers is not None:
        anew = [state | {"layers": state["layers"] | {"world": None}} for state in anew]
    return anew


def _fresh(names: list[str], steps: Steps) -> Any:
    return steps.reducer.init(layout_of(names, steps.parameters))


def check_form(state: Any) -> None:
    """Refuse what `state_dict` has not made."""
    if not isinstance(state, dict) or not state.keys() >= _KEYS:
        raise CheckpointError(
            "this is not a state that handle.state_dict() made, or only a part of one: take an earlier checkpoint"
        )
    if state["format"] != FORMAT:
        raise CheckpointError(f"the checkpoint has format {state['format']}, this version of thinwire reads {FORMAT}")
    numbers = all(isinstance(state[key], int) for key in ("rank", "world", "step"))
    groups = state["groups"]
    if (
        not numbers
        or not isinstance(state["scale"], (int, float))
        or not isinstance(groups, list)
        or not all(isinstance(group, dict) and {"names", "state"} <= group.keys() for group in groups)
    ):
        raise CheckpointError("this state is damaged: take an earlier checkpoint")


def _check(state: Any, reducer: Reducer[Any, Any], steps: Steps) -> None:
    check_form(state)
    for what, here in (("method", repr(reducer)), ("grain", steps.grain)):
        if not spelling.same(str(state[what]), str(here)):
            raise CheckpointError(
                f"the checkpoint was made with {what} {state[what]}, this run has {here}: use the same, or start "
                "without the checkpoint's method state (residuals not sent yet are lost then)"
            )
