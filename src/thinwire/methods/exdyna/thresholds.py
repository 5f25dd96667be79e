"""Online threshold scaling: how high an entry must be so that `target` of them are sent.

Part 4 of ExDyna, apart from the method so that each rule can be read and tested by itself. A threshold only decides
what its own worker picks, so workers whose exp or log differ in the last bit still agree on everything they send.
"""

import math
import statistics
from dataclasses import dataclass

from thinwire.core import memory

LOWEST, HIGHEST = 1e-30, 1e30

# Shares of the error that are made good at once, and, by a trend that goes on, later. Between two looks of a worker
# at one entry pass as many steps as there are workers; a trend that learns faster than that swings.
AT_ONCE, LATER, LATER_IN_ALL = 0.6, 0.25, 0.8
REACH_LEARNS, MARGIN_LEARNS = 0.3, 0.6  # how fast they follow what is counted
WIDEST_MARGIN = 10.0
TIGHT = 1.1  # slots for each pick that is wanted, up to which they cut off the peaks
LOST = 3.0  # when more than this factor too many are above, scaling gives up and measures


@dataclass
class Control:
    """A threshold and what is known about the entries near it."""

    threshold: float | None = memory.alike(None, degree=1)  # None until it is measured
    reach: float = memory.alike(0.1)  # half of the entries above the threshold are below e^reach times it
    trend: float = memory.alike(0.0)  # by how many reaches the threshold should move each step
    margin: float = memory.alike(1.0)  # how many times the target must be above, so that the target is sent
    lost: bool = memory.alike(False)  # whether the workers should measure at the next step

    def set(self, threshold: float) -> None:
        self.threshold = min(max(threshold, LOWEST), HIGHEST)


@dataclass(frozen=True)
class Counted:
    """What all workers together found and sent in one step."""

    sent: int
    slots: int  # how many could have been sent
    above: list[int]  # of each worker, entries at or above the threshold, sent or not
    far_above: int  # those of all that are at or above e^reach times the threshold
    measured: float = 0.0  # the threshold they measured, if they were asked to


def scale_fast(control: Control, seen: Counted, target: int) -> None:
    """Divide the error by how steeply the count falls with the threshold, and follow trends.

    Raising a threshold by a thousandth loses a few thousandths of the entries when the gradient is fresh, and some
    hundredths when residuals have piled up just below it; one gain for both is too slow or unstable. So the
    steepness is counted: `reach` is the logarithmic width in which half of the entries lie, and all steps are
    taken in reaches. The trend takes over what never ends by itself: for hundreds of steps residuals grow, or,
    after gradients have shrunk, are used up.

    Where slots cut off the peaks, as many entries must be above the threshold that slots are full on most steps:
    the margin grows until the target is sent on average. No control that acts a step later could make good what
    one batch with larger gradients than the last adds or takes away.

    One worker may see gradients fifty times those of the others, for a batch. It has its slots and no more, so what it
    has above the threshold counts as at most twice them, or the others would send nothing for as long.
    """
    assert control.threshold is not None
    halvings = math.log2((sum(seen.above) + 1) / (seen.far_above + 1))
    control.reach *= min(max(1 / max(halvings, 1e-9), 0.25), 4.0) ** REACH_LEARNS
    control.reach = min(max(control.reach, 1e-4), 1.0)

    if seen.measured > 0:
        control.lost, control.trend = False, 0.0
        return control.set(seen.measured)
    wanted, workers, chance = target * control.margin, len(seen.above), 4 / math.sqrt(target)
    control.lost = statistics.median(seen.above) > LOST * (1 + chance) * wanted / workers
    most = 2 * control.margin * seen.slots / workers
    error = sum(min(above, most) for above in seen.above) / wanted - 1
    if seen.slots < TIGHT * target + 1:
        margin = control.margin * math.exp(MARGIN_LEARNS * (1 - seen.sent / target))
        control.margin = min(max(margin, 1.0), WIDEST_MARGIN)
    control.trend = min(max(control.trend + min(LATER, LATER_IN_ALL / len(seen.above)) * error, -1.0), 1.0)
    steps = AT_ONCE * error + control.trend
    control.set(control.threshold * math.exp(steps * control.reach / math.log(2)))
