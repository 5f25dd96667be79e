"""What a worker knows of a layer: its inputs and deltas. Its weight leaves DDP's hands.

Every trainable parameter goes one way. Weights of Linear, Conv, Embedding and recurrent cells that are used by such
layers alone travel as factors; everything else (biases, norms, MultiheadAttention, parametrised or frozen weights,
subclasses with a forward of their own) stays with DDP. Parameters that `share` turns down go no way at all.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import memory
from thinwire.capture.chains import find_chains
from thinwire.capture.engine import Boundary, Engine
from thinwire.capture.factored import (
    Factored,
    FactoredConv1d,
    FactoredConv2d,
    FactoredConv3d,
    FactoredEmbedding,
    FactoredLinear,
    convolution_of,
    plain_class,
)
from thinwire.capture.recurrent import (
    FactoredGRUCell,
    FactoredLSTMCell,
    FactoredRNNCell,
    UnrolledGRU,
    UnrolledLSTM,
    UnrolledRNN,
)
from thinwire.capture.slots import FactorGroup, Slot
from thinwire.comm import Comm
from thinwire.factors import DTYPES, Chain
from thinwire.lane import Beside, Lane
from thinwire.methods.dad import DAD, FactorReducer, crossover, dense_way
from thinwire.methods.edad import EDAD
from thinwire.reducer import Layout
from thinwire.rules import LOOKUP, PRODUCT, Rule

CLASSES: dict[type[nn.Module], type[Factored]] = {
    nn.Linear: FactoredLinear,
    nn.Conv1d: FactoredConv1d,
    nn.Conv2d: FactoredConv2d,
    nn.Conv3d: FactoredConv3d,
    nn.Embedding: FactoredEmbedding,
    nn.RNNCell: FactoredRNNCell,
    nn.GRUCell: FactoredGRUCell,
    nn.LSTMCell: FactoredLSTMCell,
}
UNROLLED: dict[type[nn.Module], type[Factored]] = {nn.RNN: UnrolledRNN, nn.GRU: UnrolledGRU, nn.LSTM: UnrolledLSTM}

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
        classes = CLASSES | (UNROLLED if getattr(reducer, "unroll", False) else {})
        device = next(model.parameters()).device
        options: Any = {"in_flight": in_flight, "check_every": check_every, "scaler": scaler, "boundary": boundary}
        self.engine = Engine(reducer, comm, lane or Beside(device), **options)
        self._removers: list[Callable[[], None]] = []

        owners = _owners(model)
        slots: dict[nn.Parameter, Slot] = {}
        for weight, places in owners.items():
            rules = [_rule(module, attribute, classes) for _, module, attribute in places]
            shared = all(share(name) for name, _, _ in places)
            if shared and _may_travel(weight) and all(rule is not None for rule in rules):
                found = list(dict.fromkeys(rule for rule in rules if rule is not None))
                slots[weight] = Slot([name for name, _, _ in places], weight, found, self.engine)
        self._leave_ddp_something(slots, owners, share)

        self.ignored = [name for slot in slots.values() for name in slot.names]
        self.ignored += [name for name in _names(model) if not share(name)]
        for weight, slot in slots.items():
            comm.broadcast(weight.data, 0)
            for _, module, attribute in owners[weight]:
                if not isinstance(module, Factored):
                    module.__class__ = classes[type(module)]
                    vars(module)["factored_slots"] = {}
                vars(module)["factored_slots"][attribute] = slot
        self.engine.groups = self._groups(list(slots.values()))
        for number, group in enumerate(self.engine.groups):
            for slot in group.slots:
                slot.group = number

    @staticmethod
    def _leave_ddp_something(
        slots: dict[nn.Parameter, Slot], owners: dict[nn.Parameter, Any], share: Callable[[str], bool]
    ) -> None:
        """DDP refuses a model that leaves it nothing: then it keeps the smallest weight."""
        left = [p for p, places in owners.items() if p.requires_grad and p not in slots and share(places[0][0])]
        if slots and not left:
            smallest = min(slots, key=lambda weight: weight.numel())
            slots.pop(smallest).hook.remove()

    def _groups(self, slots: list[Slot]) -> list[FactorGroup]:
        """Neighbouring layers of one dtype share a call, from the last layer to the first; so does a chain."""
        chains = find_chains(self.model, slots, strict=self.reducer.strict) if isinstance(self.reducer, EDAD) else []
        groups = [self._group(members, chain) for members, chain in chains]
        chained = {slot for members, _ in chains for slot in members}
        run: list[Slot] = []
        for slot in reversed([slot for slot in slots if slot not in chained]):
            alike = not run or (run[0].weight.dtype, run[0].weight.device) == (slot.weight.dtype, slot.weight.device)
            if run and (not alike or sum(s.weight.numel() * s.weight.element_size() for s in run) >= COALESCED):
                groups.append(self._group(run, None))
                run = []
            run.append(slot)
        return [*groups, self._group(run, None)] if run else groups

    def _group(self, slots: list[Slot], chain: Chain | None) -> FactorGroup:
        weight = slots[0].weight
        names, shapes = tuple(slot.names[0] for slot in slots), tuple(slot.weight.shape for slot in slots)
        layout = Layout(names, shapes, weight.dtype, weight.device)
        return FactorGroup(list(slots), layout, self.reducer.init(layout), chain)

    def install(self, wrapped: nn.Module) -> None:
        """Follow the passes of the module that the user calls: DDP, or the model itself."""
        engine = self.engine

        def enter(module: nn.Module, arguments: Any) -> None:
            if torch.is_grad_enabled() and engine.groups:
                engine.enter(getattr(module, "require_backward_grad_sync", True))

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            done = engine.leave()
            if done is not None:
                for tensor in filter(lambda t: t.requires_grad, _tensors(output)):
                    tensor.register_hook(lambda gradient, done=done: engine.begin(done))

        self._removers += [
            wrapped.register_forward_pre_hook(enter).remove,
            wrapped.register_forward_hook(leave, always_call=True).remove,
        ]

    def detach(self) -> None:
        """Go on without the method: DDP no longer knows these weights, so their exact mean is exchanged from now on."""
        self.reducer = self.engine.reducer = DAD()
        for group in self.engine.groups:
            group.state, group.chain = None, None

    def unwrap(self) -> None:
        """Give the layers their own classes back. Their weights are exchanged by nobody from now on."""
        for module in self.model.modules():
            if isinstance(module, Factored):
                del vars(module)["factored_slots"]
                module.__class__ = plain_class(type(module))  # type: ignore[assignment]
        for slot in self.engine.slots:
            slot.hook.remove()
        for remove in self._removers:
            remove()
        self.engine.lane.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside are the caller's own: for torch.autograd.grad, which would otherwise be exchanged."""
        self.engine.paused = True
        try:
            yield
        finally:
            self.engine.paused = False

    # ── what there is to tell ──────────────────────────────────────────────────────────────────────────────────────

    def metrics(self) -> dict[str, float]:
        """What the last exchange cost, and what the method has to say of each layer."""
        found = dict(self.engine.last)
        for group in self.engine.groups:
            found |= self.reducer.metrics(group.state)
        return found

    def plan(self) -> list[dict[str, Any]]:
        """A row for each weight, as of the last exchange: how it goes, at what price, and what dense would cost.

        `bytes` are those that one worker's link carries; `rows` are all workers' together, and at `crossover` of them
        factors cost what the gradient does.
        """
        rows = []
        for group in self.engine.groups:
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
                        "dense_bytes": dense_way(seen, weight, self.comm, working).wire,
                        "rows": self.comm.world * seen.rows(weight),
                        "crossover": crossover(seen, weight, self.comm, working),
                    }
                )
        return rows

    # ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        groups = self.engine.groups
        return {
            "world": self.comm.world,
            "exchanges": self.engine.exchanges,
            "scale": self.engine.scale,
            "groups": [{"names": list(g.layout.names), "state": memory.save(g.state, g.layout)} for g in groups],
        }

    def load_state_dict(self, saved: list[dict[str, Any]], joins: bool = False) -> None:
        """Go on from this rank's state, or from several ranks' of a run with more workers."""
        groups = self.engine.groups
        if [part["names"] for part in saved[0]["groups"]] != [list(group.layout.names) for group in groups]:
            raise ValueError("the checkpoint has other layers, or in another order, than this model")
        states = []
        for position, group in enumerate(groups):
            state = self.reducer.init(group.layout)
            parts = [one["groups"][position]["state"] for one in saved]
            merged = parts[0] if len(parts) == 1 else memory.merge(parts, state)
            memory.load(state, merged, group.layout, same_world=saved[0]["world"] == self.comm.world)
            if joins:
                memory.empty_sums(state)
            states.append(state)
        for group, state in zip(groups, states, strict=True):
            group.state = state
        self.engine.exchanges, self.engine.scale = saved[0]["exchanges"], saved[0]["scale"]


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
    return weight.requires_grad and weight.is_leaf and weight.dtype in DTYPES and not watched


def _rule(module: nn.Module, attribute: str, classes: Mapping[type[nn.Module], Any]) -> Rule | None:
    """How a module uses one of its parameters, if it is a layer whose class can be exchanged."""
    kind: Any = type(module)
    layer: Any = module
    if kind not in classes or not attribute.startswith("weight") or "forward" in vars(module):
        return None
    if kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return convolution_of(layer)
    if kind is nn.Embedding:
        plain = layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        return LOOKUP if plain else None
    return None if getattr(layer, "proj_size", 0) else PRODUCT


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
