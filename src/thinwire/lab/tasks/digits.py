"""Handwritten digits, 8 x 8, from scikit-learn: nothing to fetch."""

from pathlib import Path

import torch

from thinwire.lab import require
from thinwire.lab.tasks.base import Arrays, Task
from thinwire.lab.tasks.models import mlp, small_cnn

MODELS = {"mlp": lambda: mlp(64, 256, 256, 10), "cnn": lambda: small_cnn(1, 8)}


def make_task(model: str, data: Path) -> Task:
    require("sklearn")
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
    arrays = Arrays.split(x, torch.tensor(digits.target))
    return Task(f"digits/{model}", MODELS[model], arrays, optimizer="sgd", lr=0.05, batch=32, steps=300)
