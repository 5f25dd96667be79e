"""One worker of `processes.launch`: python worker.py module:function folder"""

import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    torch.set_num_threads(1)
    module, function = sys.argv[1].split(":")
    folder = Path(sys.argv[2])
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    dist.init_process_group("gloo")
    result = getattr(importlib.import_module(module), function)(**arguments)
    torch.save(result, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
