"""Nine speakers say two vowels: 12 cepstral coefficients over 7 to 29 frames (Kudo et al., 1999)."""

from pathlib import Path

import torch
from torch import Tensor

from thinwire.lab.tasks.base import Arrays, Task
from thinwire.lab.tasks.data import find
from thinwire.lab.tasks.models import SequenceGRU

FRAMES, COEFFICIENTS = 29, 12
MODELS = {"gru": lambda: SequenceGRU(COEFFICIENTS + 1, 128, 9)}


def read_series(path: Path) -> tuple[Tensor, Tensor]:
    """A .ts file: a line is a sample, channels between colons, the label last; padded, with a mask."""
    series, labels = [], []
    lines = path.read_text().splitlines()
    for line in lines[lines.index("@data") + 1 :]:
        *channels, label = line.split(":")
        values = torch.tensor([[float(v) for v in channel.split(",")] for channel in channels]).T
        padded = torch.zeros(FRAMES, COEFFICIENTS + 1)
        padded[: len(values), :COEFFICIENTS] = values
        padded[: len(values), -1] = 1
        series.append(padded)
        labels.append(int(label) - 1)
    return torch.stack(series), torch.tensor(labels)


def make_task(model: str, data: Path) -> Task:
    folder = find("speech", data)
    train, test = (read_series(folder / f"JapaneseVowels_{part}.ts") for part in ("TRAIN", "TEST"))
    x, y = (torch.cat(both) for both in zip(train, test))
    arrays = Arrays.split(x, y, tested_from=len(train[1]))
    return Task(
        "speech/gru",
        MODELS[model],
        arrays,
        optimizer="adamw",
        lr=2e-3,
        batch=16,
        steps=300,
    )
