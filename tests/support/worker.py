"""One worker of `processes.launch`."""

import importlib
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path


def main(rank: int, world: int, place: tuple[int, str], folder: str) -> None:
    """Do what `folder` asks for, with what is printed going there too, and leave the result there."""
    log = os.open(Path(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # As a launcher sets it, for what asks the environment and not torch.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    try:
        work(rank, world, place, Path(folder))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()


def work(rank: int, world: int, place: tuple[int, str], folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    port, name = place
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    spelled, arguments = torch.load(folder / "call.pt", weights_only=False)
    module, function = spelled.split(":")
    result = getattr(importlib.import_module(module), function)(**arguments)
    torch.save(result, folder / f"{rank}.result")
    dist.barrier()
    dist.destroy_process_group()
