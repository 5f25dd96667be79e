"""Train with SGD, and send about a fiftieth of the bytes:

torchrun --nproc-per-node 2 examples/quickstart_sgd.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import thinwire

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
shuffled = torch.randperm(len(images))
images, labels = images[shuffled].float() / 16, labels[shuffled].long()

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
model = thinwire.wrap(model, thinwire.ErrorFeedback(thinwire.TopK(0.01)))  # instead of DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

own = torch.Generator().manual_seed(dist.get_rank())  # each worker draws its own batches
for _ in range(300):
    batch = torch.randint(1500, (32,), generator=own)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()  # the workers exchange here
    optimizer.step()

if dist.get_rank() == 0:
    accuracy = (model.module(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    sent = thinwire.handle(model).ledger.wire / 300
    print(f"accuracy {accuracy:.1%} on 297 test images, {sent / 1e3:.1f} kB a step on each worker's link")
dist.destroy_process_group()
