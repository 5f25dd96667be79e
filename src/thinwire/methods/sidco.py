"""SIDCo: a threshold read off a distribution that is fitted to the magnitudes, in stages.

Abdelmoniem, Elzanaty, Alouini and Canini, An Efficient Statistical-based Gradient Compression Technique for
Distributed Training Systems, MLSys 2021. The fits and the rule for the stages were read in the authors' code, which
works tensor by tensor: here that is grain "tensor".

The first stage fits all magnitudes and keeps a quarter; each later one fits what exceeds the threshold so far,
where the tail looks more like the model. Every fifth step a stage is added if too few entries passed, or dropped
if too many did: with one stage there is no remedy for too many. Thresholds are each worker's own, so choices overlap
and traffic grows with the workers.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from thinwire import exchange, kernels
from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer, check_density, count
from thinwire.exchange import MessageRoom
from thinwire.exchange import bytes as wire

FITS = ("exponential", "pareto", "gamma")
FIRST = 0.25  # what the first of several stages keeps
EVERY = 5  # steps between changes of the number of stages


@dataclass
class SIDCoState:
    stages: int = memory.alike(1)
    step: int = memory.alike(0)
    ratios: float = memory.alike(0.0)  # sum over steps of (entries sent) / (entries wanted)
    room: MessageRoom = field(default_factory=MessageRoom)


@dataclass(frozen=True)
class SIDCo(Reducer[Tensor, SIDCoState]):
    """About a `density` of each worker's entries, above a threshold from an exponential, Pareto or gamma `fit`.

    `gamma` and `pareto` fit generalised Pareto tails after the first stage, `exponential` exponential ones.
    """

    density: float
    fit: Literal["exponential", "pareto", "gamma"] = "exponential"

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.fit not in FITS:
            raise ValueError(f"fit must be one of {', '.join(FITS)}, not {self.fit!r}")

    def init(self, layout: Layout, /) -> SIDCoState:
        return SIDCoState()

    def reduce(self, x: Tensor, state: SIDCoState, comm: Comm, out: Tensor, /) -> None:
        index = kernels.select(x, self.threshold(x, state.stages))
        values = exchange.rounded(x[index], comm)
        message = wire.encode(index, values, x.numel(), comm.wire_dtype(x.dtype))
        messages = exchange.gather_bytes(message, comm, state.room, limit=exchange.dense_bytes(x, comm))
        if messages is None:
            self._adapt(state, 2.0)
            return exchange.fall_back(x, comm, out)
        exchange.take(x, index, comm)
        pairs = [wire.decode(message, x.numel()) for message in messages]
        kernels.fill_sparse(out, pairs, 1 / comm.world)
        wanted = count(self.density, x.numel()) * comm.world
        self._adapt(state, sum(index.numel() for index, _ in pairs) / max(1, wanted))

    def threshold(self, x: Tensor, stages: int) -> float:
        """Above the last stage's, which every entry that is sent exceeds."""
        ratios = [self.density]
        if stages > 1 and self.density < FIRST:
            ratios = [FIRST] + [(self.density / FIRST) ** (1 / (stages - 1))] * (stages - 1)
        sizes, threshold = x.abs(), 0.0
        for stage, ratio in enumerate(ratios):
            sizes = sizes[sizes > threshold]  # zeros say nothing about the distribution
            if sizes.numel() < 2:
                break
            excess = sizes - threshold
            if stage == 0 and self.fit == "gamma":
                threshold += gamma_tail(excess, ratio)
            elif self.fit == "exponential":
                threshold += exponential_tail(excess, ratio)
            else:
                threshold += pareto_tail(excess, ratio)
        # `select` takes what reaches its threshold, this method what exceeds it.
        above = torch.nextafter(x.new_tensor(threshold), x.new_tensor(math.inf))
        return float(above)

    def _adapt(self, state: SIDCoState, ratio: float) -> None:
        state.step += 1
        state.ratios += ratio
        if state.step % EVERY:
            return
        mean, state.ratios = state.ratios / EVERY, 0.0
        most = max(1, math.ceil(math.log2(1 / self.density)))
        if mean > 1.2:
            state.stages = max(1, state.stages - 1)
        elif mean < 0.8:
            state.stages = min(most, state.stages + 1)

    @property
    def needs_memory(self) -> bool:
        return True


def exponential_tail(excess: Tensor, ratio: float) -> float:
    """What a `ratio` of an exponential variable with this mean exceeds."""
    return -float(excess.mean()) * math.log(ratio)


def pareto_tail(excess: Tensor, ratio: float) -> float:
    """The same for a generalised Pareto variable with this mean and variance."""
    mean, variance = float(excess.mean()), float(excess.var(correction=0))
    if variance <= 1e-12 * mean * mean:
        return mean  # all alike
    squares = mean * mean / variance
    shape, scale = (squares - 1) / 2, mean * (squares + 1) / 2
    if abs(shape) < 1e-4:
        return -scale * math.log(ratio)  # the exponential it tends to
    return scale * (1 - ratio**shape) / shape


def gamma_tail(excess: Tensor, ratio: float) -> float:
    """The same for a gamma variable with this mean and mean logarithm."""
    mean = float(excess.mean())
    s = math.log(mean) - float(excess.log().mean())
    if s < 1e-9:
        return mean  # all alike
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return mean / shape * inverse_gamma(shape, 1 - ratio)


def inverse_gamma(shape: float, below: float) -> float:
    """Where the regularised lower incomplete gamma function has this value, by halving an interval."""
    a = torch.tensor(shape, dtype=torch.float64)

    def share(at: float) -> float:
        return float(torch.special.gammainc(a, torch.tensor(at, dtype=torch.float64)))

    low, high = 0.0, shape + 1.0
    while share(high) < below:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < below else (low, middle)
    return high
