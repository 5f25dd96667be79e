"""Workers of tests/integrations/test_accelerate.py."""

import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from framework_cases import (
    BATCHES,
    LOCAL,
    LOSSY,
    STEPS,
    Heard,
    Meter,
    batch,
    by_hand,
    die_on_rank_1,
    launched,
    loss_of,
    network,
    optimizer_for,
    told,
)
from thinwire.integrations import DEFAULT
from thinwire.integrations.accelerate import FOLDER, attach, local


def trained(folder: str) -> dict[str, Any]:
    rank, world = launched()
    found: dict[str, Any] = {"plain": by_hand(rank, world, None)}
    for method in (DEFAULT, LOSSY, LOCAL):
        found[method] = run(method, Path(folder) / method.split("(")[0], resume=False)
        found[f"{method} by hand"] = by_hand(rank, world, method)
    return found | {"refused": refused()}


def resumed(folder: str) -> dict[str, Any]:
    rank, _ = launched()
    found: dict[str, Any] = {m: run(m, Path(folder) / m.split("(")[0], resume=True) for m in (DEFAULT, LOSSY, LOCAL)}
    without = Path(folder) / "without"
    if rank == 0:
        shutil.copytree(Path(folder) / "ErrorFeedback", without)
        shutil.rmtree(without / FOLDER)
    torch.distributed.barrier()
    with Heard() as words:
        run(LOSSY, without, resume=True)
    return found | {"without": words}


def killed(folder: str) -> None:
    run(LOSSY, Path(folder), resume=False, die_at=BATCHES + 1)


def after_the_kill(folder: str) -> dict[str, Any]:
    return run(LOSSY, Path(folder), resume=True)


def run(method: str, folder: Path, resume: bool, die_at: int | None = None) -> dict[str, Any]:
    rank, world = launched()
    accelerator, net, meter = Accelerator(cpu=True), network(), Meter()
    if method != LOCAL:
        made = attach(accelerator, method)
    model, optimizer = accelerator.prepare(net, optimizer_for(net))
    assert isinstance(model, DDP)
    handle: Any = local(accelerator, model, optimizer, method) if method == LOCAL else made.handles[0]
    if resume:
        accelerator.load_state(str(folder))
    for step in range(BATCHES if resume else 0, STEPS):
        if step == die_at:
            die_on_rank_1()
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, *batch(step, rank, world)))
        optimizer.step()
        meter.read(handle)
        if step == BATCHES - 1:
            accelerator.save_state(str(folder))
            accelerator.wait_for_everyone()
    if isinstance(handle, thinwire.LocalHandle):
        handle.finish()
    else:
        assert thinwire.handle(torch.compile(model, backend="eager")) is handle
    return told(net, handle, world, meter)


def refused() -> list[str]:
    """What `attach` says to what it cannot do; and that it keeps what was asked of DDP."""
    words = []
    late = Accelerator(cpu=True)
    late.prepare(network())
    hooked = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")])
    for accelerator, method in ((Accelerator(cpu=True), "RankDAD(2)"), (late, LOSSY), (hooked, LOSSY)):
        try:
            attach(accelerator, method)
        except (TypeError, RuntimeError, ValueError) as error:
            words.append(str(error))
    asked = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    attach(asked, LOSSY)
    assert asked.prepare(network()).find_unused_parameters
    return words
