"""A reduction that runs beside the thread which finds the step bad: what the workers of test_given_up.py run."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.comm import Comm
from thinwire.comm.torch import TorchComm
from thinwire.core.reducer import Layout, Reducer
from thinwire.step.step import Steps


class Slow(Reducer[Tensor, None]):
    """Averages, but not before the other thread had time to give the step up."""

    def __init__(self, began: threading.Event):
        self.began = began

    def init(self, layout: Layout) -> None:
        return None

    def reduce(self, local: Tensor, state: None, comm: Comm, out: Tensor) -> None:
        self.began.set()
        time.sleep(0.3)
        out.copy_(comm.all_mean(local.clone() / 2))


def given_up(comm: Comm) -> tuple[Tensor, Tensor, str, Tensor]:
    """The residual before and after a step that another thread has given up; its reduction's error; the next mean."""
    began = threading.Event()
    weight = nn.Parameter(torch.zeros(4))
    steps = Steps(thinwire.ErrorFeedback(Slow(began)), comm, {"weight": weight}, grain="model")
    group = steps.make_group(Layout(("weight",), (weight.shape,), weight.dtype, weight.device))
    mine, out = torch.full((4,), float(comm.rank + 1)), torch.empty(4)

    def reduced() -> Any:
        step = steps.open()
        step.reduce(group, mine.clone(), out)
        return step

    reduced().commit(4)
    before, step = group.state.residual.clone(), steps.open()
    began.clear()
    with ThreadPoolExecutor(1) as lane:
        beside = lane.submit(step.reduce, group, mine.clone(), out)
        began.wait()
        step.fail(ValueError("refused"))
        after, error = group.state.residual.clone(), beside.exception()
    reduced().commit(4)
    return before, after, type(error).__name__, out.clone()


def given_up_among_processes() -> tuple[Tensor, Tensor, str, Tensor]:
    comm = TorchComm.own(dist.group.WORLD)
    found = given_up(comm)
    dist.barrier(dist.group.WORLD)  # nobody's message is in the way of the user's own
    comm.close()
    return found
