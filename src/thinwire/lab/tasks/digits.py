"""Handwritten digits, 8 x 8, from scikit-learn: nothing to fetch."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from thinwire.lab import require
from thinwire.lab.tasks.base import Arrays, Task
from thinwire.lab.tasks.models import mlp, small_cnn

MODELS = {"mlp": lambda: mlp(64, 256, 256, 10), "cnn": lambda: small_cnn(1, 8)}


def make_task(model: str, data: Path) -> Task:
    pictures, labels = load_digits()
    x = torch.tensor(pictures, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
    arrays = Arrays.split(x, torch.tensor(labels))
    return Task(f"digits/{model}", MODELS[model], arrays, optimizer="sgd", lr=0.05, batch=32, steps=300)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """The pictures and what they show, from the file that scikit-learn brings.

    Read here, because every worker of every run does it: importing sklearn.datasets takes longer than a short run.
    """
    require("sklearn")
    places = find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr]
    rows = np.loadtxt(Path(places[0], "datasets", "data", "digits.csv.gz"), delimiter=",")  # type: ignore[index]
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)
