"""What per-sample squares cost: a forward and backward pass with them, over one without.

    python benchmarks/moments.py

Both are measured in turn, in one run, in one thread, in CPU seconds; the ratio is the median over the rounds.
"""

import argparse
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _ratio import ratio
from torch import Tensor, nn

from thinwire.capture.layers.squares.second_moments import SecondMoments
from thinwire.lab.tasks.models import GPT, mlp, resnet, small_cnn, vgg

BAR = 1.4
Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]


def images(batch: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, *shape), torch.randint(0, 10, (batch,))


def text(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (batch, length)), torch.randint(0, 256, (batch, length))


CASES: dict[str, Case] = {
    "MLP 784-512-512-10, batch 128": (lambda: mlp(784, 512, 512, 10), lambda: images(128, 784)),
    "MLP 256-1024-1024-1024-10, batch 128": (lambda: mlp(256, 1024, 1024, 1024, 10), lambda: images(128, 256)),
    "small CNN 28x28, batch 32": (lambda: small_cnn(1, 28), lambda: images(32, 1, 28, 28)),
    "VGG 32x32, batch 32": (vgg, lambda: images(32, 3, 32, 32)),
    "ResNet-20 32x32, batch 32": (lambda: resnet(20), lambda: images(32, 3, 32, 32)),
    "GPT 4 x 256, batch 16 x 128": (lambda: GPT(256, 4, 4, 128), lambda: text(16, 128)),
    "GPT 4 x 256, batch 32 x 32": (lambda: GPT(256, 4, 4, 32), lambda: text(32, 32)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name, (make, data) in CASES.items():
        if chosen.only not in name:
            continue
        torch.manual_seed(0)
        plain, (x, y) = make(), data()
        watched = copy.deepcopy(plain)
        watch = SecondMoments(watched)

        def step(model: nn.Module, x: Tensor = x, y: Tensor = y) -> None:
            model.zero_grad(set_to_none=True)
            F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()

        def step_with_squares(step=step, watched=watched, watch=watch) -> None:
            step(watched)
            watch.clear()

        found = ratio(lambda plain=plain, step=step: step(plain), step_with_squares, chosen.rounds)
        print(f"{name:40} {found:6.2f}  at most {BAR}: {'yes' if found <= BAR else 'NO'}")


if __name__ == "__main__":
    main()
