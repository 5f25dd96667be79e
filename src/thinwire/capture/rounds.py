"""One exchange of changes after another: from the step in which it leaves to the one in which its result is applied.

Usually both are the same step. With a delay, training goes on in between, beside the exchange (as in Streaming DiLoCo,
Douillard et al., arXiv 2501.18512, recalled; there the two results are blended, here nothing is forgotten: what the
steps in between have changed is added to the result, and is part of the next change).
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from thinwire import kernels
from thinwire.agree import Disagreement
from thinwire.capture.changes import Changes
from thinwire.capture.costs import Costs, opened
from thinwire.capture.groups import Group
from thinwire.lane import Lane
from thinwire.reducer import MethodWarning

_ASKED = ("steps", "exchange", "finishing", "idle", "edited", "finite", "anchor", "optimizer")  # in a roll call
ROLL_CALL = 8 * len(_ASKED)  # bytes, without a word for each buffer


@dataclass
class Flight(Costs):
    """One exchange under way."""

    fragment: int = 0
    step: int = 0  # in which it left
    left: dict[str, Tensor] = field(default_factory=dict)  # the parameters then, if steps follow before it lands
    buffers: dict[str, Tensor] = field(default_factory=dict)  # the mean of those that have changed
    fine: bool = True  # every worker's change was finite
    latest: int = 0  # the steps of the worker that has taken most
    everyone_finishes: bool = False
    idle: bool = False  # all of them have come to finish, with nothing that has changed
    done: Future[Tensor] = field(default_factory=Future)


class Rounds:
    def __init__(self, changes: Changes, lane: Lane, delay: int, average_buffers: bool, average_state: bool):
        self.changes, self.lane, self.delay = changes, lane, delay
        self.average_buffers, self.average_state = average_buffers, average_state
        self.flight: Flight | None = None
        self.skipped = 0  # exchanges whose change was not finite

    @torch.no_grad()
    def leave(self, fragment: int, step: int, finishing: bool = False) -> Flight:
        """Send a fragment's change on its way."""
        changes = self.changes
        flight = Flight(opened(changes.comm.ledger), fragment=fragment, step=step)
        groups = changes.groups[changes.fragments[fragment]]
        with flight.timed("capture"):
            changes.check_covered()
            vectors = [changes.read(group) for group in groups]
            changed = changes.changed_buffers() if self.average_buffers else {}
            states = changes.optimizer_tensors(fragment) if self.average_state else []
            mine = {
                "steps": step,
                "exchange": changes.step,
                "finishing": finishing,
                "idle": finishing and all(map(_unmoved, groups, vectors)) and not any(changed.values()),
                "edited": bool(changes.edited),
                "finite": all(map(kernels.finite, vectors)) and all(bool(t.isfinite().all()) for t in states),
                "anchor": changes.mark(fragment),
                "optimizer": sum(t.numel() for t in states),
            }
            mine["finite"] &= all(bool(changes.buffers[name].isfinite().all()) for name, is_ in changed.items() if is_)
            buffers = {name: changes.buffers[name].detach() for name in changed}
            if self.delay:
                buffers = {name: b.clone() for name, b in buffers.items()}
                for group, vector in zip(groups, vectors, strict=True):
                    flight.left |= zip(group.layout.names, group.layout.views(vector.clone()), strict=True)

        def work() -> Tensor:
            with flight.timed("select"):
                anywhere = self._roll_call(flight, mine, list(changed.values()))
                if flight.fine and not flight.idle:
                    for group, vector in zip(groups, vectors, strict=True):
                        changes.reduce(group, vector)
                    moved = {name: b for (name, b), is_ in zip(buffers.items(), anywhere, strict=True) if is_}
                    flight.buffers = dict(zip(moved, changes.mean(list(moved.values())), strict=True))
                    for state, mean in zip(states, changes.mean(states), strict=True):
                        state.copy_(mean)
                for group in groups if finishing else ():
                    group.state.share = 0.0  # who has finished is where all are, not ahead
            return torch.empty(0)

        flight.done = self.lane.submit(work)
        changes.step += 1
        self.flight = flight
        return flight

    def _roll_call(self, flight: Flight, mine: dict[str, int], changed: list[bool]) -> list[bool]:
        """Raise on every rank what one of them must not go on with; which buffers any of them has changed."""
        answer = [*(mine[key] for key in _ASKED), *changed]
        everyone = self.changes.comm.all_gather(torch.tensor(answer, dtype=torch.int64, device=self.changes.device))
        columns = everyone.T.tolist()
        told = dict(zip(_ASKED, columns))
        for key in ("exchange", "anchor", "optimizer"):
            if len(set(told[key])) > 1:
                raise Disagreement(_lost(key, told[key]))
        if not any(told["finishing"]) and len(set(told["steps"])) > 1:
            raise Disagreement(_lost("steps", told["steps"]))
        if any(told["edited"]):
            raise Disagreement(_edited([rank for rank, edited in enumerate(told["edited"]) if edited]))
        flight.fine, flight.everyone_finishes = all(told["finite"]), all(told["finishing"])
        flight.idle, flight.latest = all(told["idle"]), max(told["steps"])
        return [any(column) for column in columns[len(_ASKED) :]]

    @torch.no_grad()
    def land(self) -> None:
        """Wait for the exchange under way, if there is one, and go on from its result."""
        changes, flight = self.changes, self.wait()
        self.flight = None
        if flight is None:
            return
        groups = changes.groups[changes.fragments[flight.fragment]]
        with flight.timed("apply"):
            if flight.fine:
                for group in groups:
                    for view, name in zip(group.layout.views(group.state.departure), group.layout.names, strict=True):
                        parameter = changes.parameters[name]
                        parameter.copy_(view + (parameter - flight.left[name]) if flight.left else view)
                for name, mean in flight.buffers.items():
                    changes.buffers[name].copy_(mean)
                changes.keep_buffers()
            else:
                self._skip()
        told = flight.told(changes.comm.ledger, sum(group.layout.numel for group in groups))
        changes.last = {key: value + changes.last.get(key, 0.0) for key, value in told.items()}

    def wait(self) -> Flight | None:
        """The exchange under way, once its result is there."""
        if self.flight is not None:
            try:
                self.flight.done.wait()
            except BaseException:
                self.flight = None
                raise
        return self.flight

    def _skip(self) -> None:
        self.skipped += 1
        self.changes.roll_back()
        warnings.warn(
            "what changed since the last exchange is not finite on every rank: all of them go back to the parameters "
            "they left from, and the exchange is skipped",
            MethodWarning,
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any] | None:
        flight = self.wait()  # its result belongs to the state, and is applied when its time has come
        if flight is None:
            return None
        kept = {key: getattr(flight, key) for key in ("fragment", "step", "fine")}
        return kept | {key: {n: t.clone() for n, t in getattr(flight, key).items()} for key in ("left", "buffers")}

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        self.wait()
        self.flight = None
        if saved is not None:
            self.flight = Flight(opened(self.changes.comm.ledger), **saved)
            self.flight.done.set_result(torch.empty(0))


def _unmoved(group: Group, vector: Tensor) -> bool:
    return torch.equal(vector, group.state.anchor.to(group.state.dtype))


def _lost(what: str, values: list[int]) -> str:
    common = max(set(values), key=values.count)
    stray = next(rank for rank, value in enumerate(values) if value != common)
    return {
        "steps": f"the ranks have taken different numbers of steps: {dict(enumerate(values))}. A schedule that is a "
        "function must give the same on every rank.",
        "exchange": f"the ranks are at different exchanges: {dict(enumerate(values))}. Did rank {stray} resume from "
        "another checkpoint?",
        "anchor": f"the ranks left from different parameters: rank {stray} has others than most. Did it resume from "
        "another checkpoint? Load the same one on every rank.",
        "optimizer": f"the optimizer of rank {stray} remembers other tensors than most: a parameter had a gradient on "
        "some ranks only. Use optimizer_state='local'.",
    }[what]


def _edited(ranks: list[int]) -> str:
    return (
        f"somebody other than the optimizer changed parameters between two steps (rank {', '.join(map(str, ranks))}). "
        "If weights were loaded, call handle.restart() on all ranks after it. If edits are meant (clipping, say), give "
        "local() check_edits=False: they count as this worker's change then."
    )
