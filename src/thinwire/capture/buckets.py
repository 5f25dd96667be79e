"""What a worker knows: the gradients, as DDP's reducer hands them out, bucket by bucket.

DDP averages nothing once a hook is registered: the reducer does. A step runs through the hook once a bucket, in
the same order on every rank; the groups (see `groups`) are reduced in order, as soon as they are complete when
a lane beside the backward pass takes them, else all after the last bucket.
"""

import copy
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from thinwire import agree, kernels, memory
from thinwire.capture.costs import Costs, opened
from thinwire.capture.groups import Arrived, Grain, Group, make_groups
from thinwire.comm.base import Comm
from thinwire.comm.cast import CastComm
from thinwire.lane import Inline, Lane
from thinwire.reducer import MethodWarning, Moments, Reducer


class Watch(Protocol):
    """Second moments of the gradients, as `capture.moments` keeps them."""

    def side_by_side(self, names: tuple[str, ...]) -> Tensor: ...
    def clear(self) -> None: ...
    def metrics(self) -> dict[str, float]: ...
    def detach(self) -> None: ...


@dataclass
class Step(Costs):
    """One exchange under way."""

    arrived: list[Arrived] = field(default_factory=list)
    futures: list[Future[Tensor]] = field(default_factory=list)
    started: int = 0  # groups handed to the lane
    finished: set[str] = field(default_factory=set)  # parameters whose gradient is final
    undo: list[tuple[Group, Any]] = field(default_factory=list)  # states as they were before this step
    bad: bool = False  # a group was not finite on some rank

    def resolve(self, names: tuple[str, ...]) -> None:
        """Tell DDP of the buckets that are final now that these parameters are."""
        self.finished.update(names)
        for bucket, future in zip(self.arrived, self.futures):
            if not future.done() and self.finished.issuperset(bucket.names):
                future.set_result(bucket.buffer)


class Buckets:
    """The comm hook of one DDP module, with the groups and states behind it."""

    def __init__(
        self,
        ddp: DDP,
        reducer: Reducer[Any, Any],
        comm: Comm,
        *,
        grain: Grain,
        lane: Lane,
        watch: Watch | None = None,
        check_every: int = 100,
        scaler: Any = None,
    ):
        # Weak, because DDP keeps the hook, and so all that is here, where the garbage collector cannot see it.
        self._ddp = weakref.ref(ddp)
        self.reducer, self.comm, self.grain, self.lane = reducer, comm, grain, lane
        self.watch, self.check_every, self.scaler = watch, check_every, scaler
        self.parameters = {
            name: parameter
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ddp.parameters_to_ignore
        }
        self.names = {p: n for n, p in self.parameters.items()}
        self.numel = sum(p.numel() for p in self.parameters.values())
        self.device = next(iter(self.parameters.values())).device
        self.active = True

        self.step = 0  # exchanges so far; saved, so that a resumed run goes on counting
        self.scale = 1.0  # the loss scale in which the states' gradients are
        self.groups: list[Group] = []  # empty until the layout has settled
        self.last: dict[str, float] = {}  # what the last step cost

        self._seen = 0  # exchanges in this process
        self._now: Step | None = None
        self._base: dict[str, Tensor] = {}  # gradients exchanged already, to which the next ones are added
        self._base_hooks: list[RemovableHandle] = []
        self._exchanged = False  # since the last forward pass
        self._silent = 0  # forward passes since the last exchange

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations by identity
            return self._hook(bucket)

        ddp.register_comm_hook(None, hook)
        self._forward_hook = ddp.register_forward_pre_hook(lambda module, args: self._before_forward())

    @property
    def ddp(self) -> DDP:
        ddp = self._ddp()
        assert ddp is not None  # whoever asks holds it
        return ddp

    @property
    def settles_at(self) -> int:
        """The first step of this process whose buckets are those of all later ones.

        DDP rebuilds them in order of arrival after the first step, after the second with a static graph, and never
        while it looks for unused parameters. Until then steps are dense, which loses nothing.
        """
        if self.ddp.static_graph:
            return 2
        return 0 if self.ddp.find_unused_parameters else 1

    @property
    def stateless(self) -> bool:
        """Whether a bad step has nothing to spoil: averaging everything keeps no memory."""
        return all(group.state is None for group in self.groups)

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────────────

    def _hook(self, bucket: Any) -> Future[Tensor]:
        now = self._now = self._now or self._begin()
        parameters = bucket.parameters()
        names = tuple(self.names[p] for p in parameters)
        now.arrived.append(Arrived(names, tuple(p.shape for p in parameters), bucket.buffer()))
        # Not bucket.is_last(): in the first step of a static graph DDP says so of no bucket.
        last = sum(len(one.names) for one in now.arrived) == len(self.parameters)
        done: Future[Tensor] = Future(devices=[self.device] if self.device.type == "cuda" else None)
        now.futures.append(done)

        if not self.active or (not self.groups and self._seen < self.settles_at):
            position = len(now.arrived) - 1
            self._submit(now, lambda: self._dense(now, now.arrived[position], last))
        elif self.groups and not isinstance(self.lane, Inline):
            self._start_complete_groups(now)
        elif last:
            if not self.groups:
                self.groups = make_groups(now.arrived, self.grain, self.reducer)
                for group in self.groups:
                    memory.rescale(group.state, self.scale)  # thresholds and the like: a state begins unscaled
            self._submit(now, lambda: self._all_groups(now))
        if last:
            self._now = None
        return done

    def _begin(self) -> Step:
        self._silent, self._exchanged = 0, True
        if self.scaler is not None and self.scaler.is_enabled() and self.scaler.get_scale() != self.scale:
            for group in self.groups:
                memory.rescale(group.state, self.scaler.get_scale() / self.scale)
            self.scale = self.scaler.get_scale()
        return Step(opened(self.comm.ledger))

    def _end(self, now: Step) -> None:
        self.last = {"step": self.step} | now.told(self.comm.ledger, self.numel)
        self.step += 1
        self._seen += 1
        if self.watch is not None:
            self.watch.clear()

    def _dense(self, now: Step, bucket: Arrived, last: bool) -> None:
        """Before the layout has settled, and after `detach`: what DDP itself would do."""
        with now.timed("select"):
            self.comm.all_mean(bucket.buffer)
        self.comm.ledger.picked += bucket.buffer.numel()
        if last:
            self._end(now)
        now.resolve(bucket.names)

    def _all_groups(self, now: Step) -> None:
        """The whole step after the last bucket, with one roll call."""
        with now.timed("capture"):
            vectors = [group.read(now.arrived) for group in self.groups]
            finite = self.stateless or all(kernels.finite(vector) for vector in vectors)
        fine = self._roll_call(finite)
        for group, vector in zip(self.groups, vectors, strict=True):
            self._reduce(now, group, vector) if fine else vector.fill_(torch.nan)
            with now.timed("apply"):
                group.write(vector, now.arrived)
        self._end(now)
        now.resolve(tuple(self.parameters))

    def _start_complete_groups(self, now: Step) -> None:
        here = {name for bucket in now.arrived for name in bucket.names}
        while now.started < len(self.groups) and here.issuperset(self.groups[now.started].layout.names):
            group = self.groups[now.started]
            now.started += 1
            last = now.started == len(self.groups)
            self._submit(now, partial(self._one_group, now, group, last))

    def _one_group(self, now: Step, group: Group, last: bool) -> None:
        """One group beside the backward pass; if it is bad, the step is taken back in the groups before it too."""
        with now.timed("capture"):
            vector = group.read(now.arrived)
            finite = self.stateless or kernels.finite(vector)
        now.bad |= not self._roll_call(finite)
        if not now.bad:
            if not self.stateless:
                now.undo.append((group, copy.deepcopy(group.state)))
            self._reduce(now, group, vector)
        else:
            while now.undo:
                earlier, kept = now.undo.pop()
                memory.restore(earlier.state, kept)
            vector.fill_(torch.nan)
        with now.timed("apply"):
            group.write(vector, now.arrived)
        if last:
            self._end(now)
        now.resolve(group.layout.names)

    def _submit(self, now: Step, work: Callable[[], None]) -> None:
        """To the lane; an error beside the backward pass must reach every future that backward() waits for."""

        def run() -> Tensor:
            try:
                work()
            except BaseException as error:
                for future in now.futures:
                    if not future.done():
                        future.set_exception(error)  # type: ignore[arg-type]
                raise
            return torch.empty(0)

        self.lane.submit(run)

    def _reduce(self, now: Step, group: Group, vector: Tensor) -> None:
        layout = group.layout
        base = self._base_of(group)
        if base is not None:
            vector -= base
        local: Any = vector
        if self.watch is not None:
            with now.timed("capture"):
                local = Moments(vector, self.watch.side_by_side(layout.names).to(vector.dtype))
        half = layout.dtype is not layout.working
        comm = CastComm(self.comm, layout.dtype) if half and self.comm.carries is None else self.comm
        with now.timed("select"):
            self.reducer.reduce(local, group.state, comm, vector)
        if base is not None:
            vector += base

    def _roll_call(self, finite: bool) -> bool:
        look = self.check_every > 0 and self.step % self.check_every == 0
        if self.stateless and not look:
            return True  # a non-finite entry spreads by itself
        mark = agree.checksum(self.parameters.values()) if look else 0
        return agree.roll_call(self.comm, self.step, finite, mark, self.device)

    # ── before a step ──────────────────────────────────────────────────────────────────────────────────────────

    def _before_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        self._note_base()
        if not self.ddp.require_backward_grad_sync:
            return
        self._silent += 1
        if self._silent == 4:
            warnings.warn(
                "three training steps passed without a gradient exchange: something replaced thinwire's hook, or "
                "backward() does not go through this DDP module (Lightning ignores hooks on CPU: attach in "
                "on_train_start, to trainer.strategy.model). The replicas may be drifting apart.",
                MethodWarning,
                stacklevel=4,
            )

    def _note_base(self) -> None:
        """Without `no_sync`, DDP hands out all that `.grad` holds: the mean of earlier micro-batches included.

        Only the increment is this worker's own, so what was exchanged already is kept aside and added back.
        """
        if self.stateless:
            return  # averaging a mean once more changes nothing
        while self._base_hooks:
            self._base_hooks.pop().remove()
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if not any(bool(grad.any()) for grad in grads.values()):
            self._base = {}
        elif self._exchanged:
            self._base = {name: grad.detach().clone().flatten() for name, grad in grads.items()}
        self._exchanged = False
        # The gradients may still be cleared between here and the backward pass.
        for name in self._base:
            hook = partial(self._drop_cleared_base, name)
            self._base_hooks.append(self.parameters[name].register_hook(hook))

    def _drop_cleared_base(self, name: str, arriving: Tensor) -> None:
        grad = self.parameters[name].grad
        if grad is None or not grad.any():
            self._base.pop(name, None)

    def _base_of(self, group: Group) -> Tensor | None:
        if not self._base:
            return None
        base = group.layout.zeros()
        for part, name in zip(base.split(group.layout.sizes), group.layout.names, strict=True):
            if name in self._base:
                part.copy_(self._base[name])
        return base

    def detach(self) -> None:
        """Average densely from now on, as DDP without a hook; DDP does not let a hook be taken away."""
        self.active = False
        self._forward_hook.remove()
        self.lane.close()
        self.lane = Inline()
        if self.watch is not None:
            self.watch.detach()
