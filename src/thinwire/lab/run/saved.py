"""What `--resume` goes on from: sets as `handle.save` writes them, with the model and the optimizer inside."""

from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.comm.torch import TorchComm
from thinwire.lab import LabError
from thinwire.lab.run.methods import Wrapped
from thinwire.step import files
from thinwire.step.checkpoints import CheckpointError

RUN = "run"  # a folder has one, so its sets need no name that tells runs apart


class Checkpoints:
    """The sets of one run. Every worker takes part in each save and load."""

    def __init__(self, folder: Path, device: torch.device):
        self.folder, self.comm = folder / "checkpoints", TorchComm()
        self.together = files.Together(self.comm, device)

    def save(self, step: int, seconds: float, model: nn.Module, optimizer: Optimizer, wrapped: Wrapped) -> None:
        state = {
            "rank": self.comm.rank,
            "world": self.comm.world,
            "step": step,
            "seconds": seconds,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "method": wrapped.state_dict(),
            "random": torch.get_rng_state(),
        }
        files.save(state, self.folder, self.together, run=RUN, step=step, unsent=0.0, keep=1)

    def load(self, model: nn.Module, optimizer: Optimizer, wrapped: Wrapped) -> tuple[int, float]:
        """The step to go on from and the seconds until then; (0, 0) where there is no checkpoint yet."""
        if not self.folder.exists():
            return 0, 0.0
        try:
            kept = files.read(self.folder, self.together, run=RUN, missing="refuse").states
        except CheckpointError as error:
            raise LabError(f"{error}. To begin anew, remove {self.folder}") from error
        mine, *others = kept
        if others or mine["world"] != self.comm.world:
            raise LabError(f"{self.folder} is of {mine['world']} workers: resume with --workers {mine['world']}")
        model.load_state_dict(mine["model"])
        optimizer.load_state_dict(mine["optimizer"])
        wrapped.load_state_dict(mine["method"])
        torch.set_rng_state(mine["random"])
        return mine["step"], mine["seconds"]
