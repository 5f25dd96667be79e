"""What thinwire knows of one model, and how users ask for it."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from thinwire.comm import Ledger
from thinwire.core import memory
from thinwire.core.reducer import Layout
from thinwire.doors.optimizers import warn_if_left_behind
from thinwire.step import checkpoints, files, gathered
from thinwire.step.step import Steps


class Handle(ABC):
    """What thinwire knows of one model: bytes, metrics, state."""

    def __init__(self, steps: Steps):
        self.capture = steps  # what is captured for the exchange, and what became of it
        self.run: str | None = None  # the id of this run's sets, once there is one
        self.resumed = False  # goes on from a saved state, or was said not to
        warn_if_left_behind(self)

    @property
    def ledger(self) -> Ledger:
        """Everything this worker has sent so far."""
        return self.capture.comm.ledger

    def metrics(self) -> dict[str, float]:
        """What the last exchange cost and what the method says of it; see the page on metrics for each name."""
        found = dict(self.capture.last)
        told = [self.capture.reducer.metrics(group.state) for group in self.capture.groups]
        for key in dict.fromkeys(key for one in told for key in one):
            values = [one[key] for one in told if key in one]
            found[key] = sum(values) / len(values)
        found["residual_norm"] = self.residual_norm()
        return found

    def residual_norm(self) -> float:
        """The length of all that this worker has been handed and has not sent."""
        squares = 0.0
        for group in self.capture.groups:
            for tensor in memory.unsent_tensors(group.state):
                squares += float(torch.linalg.vector_norm(tensor)) ** 2
        return squares**0.5

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This rank's state, which `torch.load(weights_only=True)` takes; every rank has its own."""

    @abstractmethod
    def load_state_dict(self, states: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Go on from this rank's own state, or from those of all ranks of a run with another number of workers."""

    def save(self, folder: str | Path, *, keep: int = 3) -> Path:
        """Write the state of all ranks into a new folder inside `folder`, whole or not at all; this rank's file.

        Every rank calls this, after the same step. The newest `keep` of this run's sets stay.
        """
        state = self.state_dict()  # first, as an exchange may be under way beside
        path, self.run = files.save(
            state,
            Path(folder),
            files.Together(self.capture.comm, self.capture.device),
            run=self.run,
            step=self._steps_taken(),
            unsent=self.residual_norm(),
            keep=keep,
        )
        return path

    def load(self, folder: str | Path, *, missing: files.Missing = "refuse") -> Path:
        """Go on from the newest whole set that `save` wrote, be the workers as many as then or not; its folder.

        Every rank calls this. missing: whether a set without some rank's file is refused, or taken, and what that rank
        had not sent dropped. A state that does not fit changes nothing.
        """
        before = self.state_dict()  # first, as an exchange may be under way beside
        together = files.Together(self.capture.comm, self.capture.device)
        found = files.read(Path(folder), together, run=self.run, missing=missing)
        with together.all_or_none(undo=lambda: self.load_state_dict(before)):
            layers = getattr(self, "layers", None)
            self.load_state_dict(checkpoints.with_stand_ins(found.states, found.lost, self.capture, layers))
        self.run = found.run
        return found.place

    def remembers(self) -> bool:
        """Whether the method keeps anything from step to step that a checkpoint must hold."""
        layers = getattr(self, "layers", None)
        states = [] if layers is None else [group.state for group in layers.exchange.groups]
        return any(state is not None for state in [self.capture.reducer.init(Layout((), ())), *states])

    def gathered(self) -> "Gathered":
        """For checkpoints that a framework writes on one rank: an object whose state holds that of all ranks."""
        return Gathered(self)

    def _steps_taken(self) -> int:
        """The step in a set's name."""
        return self.capture.step

    @abstractmethod
    def detach(self) -> None:
        """Leave the model alone. Residuals that were not sent are dropped."""


class Gathered:
    """`state_dict` and `load_state_dict` as frameworks call them: every rank gets, and takes, one state for all.

    Every rank must call `state_dict`, and any of them may write what comes back.
    """

    def __init__(self, handle: Handle):
        self.handle = handle

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, as bytes that `torch.load(weights_only=True)` takes."""
        state = self.handle.state_dict()
        together = files.Together(self.handle.capture.comm, self.handle.capture.device)
        return gathered.pack(state, together)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on any rank, be the workers as many as then or not."""
        self.handle.load_state_dict(gathered.unpack(state))
