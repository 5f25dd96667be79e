"""A reducer over some steps, in one process."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import Layout, Reducer
from thinwire.comm import Comm, Ledger
from thinwire.comm.threads import in_threads


class Ran(NamedTuple):
    out: Tensor  # [steps, entries]
    left: Tensor  # [workers, steps, entries], in `local`
    states: list[Any]
    ledgers: list[Ledger]


def layout_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Layout:
    return Layout(tuple(f"p{i}" for i in range(len(shapes))), tuple(map(torch.Size, shapes)), dtype)


def gradients(steps: int, world: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, world, numel, generator=generator, dtype=torch.float64).to(dtype)


def run(reducer: Reducer[Any, Any], grads: Tensor, layout: Layout | None = None) -> Ran:
    """`grads` is [steps, workers, entries]; every worker must agree with the first."""
    steps, world, numel = grads.shape
    layout = layout or layout_of((numel,), dtype=grads.dtype)

    def work(comm: Comm) -> tuple[Tensor, Tensor, Any, Ledger]:
        state, outs, lefts = reducer.init(layout), torch.zeros(steps, numel, dtype=grads.dtype), []
        for step in range(steps):
            local = grads[step, comm.rank].clone()
            reducer.reduce(local, state, comm, outs[step])
            lefts.append(local)
        return outs, torch.stack(lefts), state, comm.ledger

    outs, lefts, states, ledgers = zip(*in_threads(world, work), strict=True)
    assert all(torch.equal(out, outs[0]) for out in outs)
    return Ran(outs[0], torch.stack(lefts), list(states), list(ledgers))
