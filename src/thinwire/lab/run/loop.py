"""The training loop: everything a worker does in one run, from the first batch to the last."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.lab.records.record import Line, Recorder, Run, keep_until, rank_file
from thinwire.lab.run.links.namespaces import sent_bytes
from thinwire.lab.run.methods import wrap_model
from thinwire.lab.run.optimizers import clip, make_optimizer, set_rate
from thinwire.lab.run.saved import Checkpoints
from thinwire.lab.tasks import Task


def train(run: Run, task: Task, folder: Path, resume: bool, on_step: Callable[[Line], None] = lambda _: None) -> None:
    """One run, on this worker; the process group stands already."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), this_device()
    torch.manual_seed(run.seed)
    model = task.model().to(device)
    optimizer = make_optimizer(model, run)
    wrapped = wrap_model(model, optimizer, run, world)

    checkpoints = Checkpoints(folder, device)
    first, seconds = checkpoints.load(model, optimizer, wrapped) if resume else (0, 0.0)
    keep_until(rank_file(folder, rank), first)
    recorder = Recorder(rank_file(folder, rank))
    recorder.write({"start": first, "rank": rank, "pid": os.getpid(), "torch": torch.__version__})
    if first == 0:
        recorder.write({"step": 0, "seconds": 0.0, **evaluate(model, task, device)})

    for step in range(first, run.steps):
        began, sent = time.perf_counter(), sent_bytes()
        set_rate(optimizer, step, run)
        x, y = (part.to(device) for part in task.data.train(run.seed, step, rank, world, run.batch))
        optimizer.zero_grad()
        loss = task.loss(wrapped.net(x), y)
        loss.backward()
        clip(model, run)
        optimizer.step()
        last = step + 1 == run.steps
        if last:
            wrapped.finish()
        took = time.perf_counter() - began
        seconds += took

        line: Line = {"step": step + 1, "loss": loss.item(), "seconds": seconds, "step_s": took}
        if sent is not None:
            line["measured_bytes"] = (sent_bytes() or 0) - sent
        line |= {key: value for key, value in wrapped.metrics().items() if key != "step"}
        if last or (step + 1) % run.evaluate_every == 0:
            with wrapped.judged():
                line |= evaluate(model, task, device)
        recorder.write(line)
        on_step(line)
        if not math.isfinite(line.get("validation_loss", 0.0)):
            break  # every worker sees the same number, so all of them leave here
        if run.checkpoint_every and (last or (step + 1) % run.checkpoint_every == 0):
            checkpoints.save(step + 1, seconds, model, optimizer, wrapped)

    recorder.write({"end": True, **evaluate(model, task, device, "test")})
    recorder.close()


def evaluate(model: nn.Module, task: Task, device: torch.device, split: str = "validation") -> dict[str, float]:
    """Loss and accuracy on held-out data, every worker a share of it."""
    world = dist.get_world_size()
    average_buffers(model, world)
    total = judge(model, task, device, split, share=(dist.get_rank(), world))
    dist.all_reduce(total)
    return told(total, split)


@torch.no_grad()
def judge(model: nn.Module, task: Task, device: torch.device, split: str, share: tuple[int, int] = (0, 1)) -> Tensor:
    """Loss, right answers and answers over one worker's share of the held-out data: (which, of how many)."""
    rank, world = share
    model.eval()
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for number, (x, y) in enumerate(task.data.held_out(split)):
        if number % world == rank:
            x, y = x.to(device), y.to(device)
            outputs = model(x)
            right = (outputs.argmax(-1) == y).sum() if outputs.dim() > 1 and not y.is_floating_point() else 0
            total += torch.tensor([task.loss(outputs, y).item() * y.numel(), float(right), y.numel()], device=device)
    model.train()
    return total


def told(total: Tensor, split: str) -> dict[str, float]:
    loss, right, count = total.tolist()
    return {f"{split}_loss": loss / count, f"{split}_accuracy": right / count}


def average_buffers(model: nn.Module, world: int) -> None:
    """Running statistics drift apart, as each worker sees other samples; judge the model by their mean."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= world


def this_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
