"""Models, data and a worker's step for the tests of distributed auto-differentiation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.capture.layers.factors.capture import Layers
from thinwire.comm.threads import ThreadComm, in_threads
from thinwire.core.reducer import Reducer
from transformers_like import Conv1D

VOCABULARY = 11


class Tied(nn.Module):
    """A small transformer: embedding and head are one weight."""

    def __init__(self, attention: bool = True, width: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(6, width) * 0.1)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True) if attention else None
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        if self.attention is not None:
            x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


class FunctionalHead(Tied):
    """The same, with the head written as a function call on the embedding's weight."""

    def __init__(self) -> None:
        super().__init__(attention=False)
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        return F.linear(self.norm(x + self.down(F.gelu(self.up(x)))), self.embedding.weight)


class Recurrent(nn.Module):
    """A classifier over a sequence, by cells or by a fused module."""

    def __init__(self, layer: nn.Module, width: int):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.RNNCellBase):
            state = None
            for moment in x.unbind(1):
                state = self.layer(moment, state)
            return self.head(state[0] if isinstance(state, tuple) else state)
        return self.head(self.layer(x)[0][:, -1])


class Twice(nn.Module):
    """One layer used twice, at two widths of input rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.shared(x[: (len(x) + 1) // 2])).mean(0) + torch.tanh(self.shared(x)))


class Mixed(nn.Module):
    """Everything that must stay with DDP, beside two layers that need not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.bag = nn.EmbeddingBag(5, 8)
        self.bilinear = nn.Bilinear(8, 8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        bags = self.bag((x[:, :2] > 0).long())
        x = self.frozen(torch.tanh(self.parametrised(torch.tanh(self.first(x)))))
        return self.last(torch.tanh(self.bilinear(x, bags)) * self.scale)


class NoInputs(nn.Module):
    """A layer of which only the bias counts, as in a model that is built from a table."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.full = nn.Linear(0, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.full(x) + self.empty(x[:, :0])


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding="same", groups=3, dilation=2),
        nn.Tanh(),
        nn.Conv2d(6, 4, (1, 2), bias=False, padding=(1, 0), padding_mode="circular"),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def images(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, 2, 7, 6, generator=generator, dtype=torch.float64)


def vectors(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda rows, generator: torch.randn(rows, *shape, generator=generator, dtype=torch.float64)


def tokens(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (rows, 6), generator=generator)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7, bias=False), nn.Tanh(), nn.Linear(7, 3))


# A model, and what it is fed.
ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "mlp": (mlp, vectors(6)),
    "mlp on sequences": (mlp, vectors(5, 6)),
    "mlp on grids": (mlp, vectors(2, 3, 6)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)), vectors(6)),
    "no bias": (lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)), vectors(6)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3, stride=2), nn.Tanh(), nn.Conv1d(4, 2, 2)), vectors(2, 9)),
    "conv2d": (convolutions, images),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(32, 3)),
        vectors(2, 3, 3, 3),
    ),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 3, 1), nn.Flatten()), images),
    "embedding": (lambda: nn.Sequential(nn.Embedding(VOCABULARY, 5, padding_idx=2), nn.Linear(5, 3)), tokens),
    "tied transformer": (Tied, tokens),
    "tied by a function": (FunctionalHead, tokens),
    "conv1d of transformers": (
        lambda: nn.Sequential(Conv1D(8, 6), nn.GELU(), nn.Linear(8, 8), Conv1D(3, 8)),
        vectors(5, 6),
    ),
    "no inputs": (NoInputs, vectors(6)),
    "rnn cell": (lambda: Recurrent(nn.RNNCell(6, 5), 5), vectors(4, 6)),
    "gru cell": (lambda: Recurrent(nn.GRUCell(6, 5), 5), vectors(4, 6)),
    "lstm cell": (lambda: Recurrent(nn.LSTMCell(6, 5), 5), vectors(4, 6)),
    "fused gru": (
        lambda: Recurrent(nn.GRU(6, 5, batch_first=True, num_layers=2, bidirectional=True), 10),
        vectors(4, 6),
    ),
    "fused lstm": (lambda: Recurrent(nn.LSTM(6, 5, batch_first=True), 5), vectors(4, 6)),
    "fused rnn": (lambda: Recurrent(nn.RNN(6, 5, batch_first=True, nonlinearity="relu"), 5), vectors(4, 6)),
    "used twice": (Twice, vectors(6)),
    "all else": (Mixed, vectors(6)),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same model on every worker."""
    make, feed = ARCHITECTURES[name]
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    model = make().to(dtype)
    example = feed(2, torch.Generator().manual_seed(0))
    model(example.to(dtype) if example.is_floating_point() else example)
    torch.random.set_rng_state(state)
    return model


def batch(name: str, rank: int, rows: int, step: int = 0) -> Tensor:
    return ARCHITECTURES[name][1](rows, torch.Generator().manual_seed(1000 * step + rank))


def loss_of(out: Tensor) -> Tensor:
    """A sum over rows, so that the mean over workers does not depend on who has which."""
    weights = torch.arange(1, out.shape[-1] + 1, dtype=out.dtype, device=out.device) / out.shape[-1]
    return (weights * out - 0.3).square().sum()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def pooled(name: str, rows: list[int], step: int = 0) -> dict[str, Tensor | None]:
    """The gradient of the sum over all workers' rows, divided by the number of workers."""
    model = build(name)
    for rank, count in enumerate(rows):
        if count:
            (loss_of(model(batch(name, rank, count, step))) / len(rows)).backward()
    return gradients(model)


def distributed(
    name: str, rows: list[int], reducer: Reducer[Any, Any], step: Callable[..., None] | None = None, **options: Any
) -> list[dict[str, Tensor | None]]:
    """The gradients on every worker after one step, by factors and by what stands for DDP."""
    models = [build(name) for _ in rows]  # here, because a seed is not a thread's own

    def work(comm: ThreadComm) -> dict[str, Tensor | None]:
        model = models[comm.rank]
        layers = attach(model, reducer, comm, **options)
        x = batch(name, comm.rank, rows[comm.rank])
        step(model, x) if step else loss_of(model(x)).backward()
        average_the_rest(model, layers, comm)
        layers.unwrap()
        return gradients(model)

    return in_threads(len(rows), work, timeout=20)


def distance(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> float:
    """The largest difference of any parameter's gradient, relative to its largest entry; none counts as zero."""
    worst = 0.0
    for name, want in wanted.items():
        have = found[name]
        if want is None or have is None:
            other = have if want is None else want
            worst = max(worst, 0.0 if other is None else float(other.abs().max()))
        else:
            gap = (have - want).abs() / (want.abs().max().clamp(min=1e-30) if want.numel() else 1)
            worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
    return worst


def average_the_rest(model: nn.Module, layers: Layers, comm: ThreadComm) -> None:
    """What DDP does for the parameters that it is left."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in layers.ignored:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            comm.all_mean(parameter.grad)


def attach(model: nn.Module, reducer: Reducer[Any, Any], comm: ThreadComm, **options: Any) -> Layers:
    layers = Layers(model, reducer, comm, **options)
    layers.install(model)
    return layers
