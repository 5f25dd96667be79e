"""What a worker knows of a layer: its inputs and deltas. Its weight leaves DDP's hands.

Every trainable parameter goes one way. Weights of Linear, Conv, Embedding and recurrent cells that are used by such
layers alone travel as factors; everything else (biases, norms, MultiheadAttention, parametrised or frozen weights,
subclasses with a forward of their own) stays with DDP. Parameters that `share` turns down go no way at all.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from thinwire.capture.layers.factors.backward import BackwardExchange, Boundary
from thinwire.capture.layers.factors.chains import find_chains
from thinwire.capture.layers.factors.slots import FactorGroup, FactorSink, Slot
from thinwire.capture.layers.operations import operation_of, release, take_over
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.factor_reducer import FactorReducer, crossover, dense_plan
from thinwire.core.factors import DTYPES, Chain
from thinwire.core.reducer import Layout, MethodWarning, Reducer
from thinwire.step.hooks import ModuleHook
from thinwire.step.lanes import Beside, Lane
from thinwire.step.step import Steps

COALESCED = 2**20  # bytes of weights under which neighbouring layers share a message
IN_FLIGHT = 256 * 2**20  # bytes of factors that may wait for the network before the backward pass waits for them


class Layers:
    """The layers of one model that are exchanged as factors.

    `share` says by name which parameters are shared at all; `boundary` may replace the delta that leaves a layer.
    `check_every`: exchanges between looks at whether the weights are still equal. `scaler`: the GradScaler, if any.
    """

    def __init__(
        self,
        model: nn.Module,
        reducer: FactorReducer[Any],
        comm: Comm,
        *,
        share: Callable[[str], bool] | None = None,
        boundary: Boundary | None = None,
        check_every: int = 100,
        scaler: Any = None,
        lane: Lane | None = None,
        in_flight: int = IN_FLIGHT,
    ):
        self.model, self.comm = model, comm
        self.reducer: FactorReducer[Any] = reducer
        share = share or (lambda name: True)
        device = next(model.parameters()).device
        names = dict(model.named_parameters())
        self.steps = Steps(reducer, comm, names, grain="layers", check_every=check_every, scaler=scaler)
        lane = lane or Beside(device)
        self.exchange = BackwardExchange(self.steps, lane, in_flight=in_flight, boundary=boundary)
        self._removers: list[Callable[[], None]] = []
        self._wrapped: Callable[[], nn.Module | None] = lambda: None

        owners = _owners(model)
        operations = {module: operation_of(module, unroll=reducer.unroll) for module in model.modules()}
        products = {module: {} if one is None else one.products(module) for module, one in operations.items()}
        slots = FactorSink(self.give_back)
        for weight, places in owners.items():
            found = [products[module].get(attribute) for _, module, attribute in places]
            shared = all(share(name) for name, _, _ in places)
            if shared and _may_travel(weight) and None not in found:
                known = list(dict.fromkeys(product for product in found if product is not None))
                slots[weight] = Slot([name for name, _, _ in places], weight, known, self.exchange)
        self._leave_ddp_something(slots, owners, share)
        self._left: dict[str, list[nn.Parameter]] = {}  # what DDP keeps, by the kind of module it is in
        for weight, places in owners.items():
            if weight.requires_grad and weight not in slots and share(places[0][0]):
                self._left.setdefault(type(places[0][1]).__name__, []).append(weight)

        self.ignored = [name for slot in slots.values() for name in slot.names]
        self.ignored += [name for name in _names(model) if not share(name)]
        # As DDP calls those that the model itself holds.
        self.ignored += [f".{name}" for name in self.ignored if "." not in name]
        self._taken: list[nn.Module] = []
        for slot in slots.values():
            comm.broadcast(slot.weight.data, 0)
        for module, operation in operations.items():
            if operation is not None and any(weight in slots for weight in module.parameters(recurse=False)):
                take_over(module, operation, slots)
                self._taken.append(module)
        self.exchange.groups += self._groups(list(slots.values()))
        for number, group in enumerate(self.exchange.groups):
            for slot in group.slots:
                slot.group = number

    @staticmethod
    def _leave_ddp_something(slots: FactorSink, owners: dict[nn.Parameter, Any], share: Callable[[str], bool]) -> None:
        """DDP refuses a model that leaves it nothing: then it keeps the smallest weight."""
        left = [p for p, places in owners.items() if p.requires_grad and p not in slots and share(places[0][0])]
        if slots and not left:
            smallest = min(slots, key=lambda weight: weight.numel())
            slots.pop(smallest).hook.remove()

    def _groups(self, slots: list[Slot]) -> list[FactorGroup]:
        """Neighbouring layers of one dtype share a call, from the last layer to the first; so does a chain."""
        wanted = self.reducer.chains
        chains = [] if wanted == "none" else find_chains(self.model, slots, strict=wanted == "strict")
        groups = [self._group(members, chain) for members, chain in chains]
        chained = {slot for members, _ in chains for slot in members}
        most = math.inf if self.comm.far else COALESCED  # where trips cost much, all share one
        run: list[Slot] = []
        for slot in reversed([slot for slot in slots if slot not in chained]):
            alike = not run or (run[0].weight.dtype, run[0].weight.device) == (slot.weight.dtype, slot.weight.device)
            if run and (not alike or sum(s.weight.numel() * s.weight.element_size() for s in run) >= most):
                groups.append(self._group(run, None))
                run = []
            run.append(slot)
        return [*groups, self._group(run, None)] if run else groups

    def _group(self, slots: list[Slot], chain: Chain | None) -> FactorGroup:
        weight = slots[0].weight
        names, shapes = tuple(slot.names[0] for slot in slots), tuple(slot.weight.shape for slot in slots)
        layout = Layout(names, shapes, weight.dtype, weight.device)
        return FactorGroup(layout, self.reducer.init(layout), slots=list(slots), chain=chain)

    def install(self, wrapped: nn.Module) -> None:
        """Follow the passes of the module that the user calls: DDP, or the model itself."""
        exchange = self.exchange

        def enter(module: nn.Module, arguments: Any) -> None:
            if torch.is_grad_enabled() and exchange.groups:
                for slot in exchange.slots:
                    slot.check_unwatched()
                exchange.enter(getattr(module, "require_backward_grad_sync", True))

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            done = exchange.leave()
            if done is not None:
                for tensor in filter(lambda t: t.requires_grad, _tensors(output)):
                    tensor.register_hook(lambda gradient, done=done: exchange.begin(done))

        self._removers += [
            wrapped.register_forward_pre_hook(ModuleHook(enter)).remove,
            wrapped.register_forward_hook(ModuleHook(leave), always_call=True).remove,
        ]
        self._wrapped = weakref.ref(wrapped)

    def warn_if_few(self, rest: Reducer[Any, Any], stacklevel: int) -> None:
        """Say so if most of the model goes by another way than the one that was asked for."""
        sizes = {kind: sum(p.numel() for p in held) for kind, held in self._left.items()}
        left = sum(sizes.values())
        share = left / max(1, left + self.numel)
        if share > 0.5:
            most = sorted((kind for kind in sizes if sizes[kind] > left / 10), key=lambda kind: -sizes[kind])
            fused = any(kind in ("RNN", "GRU", "LSTM") for kind in most)
            warnings.warn(
                f"{share:.0%} of this model's entries have no factors and go by {rest!r}: "
                f"{type(self.reducer).__name__} does not know {', '.join(most[:4])} as layers"
                f"{', unless unroll=True runs them as cells' if fused else ''}.",
                MethodWarning,
                stacklevel=stacklevel + 1,
            )

    def detach(self, exact: FactorReducer[Any]) -> None:
        """Go on with a method without memory: DDP no longer knows these weights, so it exchanges them from now on."""
        self.reducer = self.steps.reducer = exact
        for group in self.exchange.groups:
            group.state, group.chain = None, None

    def unwrap(self) -> None:
        """Give the layers their own classes back. Their weights are exchanged by nobody from now on."""
        for module in self._taken:
            release(module)
        for slot in self.exchange.slots:
            slot.hook.remove()
        for remove in self._removers:
            remove()
        self.exchange.lane.close()

    def give_back(self) -> None:
        """The model is wrapped anew. Whoever still calls the old module hears of it: it exchanges nothing any more."""
        self.unwrap()
        self.comm.close()
        wrapped = self._wrapped()
        if wrapped is not None:
            wrapped.register_forward_pre_hook(ModuleHook(_refuse_old))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside are the caller's own: for torch.autograd.grad, which would otherwise be exchanged."""
        self.exchange.paused = True
        try:
            yield
        finally:
            self.exchange.paused = False

    @property
    def numel(self) -> int:
        """How many entries go as factors."""
        return sum(group.layout.numel for group in self.exchange.groups)

    # ── what there is to tell ──────────────────────────────────────────────────────────────────────────────────────

    def metrics(self) -> dict[str, float]:
        """What the last exchange cost, and what the method has to say of each layer."""
        found = dict(self.steps.last)
        for group in self.exchange.groups:
            found |= self.reducer.metrics(group.state)
        return found

    def residual_norm(self) -> float:
        """The length of all that was kept back."""
        kept = [tensor for group in self.exchange.groups for tensor in memory.unsent_tensors(group.state)]
        return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in kept))

    def plan(self) -> list[dict[str, Any]]:
        """A row for each weight, as of the last exchange: how it goes, at what price, and what dense would cost.

        `bytes` are those that one worker's link carries; `rows` are all workers' together, and at `crossover` of them
        factors cost what the gradient does.
        """
        rows = []
        for group in self.exchange.groups:
            if group.seen is None:
                continue
            seen, working = group.seen, group.layout.working
            ways = self.reducer.ways(seen, group.state, self.comm, working)
            for weight, (name, way) in enumerate(zip(group.layout.names, ways, strict=True)):
                rows.append(
                    {
                        "layer": name,
                        "mode": way.mode,
                        "bytes": way.wire,
                        "dense_bytes": dense_plan(seen, weight, self.comm, working).wire,
                        "rows": self.comm.world * seen.rows(weight),
                        "crossover": crossover(seen, weight, self.comm, working),
                    }
                )
        return rows

    # ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        groups = self.exchange.groups
        return {
            "world": self.comm.world,
            "exchanges": self.steps.step,
            "scale": self.steps.scale,
            "groups": [
                {"names": list(group.layout.names), "state": memory.save(state, group.layout)}
                for group, state in zip(groups, self.steps.states(), strict=True)
            ],
        }

    def load_state_dict(self, saved: list[dict[str, Any]]) -> None:
        """Go on from this rank's state, or from all ranks' of a run with another number of workers."""
        groups = self.exchange.groups
        if [part["names"] for part in saved[0]["groups"]] != [list(group.layout.names) for group in groups]:
            raise ValueError(
                "the checkpoint has other layers, or in another order, than this model; or it was made over another "
                "link, where layers share messages in another way"
            )
        states = []
        for position, group in enumerate(groups):
            state = self.reducer.init(group.layout)
            parts = [one["groups"][position]["state"] for one in saved]
            same = saved[0]["world"] == self.comm.world
            merged = parts[0] if same else memory.new_world(parts, state, self.comm.rank, self.comm.world)
            memory.load(state, merged, group.layout, same_world=same)
            states.append(state)
        for group, state in zip(groups, states, strict=True):
            group.state = state
        self.steps.step, self.steps.scale = saved[0]["exchanges"], saved[0]["scale"]


def _refuse_old(*_: Any) -> NoReturn:
    raise RuntimeError(
        "the model in here was wrapped anew, and this module exchanges nothing any more: call the new one"
    )


def _owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module, str]]]:
    """Every place where a parameter lives: its name there, the module, the attribute."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((f"{path}.{attribute}".lstrip("."), module, attribute))
    return owners


def _names(model: nn.Module) -> list[str]:
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return parameters + [name for name, _ in model.named_buffers(remove_duplicate=False)]


def _may_travel(weight: nn.Parameter) -> bool:
    """A leaf with a gradient to be exchanged, and nobody who waits for that gradient during the backward pass."""
    watched = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    return weight.requires_grad and weight.is_leaf and weight.numel() > 0 and weight.dtype in DTYPES and not watched


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in whatever a model returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name))
