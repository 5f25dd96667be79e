"""What a worker knows after steps of its own: where they have taken its parameters, and from which anchor.

Beside the parameters it sees to what else the steps have changed: buffers, and the optimizer's memory. And it notices
when somebody else changes parameters, since that would be taken for the work of the steps.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire import exchange
from thinwire.comm import Comm
from thinwire.core.reducer import Layout, Reducer
from thinwire.step import agreement as agree
from thinwire.step.groups import Group
from thinwire.step.step import Steps

T = TypeVar("T", bound=Tensor)
_SAMPLES = 256  # entries of a parameter that are looked at for edits by others: all of a small one


class Changes:
    """The parameters that one optimizer, or several, train, in fragments, with the anchors they left from."""

    def __init__(
        self, model: nn.Module, optimizers: list[Optimizer], reducer: Reducer[Any, Any], comm: Comm, fragments: int
    ):
        self.model, self.optimizers, self.comm = model, optimizers, comm
        self.parameters = _trained(model, optimizers)
        self.buffers = {name: b for name, b in self.all_buffers().items() if b.is_floating_point()}
        self.device = next(iter(self.parameters.values())).device
        grain = f"{fragments} fragment{'s' if fragments > 1 else ''}"
        self.steps = Steps(reducer, comm, self.parameters, grain=grain)
        self.groups = self.steps.groups
        self.fragments: list[slice] = []  # of `groups`
        for names in _fragments(self.parameters, fragments):
            layouts = _layouts({name: self.parameters[name] for name in names})
            self.fragments.append(slice(len(self.groups), len(self.groups) + len(layouts)))
            self.groups += [self.steps.make_group(layout) for layout in layouts]
        self.kept = {name: b.detach().clone() for name, b in self.buffers.items()}  # as of the last exchange
        self.edited = torch.zeros((), dtype=torch.bool, device=self.device)
        self._seen = self._sample()

    def all_buffers(self) -> dict[str, Tensor]:
        """The model's, now, masks and tables too."""
        return _plain(self.model.named_buffers())

    # ── parameters and anchors ─────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def start(self) -> None:
        """Leave from the parameters as they are now, on rank 0 if they differ; with memories that are empty."""
        everything = [*self.model.parameters(), *self.model.buffers()]
        marks = self.comm.all_gather(torch.tensor([agree.checksum(everything)], device=self.device))
        if len(set(marks.flatten().tolist())) > 1:  # a model is a long message: only where it is needed
            for tensor in (t for t in everything if t.numel()):
                sent = tensor.detach().reshape(-1).contiguous().clone()
                self.comm.broadcast(sent.view(torch.uint8), 0)
                tensor.copy_(sent.view(tensor.shape))
        for group in self.groups:
            group.state = self.steps.reducer.init(group.layout)
            group.state.anchor.copy_(self.read(group))
        self.keep_buffers()
        self.edited.zero_()
        self.note()

    def read(self, group: Group) -> Tensor:
        """A group's parameters as one vector, which belongs to the group and is overwritten by the next call."""
        if group.scratch is None:
            group.scratch = group.layout.zeros()
        for view, name in zip(group.layout.views(group.scratch), group.layout.names, strict=True):
            view.copy_(self.parameters[name])
        return group.scratch

    def write(self, group: Group, flat: Tensor) -> None:
        for view, name in zip(group.layout.views(flat), group.layout.names, strict=True):
            self.parameters[name].copy_(view)

    def mark(self, fragment: int) -> int:
        return agree.checksum(group.state.anchor for group in self.groups[self.fragments[fragment]])

    @torch.no_grad()
    def _go_to(self, flats: list[Tensor]) -> None:
        for group, flat in zip(self.groups, flats, strict=True):
            self.write(group, flat)
        for name, buffer in self.buffers.items():
            buffer.copy_(self.kept[name])

    def roll_back(self) -> None:
        """Back to departure; what is not finite in the optimizer's memory is forgotten, or it would return."""
        self._go_to([group.state.departure for group in self.groups])
        for state in (state for optimizer in self.optimizers for state in optimizer.state.values()):
            for value in state.values():
                if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
                    value.zero_()

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """With the anchors in the model's place."""
        places = [*self.parameters.values(), *self.buffers.values()]
        own = [place.detach().clone() for place in places]
        self._go_to([group.state.anchor for group in self.groups])
        try:
            yield
        finally:
            with torch.no_grad():
                for place, value in zip(places, own, strict=True):
                    place.copy_(value)

    # ── buffers and the optimizer's state ──────────────────────────────────────────────────────────────────────

    def changed_buffers(self) -> dict[str, bool]:
        """Which buffers have changed since the last exchange: statistics do, masks and tables do not."""
        return {name: not torch.equal(b, self.kept[name]) for name, b in self.buffers.items()}

    def keep_buffers(self) -> None:
        for name, buffer in self.buffers.items():
            self.kept[name].copy_(buffer)

    def optimizer_tensors(self, fragment: int) -> list[Tensor]:
        """What the optimizer remembers entry by entry of a fragment's parameters."""
        found = []
        for group in self.groups[self.fragments[fragment]]:
            for parameter in (self.parameters[name] for name in group.layout.names):
                for state in (optimizer.state.get(parameter, {}) for optimizer in self.optimizers):
                    found += [t for _, t in sorted(state.items()) if _entrywise(t, parameter)]
        return found

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        full = [t.detach().to(self.device, torch.promote_types(t.dtype, torch.float32)) for t in tensors]
        return exchange.mean_of(full, self.comm)

    # ── edits by others ────────────────────────────────────────────────────────────────────────────────────────

    def note(self) -> None:
        """Remember how the parameters look after a step."""
        self._seen = self._sample()

    def look(self) -> None:
        """See, before the next step, whether somebody has changed them since. Read only at an exchange: no waiting."""
        self.edited |= (self._sample() != self._seen).any()

    def _sample(self) -> Tensor:
        alike: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.parameters.values():
            stride = max(1, parameter.numel() // _SAMPLES)
            picked = parameter.detach().as_strided((-(-parameter.numel() // stride),), (stride,))
            alike.setdefault(parameter.dtype, []).append(picked.to(self.device))
        # As bits, in which NaN equals itself.
        return torch.cat([torch.cat(parts).double() for parts in alike.values()]).view(torch.int64)

    def check_covered(self) -> None:
        """The optimizer must not train what is not exchanged."""
        covered = {id(p) for p in self.parameters.values()}
        if any(p.requires_grad and id(p) not in covered for p in _of_optimizers(self.optimizers)):
            raise RuntimeError(
                "the optimizer trains parameters that it did not when local() was called (unfrozen, or a new group): "
                "call handle.finish(), handle.detach() and local() again"
            )


def _trained(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, nn.Parameter]:
    names = {id(p): name for name, p in model.named_parameters()}
    given = [p for p in _of_optimizers(optimizers) if p.requires_grad]
    strangers = sum(id(p) not in names for p in given)
    if strangers:
        raise ValueError(
            f"{strangers} of the optimizer's parameters are not the model's, so nobody would exchange them: "
            "give local() the module that holds them all"
        )
    if not given:
        raise ValueError("the optimizer has no parameter that is trained: there is nothing to exchange")
    trained = {id(p) for p in given}
    return _plain((name, p) for name, p in model.named_parameters() if id(p) in trained)


def _plain(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Under the names of the model that is not compiled, so that a checkpoint fits both."""
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in named}


def _of_optimizers(optimizers: list[Optimizer]) -> list[nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _fragments(parameters: dict[str, nn.Parameter], count: int) -> list[list[str]]:
    """The parameters in order, cut between tensors into `count` runs of about equal size."""
    names = list(parameters)
    if not 1 <= count <= len(names):
        raise ValueError(f"fragments must lie between 1 and the number of parameters, {len(names)}, not {count}")
    ends = [0, *accumulate(p.numel() for p in parameters.values())]
    cuts = [0]
    for part in range(1, count):
        free = range(cuts[-1] + 1, len(names) - (count - part) + 1)
        cuts.append(min(free, key=lambda at: abs(ends[at] * count - ends[-1] * part)))
    return [names[start:end] for start, end in zip(cuts, [*cuts[1:], len(names)])]


def _layouts(parameters: dict[str, nn.Parameter]) -> list[Layout]:
    """One vector for all that can lie in one: the same dtype on the same device."""
    layouts = []
    for dtype, device in dict.fromkeys((p.dtype, p.device) for p in parameters.values()):
        alike = {name: p for name, p in parameters.items() if (p.dtype, p.device) == (dtype, device)}
        layouts.append(Layout(tuple(alike), tuple(p.shape for p in alike.values()), dtype, device))
    return layouts


def _entrywise(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
