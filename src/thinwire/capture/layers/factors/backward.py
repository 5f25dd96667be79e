"""The exchange of factors during a backward pass, in the same order on every worker.

At the start of a backward pass the workers agree, in one small message, how many rows each weight has, so that
everybody pads to the same size (`sizes`; far away that goes with the factors, at the end of the pass). A group goes out
when all its uses have arrived and all groups before it are out; what never arrives (a layer that this worker did not
use) goes out empty at the end. So no order of events on one worker can make another one wait for ever, as long as DDP's
own exchange does not block the backward pass.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

import torch
from torch import Tensor
from torch.futures import Future

from thinwire import kernels
from thinwire.capture.layers.factors.sizes import OtherSizes, Sizes
from thinwire.capture.layers.factors.slots import FactorGroup, Pass, Slot, accumulate, add_tallies, holds, working
from thinwire.core.factors import Factors, Form, Use
from thinwire.core.products import GradientProduct
from thinwire.core.reducer import MethodWarning
from thinwire.step.lanes import Lane
from thinwire.step.step import Step, Steps
from thinwire.step.unused import Unused

Boundary = Callable[[str, Tensor], Tensor]  # a weight's name and the delta below its layer: what goes on instead


@dataclass
class Job:
    group: FactorGroup
    result: Future[Tensor]
    nbytes: int
    absent: list[bool] = field(default_factory=list)  # weights that no worker used


class BackwardExchange:
    """The groups of one model, and the backward pass under way.

    An error is kept until the backward pass is over and DDP, which has the rest of the model, has finished; then
    backward() raises it, and what it did to states is undone.
    """

    def __init__(self, steps: Steps, lane: Lane, *, in_flight: int, boundary: Boundary | None):
        self.steps, self.comm, self.lane = steps, steps.comm, lane
        self.in_flight, self.boundary = in_flight, boundary
        self.groups: list[FactorGroup] = steps.groups  # type: ignore[assignment]
        self.step: Step | None = None  # the exchange under way
        self.passing: Pass | None = None  # the forward pass under way
        self.passes: WeakSet[Pass] = WeakSet()  # those whose graphs are alive
        self.counted: list[Pass] = []  # whose backward passes have run, or will, before the next exchange is over
        self.tells = False  # of raw data that is about to be sent, once
        self.paused = False
        self.broken_off: Callable[[Exception], None] = lambda error: None  # tells whoever has the rest of the model
        self.exchanging = False  # whether the backward pass under way ends in an exchange
        self._round = 0
        self._running = False
        self._settled = False  # after the first exchange: uses outside the layers are known
        self.sizes = Sizes(steps.comm)
        self._unused: Unused | None = None  # once there was an exchange that a state remembers
        self._waiting: set[str] = set()  # weights whose last gradients wait for those of the exchange under way
        self._held = False  # the groups go out at the end of the pass, since sizes go with them
        self._ready: list[int] = []  # in which they were ready, here: worker 0's is the next order
        self._position = 0
        self._jobs: deque[Job] = deque()
        self._results: list[tuple[Job, Tensor]] = []  # of the jobs that are done, until all are

    @property
    def slots(self) -> list[Slot]:
        return [slot for group in self.groups for slot in group.slots]

    # ── forward ────────────────────────────────────────────────────────────────────────────────────────────────────

    def enter(self, exchanged: bool) -> None:
        if self._running:
            self._give_up()
        self.passing = Pass(exchanged)
        self.passes.add(self.passing)

    def _give_up(self) -> None:
        """A backward pass was broken off on this worker alone, by a user's error: the others must not wait for it."""
        step, self.step = self.step, None
        if step is not None:
            error = RuntimeError("the backward pass was broken off by an error outside of it")
            step.fail(error)
            self.broken_off(error)
        self.forget()

    def keeps(self, slot: Slot, raw: bool) -> bool:
        """Whether what went into a layer must not leave this worker. Data that nothing here has learnt from are raw."""
        told = getattr(self.steps.reducer, "inputs", None)
        if raw and told is None and self.tells and getattr(self.steps.reducer, "sends_inputs", False):
            self.tells = False
            name = type(self.steps.reducer).__name__
            warnings.warn(
                f"{name} sends what goes into a layer, and {slot.names[0]} is given this worker's own data: the other "
                f'workers can read them. {name}(inputs="sent") says that they may, {name}(inputs="kept") sends that '
                "layer's gradient instead.",
                MethodWarning,
                stacklevel=2,
            )
        return raw and told == "kept"

    def leave(self) -> Pass | None:
        done, self.passing = self.passing, None
        return done

    # ── backward ───────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, started: Pass) -> None:
        """Called when the gradient of an output of the wrapped model is known: before that of any layer."""
        if self._running or self.paused:
            return
        self._running = True
        for slot in self.slots:
            slot.accumulated = False
        # Other passes of the same age may be in the same graph. One that is not costs padding, and nothing else.
        together = [one for one in self.passes if one.round == started.round]
        self.counted += together
        self._round += 1
        for one in together:
            one.round = self._round
        self.exchanging = any(one.exchanged for one in together)
        # From here, not from a layer: the backward pass inside a checkpoint has an end of its own.
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if self.exchanging:
            self.step = self.steps.open()
            with self._kept_errors():
                self._agree()
                self._advance()

    @contextmanager
    def _kept_errors(self) -> Iterator[None]:
        """What goes wrong inside is raised at the end: an autograd pass that is broken off leaves DDP unusable."""
        assert self.step is not None
        try:
            with self.step.guarded():
                yield
        except Exception:
            pass  # in self.step.error

    def refuse(self, error: Exception) -> None:
        """Take the step back because of what a layer has brought."""
        with self._kept_errors():
            raise error

    def advance(self, slot: Slot | None = None) -> None:
        """Send out the groups that are complete, in order."""
        if self.exchanging and self.step is not None and self.step.error is None:
            with self._kept_errors():
                self._advance(slot)

    def _advance(self, slot: Slot | None = None) -> None:
        if slot is not None and slot.group not in self._ready and self.groups[slot.group].ready():
            self._ready.append(slot.group)
        order = [] if self._held else self.sizes.order
        while self._position < len(order) and self.groups[order[self._position]].ready():
            self._launch()

    def found(self, slot: Slot, gradient: Tensor | None) -> Tensor | None:
        """Autograd has passed a weight. A gradient here comes from a use outside the weight's layer."""
        slot.accumulated = True
        if gradient is None or self.paused:
            return None
        if self.exchanging and self._settled and not slot.outside:
            self.refuse(
                RuntimeError(
                    f"{slot.names[0]} has a gradient from outside its layer, and had none in the first step: let it "
                    "have one there too, or keep the weight out of a Linear, Conv or Embedding module"
                )
            )
        slot.strayed = True
        slot.form(gradient)
        self.advance(slot)
        return torch.zeros_like(gradient)  # its share of the mean is added at the end

    def finish(self) -> None:
        """The end of the backward pass: send what is left, wait, and write the gradients."""
        step, self.step = self.step, None
        if not self.exchanging or step is None:
            self._running = self.exchanging = False
            return
        if step.error is None:
            self.step = step
            with self._kept_errors(), torch.no_grad():
                self._finish(step)
            self.step = None
        self.forget()
        if step.error is not None:
            self.sizes.forget()
            torch.autograd.Variable._execution_engine.queue_callback(partial(_raise, step.error))

    def _finish(self, step: Step) -> None:
        if self._held:
            self.sizes.ride()
        try:
            self._send_all()
        except OtherSizes:  # heard by all with the first message: as if nothing had been sent
            step.take_back()
            self._position = 0
            self._results.clear()
            self._take_sizes()
            self._take_back_thrown()
            self._send_all()
        # All workers hold the same results, to the bit, so they decide alike whether the step was a good one.
        step.fine = all(kernels.finite(out) for _, out in self._results)
        if not step.fine:
            step.take_back()
        for job, out in self._results:
            views = job.group.layout.views(out)
            for slot, view, absent in zip(job.group.slots, views, job.absent, strict=True):
                if not absent:
                    accumulate(slot.weight, view if step.fine else view.fill_(torch.nan))
        if not self._settled:
            self._settle()
        step.commit(sum(group.layout.numel for group in self.groups))
        if step.fine and any(group.state is not None for group in self.groups):
            self._note_exchange()

    def _note_exchange(self) -> None:
        """What came out of it will be used by an optimizer, or by nobody."""
        if self._unused is None:
            self._unused = Unused({slot.names[0]: slot.weight for slot in self.slots})
            self.steps.unused = self._unused.names
        given: dict[str, Tensor] = {}
        for job, out in self._results:
            parts = zip(job.group.layout.names, out.split(job.group.layout.sizes), job.absent, strict=True)
            given |= {name: part for name, part, absent in parts if not absent}
        self._unused.note(given)

    def _send_all(self) -> None:
        while self._position < len(self.sizes.order):
            self._launch()
            while self._held and self._jobs:  # the first of them tells whether the others may go
                self._results.append(self._completed())
        while self._jobs:
            self._results.append(self._completed())
        self.comm.settle()

    def forget(self) -> None:
        """What has arrived is spent."""
        self.counted.clear()
        self._running = self.exchanging = self._held = False
        self._position = 0
        self._jobs.clear()
        self._results.clear()
        for slot in self.slots:
            slot.forget()

    def _agree(self) -> None:
        """One message: how many rows each weight has on each worker, and in which order worker 0 was ready last."""
        expected: dict[tuple[Slot, GradientProduct], list[int]] = {}
        for one in self.counted:
            for key, tally in one.tallies.items():
                expected[key] = add_tallies(expected[key], tally, key[1]) if key in expected else tally
            for slot, uses in one.uses.items():
                slot.expected += uses
        mark = self.steps.mark(slot.weight for slot in self.slots)
        ready = self._ready if len(self._ready) == len(self.groups) else list(range(len(self.groups)))
        numbers: list[list[int]] = []
        for slot in self.slots:
            numbers.append([int(slot.outside or slot.kept or slot.formed is not None)])
            numbers += [expected.get((slot, rule), [0] * (2 + sum(rule.dims))) for rule in slot.rules]
        unused = set() if self._unused is None else self._unused.names()
        self._waiting = {slot.names[0] for slot in self.slots if slot.names[0] in unused and holds(slot.weight.grad)}
        thrown = [slot.names[0] in unused - self._waiting for slot in self.slots]
        device = self.groups[0].layout.device
        self._held = not self.sizes.tell(self.steps.step, mark, thrown, ready, numbers, device)
        self._ready = []
        self._take_sizes()
        if not self._held:
            self._take_back_thrown()

    def _take_back_thrown(self) -> None:
        """Of gradients that nobody wants nothing may stay in a state and be sent later."""
        slots = self.slots
        thrown = [slots[number].names[0] for number in self.sizes.thrown]
        self.steps.undo_unused(thrown)
        self._waiting -= set(thrown)

    def _take_sizes(self) -> None:
        most = iter(self.sizes.most or ())
        for slot in self.slots:
            slot.averaged = bool(next(most)[0])
            slot.forms = {rule: Form.of(next(most), rule) for rule in slot.rules}

    def _launch(self) -> None:
        number = self.sizes.order[self._position]
        self._position += 1
        group = self.groups[number]
        if number not in self._ready:
            self._ready.append(number)
        local, absent = group.local(fits=self.sizes.fits, held=self._held)
        if all(absent):
            return
        blank = [Use(use.weight, use.rule, use.inputs.new_empty(0), use.deltas.new_empty(0)) for use in local.uses]
        group.seen = Factors(local.shapes, blank, dict.fromkeys(local.formed), local.forms, local.chain)
        nbytes = sum(t.numel() * t.element_size() for use in local.uses for t in (use.inputs, use.deltas))

        step, layout, waiting = self.step, group.layout, self._waiting
        assert step is not None

        def work() -> Tensor:
            out = torch.empty(layout.numel, dtype=layout.working, device=layout.device)
            step.reduce(group, local, out, waiting=waiting)
            return out

        self._jobs.append(Job(group, self.lane.submit(work), nbytes, absent))
        while len(self._jobs) > 1 and sum(job.nbytes for job in self._jobs) > self.in_flight:
            self._results.append(self._completed())

    def _completed(self) -> tuple[Job, Tensor]:
        job = self._jobs.popleft()
        return job, job.result.wait()

    def _settle(self) -> None:
        """After the first exchange: find the weights that are used outside their layers, and average that part too."""
        late = torch.tensor([slot.strayed + 2 * (slot.formed is not None) for slot in self.slots], dtype=torch.int32)
        anywhere = self.comm.all_gather(late.to(self.groups[0].layout.device)).amax(0).tolist()
        for slot, flag in zip(self.slots, anywhere, strict=True):
            if flag >= 2:  # it arrived when the rest of this weight was on its way
                part = slot.formed
                if part is None:
                    part = torch.zeros(slot.weight.shape, dtype=working(slot.weight.dtype), device=slot.weight.device)
                accumulate(slot.weight, self.comm.all_mean(part))
            if flag:
                slot.outside = True
                warnings.warn(
                    f"{slot.names[0]} is used outside its layer (a tied head, a penalty on weights), so its gradient "
                    "is formed and goes densely: exact, and without any saving.",
                    MethodWarning,
                    stacklevel=2,
                )
        self._settled = True


def _raise(error: BaseException) -> None:
    raise error
