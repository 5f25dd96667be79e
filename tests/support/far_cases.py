"""What the worker processes of test_far.py run."""

import warnings
from typing import Any
from unittest import mock

import torch
from torch import nn

import thinwire
from thinwire.comm.gauge import Gauge
from thinwire.comm.link import Link


def wrapped() -> dict[str, Any]:
    """As if a link with latency joined these processes: which method is used, what its metrics say, and equal bits."""
    told: dict[str, Any] = {}
    # So fast a link that bytes cost nothing, and a method whose work alone takes longer than a ring's trips.
    with mock.patch.object(Gauge, "_join", return_value=Link(1e15, 0.003)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mock.patch("thinwire.doors.far._work_of_all", return_value=1.0):
            for when in ("fall_back", "keep"):
                torch.manual_seed(0)
                net = nn.Linear(20, 10)
                model = thinwire.wrap(net, "TopK(0.1)", when_far=when)  # type: ignore[arg-type]
                handle = thinwire.handle(model)
                for _ in range(3):
                    model(torch.randn(4, 20)).sum().backward()
                same = bool(handle.capture.comm.all_gather(net.weight.grad).diff(dim=0).eq(0).all())
                told[when] = repr(handle.reducer), handle.metrics()["fell_back"], same
    return told
