"""The laws that every reducer keeps, as a kit for anybody's: `thinwire.testing.check(MyReducer(...))`.

Cases go from small to large, so the first one to fail is the smallest that shows what is wrong:

- agreement: every worker writes the same `out`, to the bit, all of it, and finite.
- order: every worker issues the same collectives, in the same order.
- conservation: what was handed in = what came out + what is still held (if the reducer says it conserves).
- repetition: two runs give the same bits; no memory but the state.
- aliasing: `out` may be the storage of `local`.
- resuming: a state saved and loaded in mid-run, as `torch.save` writes it, goes on to the same bits.
- randomness: no global generator is stepped.
- zeros: gradients that are zero, everywhere or in one parameter, give no NaN.
- planning: a dry run issues the collectives that real workers issue.
- atomicity: an error at any collective, on one worker or on all, leaves every state to the bit as before the step, and
  the step, tried again, gives the bits that it would have given.
"""

import io
import pickle
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.comm.dry import DryComm
from thinwire.comm.threads import in_threads
from thinwire.core import memory
from thinwire.core.factors import Factors
from thinwire.core.reducer import Layout, Moments, Reducer
from thinwire.testing.atomicity import check_atomicity
from thinwire.testing.cases import (
    DTYPES,
    MATRICES,
    PATIENCE,
    SHAPES,
    STEPS,
    WORLDS,
    Case,
    fail,
    gradient,
    layout_of,
    made_up,
)


@dataclass
class Told:
    """What one worker has to say after a run."""

    handed: list[Tensor]  # the gradient of each step
    out: list[Tensor]
    left: list[Tensor]  # in `local`, after each step
    held: list[Tensor]  # in the state, after each step
    collectives: list[tuple[str, int]]


def check(reducer: Reducer[Any, Any], *, worlds: tuple[int, ...] = WORLDS) -> None:
    """Raise an AssertionError that names the first law this reducer breaks, with the smallest case found."""
    shapes = _shapes(reducer)
    _check(reducer, worlds, [Case(n, layout_of(named, dtype)) for named in shapes for n in worlds for dtype in DTYPES])


def check_by_turns(reducer: Reducer[Any, Any], *, worlds: tuple[int, ...] = WORLDS) -> None:
    """The same in half the time: every layout with every number of workers, but the two dtypes take turns in them."""
    cases = [
        Case(world, layout_of(named, DTYPES[(a + b) % 2]))
        for a, named in enumerate(_shapes(reducer))
        for b, world in enumerate(worlds)
    ]
    _check(reducer, worlds, cases)


def _shapes(reducer: Reducer[Any, Any]) -> tuple[dict[str, tuple[int, ...]], ...]:
    return MATRICES if reducer.wants is Factors else SHAPES


def _check(reducer: Reducer[Any, Any], worlds: tuple[int, ...], cases: list[Case]) -> None:
    for case in cases:
        with _untouched_generators(reducer, case):
            told = _run(reducer, case)
        _check_agreement(reducer, case, told)
        _check_conservation(reducer, case, told)
    for case in cases:
        if case.layout.dtype is torch.float32 and case.world in worlds[:3]:
            _check_zeros(reducer, case)
    large = layout_of(_shapes(reducer)[-1], torch.float32)
    for world in worlds[:3]:
        _check_same_bits(reducer, Case(world, large))
    _check_planning(reducer, Case(worlds[-1], large))
    for world in worlds[:2]:
        check_atomicity(reducer, Case(world, large))


# ── the laws ───────────────────────────────────────────────────────────────────────────────────────────────────


def _check_agreement(reducer: Reducer[Any, Any], case: Case, told: list[Told]) -> None:
    for rank, worker in enumerate(told):
        if worker.collectives != told[0].collectives:
            step = _first_difference(worker.collectives, told[0].collectives)
            fail("order", reducer, case, f"collective {step} of worker {rank} is not that of worker 0")
        for step, out in enumerate(worker.out):
            if out.isnan().any() or out.isinf().any():
                where = int((~out.isfinite()).nonzero()[0])
                fail("agreement", reducer, case, f"out[{where}] is {out[where]} after step {step} (unwritten?)")
            if not torch.equal(out, told[0].out[step]):
                where = int((out != told[0].out[step]).nonzero()[0])
                values = f"{told[0].out[step][where]} on worker 0, {out[where]} on worker {rank}"
                fail("agreement", reducer, case, f"out[{where}] after step {step} is {values}")


def _check_conservation(reducer: Reducer[Any, Any], case: Case, told: list[Told]) -> None:
    if not reducer.conserves:
        return
    n = case.layout.numel
    handed, moved = (torch.zeros(n, dtype=torch.float64) for _ in range(2))
    for step in range(STEPS):
        handed += _mean([worker.handed[step] for worker in told])
        moved += told[0].out[step].double() + _mean([worker.left[step] for worker in told])
        wrong = (moved + _mean([worker.held[step] for worker in told]) - handed).abs()
        size = _mean([sum(x.abs() for x in worker.handed) for worker in told]).max() if n else 0.0
        if n and wrong.max() > size * (1e-9 if case.layout.dtype is torch.float64 else 3e-5):
            where = int(wrong.argmax())
            detail = f"entry {where} has gained or lost {wrong[where]:.3g} of {size:.3g} by step {step}"
            fail("conservation", reducer, case, detail)


def _check_same_bits(reducer: Reducer[Any, Any], case: Case) -> None:
    first = _run(reducer, case)
    variants: dict[str, Callable[[], list[Told]]] = {
        "repetition": lambda: _run(reducer, case),
        "aliasing": lambda: _run(reducer, case, alias=True),
        "resuming": lambda: _run(reducer, case, resume_at=STEPS // 2),
    }
    for law, again in variants.items():
        try:
            second = again()
        except Exception as error:
            fail(law, reducer, case, f"it raises {type(error).__name__}: {error}", error)
        for step in range(STEPS):
            if not torch.equal(first[0].out[step], second[0].out[step]):
                fail(law, reducer, case, f"step {step} gives other bits")


def _check_zeros(reducer: Reducer[Any, Any], case: Case) -> None:
    largest = max(range(len(case.layout.sizes)), key=case.layout.sizes.__getitem__)

    def dead(step: int, local: Any) -> None:
        """Nothing for two steps, then all but the largest parameter, then all."""
        if isinstance(local, Factors):
            for use in local.uses:
                use.deltas.mul_(step >= 4 or (step >= 2 and use.weight != largest))
            return
        for vector in [local] if isinstance(local, Tensor) else [local.mean, local.square]:
            if step < 2:
                vector.zero_()
            elif step < 4:
                case.layout.views(vector)[largest].zero_()

    for step, out in enumerate(_run(reducer, case, change=dead)[0].out):
        if not out.isfinite().all():
            fail("zeros", reducer, case, f"gradients of zero give {out[~out.isfinite()][0]} at step {step}")


def _check_planning(reducer: Reducer[Any, Any], case: Case) -> None:
    def alike(comm: Comm) -> list[str]:
        state, out = reducer.init(case.layout), case.layout.zeros()
        for step in range(STEPS):
            reducer.reduce(made_up(reducer.wants, case.layout, step, rank=0), state, comm, out)
        # How often a message of unknown length needs a second piece is not for a plan to know.
        return [op for op, _ in groupby(op for op, _ in comm.ledger.entries)]

    real, dry = in_threads(case.world, alike)[0], alike(DryComm(case.world))
    if real != dry:
        fail("planning", reducer, case, f"workers issue {real[:8]}, a dry run {dry[:8]}")


@dataclass
class _untouched_generators:
    reducer: Reducer[Any, Any]
    case: Case

    def _states(self) -> list[Any]:
        return [torch.get_rng_state().numpy().tobytes(), random.getstate(), pickle.dumps(np.random.get_state())]

    def __enter__(self) -> None:
        self.before = self._states()

    def __exit__(self, *_: object) -> None:
        for name, before, after in zip(("torch", "random", "numpy"), self.before, self._states()):
            if before != after:
                fail("randomness", self.reducer, self.case, f"the global generator of {name} was stepped")


# ── runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _run(
    reducer: Reducer[Any, Any],
    case: Case,
    *,
    alias: bool = False,
    resume_at: int | None = None,
    change: Callable[[int, Any], None] = lambda step, local: None,
) -> list[Told]:
    def work(comm: Comm) -> Told:
        state = reducer.init(case.layout)
        told = Told([], [], [], [], [])
        for step in range(STEPS):
            if step == resume_at:
                state = _saved_and_loaded(state, reducer, case.layout)
            local = made_up(reducer.wants, case.layout, step, comm.rank)
            change(step, local)
            told.handed.append(gradient(local, case.layout))
            out = torch.full_like(case.layout.zeros(), torch.nan)
            if alias and not isinstance(local, Factors):
                out = local.mean if isinstance(local, Moments) else local
            reducer.reduce(local, state, comm, out)
            told.out.append(out.clone())
            told.left.append(gradient(local, case.layout))
            told.held.append(memory.unsent_vector(state, case.layout, comm.rank, comm.world))
        told.collectives = _alike_on_all(comm.ledger.entries)
        return told

    try:
        return in_threads(case.world, work, timeout=PATIENCE)
    except threading.BrokenBarrierError as error:
        fail("order", reducer, case, "one worker issues more collectives than another", error)


def _alike_on_all(entries: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """What all workers must issue alike: an all_to_all has each one's own size, a shift concerns only two."""
    return [(op, 0 if op == "all_to_all" else size) for op, size in entries if op != "shift"]


def _saved_and_loaded(state: Any, reducer: Reducer[Any, Any], layout: Layout) -> Any:
    file = io.BytesIO()
    torch.save(memory.save(state, layout), file)
    file.seek(0)
    fresh = reducer.init(layout)
    memory.load(fresh, torch.load(file, weights_only=True), layout)
    return fresh


def _mean(vectors: list[Any]) -> Tensor:
    return torch.stack([vector.double() for vector in vectors]).mean(0)


def _first_difference(some: list[Any], others: list[Any]) -> int:
    pairs = enumerate(zip(some, others))
    return next((i for i, (a, b) in pairs if a != b), min(len(some), len(others)))
