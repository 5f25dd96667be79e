"""Muon as torch.optim has it, but in float32 and for all matrices of one shape at once.

torch.optim.Muon works in bfloat16, which CPUs without instructions for it imitate: a step of the lab's GPT then takes
longer than a worker's backward pass, and in studies every worker takes steps of its own. It is also not in torch before
2.9. Everything else is the same (Jordan, https://kellerjordan.github.io/posts/muon, recalled), and
a test compares the two.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a quintic that is steep at zero and brings what is in (0, 1] near 1
ITERATIONS = 5
SMALLEST = 1e-7  # norm of a matrix


class Muon(Optimizer):
    """Momentum, whose direction is made orthogonal: all singular values of a matrix's step are about one."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, alike in by_shape.items():
                directions = orthogonal(torch.stack([self._direction(p, group["momentum"]) for p in alike]))
                for p, direction in zip(alike, directions, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(direction, alpha=-group["lr"] * math.sqrt(max(1, shape[0] / shape[1])))
        return loss

    def _direction(self, p: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's: where the momentum will be when this gradient comes once more."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        assert p.grad is not None
        return p.grad.lerp(state["momentum_buffer"].lerp_(p.grad, 1 - momentum), momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """Of each of [n, rows, columns], U V^T where it is U S V^T, about: S comes out between 0.5 and 1.5."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=SMALLEST)[:, None, None]
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
