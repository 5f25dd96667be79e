"""One exchange of changes after another: from the step in which it leaves to the one in which its result is applied.

Usually both are the same step. With a delay, training goes on in between, beside the exchange (as in Streaming DiLoCo,
Douillard et al., arXiv 2501.18512, recalled; there the two results are blended, here nothing is forgotten: what the
steps in between have changed is added to the result, and is part of the next change).
"""

import time
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.futures import Future

from thinwire import kernels
from thinwire.capture.changes.changes import Changes
from thinwire.core.reducer import MethodWarning
from thinwire.step import agreement
from thinwire.step.agreement import Disagreement
from thinwire.step.groups import Group
from thinwire.step.lanes import Lane
from thinwire.step.step import OPENING, Step

# When buffers are averaged: at every exchange, when all have finished, or never.
Buffers = bool | Literal["finish"]

# What a roll call asks beside a step's own words; and a word for each buffer.
ASKED = ("steps", "finishing", "idle", "edited", "anchor", "optimizer", "change")
ROLL_CALL = 8 * (len(OPENING) + len(ASKED))  # bytes


@dataclass
class Flight:
    """One exchange under way."""

    step: Step | None  # None: it is over, and was read from a checkpoint
    fragment: int = 0
    left_at: int = 0  # the optimizer step in which it left
    left: dict[str, Tensor] = field(default_factory=dict)  # the parameters then, if steps follow before it lands
    buffers: dict[str, Tensor] = field(default_factory=dict)  # the mean of those that have changed
    fine: bool = True  # every worker's change was finite
    latest: int = 0  # the steps of the worker that has taken most
    everyone_finishes: bool = False
    done: Future[Tensor] = field(default_factory=Future)


class Exchanges:
    def __init__(self, changes: Changes, lane: Lane, delay: int, average_buffers: Buffers, average_state: bool):
        self.changes, self.lane, self.delay = changes, lane, delay
        self.average_buffers, self.average_state = average_buffers, average_state
        self.flight: Flight | None = None
        self.skipped = 0  # exchanges whose change was not finite
        self._warned = False

    @torch.no_grad()
    def leave(self, fragment: int, at: int, finishing: bool = False) -> Flight:
        """Send a fragment's change on its way."""
        changes = self.changes
        step = changes.steps.open()
        flight = Flight(step, fragment=fragment, left_at=at)
        groups = changes.groups[changes.fragments[fragment]]
        with step.guarded(), step.timed("capture"):
            changes.check_covered()
            vectors = [changes.read(group) for group in groups]
            moved = {name for name, is_ in changes.changed_buffers().items() if is_} if self.average_buffers else set()
            changed = {name: name in moved for name in changes.buffers} if self.average_buffers is True else {}
            states = changes.optimizer_tensors(fragment) if self.average_state else []
            finite = all(map(kernels.finite, vectors)) and all(bool(t.isfinite().all()) for t in states)
            finite &= all(bool(changes.buffers[name].isfinite().all()) for name in moved)
            idle = finishing and all(map(_unmoved, groups, vectors)) and not any(changed.values())
            mine = {
                "steps": at,
                "finishing": finishing,
                "idle": idle,
                "edited": bool(changes.edited),
                "anchor": changes.mark(fragment),
                "optimizer": sum(t.numel() for t in states),
                "change": 0 if all(map(_unmoved, groups, vectors)) else agreement.checksum(vectors),
            }
            mine |= {f"buffer {name}": is_ for name, is_ in changed.items()}
            buffers = {name: changes.buffers[name].detach() for name in changed}
            if self.delay:
                buffers = {name: b.clone() for name, b in buffers.items()}
                for group, vector in zip(groups, vectors, strict=True):
                    flight.left |= zip(group.layout.names, group.layout.views(vector.clone()), strict=True)

        def work() -> Tensor:
            with step.guarded():
                step.call_roll(finite=finite, parameters=0, ask=mine)
                if states or buffers or finishing:
                    step.settle()  # what follows depends on the answers
                if not (finishing and all(step.answers["idle"])) and step.fine:
                    for group, vector in zip(groups, vectors, strict=True):
                        if not finite:
                            vector.copy_(group.state.departure)  # far away the others hear of it later
                        step.reduce(group, vector, vector)
                self._hear(flight, step)
                if flight.fine and not all(step.answers["idle"]):
                    sent = {name: b for name, b in buffers.items() if any(step.answers[f"buffer {name}"])}
                    flight.buffers = dict(zip(sent, changes.mean(list(sent.values())), strict=True))
                    for state, mean in zip(states, changes.mean(states), strict=True):
                        state.copy_(mean)
                for group in groups if finishing else ():
                    group.state.share = []  # who has finished is where all are, not ahead
            return torch.empty(0)

        flight.done = self.lane.submit(work)
        self.flight = flight
        return flight

    def _hear(self, flight: Flight, step: Step) -> None:
        """Raise on every rank what one of them must not go on with."""
        step.settle()
        told = step.answers
        for key in ("anchor", "optimizer"):
            if len(set(told[key])) > 1:
                raise Disagreement(_lost(key, told[key]))
        if not any(told["finishing"]) and len(set(told["steps"])) > 1:
            raise Disagreement(_lost("steps", told["steps"]))
        if any(told["edited"]):
            raise Disagreement(_edited([rank for rank, edited in enumerate(told["edited"]) if edited]))
        if not step.fine:
            step.take_back()
        if len(told["change"]) > 1 and len(set(told["change"])) == 1 and told["change"][0]:
            self._warn_of_equals()
        flight.fine, flight.everyone_finishes = step.fine, all(told["finishing"])
        flight.latest = max(told["steps"])

    @torch.no_grad()
    def land(self) -> None:
        """Wait for the exchange under way, if there is one, and go on from its result."""
        changes, flight = self.changes, self.wait()
        self.flight = None
        if flight is None:
            return
        groups = changes.groups[changes.fragments[flight.fragment]]
        began = time.perf_counter()
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
        if flight.step is None:
            changes.steps.step += 1
        else:
            flight.step.seconds["apply"] += time.perf_counter() - began
            so_far = changes.steps.last
            flight.step.commit(sum(group.layout.numel for group in groups))
            cost = changes.steps.last
            changes.steps.last = {key: value + so_far.get(key, 0.0) for key, value in cost.items() if key != "step"}

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Give all workers the mean of those buffers in which they differ: all of them must call this."""
        changes = self.changes
        if not changes.buffers:
            return
        step = changes.steps.open()
        with step.guarded():
            marks = {f"buffer {name}": agreement.checksum([buffer]) for name, buffer in changes.buffers.items()}
            step.call_roll(finite=True, parameters=0, ask=marks)
            step.settle()
            apart = [b for name, b in changes.buffers.items() if len(set(step.answers[f"buffer {name}"])) > 1]
            for buffer, mean in zip(apart, changes.mean(apart), strict=True):
                buffer.copy_(mean)
        changes.keep_buffers()
        costs = step.figures(1) | {"density": 0.0}
        changes.steps.last = {key: costs.get(key, 0.0) + value for key, value in changes.steps.last.items()}

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

    def _warn_of_equals(self) -> None:
        if not self._warned:
            warnings.warn(
                "all ranks bring exactly the same change: do they train on the same data, or does a framework's DDP "
                "average their gradients already? Give each rank its own part of the data, and local() the plain model",
                MethodWarning,
                stacklevel=2,
            )
        self._warned = True

    def state_dict(self) -> dict[str, Any] | None:
        flight = self.wait()  # its result belongs to the state, and is applied when its time has come
        if flight is None:
            return None
        kept = {"fragment": flight.fragment, "step": flight.left_at, "fine": flight.fine}
        return kept | {key: {n: t.clone() for n, t in getattr(flight, key).items()} for key in ("left", "buffers")}

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        self.wait()
        self.flight = None
        if saved is not None:
            self.flight = Flight(None, left_at=saved["step"], **{key: saved[key] for key in saved if key != "step"})
            self.flight.done.set_result(torch.empty(0))


def _unmoved(group: Group, vector: Tensor) -> bool:
    return torch.equal(vector, group.state.anchor.to(group.state.dtype))


def _lost(what: str, values: list[int]) -> str:
    common = max(set(values), key=values.count)
    stray = next(rank for rank, value in enumerate(values) if value != common)
    return {
        "steps": f"the ranks have taken different numbers of steps: {dict(enumerate(values))}. A schedule that is a "
        "function must give the same on every rank.",
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
