"""Recurrent layers as cells, each step of each gate a use of its weight.

A use pairs the inputs and the deltas of one step by itself, so the order in which the backward pass meets the steps
does not matter. The fused modules of PyTorch show no deltas; run step by step they do, at the price of speed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from thinwire.capture.layers.operations.entry import Products, operation
from thinwire.capture.layers.operations.linear import linear
from thinwire.capture.layers.operations.sink import Sink
from thinwire.core.products import PRODUCT

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]


def _plain_step(squash: Callable[[Tensor], Tensor]) -> Step:
    return lambda gates_x, gates_h, state: (squash(gates_x + gates_h),)


def _gru_step(gates_x: Tensor, gates_h: Tensor, state: State) -> State:
    reset_x, update_x, new_x = gates_x.chunk(3, -1)
    reset_h, update_h, new_h = gates_h.chunk(3, -1)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    update = torch.sigmoid(update_x + update_h)
    return (new + update * (state[0] - new),)


def _lstm_step(gates_x: Tensor, gates_h: Tensor, state: State) -> State:
    enter, forget, new, leave = (gates_x + gates_h).chunk(4, -1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


STEPS: dict[str, Step] = {
    "RNN_TANH": _plain_step(torch.tanh),
    "RNN_RELU": _plain_step(torch.relu),
    "GRU": _gru_step,
    "LSTM": _lstm_step,
}


def _cell(layer: Any, sink: Sink, mode: str, x: Tensor, state: State | None) -> State:
    if state is None:
        state = (x.new_zeros(*x.shape[:-1], layer.hidden_size),) * (2 if mode == "LSTM" else 1)
    gates_x = linear(sink, x, layer.weight_ih, layer.bias_ih)
    return STEPS[mode](gates_x, linear(sink, state[0], layer.weight_hh, layer.bias_hh), state)


def _cell_products(layer: nn.RNNCellBase) -> Products:
    return {"weight_ih": PRODUCT, "weight_hh": PRODUCT}


@operation(nn.RNNCell, products=_cell_products)
def rnn_cell(layer: nn.RNNCell, sink: Sink, input: Tensor, hx: Tensor | None = None) -> Tensor:
    return _cell(layer, sink, f"RNN_{layer.nonlinearity.upper()}", input, None if hx is None else (hx,))[0]


@operation(nn.GRUCell, products=_cell_products)
def gru_cell(layer: nn.GRUCell, sink: Sink, input: Tensor, hx: Tensor | None = None) -> Tensor:
    return _cell(layer, sink, "GRU", input, None if hx is None else (hx,))[0]


@operation(nn.LSTMCell, products=_cell_products)
def lstm_cell(
    layer: nn.LSTMCell, sink: Sink, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    hidden, cell = _cell(layer, sink, "LSTM", input, hx)
    return hidden, cell


def _fused_products(layer: nn.RNNBase) -> Products:
    return {name: PRODUCT for name, _ in layer.named_parameters() if name.startswith("weight")}


@operation(nn.RNN, nn.GRU, nn.LSTM, products=_fused_products, refuses=lambda layer: layer.proj_size > 0, unrolls=True)
def unrolled(layer: nn.RNNBase, sink: Sink, input: Any, hx: Any = None) -> Any:
    """A fused module, run step by step; a PackedSequence still runs fused, and its weights' gradients go densely."""
    kind: Any = {"GRU": nn.GRU, "LSTM": nn.LSTM}.get(layer.mode, nn.RNN)
    if isinstance(input, PackedSequence):
        return kind.forward(layer, input, hx)
    pair = layer.mode == "LSTM"
    outputs, last = _unroll(layer, sink, input, hx if pair or hx is None else (hx,))
    return outputs, last if pair else last[0]


def _unroll(layer: nn.RNNBase, sink: Sink, inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
    single = inputs.dim() == 2
    x = inputs.unsqueeze(1) if single else inputs.transpose(0, 1) if layer.batch_first else inputs
    directions = 2 if layer.bidirectional else 1
    if state is None:
        zeros = x.new_zeros(layer.num_layers * directions, x.shape[1], layer.hidden_size)
        state = (zeros,) * (2 if layer.mode == "LSTM" else 1)
    elif single:
        state = tuple(part.unsqueeze(1) for part in state)
    last: list[State] = []
    for depth in range(layer.num_layers):
        sides = []
        for way in range(directions):
            number = depth * directions + way
            outputs, final = _run(layer, sink, x, tuple(part[number] for part in state), depth, way)
            sides.append(outputs)
            last.append(final)
        x = torch.cat(sides, -1)
        if layer.dropout and depth < layer.num_layers - 1:
            x = F.dropout(x, layer.dropout, layer.training)
    finals = tuple(torch.stack(part) for part in zip(*last, strict=True))
    if single:
        return x.squeeze(1), tuple(part.squeeze(1) for part in finals)
    return x.transpose(0, 1) if layer.batch_first else x, finals


def _run(layer: nn.RNNBase, sink: Sink, x: Tensor, state: State, depth: int, way: int) -> tuple[Tensor, State]:
    """One direction of one layer, over all moments."""
    suffix = f"_l{depth}" + ("_reverse" if way else "")

    def gates(side: str, inputs: Tensor) -> Tensor:
        bias = getattr(layer, f"bias_{side}{suffix}") if layer.bias else None
        return linear(sink, inputs, getattr(layer, f"weight_{side}{suffix}"), bias)

    gates_x = gates("ih", x)
    outputs: list[Tensor] = []
    moments: Iterable[int] = range(len(x) - 1, -1, -1) if way else range(len(x))
    for moment in moments:
        state = STEPS[layer.mode](gates_x[moment], gates("hh", state[0]), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if way else outputs), state
