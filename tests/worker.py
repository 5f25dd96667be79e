"""One worker of `processes.launch`, which takes calls until it is ended: python worker.py folder"""

import gc
import importlib
import itertools
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for number in itertools.count():
        folder = Path(sys.argv[1], f"call{number}")
        while not (folder / "call.pt").exists():
            time.sleep(0.01)
        try:
            serve(folder, rank, world)
        except BaseException:
            traceback.print_exc()
            (folder / f"{rank}.failed").touch()
            raise


def serve(folder: Path, rank: int, world: int) -> None:
    spelled, arguments = torch.load(folder / "call.pt", weights_only=False)
    module, function = spelled.split(":")
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    result = getattr(importlib.import_module(module), function)(**arguments)
    torch.save(result, folder / f"{rank}.part")
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # models refer to themselves, and their hooks to the group that is gone
    (folder / f"{rank}.part").rename(folder / f"{rank}.result")


if __name__ == "__main__":
    main()
