"""A run with all of its workers in one process: what a method does to quality and bytes, but not how long it takes.

Threads exchange in place of processes, which gives the same model (`tests/lab/test_rehearsal.py`) and costs neither
processes nor links. So a study can make as many runs at once as there are cores. The records are those of any
other run, with one file for all workers: bytes are their mean.
"""

import copy
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.capture.layers.squares.second_moments import SecondMoments
from thinwire.comm import Comm, Ledger
from thinwire.comm.threads import ThreadWorkers
from thinwire.core.reducer import Layout, Moments, Reducer
from thinwire.lab import LabError
from thinwire.lab.records.record import Line, Recorder, Run, follow, has_ended, rank_file, write_text
from thinwire.lab.records.spellings import DDP, PLAIN, method_of, reducer_in
from thinwire.lab.run.launch import OnStep
from thinwire.lab.run.loop import judge, told
from thinwire.lab.run.methods import sent_between, take_local_steps
from thinwire.lab.run.optimizers import clip, make_optimizer, set_rate
from thinwire.lab.run.worker import end_with_launcher
from thinwire.lab.tasks import Task, load_task
from thinwire.methods.dense import Dense
from thinwire.wrappers.local_steps import LocalSteps

CPU = torch.device("cpu")
# glibc returns large blocks to the kernel after every step, and faults them in again at the next
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}


class Workers(Protocol):
    """All workers of a run, which take their steps together."""

    model: nn.Module  # the first one's

    def step(self, number: int) -> float: ...  # the mean loss
    def metrics(self) -> dict[str, float]: ...
    def judged(self) -> AbstractContextManager[None]: ...
    def finish(self) -> None: ...


def rehearse(run: Run, task: Task, folder: Path) -> None:
    """Make one run, from its first step to its last."""
    write_text(rank_file(folder, 0), "")  # in the place of a rehearsal that was ended; whoever follows that one notices
    recorder = Recorder(rank_file(folder, 0))
    torch.manual_seed(run.seed)
    with ThreadWorkers(run.workers) as threads:
        method = method_of(run.method)
        workers: Workers
        if isinstance(method, LocalSteps):
            workers = Changes(run, task, threads, method)
        else:
            workers = Gradients(run, task, threads, reducer_in(method) or Dense())
        recorder.write({"start": 0, "rank": 0, "pid": os.getpid(), "torch": torch.__version__, "rehearsal": True})
        recorder.write({"step": 0, "seconds": 0.0, **told(judge(workers.model, task, CPU, "validation"), "validation")})
        seconds, before = 0.0, [Ledger(run.workers)] * run.workers
        for step in range(run.steps):
            began, last = time.perf_counter(), step + 1 == run.steps
            loss = workers.step(step)
            if last:
                workers.finish()
            took = time.perf_counter() - began
            seconds += took
            now = [copy.copy(comm.ledger) for comm in threads.comms]
            for comm in threads.comms:
                comm.ledger.clear()
            line: Line = {"step": step + 1, "loss": loss, "seconds": seconds, "step_s": took}
            line |= workers.metrics() | bytes_between(before, now) | shares(before, now, workers.model)
            before = now
            if last or (step + 1) % run.evaluate_every == 0:
                with workers.judged():
                    line |= told(judge(workers.model, task, CPU, "validation"), "validation")
            recorder.write(line)
            if not math.isfinite(line.get("validation_loss", 0.0)):
                break
    recorder.write({"end": True, **told(judge(workers.model, task, CPU, "test"), "test")})
    recorder.close()


class Gradients:
    """One replica serves all, since they are equal: every worker's gradient in turn, one exchange, one step.

    Running statistics (BatchNorm's) then follow all workers' batches, one after the other.
    """

    def __init__(self, run: Run, task: Task, threads: ThreadWorkers, method: Reducer) -> None:
        self.run, self.task, self.threads, self.method = run, task, threads, method
        self.model = task.model()
        self.optimizer = make_optimizer(self.model, run)
        self.names, self.parameters = zip(*self.model.named_parameters())
        layout = Layout(self.names, tuple(p.shape for p in self.parameters))
        self.watch = SecondMoments(self.model) if self.method.wants is Moments else None
        alone = [Layout((name,), (p.shape,)) for name, p in zip(self.names, self.parameters)]
        self.groups = alone if run.grain == "tensor" else [layout]
        self.states = [[self.method.init(group) for group in self.groups] for _ in threads.comms]
        self.gradients = [layout.zeros() for _ in threads.comms]
        self.outs = [layout.zeros() for _ in threads.comms]
        self.sizes = layout.sizes

    def step(self, number: int) -> float:
        known = [self._gradient(number, rank) for rank in range(self.run.workers)]
        if number == 0:  # as under DDP, which arranges its buckets after the first step
            self.threads.run(lambda c: Dense().reduce(self.gradients[c.rank], None, c, self.outs[c.rank]))
        else:
            self.threads.run(lambda c: self._reduce(known[c.rank][0], c))
        for p, part in zip(self.parameters, self.outs[0].split(self.sizes)):
            p.grad = part.view_as(p)
        clip(self.model, self.run)
        set_rate(self.optimizer, number, self.run)
        self.optimizer.step()
        return sum(loss for _, loss in known) / len(known)

    def _reduce(self, known: Any, comm: Comm) -> None:
        """All groups, one after the other: one for the whole model, or one for each tensor."""
        sizes = [group.numel for group in self.groups]
        parts: Any = known.split(sizes) if isinstance(known, Tensor) else self._split(known, sizes)
        for part, state, out in zip(parts, self.states[comm.rank], self.outs[comm.rank].split(sizes), strict=True):
            self.method.reduce(part, state, comm, out)

    @staticmethod
    def _split(known: Moments, sizes: list[int]) -> list[Moments]:
        return [Moments(*both) for both in zip(known.mean.split(sizes), known.square.split(sizes), strict=True)]

    def _gradient(self, number: int, rank: int) -> tuple[Any, float]:
        self.model.zero_grad()
        loss = backward(self.model, self.task, number, rank, self.run)
        flat = self.gradients[rank]
        for p, part in zip(self.parameters, flat.split(self.sizes)):
            part.zero_() if p.grad is None else part.copy_(p.grad.flatten())
        if self.watch is None:
            return flat, loss
        squares = self.watch.side_by_side(self.names).clone()  # the next worker's are collected in the same place
        self.watch.clear()
        return Moments(flat, squares), loss

    def metrics(self) -> dict[str, float]:
        """Of the method on the first worker, where it serves the whole model; and the entries that changed at all."""
        told = self.method.metrics(self.states[0][0]) if len(self.groups) == 1 else {}
        return told | {"union": float(self.outs[0].count_nonzero()) / max(1, self.outs[0].numel())}

    def judged(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        pass


class Changes:
    """Local steps: every worker has a replica and an optimizer of its own."""

    def __init__(self, run: Run, task: Task, threads: ThreadWorkers, steps: LocalSteps) -> None:
        self.run, self.task, self.threads = run, task, threads
        self.model = task.model()
        self.models = [self.model, *(copy.deepcopy(self.model) for _ in threads.comms[1:])]
        self.optimizers = [make_optimizer(model, run) for model in self.models]
        self.handles = threads.run(
            lambda c: take_local_steps(self.models[c.rank], self.optimizers[c.rank], steps, comm=c)
        )

    def step(self, number: int) -> float:
        losses = []
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers)):
            optimizer.zero_grad()
            losses.append(backward(model, self.task, number, rank, self.run))
            clip(model, self.run)
            set_rate(optimizer, number, self.run)
        self.threads.run(lambda c: self.optimizers[c.rank].step())
        return sum(losses) / len(losses)

    def metrics(self) -> dict[str, float]:
        return self.handles[0].metrics()

    @contextmanager
    def judged(self) -> Iterator[None]:
        """What the workers have in common, with the mean of their running statistics, which `anchored` puts back."""
        means = [torch.stack(each).mean(0) for each in zip(*map(floating_buffers, self.models), strict=True)]
        with self.handles[0].anchored():
            for buffer, mean in zip(floating_buffers(self.model), means, strict=True):
                buffer.copy_(mean)
            yield

    def finish(self) -> None:
        self.threads.run(lambda c: self.handles[c.rank].finish())


def floating_buffers(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def backward(model: nn.Module, task: Task, number: int, rank: int, run: Run) -> float:
    x, y = task.data.train(run.seed, number, rank, run.workers, run.batch)
    loss: Tensor = task.loss(model(x), y)
    loss.backward()
    return loss.item()


def bytes_between(before: Sequence[Ledger], now: Sequence[Ledger]) -> dict[str, float]:
    """What a worker sent since `before`, the mean of all."""
    each = [sent_between(a, b) for a, b in zip(before, now)]
    return {key: sum(one[key] for one in each) / len(each) for key in each[0]}


def shares(before: Sequence[Ledger], now: Sequence[Ledger], model: nn.Module) -> dict[str, float]:
    """The share of the entries that a worker sent, the mean of all, and the busiest worker's bytes over the mean."""
    numel = sum(p.numel() for p in model.parameters())
    wire = [b.wire - a.wire for a, b in zip(before, now)]
    found = {"density": sum(b.picked - a.picked for a, b in zip(before, now)) / len(now) / max(1, numel)}
    return found | ({"busiest": max(wire) * len(wire) / sum(wire)} if sum(wire) else {})


def refuse(run: Run) -> str | None:
    """Why a run cannot be rehearsed, if it cannot."""
    method = method_of(run.method)
    if isinstance(method, DDP) and method != PLAIN:
        return f"{run.method} is torch's own, and needs processes"
    reducer = reducer_in(method)
    if reducer is not None and reducer.wants not in (Tensor, Moments):
        return f"{run.method} sees the backward pass of every worker, and needs processes"
    if run.grain == "bucket":
        return "a rehearsal has no buckets, which are DDP's: grain bucket needs processes"
    return None


def rehearse_all(folders: Sequence[Path], at_once: int, on_step: OnStep) -> dict[Path, str]:
    """Make all runs that are missing, several at once; those that failed, with what was said."""
    failed = {folder: why for folder in folders if (why := refuse(Run.read(folder)))}
    waiting = [folder for folder in folders if folder not in failed and not has_ended(folder)]
    stages = [Stage() for _ in range(min(at_once, len(waiting)))]
    try:
        while waiting or any(stage.folder for stage in stages):
            for stage in stages:
                if stage.folder is None and waiting:
                    stage.begin(waiting.pop(0))
            time.sleep(0.2)
            for stage in stages:
                if stage.folder is not None:
                    folder, why = stage.folder, stage.heard(on_step)
                    failed |= {folder: why} if why else {}
    finally:
        for stage in stages:
            stage.close()
    return failed


class Stage:
    """A process that makes one run after another, since loading torch takes longer than many a run."""

    def __init__(self) -> None:
        self.folder: Path | None = None  # of the run that it makes now
        self.process: subprocess.Popen[str] | None = None

    def begin(self, folder: Path) -> None:
        if self.process is None:
            environment = os.environ | KEEP_MEMORY | {"OMP_NUM_THREADS": "1", "THINWIRE_LAUNCHER": str(os.getpid())}
            self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115  a pipe that nobody reads would stop it when full
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thinwire.lab.run.rehearsal"],
                env=environment, stdin=subprocess.PIPE, stderr=self.said, text=True,
            )  # fmt: skip
        self.folder, self.run, self.lines = folder, Run.read(folder), follow(rank_file(folder, 0))
        print(folder.absolute(), file=self.process.stdin, flush=True)

    def heard(self, on_step: OnStep) -> str | None:
        """Tell what the run has recorded since; why it failed, if it did."""
        assert self.process is not None
        ended = self.process.poll() is not None  # asked first: what it wrote before its end is read below
        for line in iter(lambda: next(self.lines), None):
            on_step(self.run, line)
            if "end" in line:
                self.folder = None
        if not ended or self.folder is None:
            return None
        self.said.seek(0)
        why = f"{self.run.method} failed:\n{self.said.read()}"
        self.folder = self.process = None
        return why

    def close(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


def main() -> None:
    """Make the runs whose folders are told, a line each, until no more come."""
    end_with_launcher()
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder = Path(line.removesuffix("\n"))
        run = Run.read(folder)
        if why := refuse(run):
            raise LabError(why)
        rehearse(run, load_task(run.task, run.model, Path(run.data)), folder)


if __name__ == "__main__":
    main()
