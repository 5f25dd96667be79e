"""The front door: a model in, the same model trained with fewer bytes out."""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from thinwire import agree, checkpoint, kernels, memory
from thinwire.capture.buckets import Buckets
from thinwire.capture.groups import Capture, Grain
from thinwire.capture.layers import Layers
from thinwire.capture.moments import MomentWatch
from thinwire.comm import Ledger
from thinwire.comm.torch import TorchComm
from thinwire.feedback import ErrorFeedback
from thinwire.lane import Beside, Inline, Lane
from thinwire.methods.dad import FactorReducer
from thinwire.methods.dense import Dense
from thinwire.reducer import Layout, MethodWarning, Moments, Reducer, inner_reducers

_LOG = logging.getLogger("thinwire")
_HANDLES: "WeakKeyDictionary[nn.Module, DDPHandle]" = WeakKeyDictionary()


class Handle(ABC):
    """What thinwire knows of one model: bytes, metrics, state."""

    def __init__(self, capture: Capture):
        self.capture = capture

    @property
    def ledger(self) -> Ledger:
        """Everything this worker has sent so far."""
        return self.capture.comm.ledger

    def metrics(self) -> dict[str, float]:
        """What the last exchange cost and what the method says of it; see the page on metrics for each name."""
        found = dict(self.capture.last)
        told = [self.capture.reducer.metrics(group.state) for group in self.capture.groups]
        for key in dict.fromkeys(key for one in told for key in one):
            values = [one[key] for one in told if key in one]
            found[key] = sum(values) / len(values)
        found["residual_norm"] = self.residual_norm()
        return found

    def residual_norm(self) -> float:
        """The length of all that this worker has been handed and has not sent."""
        squares = 0.0
        for group in self.capture.groups:
            for name, tensor in memory.entry_tensors(group.state).items():
                if name.split(".")[-1] in ("residual", "r"):
                    squares += float(torch.linalg.vector_norm(tensor)) ** 2
        return squares**0.5

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This rank's state, which `torch.load(weights_only=True)` takes; every rank has its own."""

    @abstractmethod
    def load_state_dict(self, states: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Go on from this rank's own state, or from those of all ranks of a run with another number of workers."""

    def save(self, folder: str | Path) -> Path:
        """Write this rank's state into `folder`, whole or not at all."""
        return checkpoint.save(self.state_dict(), Path(folder))

    def load(self, folder: str | Path) -> None:
        """Go on from what `save` wrote on all ranks, be they as many as now or not."""
        self.load_state_dict(checkpoint.read(Path(folder), self.capture.comm.rank, self.capture.comm.world))

    @abstractmethod
    def detach(self) -> None:
        """Leave the model alone. Residuals that were not sent are dropped."""


class DDPHandle(Handle):
    """The handle of a DDP module. After `detach` its gradients are averaged densely."""

    def __init__(self, reducer: Reducer[Any, Any], buckets: Buckets, layers: Layers | None = None):
        super().__init__(buckets)
        self.reducer, self.buckets, self.layers = reducer, buckets, layers

    def metrics(self) -> dict[str, float]:
        beside = self.layers or self.buckets.watch
        found, told = super().metrics(), {} if beside is None else beside.metrics()
        both = {key: found[key] + told[key] for key in told if key in found}  # bytes and seconds of both exchanges
        return found | told | both

    @property
    def ledger(self) -> Ledger:
        ledger = super().ledger
        return ledger if self.layers is None else ledger + self.layers.comm.ledger

    def plan(self) -> list[dict[str, Any]]:
        """How each layer goes, for methods that choose by layer."""
        return [] if self.layers is None else self.layers.plan()

    def state_dict(self) -> dict[str, Any]:
        return checkpoint.state_dict(self.reducer, self.buckets, self.layers)

    def load_state_dict(self, states: dict[str, Any] | list[dict[str, Any]]) -> None:
        checkpoint.load_state_dict(self.reducer, self.buckets, self.layers, states)

    def detach(self) -> None:
        self.buckets.detach()
        if self.layers is not None:
            self.layers.detach()
        _HANDLES.pop(self.buckets.ddp, None)


def wrap(
    model: nn.Module,
    reducer: Reducer[Any, Any],
    *,
    grain: Grain | None = None,
    overlap: bool | None = None,
    share: Callable[[str], bool] | None = None,
    boundary: Callable[[str, Tensor], Tensor] | None = None,
    check_every: int = 100,
    scaler: Any = None,
    process_group: dist.ProcessGroup | None = None,
    **ddp: Any,
) -> DDP:
    """`DDP(model)`, with `reducer` in place of the all-reduce.

    grain: what one call of the method sees: each tensor, each of DDP's buckets, or the whole model in one vector.
    overlap: reduce beside the backward pass. check_every: steps between looks at whether replicas are still equal.
    scaler: the GradScaler, if there is one, so that residuals follow its scale. share, boundary: see distributed
    auto-differentiation. Everything else goes to DDP.
    """
    rest: Reducer[Any, Any] = Dense() if isinstance(reducer, FactorReducer) else reducer
    options = _options(rest, grain, overlap, check_every, scaler)
    group = process_group or dist.distributed_c10d._get_default_group()
    comm = _joined(model, reducer, options, group)
    warn_without_memory(reducer, stacklevel=3)
    layers = None
    if isinstance(reducer, FactorReducer):
        for_layers: Any = {"share": share, "boundary": boundary, "check_every": check_every, "scaler": scaler}
        layers = Layers(model, reducer, TorchComm(own_group(group)), **for_layers)
        DDP._set_params_and_buffers_to_ignore_for_model(model, layers.ignored)
    if grain is None and options.grain == "model":
        # One bucket for all, so that the whole gradient lies in one vector and nothing is copied.
        ddp.setdefault("bucket_cap_mb", 1 + 2 * sum(p.numel() * p.element_size() for p in model.parameters()) // 2**20)
    wrapped = DDP(model, process_group=process_group, **ddp)
    if layers is not None:
        layers.install(wrapped)
    _attach(wrapped, reducer, rest, layers, comm, options)
    return wrapped


def attach(
    ddp_model: DDP,
    reducer: Reducer[Any, Any],
    *,
    grain: Grain | None = None,
    overlap: bool | None = None,
    check_every: int = 100,
    scaler: Any = None,
) -> DDPHandle:
    """Put `reducer` in place of the all-reduce of a DDP module that somebody else made. Options as for `wrap`."""
    if not isinstance(ddp_model, DDP):
        raise TypeError(
            f"attach wants a DistributedDataParallel module, not {type(ddp_model).__name__}: use wrap(model, ...)"
        )
    if isinstance(reducer, FactorReducer):
        raise TypeError(f"{type(reducer).__name__} replaces layers before DDP sees them: use thinwire.wrap(model, ...)")
    if ddp_model in _HANDLES:
        raise RuntimeError("this DDP module has a thinwire method already: detach it, and wrap a new DDP module")
    options = _options(reducer, grain, overlap, check_every, scaler)
    comm = _joined(ddp_model.module, reducer, options, ddp_model.process_group)
    warn_without_memory(reducer, stacklevel=3)
    return _attach(ddp_model, reducer, reducer, None, comm, options)


def handle(ddp_model: nn.Module) -> DDPHandle:
    """The handle of a module that went through `wrap` or `attach`."""
    if ddp_model not in _HANDLES:
        raise KeyError("this module has no thinwire handle: it must be what wrap() returned or attach() was given")
    return _HANDLES[ddp_model]


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


def _joined(model: nn.Module, reducer: Reducer[Any, Any], options: _Options, group: dist.ProcessGroup) -> TorchComm:
    """The workers, once they have agreed on what they are about to do; before anything that could hang if not."""
    comm = TorchComm(own_group(group))
    shapes = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in model.named_parameters() if p.requires_grad]
    description = {
        "method": repr(reducer),
        "grain": options.grain,
        "overlap": str(options.overlap),
        "check_every": str(options.check_every),
        "scaler": "a GradScaler" if options.scaler is not None else "none",
        "model": "; ".join(shapes),
        "torch version": torch.__version__.split("+")[0],
    }
    agree.compare(description, comm, next(model.parameters()).device)
    return comm


def _attach(
    ddp: DDP,
    reducer: Reducer[Any, Any],
    rest: Reducer[Any, Any],
    layers: Layers | None,
    comm: TorchComm,
    options: _Options,
) -> DDPHandle:
    device = next(ddp.parameters()).device
    if not averages_everything(rest):
        warm_kernels(comm.rank)
    lane: Lane = Beside(device) if options.overlap else Inline()
    watch = MomentWatch(ddp.module) if rest.wants is Moments else None
    buckets = Buckets(
        ddp,
        rest,
        comm,
        grain=options.grain,
        lane=lane,
        watch=watch,
        check_every=options.check_every,
        scaler=options.scaler,
    )
    _HANDLES[ddp] = DDPHandle(reducer, buckets, layers)
    return _HANDLES[ddp]


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A process group for thinwire alone, so that nobody's collectives interleave with its own."""
    everyone = dist.get_world_size(group) == dist.get_world_size()
    ranks = None if everyone else dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=_timeout(group), use_local_synchronization=not everyone)


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long the user lets `group` wait; torch has no public way to ask."""
    for name in ("cuda", "cpu"):
        try:
            return group._get_backend(torch.device(name)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


@cache  # once a process
def warm_kernels(rank: int) -> None:
    """Compile now what would else be compiled in the middle of training."""
    seconds = kernels.warm(torch.float32)
    if seconds > 1 and rank == 0:
        _LOG.warning("loading kernels took %.1f s; what was compiled is cached for the next run", seconds)


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
