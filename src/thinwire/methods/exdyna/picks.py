"""What a worker picks in its partition, how all are told, and what all conclude for the threshold.

Parts 3 and 4 of ExDyna as they are done here; `published.PublishedControl` does them as the authors' code does.
"""

import math
import statistics

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm import Comm
from thinwire.exchange import slots
from thinwire.methods.exdyna import thresholds
from thinwire.methods.exdyna.state import ExDynaState, Report

REPORT = 24  # bytes before a worker's indices: two counts and a magnitude


class FastControl:
    """Of what lies above the threshold a worker sends the largest, as many as it has slots for."""

    def begin(self, state: ExDynaState) -> None:
        """The first threshold is measured, in the first step."""

    def measure(self, x: Tensor, density: float, comm: Comm) -> list[float]:
        """Every worker's first threshold, as bytes, which no cast of values touches."""
        value = kernels.quantile(x, density)
        bits = torch.tensor([value], dtype=torch.float64).view(torch.uint8).to(x.device)
        return comm.all_gather(bits).cpu().view(torch.float64).flatten().tolist()

    def start(self, state: ExDynaState, measured: list[float]) -> None:
        """The median of what the workers measured, since one of them may be far off."""
        state.control.set(statistics.median(measured))

    def pick(self, x: Tensor, state: ExDynaState, low: int, high: int, most: int, density: float) -> Report:
        """The `most` largest that reach the threshold between `low` and `high`."""
        control = state.control
        assert control.threshold is not None
        index = kernels.select(x, control.threshold, low, high)
        above, values = index.numel(), x[index]
        far_above = kernels.select(values, control.threshold * math.exp(control.reach)).numel()
        measured = kernels.quantile(x, density) if control.lost else 0.0
        return Report(above, far_above, measured, index if above <= most else index[kernels.top_k(values, most)])

    def tell(self, mine: Report, state: ExDynaState, size: int, comm: Comm) -> list[Report]:
        """Everybody's report, in one collective of `size` bytes from each."""
        counts = torch.tensor([mine.above, mine.far_above]).view(torch.uint8)
        magnitude = torch.tensor([mine.measured], dtype=torch.float64).view(torch.uint8)
        report = torch.cat([counts, magnitude]).to(mine.index.device)
        indices = slots.fill(mine.index, state.numel, size - REPORT)
        return [_read(row, state.numel) for row in comm.all_gather(torch.cat([report, indices]))]

    def is_flood(self, above: int, state: ExDynaState) -> bool:
        """Whether so many are above the threshold that they tell nothing about the loads."""
        return above > thresholds.LOST * state.target * state.control.margin

    def scale(self, state: ExDynaState, reports: list[Report], room: int) -> None:
        """The threshold of the next step; there was `room` for so many picks."""
        far_above, measured = sum(r.far_above for r in reports), statistics.median(r.measured for r in reports)
        seen = thresholds.Counted(sum(state.picks), room, [r.above for r in reports], far_above, measured)
        thresholds.scale_fast(state.control, seen, state.target)


def _read(message: Tensor, numel: int) -> Report:
    report = message[:REPORT].clone().cpu()  # a copy, because the bytes may begin at any address
    above, far_above = report[:16].view(torch.int64).tolist()
    measured = float(report[16:].view(torch.float64))
    return Report(above, far_above, measured, slots.read(message[REPORT:], numel))
