"""Whose gradients nobody has used since the last exchange, as far as one can see from the parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_SAMPLES = 64  # entries of a parameter that are looked at for edits which its version does not show
_PIECE = 4096  # entries of a gradient that are searched at once for some that are not zero


class Unused:
    """The parameters right after an exchange: those that have not changed since were in no optimizer's step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.parameters = parameters
        self._given: set[str] = set()  # those that the exchange had a gradient for
        self._places: dict[str, Tensor] = {}  # entries at which a step must show
        self._after: tuple[list[int], list[Tensor]] | None = None
        self._versions_tell: bool | None = None  # whether steps show in versions, as those of torch's optimizers do

    def note(self, gradients: Mapping[str, Tensor]) -> None:
        """Right after an exchange that gave these gradients, each flat."""
        self._given = set(gradients)
        found = {} if self._versions_tell else {name: _some_of(gradient) for name, gradient in gradients.items()}
        self._places = {name: places for name, places in found.items() if len(places)}
        self._after = self._look()

    def names(self) -> set[str]:
        """The parameters that were given a gradient, and that nothing has changed since.

        Who writes into `.data` leaves no trace but the values, and of those a sparse gradient changes few. Then one
        parameter alone tells nothing: only if none of them has changed was there no step.
        """
        if self._after is None:
            return set()
        versions, samples = self._look()
        marked = [now != then for now, then in zip(versions, self._after[0], strict=True)]
        edited = [not torch.equal(now, then) for now, then in zip(samples, self._after[1], strict=True)]
        if any(is_ and not shown for is_, shown in zip(edited, marked, strict=True)):
            self._versions_tell = False
        elif self._versions_tell is None and any(marked):
            self._versions_tell = True
        if self._versions_tell:
            return {name for name, shown in zip(self.parameters, marked, strict=True) if not shown} & self._given
        return set() if any(marked) or any(edited) or not self._places else set(self._given)

    @torch.no_grad()
    def _look(self) -> tuple[list[int], list[Tensor]]:
        """Versions, and samples as bits, in which NaN equals itself."""
        versions, picked, sizes = [], [], []
        for name, parameter in self.parameters.items():
            versions.append(parameter._version)
            flat = parameter.detach().reshape(-1) if parameter.is_contiguous() else parameter.detach().flatten()
            samples = [flat[:: max(1, flat.numel() // _SAMPLES)]]
            samples += [flat[self._places[name]]] if name in self._places else []
            picked += [sample.double() for sample in samples]
            sizes.append(sum(map(len, samples)))
        return versions, list(torch.cat(picked).cpu().view(torch.int64).split(sizes))


def _some_of(gradient: Tensor) -> Tensor:
    """Some entries of a flat gradient that are not zero, if there are any."""
    for start in range(0, len(gradient), _PIECE):
        places = gradient[start : start + _PIECE].nonzero()[:_SAMPLES, 0]
        if len(places):
            return places + start
    return torch.empty(0, dtype=torch.int64)
