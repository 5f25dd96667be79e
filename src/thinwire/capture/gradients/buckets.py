"""What a worker knows: the gradients, as DDP's reducer hands them out, bucket by bucket.

DDP averages nothing once a hook is registered: the step does. It runs through the hook once a bucket, in the same order
on every rank; groups are reduced in order, as soon as they are complete when a lane beside the backward pass takes
them, else all after the last bucket.

An error never leaves through the hook, because DDP would refuse every later step: the buckets become NaN, DDP finishes,
and then backward() raises.
"""

import warnings
import weakref
import zlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from thinwire import kernels
from thinwire.capture.gradients import arrived as places
from thinwire.capture.gradients.arrived import Arrived, BucketStep, Grain
from thinwire.capture.gradients.earlier import Earlier
from thinwire.capture.gradients.reached import Reached
from thinwire.comm import Comm
from thinwire.core.reducer import MethodWarning, Moments, Reducer
from thinwire.step.groups import Group
from thinwire.step.hooks import ModuleHook
from thinwire.step.lanes import Inline, Lane
from thinwire.step.step import Steps


class Squares(Protocol):
    """Second moments of the gradients, as `capture.layers.squares` keeps them."""

    def side_by_side(self, names: tuple[str, ...]) -> Tensor: ...
    def clear(self) -> None: ...
    def metrics(self) -> dict[str, float]: ...
    def detach(self) -> None: ...


class Buckets:
    """The comm hook of one DDP module."""

    def __init__(
        self,
        ddp: DDP,
        reducer: Reducer[Any, Any],
        comm: Comm,
        *,
        grain: Grain,
        lane: Lane,
        spreads: bool,
        squares: Squares | None = None,
        check_every: int = 100,
        scaler: Any = None,
    ):
        # Weak, because DDP keeps the hook, and so all that is here, where the garbage collector cannot see it.
        self._ddp = weakref.ref(ddp)
        self.grain, self.lane, self.squares = grain, lane, squares
        self.spreads = spreads  # everything is averaged: a value that is not finite reaches all by itself
        parameters = {
            name.replace("_orig_mod.", ""): parameter  # a compiled model's names are those of the model
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ddp.parameters_to_ignore
        }
        self.steps = Steps(reducer, comm, parameters, grain=grain, check_every=check_every, scaler=scaler)
        self.names = {p: n for n, p in parameters.items()}
        self.numel = sum(p.numel() for p in parameters.values())
        self.earlier = Earlier(parameters)
        self.steps.unused = self.earlier.unused
        self.reached = Reached(parameters) if ddp.find_unused_parameters and not ddp.static_graph else None
        self.active = True
        self._seen = 0  # exchanges in this process
        self._now: BucketStep | None = None
        self._silent = 0  # forward passes since the last exchange
        self._install(ddp)

    def _install(self, ddp: DDP) -> None:
        this = weakref.proxy(self)

        def hook(state: Any, bucket: Any) -> Future[Tensor]:
            return self._hook(bucket)

        hook.__annotations__ = {}  # DDP compares annotations by identity
        ddp.register_comm_hook(None, hook)
        del ddp._comm_hooks[-1:]  # kept for a python reducer, and in the way when the module is pickled
        self._forward_hook = ddp.register_forward_pre_hook(ModuleHook(lambda *_: this.before_forward()))

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

    # ── one backward pass ──────────────────────────────────────────────────────────────────────────────────────────

    def _hook(self, bucket: Any) -> Future[Tensor]:
        now = self._now = self._now or self._begin()
        parameters = bucket.parameters()
        names = tuple(self.names[p] for p in parameters)
        now.arrived.append(Arrived(names, tuple(p.shape for p in parameters), bucket.buffer()))
        # Not bucket.is_last(): in the first step of a static graph DDP says so of no bucket.
        last = sum(len(one.names) for one in now.arrived) == len(self.steps.parameters)
        device = self.steps.device
        done: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
        now.futures.append(done)

        groups = self.steps.groups
        if not self.active or (not groups and self._seen < self.settles_at):
            position = len(now.arrived) - 1
            self._submit(now, lambda: self._dense(now, now.arrived[position], last))
        elif groups and not isinstance(self.lane, Inline):
            self._start_complete_groups(now)
        elif last:
            if not groups:
                groups += [self.steps.make_group(layout) for layout in places.layouts(now.arrived, self.grain)]
            self._submit(now, lambda: self._all_groups(now))
        if last:
            self._now = None
            self._raise_after_ddp(now)
        return done

    def _begin(self) -> BucketStep:
        self._silent = 0
        return BucketStep(self.steps.open())

    def _raise_after_ddp(self, now: BucketStep) -> None:
        """Raise what went wrong at the end of the pass in which the last bucket came: DDP's own last act is queued
        there too. It may be a pass inside another one, of a checkpointed block; an earlier bucket's may be over before.
        """
        callback = torch.autograd.Variable._execution_engine.queue_callback

        def raise_error() -> None:
            if now.step.error is not None:
                self._forget_pass()  # its gradients are gone
                raise now.step.error
            if not self.spreads:
                self.earlier.note_gradients_left()

        callback(lambda: callback(raise_error))  # DDP queues its own between the two

    def _submit(self, now: BucketStep, work: Callable[[], None]) -> None:
        def run() -> Tensor:
            if now.step.error is None:
                try:
                    with now.step.guarded():
                        work()
                except BaseException:
                    pass  # kept in the step, and raised when DDP has finished
            if now.step.error is not None:
                now.give_up()
            return torch.empty(0)

        self.lane.submit(run)

    def _dense(self, now: BucketStep, bucket: Arrived, last: bool) -> None:
        """Before the layout has settled, and after `detach`: what DDP itself would do."""
        comm = self.steps.comm
        with now.step.timed("select"):
            comm.all_mean(bucket.buffer)
        comm.ledger.picked += bucket.buffer.numel()
        if last:
            self._end(now)
        now.resolve(bucket.names)

    def _all_groups(self, now: BucketStep) -> None:
        """The whole step after the last bucket, with one roll call."""
        groups = self.steps.groups
        with now.step.timed("capture"):
            vectors = [places.read(group, now.arrived) for group in groups]
            finite = self.spreads or all(kernels.finite(vector) for vector in vectors)
        self._call_roll(now, finite, tuple(self.steps.parameters))
        for group, vector in zip(groups, vectors, strict=True):
            self._reduce(now, group, vector, finite)
        now.step.settle()
        if not now.step.fine:
            now.step.take_back()
        for group, vector in zip(groups, vectors, strict=True):
            self._write(now, group, vector)
        self._end(now)
        now.resolve(tuple(self.steps.parameters))

    def _start_complete_groups(self, now: BucketStep) -> None:
        here = {name for bucket in now.arrived for name in bucket.names}
        groups = self.steps.groups
        while now.started < len(groups) and here.issuperset(groups[now.started].layout.names):
            group = groups[now.started]
            now.started += 1
            self._submit(now, partial(self._one_group, now, group, now.started == len(groups)))

    def _one_group(self, now: BucketStep, group: Group, last: bool) -> None:
        """One group beside the backward pass; if it is bad, the step is taken back in the groups before it too."""
        with now.step.timed("capture"):
            vector = places.read(group, now.arrived)
            finite = self.spreads or kernels.finite(vector)
        self._call_roll(now, finite, group.layout.names)
        self._reduce(now, group, vector, finite)
        now.step.settle()
        if not now.step.fine:
            now.step.take_back()
        self._write(now, group, vector)
        if last:
            self._end(now)
        now.resolve(group.layout.names)

    def _call_roll(self, now: BucketStep, finite: bool, names: tuple[str, ...]) -> None:
        step, steps = now.step, self.steps
        mark = 0 if now.called else steps.mark(steps.parameters.values())
        if self.spreads:  # averaging a mean once more changes nothing, and no state could be spoilt
            if mark:
                step.call_roll(finite=True, parameters=mark)
            return
        base = 0 if now.called else self.earlier.mark()
        thrown = set() if now.called else self.earlier.thrown_away()
        ask = {"base": base, "thrown": _number_of(thrown)} | (self.reached.words(names) if self.reached else {})
        step.call_roll(finite=finite, parameters=mark, ask=ask)
        if base or thrown:
            step.settle()
        if not now.called:
            told = step.answers
            now.based = base != 0 and len(set(told["base"])) == 1
            now.waiting = self.earlier.waiting() if now.based else set()
            if thrown and len(set(told["thrown"])) == 1:
                steps.undo_unused(thrown)
        now.called = True

    def _reduce(self, now: BucketStep, group: Group, vector: Tensor, finite: bool) -> None:
        if not now.step.fine:
            return
        if not finite:
            vector.zero_()  # far away the others hear of it later: nothing may choke on it until then
        base = self.earlier.base(group.layout) if now.based else None
        if base is not None:
            vector -= base
        local: Any = vector
        if self.squares is not None:
            with now.step.timed("capture"):
                local = Moments(vector, self.squares.side_by_side(group.layout.names).to(vector.dtype))
        now.step.reduce(group, local, vector, waiting=now.waiting)
        if base is not None:
            vector += base

    def _write(self, now: BucketStep, group: Group, vector: Tensor) -> None:
        if not now.step.fine:
            vector.fill_(torch.nan)
        elif self.reached is not None and not self.spreads:
            unused = self.reached.by_nobody(now.step.answers)
            now.nobodys |= unused
            now.step.keep_back(group, unused)
        with now.step.timed("apply"):
            places.write(group, vector, now.arrived)

    def _end(self, now: BucketStep) -> None:
        now.step.commit(self.numel)
        self._seen += 1
        if now.step.fine and not self.spreads:
            spans = {name: span for bucket in now.arrived for name, span in bucket.spans().items()}
            self.earlier.note_exchange({name: span for name, span in spans.items() if name not in now.nobodys})
        self._forget_pass()

    def _forget_pass(self) -> None:
        """What was noted of a backward pass beside its gradients."""
        if self.reached is not None:
            self.reached.clear()
        if self.squares is not None:
            self.squares.clear()

    # ── before a backward pass ─────────────────────────────────────────────────────────────────────────────────────

    def before_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        self._now = None  # if a backward pass was broken off, some buckets never came
        outside = DDP._active_ddp_module
        if outside is not None and outside is not self.ddp and self.active:
            raise RuntimeError(
                "another DistributedDataParallel was put around what thinwire.wrap() returned: both would exchange, "
                "and the dense one has the last word. Give the framework the plain model, and write "
                "thinwire.attach(prepared_model, method) for the DDP module that it makes"
            )
        if not self.spreads:
            self.earlier.note_gradients()
        if not self.ddp.require_backward_grad_sync or not self.ddp.training:
            return
        self._silent += self.ddp.training  # nobody need differentiate what is only looked at
        if self._silent == 4 and self.ddp.training:
            warnings.warn(
                "three training steps passed without a gradient exchange: something replaced thinwire's hook, or "
                "backward() does not go through this DDP module (Lightning ignores hooks on CPU: attach in "
                "on_train_start, to trainer.strategy.model). The replicas may be drifting apart.",
                MethodWarning,
                stacklevel=4,
            )

    def break_off(self, error: Exception) -> None:
        """This worker's part of the backward pass will not come: whoever waits for it hears why."""
        self._now = None
        self.steps.comm.abandon(f"step {self.steps.step}: {error}")

    def detach(self, comm: Comm) -> None:
        """Average densely from now on, over `comm`, as DDP without a hook; DDP does not let a hook be taken away."""
        self.active = False
        self._forward_hook.remove()
        self.lane.close()
        self.lane = Inline()
        self.steps.comm = comm
        if self.reached is not None:
            self.reached.detach()
            self.reached = None
        if self.squares is not None:
            self.squares.detach()


def _number_of(names: Collection[str]) -> int:
    """The same for the same names on every rank; 0 for none."""
    return 1 + zlib.crc32("\n".join(sorted(names)).encode()) if names else 0
