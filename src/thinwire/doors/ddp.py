"""The front door: a model in, the same model trained with fewer bytes out."""

import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parameter import is_lazy

from thinwire import kernels
from thinwire.capture.gradients.arrived import Grain
from thinwire.capture.gradients.buckets import Buckets
from thinwire.capture.layers.factors.capture import Layers
from thinwire.capture.layers.operations import give_back
from thinwire.capture.layers.squares.second_moments import SecondMoments
from thinwire.comm import Comm, Ledger
from thinwire.comm.torch import TorchComm
from thinwire.core.factor_reducer import FactorReducer
from thinwire.core.reducer import Layout, MethodWarning, Moments, Reducer, inner_reducers
from thinwire.doors.far import Chosen, WhenFar, choose
from thinwire.doors.handle import Handle as Handle
from thinwire.doors.levels import ddp_inside
from thinwire.methods.dad.dad import DAD
from thinwire.methods.dense import Dense
from thinwire.spelling import reducer_of
from thinwire.step import agreement, checkpoints
from thinwire.step.hooks import ModuleHook
from thinwire.step.lanes import Beside, Inline, Lane
from thinwire.wrappers.feedback import ErrorFeedback

_LOG = logging.getLogger("thinwire")
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # where DDP looks for names, when it is made
_HANDLES: "weakref.WeakKeyDictionary[nn.Module, DDPHandle]" = weakref.WeakKeyDictionary()


class DDPHandle(Handle):
    """The handle of a DDP module. After `detach` its gradients are averaged densely."""

    def __init__(self, reducer: Reducer[Any, Any], buckets: Buckets, layers: Layers | None = None):
        super().__init__(buckets.steps)
        self.reducer, self.buckets, self.layers = reducer, buckets, layers
        self.chosen = Chosen(reducer)

    def metrics(self) -> dict[str, float]:
        beside = self.layers or self.buckets.squares
        found, told = super().metrics(), {} if beside is None else beside.metrics()
        both = {key: found[key] + told[key] for key in told if key in found}  # bytes and seconds of both exchanges
        if self.layers is not None and "density" in both:  # entries sent of all entries
            every, factored = sum(p.numel() for p in self.buckets.steps.parameters.values()), self.layers.numel
            both["density"] = (found["density"] * every + told["density"] * factored) / (every + factored)
        return found | told | both | self.chosen.metrics()

    def residual_norm(self) -> float:
        beside = self.layers.residual_norm() if self.layers is not None else 0.0
        return math.hypot(super().residual_norm(), beside)

    @property
    def ledger(self) -> Ledger:
        ledger = super().ledger
        return ledger if self.layers is None else ledger + self.layers.comm.ledger

    def plan(self) -> list[dict[str, Any]]:
        """How each layer goes, for methods that choose by layer."""
        return [] if self.layers is None else self.layers.plan()

    def state_dict(self) -> dict[str, Any]:
        return checkpoints.state_dict(self.reducer, self.buckets.steps, self.layers)

    def load_state_dict(self, states: dict[str, Any] | list[dict[str, Any]]) -> None:
        checkpoints.load_state_dict(self.reducer, self.buckets.steps, self.layers, states)
        self.resumed = True

    def detach(self) -> None:
        ddp = self.buckets.ddp
        ours = self.buckets.steps.comm
        self.buckets.detach(TorchComm(ddp.process_group))
        if self.layers is not None:
            self.layers.detach(DAD())
        _HANDLES.pop(ddp, None)
        ours.close()


def wrap(
    model: nn.Module,
    reducer: Reducer[Any, Any] | str,
    *,
    grain: Grain | None = None,
    overlap: bool | None = None,
    share: Callable[[str], bool] | None = None,
    boundary: Callable[[str, Tensor], Tensor] | None = None,
    check_every: int = 100,
    scaler: Any = None,
    when_far: WhenFar = "fall_back",
    process_group: dist.ProcessGroup | None = None,
    **ddp: Any,
) -> DDP:
    """`DDP(model)`, with `reducer` (or its spelling) in place of the all-reduce.

    grain: what the method gets in one call: a "tensor", one of DDP's buckets ("bucket"), or the whole "model" as one
    vector. overlap: exchange while the backward pass runs. check_every: after so many steps the workers compare their
    replicas. scaler: the GradScaler, if there is one, so that residuals follow its scale. when_far: where the method
    would take longer than DDP's fp16 hook, on a link with latency, "fall_back" uses `Cast(Dense())` and warns, "keep"
    uses the method. share, boundary: for distributed auto-differentiation. All other arguments go to DDP.
    """
    reducer = reducer_of(reducer)
    rest = (reducer.rest or Dense()) if isinstance(reducer, FactorReducer) else reducer
    options = _options(rest, grain, overlap, check_every, scaler)
    group = process_group or dist.distributed_c10d._get_default_group()
    comm = _joined(model, reducer, options, when_far, group)
    chosen = choose(model, reducer, comm, when_far, stacklevel=2)
    if chosen.fell_back:
        reducer = rest = chosen.reducer
        options = _options(rest, grain, overlap, check_every, scaler)
    warn_without_memory(rest, stacklevel=3)
    layers = None
    if isinstance(reducer, FactorReducer):
        for_layers: Any = {"share": share, "boundary": boundary, "check_every": check_every, "scaler": scaler}
        layers = Layers(model, reducer, TorchComm.own(group), **for_layers)
        layers.warn_if_few(rest, stacklevel=3)
        layers.exchange.tells = True
    if grain is None and options.grain == "model":
        # One bucket for all, so that the whole gradient lies in one vector and nothing is copied.
        ddp.setdefault("bucket_cap_mb", 1 + 2 * sum(p.numel() * p.element_size() for p in model.parameters()) // 2**20)
    elif comm.far:
        # DDP's own size, but without its small first bucket, whose trips cost more than starting early saves.
        ddp.setdefault("bucket_cap_mb", 25)
    with _hidden(model, [] if layers is None else layers.ignored):
        wrapped = DDP(model, process_group=process_group, **ddp)
    if layers is not None:
        layers.install(wrapped)
    _attach(wrapped, reducer, rest, layers, comm, options).chosen = chosen
    return wrapped


def attach(
    ddp_model: DDP,
    reducer: Reducer[Any, Any] | str,
    *,
    grain: Grain | None = None,
    overlap: bool | None = None,
    check_every: int = 100,
    scaler: Any = None,
    when_far: WhenFar = "fall_back",
) -> DDPHandle:
    """Put `reducer` in place of the all-reduce of a DDP module that somebody else made. Options as for `wrap`."""
    found = ddp_inside(ddp_model)
    if found is None:
        raise TypeError(
            f"attach wants a DistributedDataParallel module, or what a framework put around one, and there is none in "
            f"this {type(ddp_model).__name__}: attach to what the framework's prepare() or setup() returned; in a "
            "training loop of your own, use wrap(model, ...)"
        )
    ddp_model = found
    reducer = reducer_of(reducer)
    if isinstance(reducer, FactorReducer):
        raise TypeError(f"{type(reducer).__name__} replaces layers before DDP sees them: use thinwire.wrap(model, ...)")
    if ddp_model in _HANDLES:
        raise RuntimeError("this DDP module has a thinwire method already: detach it, and wrap a new DDP module")
    options = _options(reducer, grain, overlap, check_every, scaler)
    comm = _joined(ddp_model.module, reducer, options, when_far, ddp_model.process_group)
    chosen = choose(ddp_model.module, reducer, comm, when_far, stacklevel=2)
    if chosen.fell_back:
        reducer, options = chosen.reducer, _options(chosen.reducer, grain, overlap, check_every, scaler)
    warn_without_memory(reducer, stacklevel=3)
    attached = _attach(ddp_model, reducer, reducer, None, comm, options)
    attached.chosen = chosen
    return attached


def handle(ddp_model: nn.Module) -> DDPHandle:
    """The handle of a module that went through `wrap` or `attach`."""
    found = ddp_inside(ddp_model)
    if found is None or found not in _HANDLES:
        raise KeyError("this module has no thinwire handle: it must be what wrap() returned or attach() was given")
    return _HANDLES[found]


@dataclass(frozen=True)
class _Options:
    """How a method is run, with defaults filled in; the same on all ranks."""

    grain: Grain
    overlap: bool
    check_every: int
    scaler: Any


def _options(
    rest: Reducer[Any, Any], grain: Grain | None, overlap: bool | None, check_every: int, scaler: Any
) -> _Options:
    if grain not in (None, "tensor", "bucket", "model"):
        raise ValueError(f"grain must be 'tensor', 'bucket' or 'model', not {grain!r}")
    plain = averages_everything(rest)  # as DDP does it: bucket by bucket, beside the backward pass
    return _Options(
        grain or ("bucket" if plain else "model"), plain if overlap is None else overlap, check_every, scaler
    )


def _joined(
    model: nn.Module, reducer: Reducer[Any, Any], options: _Options, when_far: WhenFar, group: dist.ProcessGroup
) -> TorchComm:
    """The workers, once they have agreed on what they are about to do; before anything that could hang if not."""
    check_trainable(model)
    _check_dense(model)
    comm = TorchComm.own(group)
    shapes = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in model.named_parameters() if p.requires_grad]
    description = {
        "method": repr(reducer),
        "grain": options.grain,
        "overlap": str(options.overlap),
        "check_every": str(options.check_every),
        "when_far": when_far,
        "scaler": "a GradScaler" if options.scaler is not None else "none",
        "model": "; ".join(shapes),
        "torch version": torch.__version__.split("+")[0],
    }
    agreement.compare(description, comm, next(model.parameters()).device)
    give_back(model)
    return comm


@contextmanager
def _hidden(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Let the DDP that is made inside ignore these too. A later one, around the same model, must see them again."""
    before = getattr(model, _IGNORED, None)
    DDP._set_params_and_buffers_to_ignore_for_model(model, [*(before or ()), *names])
    try:
        yield
    finally:
        delattr(model, _IGNORED) if before is None else setattr(model, _IGNORED, before)


def _attach(
    ddp: DDP,
    reducer: Reducer[Any, Any],
    rest: Reducer[Any, Any],
    layers: Layers | None,
    comm: TorchComm,
    options: _Options,
) -> DDPHandle:
    device = next(ddp.parameters()).device
    if getattr(ddp, "_use_python_reducer", False):
        raise RuntimeError(
            "DDP was built for torch.compile's python reducer, which calls no communication hooks: set "
            "torch._dynamo.config.optimize_ddp = 'ddp_optimizer' before DDP is made"
        )
    ddp.join_hook = ModuleHook(partial(_refuse_join, type(reducer).__name__))  # type: ignore[method-assign]
    if not averages_everything(rest):
        warm_kernels(comm.rank, device)
    lane: Lane = Beside(device) if options.overlap else Inline()
    buckets = Buckets(
        ddp,
        rest,
        comm,
        grain=options.grain,
        lane=lane,
        spreads=averages_everything(rest),
        squares=SecondMoments(ddp.module) if rest.wants is Moments else None,
        check_every=options.check_every,
        scaler=options.scaler,
    )
    if layers is not None:
        layers.exchange.broken_off = buckets.break_off
    _HANDLES[ddp] = DDPHandle(reducer, buckets, layers)
    for used in [comm] if layers is None else [comm, layers.comm]:
        close_with(ddp, used)
    return _HANDLES[ddp]


def close_with(owner: Any, comm: Comm) -> None:
    """Close the connections when nobody holds `owner` any more: not everybody calls `detach`."""
    weakref.finalize(owner, comm.close).atexit = False


def _refuse_join(name: str, **_: Any) -> NoReturn:
    raise RuntimeError(
        f"join() lets a worker without data stand aside, and {name} needs every worker in every backward pass: give "
        "all workers as many batches, if need be empty ones"
    )


def _check_dense(model: nn.Module) -> None:
    """Refuse sparse gradients: DDP hands them out as something else than a vector."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise TypeError(
                f"{name} is an {type(module).__name__} with sparse=True, and methods take gradients as vectors: write "
                "sparse=False (sparse methods find the rows that count by themselves), or train it with local()"
            )


def check_trainable(model: nn.Module) -> None:
    """Refuse what no method can carry, before anything is set up."""
    if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise ValueError(f"{lazy[0]} has no shape yet: run the model on a batch first, so that lazy modules get theirs")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("the model has no parameter that is trained: there is nothing to exchange")
    if odd := [name for name, p in trained.items() if not p.is_floating_point()]:
        raise TypeError(
            f"{odd[0]} is {trained[odd[0]].dtype} ({len(odd)} such parameters): methods count in real numbers. Store "
            "it as torch.view_as_real(...) and make it complex in forward, or train this model with plain DDP"
        )
    if sharded := [name for name, p in trained.items() if type(p.data).__name__ == "DTensor"]:  # slow to import
        raise TypeError(
            f"{sharded[0]} is a DTensor ({len(sharded)} such parameters), as FSDP2 and tensor parallelism make them: "
            "thinwire takes models that are whole on every worker. Leave out fully_shard, or train without thinwire"
        )


@cache  # once a process
def warm_kernels(rank: int, device: torch.device) -> None:
    """Compile now what would else be compiled in the middle of training; loading what is cached is not worth a word."""
    if kernels.chosen(device) != "cpu":
        return  # nothing is compiled by numba
    from thinwire.kernels.compiling import watched

    tell = _LOG.warning if rank == 0 else _LOG.debug
    with watched(lambda: tell("compiling kernels, once on this machine ...")) as compiling:
        seconds = kernels.warm(torch.float32)
    if compiling.begun:
        tell("compiling kernels took %.1f s; they are cached for the next run", seconds)


def averages_everything(reducer: Reducer[Any, Any]) -> bool:
    """Dense, or Dense in fewer bits: no memory, so buckets may go as they come."""
    return isinstance(inner_reducers(reducer)[-1], Dense) and reducer.init(Layout((), ())) is None


def warn_without_memory(reducer: Reducer[Any, Any], stacklevel: int) -> None:
    parts = inner_reducers(reducer)
    if any(part.needs_memory for part in parts) and not any(isinstance(part, ErrorFeedback) for part in parts):
        warnings.warn(
            f"{reducer!r} never sends what it leaves out, so the model it trains is biased. "
            f"Write ErrorFeedback({reducer!r}) to send it later.",
            MethodWarning,
            stacklevel=stacklevel,
        )
