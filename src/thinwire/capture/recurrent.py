"""Recurrent layers as cells, each step of each gate a use of its weight.

A use pairs the inputs and the deltas of one step by itself, so the order in which the backward pass meets the steps
does not matter. The fused modules of PyTorch show no deltas; run step by step they do, at the price of speed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from thinwire.capture.factored import Factored, linear


def _plain_step(kind: str, gates_x: Tensor, gates_h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    squash = torch.tanh if kind == "RNN_TANH" else torch.relu
    return (squash(gates_x + gates_h),)


def _gru_step(kind: str, gates_x: Tensor, gates_h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    reset_x, update_x, new_x = gates_x.chunk(3, -1)
    reset_h, update_h, new_h = gates_h.chunk(3, -1)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    update = torch.sigmoid(update_x + update_h)
    return (new + update * (state[0] - new),)


def _lstm_step(kind: str, gates_x: Tensor, gates_h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    enter, forget, new, leave = (gates_x + gates_h).chunk(4, -1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


STEPS = {"RNN_TANH": _plain_step, "RNN_RELU": _plain_step, "GRU": _gru_step, "LSTM": _lstm_step}


class _FactoredCell(Factored):
    def step(self, kind: str, inputs: Tensor, state: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        layer: Any = self
        slots = self.factored_slots
        single = inputs.dim() == 1
        x = inputs.unsqueeze(0) if single else inputs
        parts = 2 if kind == "LSTM" else 1
        if state is None:
            held = (x.new_zeros(len(x), layer.hidden_size),) * parts
        else:
            held = tuple(part.unsqueeze(0) if single else part for part in state)
        gates_x = linear(x, layer.weight_ih, layer.bias_ih, slots.get("weight_ih"))
        gates_h = linear(held[0], layer.weight_hh, layer.bias_hh, slots.get("weight_hh"))
        after = STEPS[kind](kind, gates_x, gates_h, held)
        return tuple(part.squeeze(0) if single else part for part in after)


class FactoredRNNCell(_FactoredCell, nn.RNNCell):
    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        return self.step(f"RNN_{self.nonlinearity.upper()}", input, None if hx is None else (hx,))[0]


class FactoredGRUCell(_FactoredCell, nn.GRUCell):
    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        return self.step("GRU", input, None if hx is None else (hx,))[0]


class FactoredLSTMCell(_FactoredCell, nn.LSTMCell):
    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        hidden, cell = self.step("LSTM", input, hx)
        return hidden, cell


class _Unrolled(Factored):
    """A fused module, run step by step; a PackedSequence still runs fused, and its weights' gradients go densely."""

    def unroll(self, inputs: Tensor, state: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        layer: Any = self
        single = inputs.dim() == 2
        x = inputs.unsqueeze(1) if single else inputs.transpose(0, 1) if layer.batch_first else inputs
        directions = 2 if layer.bidirectional else 1
        parts = 2 if layer.mode == "LSTM" else 1
        if state is None:
            state = (x.new_zeros(layer.num_layers * directions, x.shape[1], layer.hidden_size),) * parts
        elif single:
            state = tuple(part.unsqueeze(1) for part in state)
        last: list[tuple[Tensor, ...]] = []
        for depth in range(layer.num_layers):
            sides = []
            for way in range(directions):
                number = depth * directions + way
                outputs, final = self._run(x, tuple(part[number] for part in state), depth, way)
                sides.append(outputs)
                last.append(final)
            x = torch.cat(sides, -1)
            if layer.dropout and depth < layer.num_layers - 1:
                x = F.dropout(x, layer.dropout, layer.training)
        finals = tuple(torch.stack(part) for part in zip(*last, strict=True))
        if single:
            return x.squeeze(1), tuple(part.squeeze(1) for part in finals)
        return x.transpose(0, 1) if layer.batch_first else x, finals

    def _run(self, x: Tensor, state: tuple[Tensor, ...], depth: int, way: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        layer: Any = self
        suffix = f"_l{depth}" + ("_reverse" if way else "")
        slots, mode = self.factored_slots, layer.mode

        def gates(side: str, inputs: Tensor) -> Tensor:
            bias = getattr(layer, f"bias_{side}{suffix}") if layer.bias else None
            name = f"weight_{side}{suffix}"
            return linear(inputs, getattr(layer, name), bias, slots.get(name))

        gates_x = gates("ih", x)
        outputs: list[Tensor] = []
        for moment in range(len(x) - 1, -1, -1) if way else range(len(x)):
            state = STEPS[mode](mode, gates_x[moment], gates("hh", state[0]), state)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if way else outputs), state


class UnrolledRNN(_Unrolled, nn.RNN):
    def forward(self, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            return nn.RNN.forward(self, input, hx)
        out, (hidden,) = self.unroll(input, None if hx is None else (hx,))
        return out, hidden


class UnrolledGRU(_Unrolled, nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            return nn.GRU.forward(self, input, hx)
        out, (hidden,) = self.unroll(input, None if hx is None else (hx,))
        return out, hidden


class UnrolledLSTM(_Unrolled, nn.LSTM):
    def forward(self, input: Any, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            return nn.LSTM.forward(self, input, hx)
        return self.unroll(input, hx)
