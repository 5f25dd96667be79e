"""The kit finds what is wrong with a reducer, and names the law and a small case."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire import Dense, ErrorFeedback, Layout, Reducer, TopK, testing
from thinwire.comm.dry import DryComm
from thinwire.core.memory import entries
from thinwire.testing import check, laws


@dataclass
class Counter:
    steps: int = 0


@dataclass(frozen=True)
class Broken(Reducer[Tensor, Any]):
    """Averages everything, except for what a subclass gets wrong."""

    def init(self, layout: Layout, /) -> Any:
        return Counter()

    def reduce(self, x, state, comm, out, /):
        mean = comm.all_mean(x.clone())
        x.zero_()
        out.copy_(mean)


class KeepsToItself(Broken):
    def reduce(self, x, state, comm, out, /):
        out.copy_(x)
        x.zero_()


class Forgets(Broken):
    def reduce(self, x, state, comm, out, /):
        super().reduce(x, state, comm, out)
        out[1:] = 0


class SendsTwice(Broken):
    """Sends everything, and keeps it as well."""

    def reduce(self, x, state, comm, out, /):
        mean = comm.all_mean(x.clone())
        out.copy_(mean)


class LeavesGaps(Broken):
    def reduce(self, x, state, comm, out, /):
        mean = comm.all_mean(x.clone())
        x.zero_()
        out[: len(out) // 2] = mean[: len(out) // 2]


class WritesTooSoon(Broken):
    def reduce(self, x, state, comm, out, /):
        out.zero_()
        out += comm.all_mean(x.clone())
        x.zero_() if out.data_ptr() != x.data_ptr() else None


class Draws(Broken):
    def reduce(self, x, state, comm, out, /):
        torch.rand(1)
        super().reduce(x, state, comm, out)


class DividesByItsSize(Broken):
    def reduce(self, x, state, comm, out, /):
        size = x.norm()
        super().reduce(x.div_(size).mul_(size), state, comm, out)


class TalksByRank(Broken):
    def reduce(self, x, state, comm, out, /):
        mean = comm.all_gather(x).mean(0) if comm.rank == 0 else comm.all_mean(x.clone())
        super().reduce(x, state, comm, out)
        del mean


class TalksOnceMore(Broken):
    def reduce(self, x, state, comm, out, /):
        super().reduce(x, state, comm, out)
        state.steps += 1
        if comm.rank == 1 and state.steps == testing.STEPS:
            comm.all_mean(x.clone())


class PlansAnotherThing(Broken):
    def reduce(self, x, state, comm, out, /):
        super().reduce(x, state, comm, out)
        if isinstance(comm, DryComm):
            comm.all_gather(x)


SEEN: dict[tuple[int, int], int] = {}


class RemembersElsewhere(Broken):
    """Every third step is sent with the next one; which ones, a global counter knows."""

    def init(self, layout, /):
        return Held(layout.zeros())

    def reduce(self, x, state, comm, out, /):
        me = comm.world, comm.rank
        SEEN[me] = SEEN.get(me, 0) + 1
        delay(x, state, comm, out, skip=SEEN[me] % 3 == 0)


@dataclass
class Held:
    residual: Tensor = entries()
    steps: list[int] = field(default_factory=list, metadata={"kind": "derived"})


class SavesTooLittle(Broken):
    def init(self, layout, /):
        return Held(layout.zeros())

    def reduce(self, x, state, comm, out, /):
        state.steps.append(1)
        delay(x, state, comm, out, skip=len(state.steps) % 4 == 0)


class Thing:
    """Nothing that a checkpoint takes."""


@dataclass
class Odd:
    thing: Thing = field(default_factory=Thing)


class SavesAnything(Broken):
    def init(self, layout, /):
        return Odd()


def delay(x, state, comm, out, skip):
    state.residual += x
    x.zero_()
    if skip:
        out.zero_()
    else:
        mean = comm.all_mean(state.residual.clone())
        state.residual.zero_()
        out.copy_(mean)


@pytest.mark.parametrize(
    ("broken", "law", "case"),
    [
        (KeepsToItself(), "agreement", "2 workers, scalar ()"),
        (Forgets(), "conservation", "1 worker, vector (7,)"),
        (SendsTwice(), "conservation", "1 worker, scalar ()"),
        (LeavesGaps(), "agreement", "unwritten"),
        (WritesTooSoon(), "aliasing", "1 worker"),
        (Draws(), "randomness", "generator of torch"),
        (DividesByItsSize(), "zeros", "1 worker, scalar ()"),
        (TalksByRank(), "order", "2 workers"),
        (TalksOnceMore(), "order", "2 workers"),
        (PlansAnotherThing(), "planning", "dry run"),
        (RemembersElsewhere(), "repetition", "1 worker"),
        (SavesTooLittle(), "resuming", "1 worker"),
        (SavesAnything(), "resuming", "raises"),
    ],
    ids=lambda thing: type(thing).__name__ if isinstance(thing, Broken) else "",
)
def test_the_kit_names_the_law_and_a_small_case(broken, law, case, monkeypatch):
    monkeypatch.setattr(laws, "PATIENCE", 1)
    with pytest.raises(AssertionError) as error:
        check(broken)
    assert str(error.value).startswith(f"{law} does not hold for {type(broken).__name__}()")
    assert case in str(error.value)


def test_the_kit_is_content_with_what_is_right():
    check(Broken())
    check(Dense())


def test_a_declared_loss_is_no_breach():
    class Admits(Forgets):
        @property
        def conserves(self):
            return False

    check(Admits(), worlds=(1, 2))


def test_a_residual_counts_as_kept():
    check(ErrorFeedback(TopK(0.3)), worlds=(2,))


def test_an_inner_loss_shows_through_feedback():
    with pytest.raises(AssertionError, match="conservation"):
        check(ErrorFeedback(Forgets()))


def test_the_smallest_case_is_reported():
    class BreaksOnFour(Broken):
        def reduce(self, x, state, comm, out, /):
            super().reduce(x, state, comm, out)
            if comm.world == 4 and x.numel() > 30:
                out.mul_(1 + comm.rank)

    with pytest.raises(AssertionError, match=r"\[4 workers, nothing \(0,\), vector \(33,\), float32\]"):
        check(BreaksOnFour())


def test_half_a_unit_in_the_last_place_is_not_forgiven_in_agreement():
    class Rounds(Broken):
        def reduce(self, x, state, comm, out, /):
            super().reduce(x, state, comm, out)
            if comm.rank == 1:
                out.copy_(torch.nextafter(out, torch.full_like(out, math.inf)))

    with pytest.raises(AssertionError, match="agreement"):
        check(Rounds())
