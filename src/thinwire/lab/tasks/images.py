"""CIFAR-10, MNIST and Fashion-MNIST, whole."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.lab.tasks.base import Arrays, Task
from thinwire.lab.tasks.data import read_cifar10, read_idx_set
from thinwire.lab.tasks.models import mlp, resnet, small_cnn, vgg

CIFAR_MODELS = {
    "resnet8": lambda: resnet(8),
    "resnet20": lambda: resnet(20),
    "vgg": vgg,
    "resnet8-half": lambda: nn.Sequential(nn.AvgPool2d(2), resnet(8)),  # sees 16 x 16: a quarter of the work
}
GREY_MODELS = {"cnn": lambda: small_cnn(1, 28), "mlp": lambda: mlp(784, 512, 512, 10)}


def standard_cifar(x: Tensor) -> Tensor:
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    spread = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    return (x.float() / 255 - mean) / spread


def crop_and_flip(x: Tensor, draw: torch.Generator) -> Tensor:
    """Shift by up to four pixels, mirror every other picture: the augmentation of the ResNet paper."""
    count, channels, side, _ = x.shape
    across = torch.randint(9, (2, count, 1), generator=draw) + torch.arange(side)
    mirrored = torch.rand(count, generator=draw) < 0.5
    columns = torch.where(mirrored[:, None], across[1].flip(1), across[1])
    padded = F.pad(x, (4, 4, 4, 4))
    sample = torch.arange(count)[:, None, None, None]
    channel = torch.arange(channels)[None, :, None, None]
    return padded[sample, channel, across[0][:, None, :, None], columns[:, None, None, :]]


def cifar10(model: str, data: Path) -> Task:
    arrays = Arrays.split(*read_cifar10(data), prepare=standard_cifar, augment=crop_and_flip)
    return Task(f"cifar10/{model}", CIFAR_MODELS[model], arrays, optimizer="sgd", lr=0.1, batch=64, steps=1500)


def _grey(name: str, model: str, data: Path) -> Task:
    arrays = Arrays.split(*read_idx_set(name, data), prepare=lambda x: x.float().unsqueeze(1) / 255 - 0.3)
    return Task(f"{name}/{model}", GREY_MODELS[model], arrays, optimizer="sgd", lr=0.05, batch=64, steps=800)


def mnist(model: str, data: Path) -> Task:
    return _grey("mnist", model, data)


def fashion(model: str, data: Path) -> Task:
    return _grey("fashion", model, data)
