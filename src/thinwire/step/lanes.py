"""Where a reduction runs, so that methods can be written straight down the page.

`Inline` runs it at once, in the backward pass. `Beside` runs it next to the backward pass, on a thread of
its own and, on CUDA, a stream of its own (that half is written with care and not measured on a GPU).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future


class Lane(Protocol):
    def submit(self, work: Callable[[], Tensor]) -> Future[Tensor]:
        """Run `work` after all work submitted before it; its result, now or later."""

    def close(self) -> None:
        """Take no more work."""


class Inline:
    def submit(self, work: Callable[[], Tensor]) -> Future[Tensor]:
        done: Future[Tensor] = Future()
        with torch.no_grad():
            done.set_result(work())
        return done

    def close(self) -> None:
        pass


class Beside:
    """One job after another, in the order given: the order all workers share."""

    def __init__(self, device: torch.device):
        self.device, self.thread = device, ThreadPoolExecutor(1, thread_name_prefix="thinwire")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, work: Callable[[], Tensor]) -> Future[Tensor]:
        stream = self.stream
        done: Future[Tensor] = Future(devices=[self.device] if stream is not None else None)
        ready = torch.cuda.current_stream(self.device).record_event() if stream is not None else None

        def run() -> None:
            try:
                with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
                    if stream is not None and ready is not None:
                        stream.wait_event(ready)
                    done.set_result(work())
            except BaseException as error:  # must reach backward(), or it waits for ever
                done.set_exception(error)  # type: ignore[arg-type]

        self.thread.submit(run)
        return done

    def close(self) -> None:
        self.thread.shutdown(wait=False)
