"""The table of training loops, and what workers run for it: each with plain DDP, and with thinwire in its place."""

import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import loops as one
import loops_of_models as two
import thinwire

FEEDBACK, LOCAL, FACTORS = "ErrorFeedback(TopK(1.0))", "local", "DAD(inputs='sent')"
LOW_RANK, FULL_RANK = "ErrorFeedback(PowerSGD(8))", "ErrorFeedback(PowerSGD(24))"
WRAPS = ("Dense()", "TopK(1.0)", FEEDBACK, LOW_RANK, FACTORS)
WAYS = (*WRAPS, LOCAL)
SEVERAL = 0.002  # bucket_cap_mb that cuts `loops.net` into a few buckets
Loop = Callable[["Kit"], Iterator[nn.Module]]


@dataclass(frozen=True)
class Case:
    """A loop; the ways whose result need not be DDP's, and why; those in which an error must say so."""

    loop: Loop
    unfair: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # by way: what the error says
    rounding: float = 1e-4  # how far apart they may be, as a part of how far DDP's parameters have moved
    full: bool = False  # gradients of a rank above 8, so that PowerSGD needs all of it to be exact

    def ways(self) -> list[str]:
        """The ways in which it makes sense."""
        return [FULL_RANK if way == LOW_RANK and self.full else way for way in WAYS if way not in self.unfair]


NOT_LINEAR = {LOCAL: "a step that is not linear in the gradient is another one for each worker's own"}
BOTH = "DDP averages the first loss alone, and leaves the second to each rank: these average both"
INSIDE = {FACTORS: "call the module that wrap() returned, not the model inside it"}
TWICE = {FACTORS: "takes the gradients of layers apart, which works once"}

TABLE: dict[str, Case] = {
    "plain": Case(one.plain),
    "zero_grad(set_to_none=False)": Case(partial(one.plain, set_to_none=False)),
    "gradient_as_bucket_view": Case(partial(one.plain, gradient_as_bucket_view=True)),
    "gradient_as_bucket_view, zeroed": Case(partial(one.plain, set_to_none=False, gradient_as_bucket_view=True)),
    "several buckets": Case(partial(one.plain, bucket_cap_mb=SEVERAL)),
    "static_graph": Case(partial(one.plain, static_graph=True)),
    "find_unused_parameters": Case(partial(one.plain, find_unused_parameters=True)),
    "cleared after the forward pass": Case(one.cleared_after_the_forward_pass),
    "cleared after the forward pass, views": Case(
        partial(one.cleared_after_the_forward_pass, gradient_as_bucket_view=True)
    ),
    "cleared by the model after the step": Case(one.cleared_by_the_model_after_the_step),
    "never cleared": Case(one.never_cleared),
    "momentum and a schedule": Case(one.momentum_and_schedule),
    "AdamW": Case(one.adamw, NOT_LINEAR),
    "several optimizers": Case(one.several_optimizers),
    "a parameter group added later": Case(
        one.a_group_added_later, refused={LOCAL: "trains parameters that it did not when local() was called"}
    ),
    "LBFGS": Case(one.closures, NOT_LINEAR),
    "a closure of SGD": Case(one.a_closure_of_sgd),
    "a step in the backward pass": Case(
        one.a_step_in_the_backward_pass, refused={FACTORS: "register it before wrap()"}
    ),
    "accumulation": Case(partial(one.accumulated, silent=False)),
    "accumulation, views": Case(partial(one.accumulated, silent=False, gradient_as_bucket_view=True)),
    "accumulation with no_sync": Case(partial(one.accumulated, silent=True, parts=3), full=True),
    "accumulation with no_sync, several buckets": Case(partial(one.accumulated, silent=True, bucket_cap_mb=SEVERAL)),
    "backward again after the step": Case(one.backward_again_after_the_step),
    "losses of one graph": Case(one.losses_of_one_graph, {FACTORS: BOTH, LOCAL: BOTH}),
    "losses of two passes": Case(one.losses_of_two_passes),
    "clip_grad_norm_": Case(partial(one.clipped, how="norm"), NOT_LINEAR),
    "clip_grad_value_": Case(partial(one.clipped, how="value"), NOT_LINEAR),
    "edited gradients": Case(one.edited_gradients),
    "a skipped spike": Case(one.a_skipped_spike),
    "gradients thrown away": Case(one.gradients_thrown_away),
    "an average of weights": Case(one.a_mean_over_the_world_of_weights),
    "a GAN": Case(partial(two.adversaries, through="wrapped")),
    "a GAN through the bare module": Case(partial(two.adversaries, through="bare"), refused=INSIDE),
    "a teacher": Case(two.a_teacher),
    "a gradient penalty": Case(partial(two.gradient_penalty, through="wrapped"), refused=TWICE),
    "a gradient penalty through the bare module": Case(partial(two.gradient_penalty, through="bare"), refused=TWICE),
    "a penalty before the forward pass": Case(two.a_penalty_before, refused=INSIDE),
    "weights in the loss": Case(two.weights_in_the_loss, full=True),
    "branches by turns": Case(partial(two.branches_by_turns, late=False)),
    "branches by turns, cleared late": Case(partial(two.branches_by_turns, late=True)),
    "branches by turns, views": Case(partial(two.branches_by_turns, late=True, gradient_as_bucket_view=True)),
    "branches by rank": Case(partial(two.branches_by_turns, late=False, apart=True)),
    "a layer used twice": Case(partial(two.shared, tied=False)),
    "tied weights": Case(partial(two.shared, tied=True), full=True),
    "frozen layers": Case(two.frozen),
    "double precision": Case(two.double),
    "two precisions": Case(two.two_precisions),
    "unfrozen by a new wrap": Case(partial(two.unfrozen_by_a_new_wrap, drop=False)),
    "unfrozen by a new wrap, the old one detached": Case(partial(two.unfrozen_by_a_new_wrap, drop=True)),
    "wrapped anew every epoch": Case(two.wrapped_anew),
    "BatchNorm": Case(two.batch_norm),
    "an embedding": Case(partial(two.words, sparse=False)),
    "a sparse embedding": Case(partial(two.words, sparse=True), refused=dict.fromkeys(WRAPS, "write sparse=False")),
    "an LSTM": Case(two.recurrent),
    "checkpoint": Case(partial(two.checkpointed, reentrant=False)),
    "checkpoint, several buckets": Case(partial(two.checkpointed, reentrant=False, bucket_cap_mb=SEVERAL)),
    "checkpoint, reentrant": Case(partial(two.checkpointed, reentrant=True)),
    "checkpoint, reentrant, several buckets": Case(partial(two.checkpointed, reentrant=True, bucket_cap_mb=SEVERAL)),
    "torch.compile before": Case(partial(two.compiled, first=True)),
    "torch.compile after": Case(partial(two.compiled, first=False)),
    "a GradScaler": Case(partial(two.scaled, overflow=False)),
    "a GradScaler that skips a step": Case(
        partial(two.scaled, overflow=True), {LOCAL: "each worker's scaler skips steps of its own"}
    ),
    "autocast": Case(two.autocast, rounding=1e-2, full=True),
    "evaluation under no_grad": Case(partial(two.looked_at_in_between, graded=False)),
    "evaluation with gradients on": Case(partial(two.looked_at_in_between, graded=True)),
    "hooks on gradients": Case(two.hooks_on_gradients, full=True),
    "join": Case(
        two.joined, {LOCAL: "there is no join"}, dict.fromkeys(WRAPS, "needs every worker in every backward pass")
    ),
}


def ways(name: str) -> list[str]:
    """The ways in which a loop is tried.

    A capture sees that both TopK without a memory and PowerSGD give gradients for gradients, as Dense and TopK with a
    memory do, which every loop has: so loops take one of the two by turns. `pytest --all` tries both with all.
    """
    case = TABLE[name]
    left_out = LOW_RANK if list(TABLE).index(name) % 2 else "TopK(1.0)"
    both = case.full or case.refused or os.environ.get("THINWIRE_TEST_ALL")
    return [way for way in case.ways() if both or way != left_out]


class Kit:
    """What a loop is given: `way` is "DDP", a method's spelling, or "local"."""

    def __init__(self, way: str):
        self.way, self.rank = way, dist.get_rank()
        self._local: list[thinwire.LocalHandle] = []

    def wrap(self, model: nn.Module, *, scaler: Any = None, **options: Any) -> nn.Module:
        if self.way == LOCAL:
            return model
        if self.way == "DDP":
            return DDP(model, **options)
        return thinwire.wrap(model, self.way, scaler=scaler, **options)

    def follow(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
        """The optimizers that train `model`, or the only one."""
        if self.way == LOCAL:
            self._local.append(thinwire.local(model, list(optimizers), "Dense()", every=1))
        return optimizers if len(optimizers) > 1 else optimizers[0]

    def bare(self, model: nn.Module) -> Any:
        return model.module if isinstance(model, DDP) else model

    def no_sync(self, model: Any, silent: bool) -> AbstractContextManager[Any]:
        return model.no_sync() if silent and isinstance(model, DDP) else nullcontext()

    def restart(self) -> None:
        """Weights were loaded."""
        for handle in self._local:
            handle.restart()

    def drop(self, model: nn.Module | None) -> None:
        """Done with `model`, or, where nobody tells thinwire so, with the local steps alone."""
        while self._local:
            self._local.pop().detach()
        if self.way not in ("DDP", LOCAL) and model is not None:
            thinwire.handle(model).detach()


def trace(loop: Loop, way: str) -> list[tuple[Tensor, Tensor]]:
    """The parameters and the buffers after each step."""
    torch.manual_seed(0)
    kit = Kit(way)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [(_numbers(module), _buffers(module)) for module in loop(kit)]
    finally:
        kit.drop(None)


def _numbers(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in module.parameters()])


def _buffers(module: nn.Module) -> Tensor:
    """What layers keep of the data, as BatchNorm's statistics."""
    return torch.cat([torch.zeros(1).double(), *(b.detach().flatten().double() for b in module.buffers())])


@dataclass
class Outcome:
    """How far from DDP's parameters, at worst after any step, as a part of how far those have moved; or an error."""

    apart: float = 0.0
    moved: float = 0.0
    buffers: float = 0.0  # how far from DDP's buffers, of their size
    error: str = ""
    traceback: str = ""


def table(names: list[str]) -> dict[tuple[str, str], Outcome]:
    found = {}
    for name in names:
        case = TABLE[name]
        expected = trace(case.loop, "DDP")
        for way in ways(name):
            try:
                ours = trace(case.loop, way)
                found[name, way] = _compared([one for one, _ in ours], [one for one, _ in expected])
                if way != LOCAL:  # whose statistics stay local until `finish`
                    found[name, way].buffers = _buffers_apart([one for _, one in ours], [one for _, one in expected])
            except Exception as error:
                found[name, way] = Outcome(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
            dist.barrier()
    return found


def from_one_method_to_another() -> tuple[Outcome, str]:
    """A model trained with factors, and then wrapped with another method; and what the first wrap says after that."""
    traces: dict[str, list[Tensor]] = {"DDP": [], "ours": []}
    told = ""
    for way, trace in traces.items():
        bare = model = one.net()
        for method in (FACTORS, FEEDBACK):
            old = model
            model = Kit("DDP" if way == "DDP" else method).wrap(bare)
            optimizer = one.sgd(model)
            for batch in one.data(3):
                optimizer.zero_grad()
                one.loss_of(model, batch).backward()
                optimizer.step()
                trace.append(_numbers(model))
        if way == "ours":
            try:
                old(one.data(1)[0][0])
            except RuntimeError as error:
                told = str(error)
    return _compared(traces["ours"], traces["DDP"]), told


def under_a_scaler(spellings: list[str], steps: int = 6) -> dict[str, float]:
    """How far parameters end from those of a run without the GradScaler, whose scale is a power of two and grows."""
    return {
        spelling: float((_scaled(spelling, steps, True) - _scaled(spelling, steps, False)).abs().max())
        for spelling in spellings
    }


def _scaled(spelling: str, steps: int, enabled: bool) -> Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3, enabled=enabled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = thinwire.wrap(one.net(), spelling, scaler=scaler)
    optimizer = one.sgd(model)
    for batch in one.data(steps, rows=64):
        optimizer.zero_grad()
        scaler.scale(one.loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    thinwire.handle(model).detach()
    return _numbers(model)


def _buffers_apart(ours: list[Tensor], expected: list[Tensor]) -> float:
    return max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in zip(ours, expected, strict=True))


def _compared(ours: list[Tensor], expected: list[Tensor]) -> Outcome:
    assert len(ours) == len(expected), "another number of steps"
    moved = float((expected[-1] - expected[0]).abs().max())
    apart = max(float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True))
    return Outcome(apart / max(moved, 1e-30), moved)
