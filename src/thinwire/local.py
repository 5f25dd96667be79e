"""Local steps: every worker trains on its own for a while, then the workers exchange what that has changed.

`local(model, optimizer, reducer, every=10)` hooks onto the optimizer, so that the training loop stays as it is. Between
exchanges the replicas differ; right after one they are equal to the bit, in the fragment that was exchanged, unless
they go on `ahead`.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from thinwire import agree, checkpoint
from thinwire.capture.anchor import Anchored, Outer
from thinwire.capture.changes import Changes
from thinwire.capture.costs import Costs
from thinwire.capture.rounds import Rounds
from thinwire.comm import Comm, Ledger
from thinwire.comm.torch import TorchComm
from thinwire.ddp import Handle, averages_everything, own_group, warm_kernels, warn_without_memory
from thinwire.lane import Beside, Inline, Lane
from thinwire.reducer import MethodWarning, Reducer

Every = int | Sequence[tuple[int, int]] | Callable[[int], int]

PLAIN = Outer()
_NOTHING = Costs(Ledger()).told(Ledger(), 1)  # what a step without an exchange costs
_COUNTS = ("steps", "start", "width", "position")
_KEYS = {"counts", "parameters", "buffers", "kept", "optimizer", "flight"}  # of a state's own part
_TAKEN: "WeakSet[Optimizer]" = WeakSet()


def local(
    model: nn.Module,
    optimizer: Optimizer,
    reducer: Reducer[Any, Any],
    every: Every,
    *,
    outer: Outer = PLAIN,
    ahead: bool = False,
    fragments: int = 1,
    delay: int = 0,
    average_buffers: bool = True,
    optimizer_state: Literal["local", "average"] = "local",
    check_edits: bool = True,
    process_group: dist.ProcessGroup | None = None,
    comm: Comm | None = None,
) -> "LocalHandle":
    """Exchange, through `reducer`, what every so many steps of `optimizer` have changed in its parameters.

    every: optimizer steps between exchanges; or a schedule, ((0, 1), (500, 10)): after each of the first 500 steps,
    then after every 10; or a function from the steps taken so far to the steps until the next exchange. outer: how the
    common parameters follow the mean change. ahead: let each worker go on from the common parameters plus the share
    of its own unsent change that it expects all to have, with methods in ErrorFeedback. fragments: cut the model in as
    many parts, one exchanged every `every` / `fragments` steps. delay: let that many steps pass beside an exchange
    before its result is applied. average_buffers: average floating-point buffers that have changed. optimizer_state:
    as each worker has it, or averaged, densely, at each exchange. check_edits: refuse parameters that somebody else
    changed between two steps. process_group: who exchanges; by default everybody. comm: the same, for workers that are
    not processes.

    Call `handle.finish()` after the last step.
    """
    if reducer.wants is not Tensor:
        raise TypeError(
            f"{type(reducer).__name__} needs to see the backward pass, and a change comes from many of them"
        )
    if delay < 0:
        raise ValueError(f"delay must be a number of steps, 0 or more, not {delay}")
    if optimizer_state not in ("local", "average"):
        raise ValueError(f"optimizer_state must be 'local' or 'average', not {optimizer_state!r}")
    if delay and optimizer_state == "average":
        raise ValueError("an optimizer's state cannot be averaged with a delay: it holds the steps in between already")
    if optimizer in _TAKEN:
        raise RuntimeError("this optimizer has local steps already: detach() their handle first")
    interval(every, 0)
    anchored = Anchored(reducer, outer, ahead)
    if comm is None:
        _check_levels(model, process_group)
        comm = TorchComm(own_group(process_group or dist.distributed_c10d._get_default_group()))
    module = model.module if isinstance(model, DDP) else model
    changes = Changes(module, optimizer, anchored, comm, fragments)
    description = {
        "method": repr(anchored),
        "steps between exchanges": "a function" if callable(every) else repr(every),
        "fragments": str(fragments),
        "delay": str(delay),
        "buffers": f"{len(changes.buffers)}, {'averaged' if average_buffers else 'kept'}",
        "optimizer": f"{type(optimizer).__name__}, its state {optimizer_state}",
        "model": "; ".join(f"{n} {tuple(p.shape)} {p.dtype}" for n, p in changes.parameters.items()),
        "torch version": torch.__version__.split("+")[0],
    }
    agree.compare(description, comm, changes.device)
    warn_without_memory(reducer, stacklevel=3)
    if not averages_everything(reducer):
        warm_kernels(comm.rank)
    changes.start()
    lane: Lane = Beside(changes.device) if delay else Inline()
    rounds = Rounds(changes, lane, delay, average_buffers, optimizer_state == "average")
    return LocalHandle(rounds, every, check_edits)


def interval(every: Every, step: int) -> int:
    """How many steps after `step` all of the model has been exchanged."""
    if callable(every):
        width = every(step)
    elif isinstance(every, int):
        width = every
    else:
        starts = [start for start, _ in every]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"a schedule is ((0, steps), (start, steps), ...) with growing starts, not {every!r}")
        width = [steps for start, steps in every if start <= step][-1]
    if width < 1:
        raise ValueError(f"there must be 1 step or more between exchanges, not {width}")
    return width


class LocalHandle(Handle):
    """The handle of local steps. `metrics` speaks of the last optimizer step, in which nothing may have been sent."""

    def __init__(self, rounds: Rounds, every: Every, check_edits: bool):
        super().__init__(rounds.changes)
        self.changes, self.rounds, self.every, self.check_edits = rounds.changes, rounds, every, check_edits
        self.steps = 0  # that this worker's optimizer has taken
        self._begin_cycle(0)
        optimizer = self.changes.optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._look()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
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
        if self.check_edits:
            self.changes.look()

    def _after_step(self) -> None:
        if float(getattr(self.changes.optimizer, "found_inf", 0.0)):
            return  # a fused optimizer under a GradScaler took no step; others are not even called then
        self.steps += 1
        self.changes.last = {}
        flight = self.rounds.flight
        if flight is not None and self.steps - flight.step >= self.rounds.delay:
            self.rounds.land()
        while self.steps == self.due:
            self.rounds.land()
            self._leave()
            if self.rounds.delay == 0:
                self.rounds.land()
        self._tell()

    def _leave(self, finishing: bool = False) -> None:
        self.rounds.leave(self.position, self.steps, finishing)
        self.position += 1
        if self.position == len(self.changes.fragments):
            self._begin_cycle(self.start + self.width)

    def _tell(self) -> None:
        counts = {"step": self.steps, "exchanges": self.changes.step, "skipped": self.rounds.skipped}
        self.changes.last = _NOTHING | self.changes.last | counts
        self.changes.note()

    def finish(self) -> None:
        """No more steps on this rank for now: exchange what is left, and be equal to all others, to the bit.

        Ranks may have taken different numbers of steps. One that is done takes part in the others' exchanges, without
        a change of its own, until all have called this; then everybody may go on.
        """
        self._look()
        self.rounds.land()
        self.changes.last = {}
        together = alone = latest = 0
        while together < len(self.changes.fragments):
            self._leave(finishing=True)
            flight = self.rounds.wait()
            assert flight is not None  # it has just left
            self.rounds.land()
            together = together + 1 if flight.everyone_finishes else 0
            alone += not flight.everyone_finishes
            latest = flight.latest
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
        self.rounds.wait()
        return self.changes.anchored()

    def restart(self) -> None:
        """Leave from the model as it is now, on rank 0: for weights loaded after `local`. Memories begin empty."""
        self.rounds.load_state_dict(None)
        self.changes.start()
        self._begin_cycle(self.steps)

    def detach(self) -> None:
        """Exchange no more; every worker keeps its parameters. Call `finish` first to leave with equal ones."""
        self.rounds.land()
        for hook in self._hooks:
            hook.remove()
        self.rounds.lane.close()
        _TAKEN.discard(self.changes.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """All that is this rank's own between two exchanges: method, anchors, parameters, buffers, optimizer."""
        flight = self.rounds.state_dict()  # first, as it waits for the method's states to be settled
        return checkpoint.state_dict(self.changes.reducer, self.changes, None) | {
            "local": {
                "counts": {key: getattr(self, key) for key in _COUNTS},
                "parameters": _copies(self.changes.parameters),
                "buffers": _copies(dict(self.changes.model.named_buffers())),
                "kept": _copies(self.changes.kept),
                "optimizer": self.changes.optimizer.state_dict(),
                "flight": flight,
            }
        }

    @torch.no_grad()
    def load_state_dict(self, states: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Go on from this rank's own state; or, with another number of workers, from those of all ranks there were.

        Everybody then starts from the mean of their parameters, so that the mean of all change is what it was.
        """
        changes, comm = self.changes, self.changes.comm
        given = states if isinstance(states, list) else [states]
        names = [list(group.layout.names) for group in changes.groups]
        for state in given:
            if not isinstance(state, dict) or "local" not in state:
                raise checkpoint.CheckpointError("this is no state of local steps: handle.state_dict() makes one")
            if [group["names"] for group in state["groups"]] != names:
                raise checkpoint.CheckpointError("the checkpoint's parameters are others, or in another order")
            if missing := _KEYS - state["local"].keys():
                raise checkpoint.CheckpointError(f"the checkpoint is not whole: its local steps lack {min(missing)}")
        mine = [s for s in given if s["rank"] == comm.rank or s["world"] != comm.world] or given
        mine = sorted(mine, key=lambda state: state["rank"])
        parts = [state["local"] for state in mine]
        own = parts[comm.rank % len(parts)]
        before = changes.optimizer.state_dict()
        try:  # torch looks at all of it before it changes anything
            changes.optimizer.load_state_dict(own["optimizer"])
        except (ValueError, KeyError) as error:
            raise checkpoint.CheckpointError(f"the checkpoint's optimizer does not fit this one: {error}") from error
        try:
            checkpoint.load_state_dict(changes.reducer, changes, None, states)
        except checkpoint.CheckpointError:
            changes.optimizer.load_state_dict(before)
            raise
        for key in _COUNTS:
            setattr(self, key, own["counts"][key])
        _fill(changes.parameters, _mean([_parameters(state, comm.world) for state in mine]))
        _fill(dict(changes.model.named_buffers()), _mean([part["buffers"] for part in parts]))
        _fill(changes.kept, own["kept"])
        flight = own["flight"]
        if flight is not None:
            flight = flight | {"left": _mean([part["flight"]["left"] for part in parts])}
        self.rounds.load_state_dict(flight)
        changes.edited.zero_()
        changes.note()


def _copies(tensors: Any) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def _parameters(state: dict[str, Any], world: int) -> dict[str, Tensor]:
    """A worker's parameters; for another number of workers, as if it had left from the anchor, as all of them will."""
    parameters = dict(state["local"]["parameters"])
    if state["world"] == world or state["local"]["flight"]:  # what is under way lands from the anchor
        return parameters
    for saved in (group["state"] for group in state["groups"] if group["state"]["share"]):
        for name, unsent in saved["inner"]["residual"].items():
            parameters[name] = (parameters[name] - saved["share"] * unsent).to(unsent.dtype)
    return parameters


def _fill(places: Any, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        places[name].copy_(value)


def _mean(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Entry by entry; what is no floating-point number is taken from the first."""
    means = {}
    for name, first in parts[0].items():
        if len(parts) > 1 and first.is_floating_point():
            means[name] = torch.stack([part[name].double() for part in parts]).mean(0).to(first.dtype)
        else:
            means[name] = first
    return means


def _check_levels(model: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    if not dist.is_initialized():
        raise RuntimeError("there are no other workers: call torch.distributed.init_process_group() before local()")
    if isinstance(model, DDP) and process_group is None:
        inside = dist.get_world_size(model.process_group)
        if inside == dist.get_world_size() > 1:
            raise ValueError(
                "this DDP module averages over all ranks in every step already: there is nothing left to exchange. "
                "Give local() the plain model; or DDP the ranks of one node, and local() a process_group across nodes"
            )
