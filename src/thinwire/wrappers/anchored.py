"""Parameters that left from one anchor, made one again: local steps as a reducer around a reducer.

All workers leave from one anchor. At an exchange the change since then goes through a reducer as a gradient would,
an outer optimizer moves the anchor by the mean change, and everybody goes on from there.

A method that sends little leaves the anchor behind: what all workers have found out and nobody has sent is missing in
it, and gradients are those of a model many steps old. No worker knows what the others hold back, but their findings
are alike. So a worker may go on *ahead* of the anchor, by the share of its own unsent change that it expects the mean
of all to be. What was sent tells which share that is: there a worker sees its own part and the mean of all. Or by all
of it: then nothing that a worker has learnt is missing in its own model, as with plain local steps. Where everything
waits for the same few steps (a window that goes round) that is better; where some wait for long, it drifts.

The mean of noisy steps is short. An optimizer that sets the length of its own step (Adam by its second moment, Muon by
making it orthogonal) takes a full one on every worker, most of it noise, and the mean of n is shorter by up to sqrt(n)
than the one step of a dense run. `keep_length` gives a tensor's mean its length back.

Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; Douillard et al., DiLoCo, arXiv 2311.08105. Both
recalled. Going ahead by the whole residual is step-ahead error feedback (Xu, Huo and Huang, 2020, recalled); by a fixed
share of it, step-ahead partial error feedback (Redie, Arablouei and Werner, arXiv 2601.20738, abstract read).
CocktailSGD and DisTrO keep their whole residual in their own parameters. That the share is measured is ours.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.core import memory
from thinwire.core.reducer import Layout, Reducer
from thinwire.core.spelled import Spelled
from thinwire.wrappers.feedback import ErrorFeedback

Ahead = bool | Literal["all"]
FOLLOWS = 0.1  # how fast a share follows what is seen in one exchange


@dataclass(frozen=True)
class Outer(Spelled):
    """How the anchor follows the mean change: all the way by default, which averages the workers' parameters.

    Outer(0.7, momentum=0.9, nesterov=True) is DiLoCo's. Momentum is that of torch.optim.SGD, without dampening.

    keep_length: how much of the length that a tensor's mean change has lost against the workers' own is given back: 0
    nothing, 1 all of it (Muon), 0.5 its root (AdamW, which is close to where it swings). The change is multiplied by
    (|own| / |mean|) ** keep_length, where |own| is the root mean square over the workers; at least by 1 and at most by
    the root of their number. With `ahead` it comes from the share, whose inverse root it is.
    """

    unnamed: ClassVar[int] = 2  # Outer(0.7, 0.9)
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    keep_length: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"the outer lr must lie above 0, not {self.lr}: 1 goes all the way to the mean")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"the outer momentum must lie at 0 or above and below 1, not {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov looks ahead along the momentum: give one, 0.9 say")
        if not 0 <= self.keep_length <= 1:
            raise ValueError(
                f"keep_length must lie between 0 (as short as it is) and 1 (in full), not {self.keep_length}"
            )

    def move(self, anchor: Tensor, change: Tensor, velocity: Tensor | None) -> None:
        if velocity is None:
            anchor.add_(change, alpha=self.lr)
            return
        velocity.mul_(self.momentum).add_(change)
        if self.nesterov:
            anchor.add_(change, alpha=self.lr).add_(velocity, alpha=self.lr * self.momentum)
        else:
            anchor.add_(velocity, alpha=self.lr)


@dataclass
class AnchorState:
    anchor: Tensor = memory.averaged(degree=0)  # what all workers have in common
    velocity: Tensor | None = memory.averaged(degree=0)  # the outer momentum; None without one
    dtype: torch.dtype = memory.derived()  # of the parameters, which leave from the anchor rounded to it
    sizes: list[int] = memory.derived()  # of the tensors
    inner: Any = None
    # Of what this worker has not sent, by which it is ahead of the anchor, by tensor; 0.1 had one number for all.
    share: list[float] | float = memory.per_world(list)

    @property
    def departure(self) -> Tensor:
        """Where this worker left from."""
        ahead = leads(self.share, self.gains, len(self.sizes))
        if not any(ahead):
            return self.anchor
        left = self.anchor.clone()
        for part, unsent, by in zip(left.split(self.sizes), self.inner.residual.split(self.sizes), ahead, strict=True):
            part.add_(unsent, alpha=by)
        return left

    @property
    def gains(self) -> list[float]:
        """By what the last mean of each tensor was lengthened; none where it was not."""
        return []


@dataclass
class LengthenedState(AnchorState):
    gain: list[float] = memory.per_world(list)

    @property
    def gains(self) -> list[float]:
        return self.gain


@dataclass(frozen=True)
class Anchored(Reducer[Tensor, AnchorState]):
    """Parameters in, parameters out: the change since departure through `inner`, the anchor moved by `outer`.

    With `ahead`, which needs an ErrorFeedback right inside, a worker goes on from where it expects all to be; with
    "all" from where its own unsent change has taken it.

    Conservation is a law of changes, not of parameters. With a plain outer step the mean of all that the workers have
    changed is what the anchor has moved, plus the mean of what is unsent. With `keep_length` that holds of what was
    sent, before it was lengthened: the anchor moves by gain times that, tensor by tensor.
    """

    inner: Reducer[Tensor, Any]
    outer: Outer = Outer()
    ahead: Ahead = False

    def __post_init__(self) -> None:
        if self.ahead not in (False, True, "all"):
            raise ValueError(f"ahead must be False, True (by the measured share) or 'all', not {self.ahead!r}")
        if self.ahead == "all" and self.outer.keep_length:
            raise ValueError("keep_length takes its measure from the share: ahead=True, or leave one of the two out")
        if self.ahead and not isinstance(self.inner, ErrorFeedback):
            raise TypeError(f"ahead needs to know what was not sent: ErrorFeedback({self.inner!r}), not {self.inner!r}")
        if self.ahead and replace(self.outer, keep_length=0.0) != Outer():
            raise ValueError(f"ahead expects the anchor to follow the mean change all the way, not by {self.outer!r}")

    def init(self, layout: Layout, /) -> AnchorState:
        velocity = layout.zeros() if self.outer.momentum else None
        kind = LengthenedState if self.outer.keep_length else AnchorState
        return kind(layout.zeros(), velocity, layout.dtype, layout.sizes, self.inner.init(layout))

    def reduce(self, x: Tensor, state: AnchorState, comm: Comm, out: Tensor, /) -> None:
        x.sub_(state.departure.to(state.dtype))
        measured = self.ahead not in (False, "all") or self.outer.keep_length
        sent = x.clone() if measured else None
        if sent is not None:
            for unsent in _waiting(state.inner):
                sent += unsent
        self.inner.reduce(x, state.inner, comm, out)
        if sent is not None:
            for unsent in _waiting(state.inner):
                sent -= unsent
            self._compare(sent, out, state, comm)
        elif self.ahead == "all":
            state.share = [1.0] * len(state.sizes)
        for part, gain in zip(out.split(state.sizes), state.gains):
            part.mul_(gain)
        self.outer.move(state.anchor, out, state.velocity)
        out.copy_(state.departure)

    def _compare(self, sent: Tensor, mean: Tensor, state: AnchorState, comm: Comm) -> None:
        """See, tensor by tensor, what the mean of all is of what this worker sent: its share in it, and its length."""
        own, common, both = _products(sent, mean, state.sizes)
        shares = by_tensor(state.share, len(state.sizes))
        if not isinstance(state, LengthenedState):
            state.share = [followed(*each) for each in zip(shares, both, own, strict=True)]
            return
        # A gain must be the same everywhere, to the bit: what all have in common comes out of one message. Beyond n^2
        # one worker alone brings the mean to its bound, so nothing need be longer.
        longest = float(comm.world) ** 2
        squares = [min(o / c, longest) if 0 < c < math.inf else 1.0 for o, c in zip(own, common, strict=True)]
        squares = comm.all_mean(sent.new_tensor(squares)).tolist()
        if self.ahead:
            seen = [square if c else 0.0 for square, c in zip(squares, common, strict=True)]
            state.share = [followed(share, 1.0, square) for share, square in zip(shares, seen, strict=True)]
            squares = [1 / share if share else 1.0 for share in state.share]
        gains = [min(max(square, 1.0), comm.world) ** (self.outer.keep_length / 2) for square in squares]
        state.gain = torch.tensor(gains).tolist()  # in 32 bits: on two machines a power may differ in its 64th

    def metrics(self, state: AnchorState, /) -> dict[str, float]:
        told = self.inner.metrics(state.inner)
        if self.ahead:
            told["ahead"] = _mean(by_tensor(state.share, len(state.sizes)), state.sizes)
        if self.outer.keep_length:
            told["gain"] = _mean(state.gains or [1.0] * len(state.sizes), state.sizes)
        return told

    @property
    def conserves(self) -> bool:
        return False  # of changes it does, as said above, if `inner` does; parameters are no mass


def followed(share: float, both: float, own: float) -> float:
    """The share, after one more look at what this worker sent, and what all did: the slope of the one over the other.

    both: the product of the two; own: that of what this worker sent with itself. Entries are sent because they are
    large, which does not bend a slope.
    """
    if own == 0:
        return share
    slope = min(max(both / own, 0.0), 1.0)
    return share + FOLLOWS * (slope - share) if share else slope


def by_tensor(share: list[float] | float, count: int) -> list[float]:
    """A share for each tensor: none yet, one for all (as 0.1 stored it), or as it is."""
    return [share] * count if isinstance(share, float) else share or [0.0] * count


def leads(share: list[float] | float, gain: list[float], count: int) -> list[float]:
    """By what part of its unsent change a worker is ahead of the anchor, tensor by tensor."""
    return [s * g for s, g in zip(by_tensor(share, count), gain or [1.0] * count, strict=True)]


def _waiting(state: Any) -> list[Tensor]:
    """What a method holds of this worker's own changes; what it owns of a mean is nobody's own."""
    return [v for _, f, v in memory.walk(state) if f.metadata.get("unsent") and memory.place(f) == "summed"]


def _products(sent: Tensor, mean: Tensor, sizes: list[int]) -> list[list[float]]:
    """Of each tensor: sent with sent, mean with mean, sent with mean; read at once, since a GPU would be waited for."""
    pairs = list(zip(sent.split(sizes), mean.split(sizes), strict=True))
    products = [p for a, b in pairs for p in (a.dot(a), b.dot(b), a.dot(b))]
    found: list[list[float]] = torch.stack(products).view(-1, 3).T.tolist()
    return found


def _mean(values: list[float], sizes: list[int]) -> float:
    return sum(v * n for v, n in zip(values, sizes, strict=True)) / max(1, sum(sizes))
