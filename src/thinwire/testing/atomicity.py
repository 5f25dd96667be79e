"""The third law: a step happens on all workers or on none, whatever goes wrong in it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.comm.codec import as_bytes
from thinwire.comm.protocol import PeerFailed
from thinwire.comm.threads import in_threads
from thinwire.core import memory
from thinwire.core.reducer import Reducer
from thinwire.step.step import Steps
from thinwire.testing.cases import PATIENCE, Case, fail, made_up

COLLECTIVES = ("all_mean", "scatter_mean", "all_gather", "broadcast", "all_to_all", "all_to_all_uneven", "shift")


class Breaks(RuntimeError):
    """What goes wrong on purpose."""


class Breaking:
    """A transport that fails at one of its calls."""

    def __init__(self, transport: Any, at: int):
        self.transport, self.left = transport, at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.transport, name)
        if name not in COLLECTIVES:
            return found

        def call(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Breaks(f"at {name}")
            return found(*arguments)

        return call


def check_atomicity(reducer: Reducer[Any, Any], case: Case) -> None:
    layout = case.layout
    parameters = {n: torch.nn.Parameter(torch.zeros(s)) for n, s in zip(layout.names, layout.shapes, strict=True)}

    def train(comm: Comm, at: int | None, alone: bool) -> tuple[list[Tensor], bool]:
        """Three steps, the second broken off once; what came out of each, and whether the state was as before."""
        steps, whole = Steps(reducer, comm, parameters, grain="model"), comm.transport
        group, outs, same = steps.make_group(layout), [], True
        steps.groups.append(group)
        for number in range(3):
            tries = [None] if number != 1 or at is None else [at, None]
            for broken in tries:
                out, before = torch.empty_like(layout.zeros()), memory.save(group.state, layout)
                step = steps.open()
                try:
                    with step.guarded():
                        if broken is not None and (comm.rank == 0 or not alone):
                            comm.transport = Breaking(whole, broken)
                        step.reduce(group, made_up(reducer.wants, layout, number, comm.rank), out)
                        if broken is not None:
                            raise Breaks("after the exchange")
                    step.commit(layout.numel)
                    outs.append(out)
                except (Breaks, PeerFailed):
                    comm.transport = whole
                    same &= same_state(before, memory.save(group.state, layout))
        return outs, same

    wanted = in_threads(case.world, lambda comm: train(comm, None, False)[0], timeout=PATIENCE)[0]
    last = len(_collectives(reducer, case))
    for at in range(last + 1):
        for alone in (True, False) if at < last and case.world > 1 else (False,):
            told = in_threads(case.world, partial(train, at=at, alone=alone), timeout=PATIENCE)
            where = f"after an error at collective {at} of {last} on {'one worker' if alone else 'all workers'}"
            for rank, (outs, same) in enumerate(told):
                if not same:
                    fail("atomicity", reducer, case, f"worker {rank} has another state than before, {where}")
                if not all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True)):
                    fail("atomicity", reducer, case, f"worker {rank} goes on to other bits, {where}")


def _collectives(reducer: Reducer[Any, Any], case: Case) -> list[str]:
    """What a worker calls in its second step."""

    def work(comm: Comm) -> list[str]:
        state, out = reducer.init(case.layout), case.layout.zeros()
        for step in range(2):
            comm.ledger.clear()
            reducer.reduce(made_up(reducer.wants, case.layout, step, comm.rank), state, comm, out)
        return [op for op, _ in comm.ledger.entries]

    return in_threads(case.world, work, timeout=PATIENCE)[0]


def same_state(one: Any, other: Any) -> bool:
    """Whether two saved states are the same, to the bit."""
    if isinstance(one, Tensor):
        same = isinstance(other, Tensor) and one.shape == other.shape
        return same and torch.equal(as_bytes(one), as_bytes(other))  # in which NaN equals itself
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)
