"""A task of one's own for the lab, in ten lines: a wide net on the digits.

cd examples
thinwire compare --task my_task:make_task --workers 4 --link 100mbit --steps 60 --method DDP --method "AutoDAD()"
"""

import torch
from sklearn.datasets import load_digits

from thinwire.lab.tasks.base import Arrays, Task
from thinwire.lab.tasks.models import mlp


def make_task() -> Task:
    images, labels = load_digits(return_X_y=True)
    data = Arrays.split(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    return Task("wide digits", lambda: mlp(64, 1024, 1024, 10), data, lr=0.05, batch=32, steps=60)
