"""The workers agree on what joins them, and learn its rate from what they send anyway."""

from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.comm import gauge
from thinwire.comm.gauge import Gauge
from thinwire.comm.link import FAR


class Two:
    """Two workers of which the other answers with a number of its own."""

    world = 2

    def __init__(self, other: float):
        self.other, self.calls = other, 0

    def all_gather(self, raw: Tensor) -> Tensor:
        self.calls += 1
        theirs = torch.tensor([self.other], dtype=torch.float64).view(torch.uint8)
        return torch.stack([raw, theirs if raw.numel() == 8 else raw])


def joined(other: float) -> tuple[Gauge, Any]:
    direct: Any = Two(other)
    return Gauge(direct), direct


def test_one_machine_is_near_and_costs_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge, "_place", lambda: 5)
    found, direct = joined(5.0)
    assert not found.link.far and direct.calls == 1
    found.note(10**6, 1, 1.0)
    assert direct.calls == 1  # who is near measures nothing


def test_the_slowest_answer_counts() -> None:
    found, direct = joined(0.5)  # half a second there and back, says the other; and half a bit a second
    assert found.link.far and found.link.rtt == 0.5 and found.link.rate == 0.5
    direct.other = 1e8
    for count in range(1, 65):
        calls = direct.calls
        found.note(1e6, 1, 0.5 + 0.16)  # 50 Mbit/s
        assert (direct.calls > calls) == (count in (8, 64))  # on all workers at the same exchanges
    assert found.link.rate == pytest.approx(5e7) and found.link.rtt == 0.5


def test_a_quick_answer_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge.time, "perf_counter", lambda: 0.0)
    found, _ = joined(FAR / 2)
    assert not found.link.far and found.link.rtt == FAR / 2
