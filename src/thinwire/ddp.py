"""The front door: a model in, the same model trained with fewer bytes out."""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
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
    if grain is None and not _averages_everything(reducer):
        # One bucket for all, so that the whole gradient lies in one vector and nothing is copied.
        ddp.setdefault("bucket_cap_mb", 1 + 2 * sum(p.numel() * p.element_size() for p in model.parameters()) // 2**20)
    group = process_group or dist.distributed_c10d._get_default_group()
    layers = None
    rest = reducer
    if isinstance(reducer, FactorReducer):
        options: Any = {"share": share, "boundary": boundary, "check_every": check_every, "scaler": scaler}
        layers = Layers(model, reducer, TorchComm(own_group(group)), **options)
        DDP._set_params_and_buffers_to_ignore_for_model(model, layers.ignored)
        rest = Dense()
    wrapped = DDP(model, process_group=process_group, **ddp)
    if layers is not None:
        layers.install(wrapped)
    _attach(wrapped, reducer, rest, layers, grain, overlap, check_every, scaler)
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
    return _attach(ddp_model, reducer, reducer, None, grain, overlap, check_every, scaler)


def handle(ddp_model: nn.Module) -> DDPHandle:
    """The handle of a module that went through `wrap` or `attach`."""
    if ddp_model not in _HANDLES:
        raise KeyError("this module has no thinwire handle: it must be what wrap() returned or attach() was given")
    return _HANDLES[ddp_model]


def _attach(
    ddp: DDP,
    reducer: Reducer[Any, Any],
    rest: Reducer[Any, Any],
    layers: Layers | None,
    grain: Grain | None,
    overlap: bool | None,
    check_every: int,
    scaler: Any,
) -> DDPHandle:
    if ddp in _HANDLES:
        raise RuntimeError("this DDP module has a thinwire method already: detach it, and wrap a new DDP module")
    plain = _averages_everything(rest)
    grain = grain or ("bucket" if plain else "model")
    if grain not in ("tensor", "bucket", "model"):
        raise ValueError(f"grain must be 'tensor', 'bucket' or 'model', not {grain!r}")
    comm = TorchComm(own_group(ddp.process_group))
    device = next(ddp.parameters()).device
    agree.compare(_description(ddp, reducer, grain), comm, device)
    warn_without_memory(reducer, stacklevel=4)
    if not plain:
        warm_kernels(comm.rank)
    lane: Lane = Beside(device) if (plain if overlap is None else overlap) else Inline()
    watch = MomentWatch(ddp.module) if rest.wants is Moments else None
    buckets = Buckets(ddp, rest, comm, grain=grain, lane=lane, watch=watch, check_every=check_every, scaler=scaler)
    _HANDLES[ddp] = DDPHandle(reducer, buckets, layers)
    return _HANDLES[ddp]


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A process group for thinwire alone, so that nobody's collectives interleave with its own."""
    everyone = dist.get_world_size(group) == dist.get_world_size()
    ranks = None if everyone else dist.get_process_group_ranks(group)
    return dist.new_group(ranks, use_local_synchronization=not everyone)


@cache  # once a process
def warm_kernels(rank: int) -> None:
    """Compile now what would else be compiled in the middle of training."""
    seconds = kernels.warm(torch.float32)
    if seconds > 1 and rank == 0:
        _LOG.warning("loading kernels took %.1f s; what was compiled is cached for the next run", seconds)


def _averages_everything(reducer: Reducer[Any, Any]) -> bool:
    """Dense, or Dense in fewer bits: no memory, so buckets may go as they come."""
    return isinstance(inner_reducers(reducer)[-1], Dense) and reducer.init(Layout((), ())) is None


def _description(ddp: DDP, reducer: Reducer[Any, Any], grain: str) -> dict[str, str]:
    shapes = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in ddp.module.named_parameters() if p.requires_grad]
    return {
        "method": repr(reducer),
        "grain": grain,
        "model": "; ".join(shapes),
        "torch version": torch.__version__.split("+")[0],
    }


def warn_without_memory(reducer: Reducer[Any, Any], stacklevel: int) -> None:
    parts = inner_reducers(reducer)
    if any(part.needs_memory for part in parts) and not any(isinstance(part, ErrorFeedback) for part in parts):
        warnings.warn(
            f"{reducer!r} never sends what it leaves out, so the model it trains is biased. "
            f"Write ErrorFeedback({reducer!r}) to send it later.",
            MethodWarning,
            stacklevel=stacklevel,
        )
