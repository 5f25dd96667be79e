"""edAD: one delta for a whole chain of layers, the others computed by everyone for the rows of all workers.

Baker et al., arXiv 2102.09631 (abstracts read; the rest from the authors' public code). Within a chain

    z_i = a_{i-1} @ W_i.T + b_i,   a_i = f_i(z_i)

workers exchange the chain's inputs a_0, the values z_1 .. z_{L-1} and the last delta; every inner delta follows from
the one above through W and f_i. The public code shares a_i and takes the derivative from it, which only monotone
activations allow; z_i is as large, and any f_i that looks at one row at a time will do. `replay` shares a_0 and the
last delta alone and computes the z_i again too. Both are exact, and both make every worker do the backward
pass of all: they pay where links are thin and there is time to spare.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.comm import Comm
from thinwire.comm.table import wire_bytes
from thinwire.core import memory
from thinwire.core.factor_reducer import FactorReducer, LayerPlan, check_options, dense_plan, factor_plan
from thinwire.core.factors import Chain, Factors
from thinwire.core.reducer import Layout, Reducer
from thinwire.exchange import factors
from thinwire.methods.dad.dad import empty, exact, split

# How far a delta that was computed may lie from the one that autograd gave, relative to it: far above rounding, far
# below what a layer that is not a chain would bring.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}


@dataclass
class EDADState:
    names: list[str] = memory.derived()


@dataclass(frozen=True)
class EDAD(FactorReducer[EDADState]):
    """The exact mean gradient; about half of dAD's bytes in a chain of equal layers, or with `replay` far fewer.

    Chains are runs of Linear layers in nn.Sequential modules with activations or LayerNorms between them. `strict`
    refuses by name what interrupts one (dropout, batch norm); without it a new chain starts there. Other layers go
    as in dAD.
    """

    replay: bool = False
    strict: bool = True
    rest: Reducer[Any, Any] | None = None
    inputs: Literal["sent", "kept"] | None = None

    def __post_init__(self) -> None:
        check_options(self.rest, self.inputs)

    @property
    def chains(self) -> Literal["found", "strict"]:
        return "strict" if self.strict else "found"

    def init(self, layout: Layout, /) -> EDADState:
        return EDADState(list(layout.names))

    def reduce(self, local: Factors, state: EDADState, comm: Comm, out: Tensor, /) -> None:
        if local.chain is None:
            exact(factors.agreed(local, comm), local.formed, comm, out)
        else:
            self._reduce_chain(factors.agreed(local, comm), local.chain, state, comm, out)
        empty(local)

    def _reduce_chain(self, local: Factors, chain: Chain, state: EDADState, comm: Comm, out: Tensor) -> None:
        uses, forms = local.uses, local.forms or []
        rows = forms[0].rows
        if any(form.rows != rows for form in forms):
            raise RuntimeError(f"{_chain(state)} is not run as a chain: its layers see different numbers of rows")
        sides: list[factors.Side] = [(uses[0].inputs, forms[0].inputs, forms[0].input_dtype)]
        last = (uses[-1].deltas, forms[-1].deltas, forms[-1].delta_dtype)
        if not self.replay:
            for use, form, weight, bias in zip(uses[:-1], forms, chain.weights, chain.biases):
                sides.append((_through(use.inputs, weight, bias), form.deltas, form.delta_dtype))
        first, *values, delta = (t.to(out.dtype) for t in factors.gather_stacked([*sides, last], comm))

        inputs = [first]
        for i, between in enumerate(chain.between):
            if self.replay:
                values.append(_through(inputs[i], chain.weights[i], chain.biases[i]))
            inputs.append(between(values[i].clone()))
        here = slice(comm.rank * rows, comm.rank * rows + len(uses[0].inputs))
        for i in reversed(range(len(uses))):
            _compare(delta[here], uses[i].deltas, i, state)
            torch.mul(delta.T @ inputs[i], 1 / comm.world, out=split(out, local.shapes)[i])
            if i:
                delta = _pulled_back(chain, i - 1, values[i - 1], delta @ chain.weights[i].to(delta.dtype))

    def ways(self, local: Factors, state: EDADState, comm: Comm, working: torch.dtype, /) -> list[LayerPlan]:
        if local.chain is None or local.formed:
            return [
                dense_plan(local, weight, comm, working) if weight in local.formed else factor_plan(local, weight, comm)
                for weight in range(len(local.shapes))
            ]
        ways, forms = [], local.forms or []
        for i, form in enumerate(forms):
            size = 0
            if i == 0:
                size += comm.value_bytes(torch.Size(form.inputs).numel(), form.input_dtype)
            if i == len(forms) - 1 or not self.replay:
                size += comm.value_bytes(torch.Size(form.deltas).numel(), form.delta_dtype)
            ways.append(LayerPlan("chain", wire_bytes("all_gather", size, comm.world)))
        return ways


def _through(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(inputs, weight.detach().to(inputs.dtype), None if bias is None else bias.detach().to(inputs.dtype))


def _pulled_back(chain: Chain, i: int, value: Tensor, delta: Tensor) -> Tensor:
    """The delta before f_i, from the one after it."""
    with torch.enable_grad():
        value = value.detach().requires_grad_()
        after = chain.between[i](value.clone())  # a clone, for activations that work in place
        (before,) = torch.autograd.grad(after, value, delta)
    return before


def _compare(computed: Tensor, own: Tensor, i: int, state: EDADState) -> None:
    """A worker knows its own deltas: if those computed for its rows differ, the layers are no chain."""
    kind, own = own.dtype, own.to(computed.dtype)
    gap, length = float(torch.linalg.vector_norm(computed - own)), float(torch.linalg.vector_norm(own))
    if gap > TOLERANCE[kind] * length:
        raise RuntimeError(
            f"{_chain(state)} is not run as a chain: the delta computed for {state.names[i]} is not the one it had "
            f"(off by {gap / max(length, 1e-300):.1g}). Is an output used twice, a layer skipped? Use DAD"
        )


def _chain(state: EDADState) -> str:
    return f"the chain {state.names[0]} .. {state.names[-1]}"
