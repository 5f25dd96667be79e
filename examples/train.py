"""An ordinary DDP script, and the one line that makes it thin.

    torchrun --nproc-per-node 2 examples/train.py
    torchrun --nproc-per-node 2 examples/train.py "RandomBlock(0.1)"
    torchrun --nproc-per-node 2 examples/train.py DDP

The argument is any spelling of a method (`thinwire methods` lists them), or DDP for plain DDP.
"""

import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

METHOD = sys.argv[1] if len(sys.argv) > 1 else "ErrorFeedback(TopK(0.01))"
STEPS, BATCH = 300, 32


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images, labels = images.float() / 16, labels.long()
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = shuffled[:1500], shuffled[1500:]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    if METHOD == "DDP":
        model = DDP(model)
    else:
        model = thinwire.wrap(model, METHOD)  # instead of DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    own = torch.Generator().manual_seed(1 + rank)
    start = time.perf_counter()
    for _ in range(STEPS):
        batch = train[torch.randint(len(train), (BATCH,), generator=own)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start

    if rank == 0:
        accuracy = (model.module(images[test]).argmax(1) == labels[test]).float().mean()
        if METHOD == "DDP":
            sent = STEPS * 4 * sum(p.numel() for p in model.parameters())
        else:
            sent = thinwire.handle(model).ledger.payload
        print(f"{METHOD}, {world} workers: loss {loss.item():.4f}, accuracy {accuracy:.1%}", end=", ")
        print(f"{sent / STEPS / 1e3:.1f} kB a step and worker, {1e3 * seconds / STEPS:.1f} ms a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        METHOD == "DDP" or thinwire.parse(METHOD)
    except ValueError as error:  # a typo is one line
        sys.exit(f"examples/train.py: {error}")
    main()
