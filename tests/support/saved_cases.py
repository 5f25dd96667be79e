"""What workers of `tests/lab/test_saved.py` do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from thinwire.lab import LabError
from thinwire.lab.run.saved import Checkpoints


def save_or_load(folder: str, steps: list[int], load: bool) -> Any:
    """After the saves: where they go on from, or why they cannot."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoints = Checkpoints(Path(folder), torch.device("cpu"))
    wrapped: Any = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)
    for step in steps:
        with torch.no_grad():
            model.bias.fill_(step)
        checkpoints.save(step, 0.5 * step, model, optimizer, wrapped)
    if not load:
        return None
    try:
        return (*checkpoints.load(model, optimizer, wrapped), model.bias.tolist())
    except LabError as error:
        return str(error)
