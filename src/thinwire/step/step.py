"""The step: one exchange, which happens on all workers or on none.

A capture gathers what a worker knows and opens a step with it. The workers call the roll (is everybody at the same
step, with the same parameters, with finite values?), the reducer is run for each group, and the step is committed. If
anything goes wrong (a value that is not finite, an exception in a method, a wire that breaks), every state is put back
to the bit as it was before, and the next step works.
"""

import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm import Comm
from thinwire.comm.cast import CastComm
from thinwire.core import memory, put_back
from thinwire.core.reducer import Layout, Reducer
from thinwire.step import agreement
from thinwire.step.agreement import Disagreement
from thinwire.step.costs import Costs
from thinwire.step.groups import Group

OPENING = ("step", "finite", "parameters")  # what every roll call asks; a capture may ask for more


class NotFinite(Exception):
    """A worker has brought a value that is not finite, so that the step ends here, on all of them."""


class Steps:
    """The steps of one capture: its groups and their states, how many steps there were, in which loss scale."""

    def __init__(
        self,
        reducer: Reducer[Any, Any],
        comm: Comm,
        parameters: dict[str, nn.Parameter],
        *,
        grain: str,
        check_every: int = 0,
        scaler: Any = None,
    ):
        self.reducer, self.comm, self.parameters, self.grain = reducer, comm, parameters, grain
        self.check_every, self.scaler = check_every, scaler
        self.device = next(iter(parameters.values())).device
        self.groups: list[Group] = []
        self.step = 0  # steps so far; saved, so that a resumed run goes on counting
        self.scale = 1.0  # the loss scale in which the states' gradients are
        self.last: dict[str, float] = {}  # what the last step cost
        self.unused: Callable[[], Collection[str]] = tuple  # parameters whose last gradients nobody has used yet

    def make_group(self, layout: Layout) -> Group:
        """A group with a new state; thresholds and the like begin unscaled, and follow the loss scale."""
        group = Group(layout, self.reducer.init(layout))
        memory.rescale(group.state, self.scale)
        return group

    def open(self) -> "Step":
        self.comm.renew()  # if the last step has ended in an error
        scaled = self.scaler is not None and self.scaler.is_enabled()
        scale = self.scaler.get_scale() if scaled else 1.0  # a checkpoint may bring states in another
        if scale != self.scale:
            for group in self.groups:
                group.rescale(scale / self.scale)
            self.scale = scale
        return Step(self)

    def mark(self, tensors: Iterable[Tensor]) -> int:
        """A checksum where it is time to look whether replicas are still equal, else 0."""
        look = self.check_every > 0 and self.step % self.check_every == 0
        return agreement.checksum(tensors) if look else 0

    def undo_unused(self, names: Collection[str]) -> None:
        """As if the steps whose gradients for these parameters nobody has used had not been, but for their number."""
        for group in self.groups:
            group.undo_unused(names, self.comm.rank, self.comm.world)

    def states(self) -> list[Any]:
        """Each group's, to be saved: who goes on from them has no gradients, so none is waiting to be used."""
        unused = self.unused()
        return [group.without(unused, self.comm.rank, self.comm.world) for group in self.groups]


class Step(Costs):
    """One exchange under way."""

    def __init__(self, steps: Steps):
        super().__init__(steps.comm.ledger)
        self.steps = steps
        self.answers: dict[str, list[int]] = {}  # what each worker has said in the roll call, by word
        self.fine = True  # no worker has brought a value that is not finite
        self.error: BaseException | None = None
        self._touched: list[Group] = []
        self._reducing = threading.RLock()  # a reduction may run beside the thread that finds the step bad
        self._words: list[str] = []

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An error inside is this step's: it is taken back, the other workers hear of it, and it is raised again."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            if self.error is not error and self.error is not None:
                raise self.error from error
            raise

    # ── who is here ────────────────────────────────────────────────────────────────────────────────────────────────

    def call_roll(self, *, finite: bool, parameters: int, ask: dict[str, int] | None = None) -> None:
        """Tell all workers how this one stands, in one small message.

        Far away it goes in the head of the step's first message, since every trip costs; what was done in vain is
        taken back. Near, a message more is cheaper than work in vain, and the answers are read at once.
        """
        words = {"step": self.steps.step, "finite": finite, "parameters": parameters} | (ask or {})
        comm, self._words = self.steps.comm, list(words)
        comm.ride(torch.tensor(list(words.values()), dtype=torch.int64, device=self.steps.device), self._hear)
        if not comm.far:
            self.settle()

    def settle(self) -> None:
        """See to it that the answers are in; raises on all workers alike if one is at another step."""
        with suppress(NotFinite):
            self.steps.comm.settle()

    def _hear(self, heads: Tensor) -> None:
        """Hear all workers' words, which come with the first message; what is raised here ends it."""
        answers = heads.contiguous().view(torch.int64).view(self.steps.comm.world, -1)
        self.answers = dict(zip(self._words, answers.T.tolist(), strict=True))
        agreement.check_alike(self.answers, ("step", "parameters"))
        self.fine &= all(self.answers["finite"])
        if not self.fine:
            raise NotFinite

    # ── the exchange ───────────────────────────────────────────────────────────────────────────────────────────────

    def reduce(self, group: Group, local: Any, out: Tensor, *, waiting: Collection[str] = ()) -> None:
        """Write the mean of what all workers know into `out`, and remember the way back.

        waiting: parameters whose gradients of earlier steps wait for this one's.
        """
        layout, comm = group.layout, self.steps.comm
        if layout.dtype is not layout.working and comm.carries is None:
            comm = CastComm(comm, layout.dtype)  # what is trained in half precision travels in it
        with self._reducing:
            if self.error is not None:
                raise self.error  # of another thread, while this reduction waited for its turn
            if group.state is not None:
                group.remember(waiting)
                self._touched.append(group)
            with self.timed("select"), suppress(NotFinite):
                self.steps.reducer.reduce(local, group.state, comm, out)

    def keep_back(self, group: Group, names: Collection[str]) -> None:
        """Nobody takes what was sent for these parameters: it waits as before this step."""
        if names and group.state is not None:
            comm = self.steps.comm
            put_back.restore_unsent(group.state, group.before, group.layout, names, comm.rank, comm.world)

    def take_back(self) -> None:
        """Every state as it was before this step."""
        while self._touched:
            self._touched.pop().undo()

    def commit(self, numel: int) -> None:
        """The step has happened, for `numel` gradient entries."""
        self.steps.last = {"step": self.steps.step} | self.figures(numel)
        self.steps.step += 1

    def fail(self, error: BaseException) -> None:
        """Something went wrong on this worker: as if the step had not been, here and, as they find out, elsewhere."""
        if self.error is not None:
            return
        comm = self.steps.comm
        self.error = comm.explain(error)
        if self.error is not error:
            traceback.clear_frames(error.__traceback__)  # which hold the group whose connections are to be closed
        if not isinstance(error, Disagreement):  # which is raised on all workers at the same point
            comm.abandon(f"step {self.steps.step}: {type(self.error).__name__}: {self.error}")
        with self._reducing:  # a reduction under way ends first, since its exchange is gone; it must not write later
            self.take_back()
