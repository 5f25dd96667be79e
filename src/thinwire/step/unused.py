"""Whether anybody has used what came out of the last exchange, as far as one can see from the parameters."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_SAMPLES = 64  # entries of a parameter that are looked at for edits which its version does not show


class Unused:
    """The parameters right after an exchange: as long as they have not changed, no optimizer has taken its step."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)
        self._after: tuple[list[int], Tensor] | None = None

    def note(self) -> None:
        """Right after an exchange."""
        self._after = self._look()

    def __bool__(self) -> bool:
        """Whether there was an exchange, and no parameter has changed since."""
        if self._after is None:
            return False
        versions, samples = self._look()
        return versions == self._after[0] and torch.equal(samples, self._after[1])

    @torch.no_grad()
    def _look(self) -> tuple[list[int], Tensor]:
        versions = [p._version for p in self.parameters]
        picked = []
        for p in self.parameters:
            flat = p.detach().reshape(-1) if p.is_contiguous() else p.detach().flatten()
            picked.append(flat[:: max(1, flat.numel() // _SAMPLES)].double())
        return versions, torch.cat(picked).cpu().view(torch.int64)  # as bits, in which NaN equals itself
