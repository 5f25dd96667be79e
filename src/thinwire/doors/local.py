"""Local steps: every worker trains on its own for a while, then the workers exchange what that has changed.

`local(model, optimizer, reducer, every=10)` hooks onto the optimizer, so that the training loop stays as it is. Between
exchanges the replicas differ; right after one they are equal to the bit, in the fragment that was exchanged, unless
they go on `ahead`.
"""

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from thinwire.capture.changes.changes import Changes
from thinwire.capture.changes.exchanges import Buffers, Exchanges
from thinwire.comm import Comm, Ledger
from thinwire.comm.torch import TorchComm
from thinwire.core.reducer import MethodWarning, Reducer
from thinwire.doors.ddp import averages_everything, check_trainable, close_with, warm_kernels, warn_without_memory
from thinwire.doors.handle import Handle
from thinwire.doors.levels import NotInsideDDP, check_levels
from thinwire.doors.local_state import COUNTS, choose, copies
from thinwire.doors.optimizers import optimizer_inside
from thinwire.spelling import recipe_of
from thinwire.step import agreement, checkpoints
from thinwire.step.costs import Costs
from thinwire.step.lanes import Beside, Inline, Lane
from thinwire.wrappers.anchored import Ahead, Anchored, Outer
from thinwire.wrappers.local_steps import Every, LocalSteps, check_takes_changes, interval

PLAIN = Outer()
_NOTHING = Costs(Ledger()).figures(1)  # what a step without an exchange costs
_WHEN: dict[Buffers, str] = {True: "averaged", False: "kept", "finish": "averaged at the end"}
_TAKEN: "WeakSet[Optimizer]" = WeakSet()


def local(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    reducer: Reducer[Any, Any] | LocalSteps | str,
    every: Every | None = None,
    *,
    outer: Outer = PLAIN,
    ahead: Ahead = False,
    fragments: int = 1,
    delay: int = 0,
    average_buffers: Buffers = "finish",
    optimizer_state: Literal["local", "average"] = "local",
    check_edits: bool = True,
    process_group: dist.ProcessGroup | None = None,
    comm: Comm | None = None,
) -> "LocalHandle":
    """Exchange, through `reducer`, what every so many steps of `optimizer` have changed in its parameters.

    optimizer: one, or several that take a step each (Muon for matrices, AdamW for the rest). reducer: a method and
    `every`; or both, and more of what follows, in a `LocalSteps`, or in its spelling.

    every: optimizer steps between exchanges; or a schedule, ((0, 1), (500, 10)): after each of the first 500 steps,
    then after every 10; or a function from the steps taken so far to the steps until the next exchange. outer: how the
    common parameters follow the mean change. ahead: each worker goes on from the common parameters plus its estimate
    of the updates that are not exchanged yet, or plus "all" of its own; for methods in ErrorFeedback. fragments: cut
    the model in as many parts, one exchanged every `every` / `fragments` steps. delay: let that many steps pass beside
    an exchange before its result is applied. average_buffers: floating-point buffers that steps change (BatchNorm's
    statistics) are each worker's own until `finish` averages them; True averages them at each exchange, False never.
    optimizer_state: "local", each worker its own, or "average", averaged densely at each exchange. check_edits: refuse
    parameters that something other than the optimizer has changed. process_group: which workers exchange; by default
    all. comm: the same, for workers that are not processes.

    Call `handle.finish()` after the last step.
    """
    recipe = recipe_of(reducer)
    if isinstance(recipe, LocalSteps):
        if every is not None or (outer, ahead, fragments, delay) != (PLAIN, False, 1, 0):
            raise TypeError(f"{recipe!r} says when and how to exchange: give local() nothing of that beside it")
        reducer, every = recipe.inner, recipe.every
        outer, ahead, fragments, delay = recipe.outer, recipe.ahead, recipe.fragments, recipe.delay
    else:
        reducer = recipe
    if every is None:
        raise TypeError("say how many steps lie between exchanges: local(model, optimizer, method, every=10)")
    check_takes_changes(reducer)
    if delay < 0:
        raise ValueError(f"delay must be a number of steps, 0 or more, not {delay}")
    if average_buffers not in (True, False, "finish"):
        raise ValueError(f"average_buffers must be 'finish', True or False, not {average_buffers!r}")
    if optimizer_state not in ("local", "average"):
        raise ValueError(f"optimizer_state must be 'local' or 'average', not {optimizer_state!r}")
    if delay and optimizer_state == "average":
        raise ValueError("an optimizer's state cannot be averaged with a delay: it holds the steps in between already")
    optimizers = [optimizer_inside(one) for one in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    if any(one in _TAKEN for one in optimizers):
        raise RuntimeError("this optimizer has local steps already: detach() their handle first")
    interval(every, 0)
    anchored = Anchored(reducer, outer, ahead)
    if comm is None:
        check_levels(model, process_group)
        comm = TorchComm.own(process_group or dist.distributed_c10d._get_default_group())
    module = model.module if isinstance(model, DDP) else model
    check_trainable(module)
    changes = Changes(module, optimizers, anchored, comm, fragments)
    description = {
        "method": repr(anchored),
        "steps between exchanges": "a function" if callable(every) else repr(every),
        "fragments": str(fragments),
        "delay": str(delay),
        "buffers": f"{len(changes.buffers)}, {_WHEN[average_buffers]}",
        "optimizer": f"{', '.join(type(one).__name__ for one in optimizers)}, its state {optimizer_state}",
        "model": "; ".join(f"{n} {tuple(p.shape)} {p.dtype}" for n, p in changes.parameters.items()),
        "torch version": torch.__version__.split("+")[0],
    }
    agreement.compare(description, comm, changes.device)
    warn_without_memory(reducer, stacklevel=3)
    if not averages_everything(reducer):
        warm_kernels(comm.rank, changes.device)
    changes.start()
    lane: Lane = Beside(changes.device) if delay else Inline()
    exchanges = Exchanges(changes, lane, delay, average_buffers, optimizer_state == "average")
    handle = LocalHandle(exchanges, every, check_edits)
    close_with(handle, comm)
    return handle


class LocalHandle(Handle):
    """The handle of local steps. `metrics` speaks of the last optimizer step, in which nothing may have been sent."""

    def __init__(self, exchanges: Exchanges, every: Every, check_edits: bool):
        super().__init__(exchanges.changes.steps)
        self.changes, self.exchanges, self.every, self.check_edits = exchanges.changes, exchanges, every, check_edits
        self.steps = 0  # that this worker's optimizer has taken
        self._begin_cycle(0)
        self._stepped: set[Optimizer] = set()  # those that have taken their part of the step under way
        self._hooks = [self.changes.model.register_forward_pre_hook(NotInsideDDP(self.changes.comm.world))]
        for optimizer in self.changes.optimizers:
            self._hooks += [
                optimizer.register_step_pre_hook(lambda *_: self._look()),
                optimizer.register_step_post_hook(lambda optimizer, *_: self._took(optimizer)),
            ]
            _TAKEN.add(optimizer)

    def _begin_cycle(self, start: int) -> None:
        """In a cycle all fragments are exchanged once, at even distances."""
        self.start, self.width, self.position = start, interval(self.every, start), 0

    @property
    def due(self) -> int:
        """The step in which the next fragment is exchanged."""
        return self.start + math.ceil((self.position + 1) * self.width / len(self.changes.fragments))

    def _look(self) -> None:
        if self.check_edits and not self._stepped:  # between two optimizers' parts nobody else has a turn
            self.changes.look()

    def _took(self, optimizer: Optimizer) -> None:
        """An optimizer has taken its part; the step is complete when all have."""
        self._stepped.add(optimizer)
        if len(self._stepped) < len(self.changes.optimizers):
            return
        self._stepped.clear()
        if any(float(getattr(one, "found_inf", 0.0)) for one in self.changes.optimizers):
            return  # a fused optimizer under a GradScaler took no step; others are not even called then
        self._after_step()

    def _after_step(self) -> None:
        self.steps += 1
        self.changes.steps.last = {}
        flight = self.exchanges.flight
        if flight is not None and self.steps - flight.left_at >= self.exchanges.delay:
            self.exchanges.land()
        while self.steps == self.due:
            try:
                self.exchanges.land()
                self._leave()
                if self.exchanges.delay == 0:
                    self.exchanges.land()
            except BaseException:
                self._begin_cycle(self.steps)  # what could not be exchanged goes with the next exchange
                self._tell()
                raise
        self._tell()

    def _leave(self, finishing: bool = False) -> None:
        self.exchanges.leave(self.position, self.steps, finishing)
        self.position += 1
        if self.position == len(self.changes.fragments):
            self._begin_cycle(self.start + self.width)

    def _tell(self) -> None:
        counts = {"step": self.steps, "exchanges": self.changes.steps.step, "skipped": self.exchanges.skipped}
        self.changes.steps.last = _NOTHING | self.changes.steps.last | counts
        self.changes.note()

    def finish(self) -> None:
        """No more steps on this rank for now: exchange what is left, and be equal to all others, to the bit.

        Ranks may have taken different numbers of steps. One that is done takes part in the others' exchanges, without
        a change of its own, until all have called this; then everybody may go on.
        """
        self._look()
        self.exchanges.land()
        self.changes.steps.last = {}
        together = alone = latest = 0
        while together < len(self.changes.fragments):
            self._leave(finishing=True)
            flight = self.exchanges.wait()
            assert flight is not None  # it has just left
            self.exchanges.land()
            together = together + 1 if flight.everyone_finishes else 0
            alone += not flight.everyone_finishes
            latest = flight.latest
        if self.exchanges.average_buffers == "finish":
            self.exchanges.share_buffers()
        self.steps = latest
        self._begin_cycle(latest)
        self._tell()
        if alone > len(self.changes.fragments):
            warnings.warn(
                f"this rank was done {alone} exchanges before the last one, and took part in them without a change "
                "of its own, which makes the mean change smaller: give every rank as many steps",
                MethodWarning,
                stacklevel=2,
            )

    def anchored(self) -> AbstractContextManager[None]:
        """The parameters all workers left from, in the model's place: to judge or save what they have in common."""
        self.exchanges.wait()
        return self.changes.anchored()

    def average_buffers(self) -> None:
        """Give all workers the mean of their buffers (BatchNorm's statistics) now, on every rank: before judging."""
        self.exchanges.land()
        self.exchanges.share_buffers()
        self.changes.note()

    def restart(self) -> None:
        """Leave from the model as it is now, on rank 0: for weights loaded after `local`. Memories begin empty."""
        self.exchanges.load_state_dict(None)
        self.changes.start()
        self._begin_cycle(self.steps)

    def detach(self) -> None:
        """Exchange no more; every worker keeps its parameters. Call `finish` first to leave with equal ones."""
        self.exchanges.land()
        for hook in self._hooks:
            hook.remove()
        self.exchanges.lane.close()
        for optimizer in self.changes.optimizers:
            _TAKEN.discard(optimizer)
        self.changes.comm.close()

    def _steps_taken(self) -> int:
        return self.steps

    def state_dict(self) -> dict[str, Any]:
        """All that is this rank's own between two exchanges: method, anchors, parameters, buffers, optimizer."""
        flight = self.exchanges.state_dict()  # first, as it waits for the method's states to be settled
        return checkpoints.state_dict(self.changes.steps.reducer, self.changes.steps, None) | {
            "local": {
                "counts": {key: getattr(self, key) for key in COUNTS},
                "parameters": copies(self.changes.parameters),
                "buffers": copies(self.changes.all_buffers()),
                "kept": copies(self.changes.kept),
                "kinds": [type(optimizer).__name__ for optimizer in self.changes.optimizers],
                "optimizers": [optimizer.state_dict() for optimizer in self.changes.optimizers],
                "flight": flight,
            }
        }

    @torch.no_grad()
    def load_state_dict(self, states: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Go on from this rank's own state; or, with another number of workers, from those of all ranks there were.

        Everybody then starts from the mean of their parameters, so that the mean of all change is what it was.
        """
        changes = self.changes
        given = states if isinstance(states, list) else [states]
        chosen = choose(given, changes)
        checkpoints.load_state_dict(changes.steps.reducer, changes.steps, None, given)
        # Everything fits: only now is anything of the model's touched.
        for optimizer, state in zip(changes.optimizers, chosen.optimizers, strict=True):
            optimizer.load_state_dict(state)
        for key, count in chosen.counts.items():
            setattr(self, key, count)
        for place, value in chosen.values:
            place.copy_(value)
        self.exchanges.load_state_dict(chosen.flight)
        changes.edited.zero_()
        changes.note()
        self.resumed = True
