"""How many rows each weight has on the worker that has most: what all workers pad their factors to.

Near, the workers tell each other in a message of its own when a backward pass begins. Far away that would cost a trip,
so the sizes of the last step are taken to be this one's, and the message with the factors says in its head whether they
are. If they are not, everybody hears that at once, and sends again.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.step import agreement

Numbers = list[list[int]]  # a few for each weight: how many rows, in which dtypes


class OtherSizes(Exception):
    """A worker's factors do not fit those of the last step, or all have thrown gradients of its away.

    Raised on all workers alike, before any has a result.
    """


class Sizes:
    def __init__(self, comm: Comm):
        self.comm = comm
        self.most: Numbers | None = None  # as all workers know them since the last step
        self.order: list[int] = []  # in which groups go out
        self.fits = True  # what this worker has fits into `most`
        self.thrown: list[int] = []  # the weights whose last gradients all workers have thrown away
        self._told = torch.empty(0)

    def tell(
        self, step: int, mark: int, thrown: list[bool], ready: list[int], mine: Numbers, device: torch.device
    ) -> bool:
        """Agree with all workers; False: that is left to the message that `ride` sends a head with."""
        used = [int(not gone) for gone in thrown]
        numbers = [[step, mark & 0x7FFFFFFF, mark >> 31], used, ready, *mine]
        self._told = torch.tensor([n for part in numbers for n in part], dtype=torch.int32, device=device)
        self._lengths, self.fits = [len(part) for part in numbers], True
        if self.comm.far and self.most is not None and [len(part) for part in self.most] == self._lengths[3:]:
            self.fits = all(here <= most for here, most in _side_by_side(mine, self.most))
            return False
        self.most = None
        self._hear(self.comm.all_gather(self._told))
        return True

    def ride(self) -> None:
        self.comm.ride(self._told, self._hear)

    def forget(self) -> None:
        """After an error, since some workers may have heard what others have not."""
        self.most = None

    def _hear(self, heads: Tensor) -> None:
        everyone = heads.view(torch.int32).view(self.comm.world, -1)
        steps, low, high = everyone[:, :3].T.tolist()
        marks = [a + (b << 31) for a, b in zip(low, high, strict=True)]
        agreement.check_alike({"step": steps, "parameters": marks}, ("step", "parameters"))
        _, used, _, *most = everyone.amax(0).split(self._lengths)
        before, self.most = self.most, [part.tolist() for part in most]
        self.order = everyone[0].split(self._lengths)[2].tolist()
        self.thrown = [weight for weight, by_some in enumerate(used.tolist()) if not by_some]
        pairs = _side_by_side(self.most, before or self.most)
        # What nobody used has no gradient, so zeros must be where they were. And who has thrown the last gradients away
        # must take their exchange back before the next one.
        if not all(now <= then and (now > 0) == (then > 0) for now, then in pairs) or (before and self.thrown):
            self.fits = True  # from now on
            raise OtherSizes


def _side_by_side(one: Numbers, other: Numbers) -> Iterator[tuple[int, int]]:
    return zip(chain.from_iterable(one), chain.from_iterable(other), strict=True)
