"""The contract of methods that want a layer's factors, and what each way of sending a weight costs."""

from abc import abstractmethod
from typing import Any, ClassVar, Generic, Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.comm.table import wire_bytes
from thinwire.core.factors import Factors
from thinwire.core.reducer import Reducer, State


class LayerPlan(NamedTuple):
    """How one weight goes: densely, as factors or as few columns, and the bytes this puts on every worker's link."""

    mode: str
    wire: float


class FactorReducer(Reducer[Factors, State], Generic[State]):
    """A method that wants a layer's factors; the weights of a layout are its layers."""

    wants: ClassVar[type] = Factors

    unroll: bool = False  # whether RNN, GRU and LSTM are to run as cells, which show their factors
    rest: Reducer[Any, Any] | None = None  # for what has no factors (biases, norms, unknown layers); None: averaged

    inputs: Literal["sent", "kept"] | None = None  # of layers that see raw data; "kept": their gradients go instead

    @property
    def sends_inputs(self) -> bool:
        """Whether what goes into a layer goes out as it is."""
        return True

    @property
    def chains(self) -> Literal["none", "found", "strict"]:
        """Whether runs of Linear layers are to be found; "strict" refuses what interrupts one."""
        return "none"

    @abstractmethod
    def ways(self, local: Factors, state: State, comm: Comm, working: torch.dtype, /) -> list[LayerPlan]:
        """How each weight goes when the workers' factors have the forms of `local`; the same on all workers."""


def check_options(rest: Reducer[Any, Any] | None, inputs: str | None, bits: int | None = None) -> None:
    """What has no factors is a gradient, and goes by a method that takes gradients."""
    if rest is not None and not (isinstance(rest, Reducer) and rest.wants is Tensor):
        raise TypeError(f"rest is a method that takes gradients, such as ErrorFeedback(ExDyna(0.01)), not {rest!r}")
    if inputs not in (None, "sent", "kept"):
        raise ValueError(f"inputs must be 'sent' or 'kept', not {inputs!r}: may raw data go to the other workers?")
    if bits not in (None, 4, 8, 16):
        raise ValueError(f"bits must be 16, 8 or 4, not {bits}: of a value of the factors")


def factor_plan(local: Factors, weight: int, comm: Comm) -> LayerPlan:
    return LayerPlan("factors", wire_bytes("all_gather", local.nbytes(weight, comm), comm.world))


def dense_plan(local: Factors, weight: int, comm: Comm, working: torch.dtype) -> LayerPlan:
    size = comm.value_bytes(local.shapes[weight].numel(), working)
    return LayerPlan("dense", wire_bytes("all_mean", size, comm.world))


def crossover(local: Factors, weight: int, comm: Comm, working: torch.dtype) -> float:
    """The rows of all workers together at which factors cost as much as the gradient; no rows, no crossover."""
    rows = local.rows(weight)
    size = comm.value_bytes(local.shapes[weight].numel(), working)
    return 2 * size * rows / local.nbytes(weight, comm) if rows else float("inf")
