"""The nets the tasks train: small, plain, and of the kinds the papers used."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def small_cnn(channels: int, side: int, classes: int = 10) -> nn.Sequential:
    """Two convolutions, each halving the picture, and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (side // 4) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is padded with zeros where the width grows."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.stride, self.grown = stride, after - before

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.grown))
        return F.relu(y + shortcut)


def resnet(depth: int, classes: int = 10) -> nn.Sequential:
    """He et al. (2016), the CIFAR-10 family: depth = 6n + 2, widths 16, 32, 64."""
    blocks = (depth - 2) // 6
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    before = 16
    for width in (16, 32, 64):
        for i in range(blocks):
            layers.append(Residual(before, width, stride=2 if i == 0 and width > 16 else 1))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def vgg(classes: int = 10) -> nn.Sequential:
    """Simonyan and Zisserman's stacks of 3x3 convolutions with BatchNorm, thin enough for a CPU."""
    layers: list[nn.Module] = []
    before = 3
    for width in (32, 0, 64, 0, 128, 128, 0, 256, 256, 0):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 4, 256), nn.ReLU(), nn.Linear(256, classes))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = self.mix(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.second_norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.narrow(F.gelu(self.wide(self.second_norm(x))))


class GPT(nn.Module):
    """A decoder over bytes: 256 symbols, learned positions, pre-norm blocks, tied embedding."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_the_stream = name.endswith(("out.weight", "narrow.weight"))  # scaled down, as GPT-2 does
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if into_the_stream else 0.02)
        self.head.weight = self.symbols.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.symbols(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


class SequenceGRU(nn.Module):
    """Reads a series whose last channel says which steps are real; answers from the last real one."""

    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.cell = nn.GRU(channels, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(x)
        last = x[:, :, -1].sum(1).long() - 1
        return self.head(states[torch.arange(len(x), device=x.device), last])
