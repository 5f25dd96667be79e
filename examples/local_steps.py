"""An ordinary AdamW script without DDP, and the three lines that make its workers train one model together.

    torchrun --nproc-per-node 2 examples/local_steps.py

Each worker takes ten steps of its own; then the workers exchange the largest twentieth of what those have changed.
The argument is the number of steps.
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import thinwire  # line 1

STEPS, BATCH = int(sys.argv[1]) if len(sys.argv) > 1 else 300, 32


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    method = thinwire.ErrorFeedback(thinwire.TopK(0.05))
    handle = thinwire.local(model, optimizer, method, every=10)  # line 2

    own = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        batch = train[torch.randint(len(train), (BATCH,), generator=own)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    handle.finish()  # line 3: every worker holds the same model now

    if rank == 0:
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
        dense = 4 * sum(p.numel() for p in model.parameters())
        sent = handle.ledger.payload / STEPS
        print(f"{world} workers: loss {loss.item():.4f}, accuracy {accuracy:.1%}", end=", ")
        print(f"{sent / 1e3:.2f} kB a step and worker, 1/{dense / sent:.0f} of the parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
