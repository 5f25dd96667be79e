"""Train, and go on after a kill. Start it, kill it at any time, and start the same command again:

torchrun --nproc-per-node 2 examples/resume.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import thinwire

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
rank = dist.get_rank()
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
shuffled = torch.randperm(len(images))
images, labels = images[shuffled].float() / 16, labels[shuffled].long()

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
model = thinwire.wrap(model, thinwire.ErrorFeedback(thinwire.TopK(0.01)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
handle = thinwire.handle(model)

folder, done = Path("checkpoints"), 0
if (folder / "method" / "latest").exists():  # there is a complete save
    place = handle.load(folder / "method")  # on every rank; checkpoints/method/step-00000050-1f3a9c2e
    done = int(place.name.split("-")[1])
    kept = torch.load(folder / f"model-{done:08d}.pt", weights_only=True)
    model.module.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    print(f"rank {rank} goes on after step {done}")

for step in range(done, 500):
    own = torch.Generator().manual_seed(1000 * rank + step)  # a resumed run draws the same batches
    batch = torch.randint(1500, (32,), generator=own)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    if (step + 1) % 50 == 0:
        if rank == 0:  # weights and optimizer are the same on all ranks
            folder.mkdir(exist_ok=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / f"model-{step + 1:08d}.pt")
        handle.save(folder / "method")  # on every rank; complete only when rank 0, too, has got here

if rank == 0:
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    accuracy = (model.module(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"accuracy {accuracy:.1%} on 297 test images, sum of all parameters {total:.9f}")
dist.destroy_process_group()
