"""One small model and its data for every framework, and the same training without one."""

import os
import signal
import warnings
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

LOSSY = "ErrorFeedback(TopK(0.1))"
LOCAL = "LocalSteps(ErrorFeedback(TopK(0.1)), every=2)"
BATCH, BATCHES, EPOCHS = 8, 3, 2  # a worker's, in an epoch
STEPS = BATCHES * EPOCHS


def launched() -> tuple[int, int]:
    """Rank and world, after the environment has been made to look as torchrun leaves it."""
    more = {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ |= more | {"ACCELERATE_USE_CPU": "true"}  # nobody meets at that port: the group is there already
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))


def optimizer_for(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def examples(world: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * BATCHES * world, 12, generator=generator)
    return x, torch.sin(3 * x[:, :4])


def batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """As an unshuffled DistributedSampler deals them out."""
    x, y = examples(world)
    mine = slice(rank + world * BATCH * (step % BATCHES), world * BATCH * (step % BATCHES + 1), world)
    return x[mine], y[mine]


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(net(x), y)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


class Meter:
    """The bytes of each step, as the handle tells them; those of checkpoints are no step's."""

    def __init__(self) -> None:
        self.payload = 0.0

    def read(self, handle: Any) -> None:
        self.payload += handle.metrics()["payload_bytes"]


def told(net: nn.Module, handle: Any, world: int, meter: Meter | None = None) -> dict[str, Any]:
    """What a run is judged by."""
    with torch.no_grad():
        loss = float(loss_of(net, *examples(world)))
    found = {"parameters": flat(net), "loss": loss}
    if handle is not None:
        found |= {"step": handle._steps_taken(), "payload": 0.0 if meter is None else meter.payload}
        found |= {"residual": handle.residual_norm(), "names": list(handle.capture.parameters)}
    return found


def by_hand(rank: int, world: int, method: str | None, inside: bool = False) -> dict[str, Any]:
    """The same training in a loop of one's own: through DDP (None), `wrap` or `local`.

    inside: the network is a part, called net, of the model that is trained, as it is in a LightningModule.
    """
    net = network()
    optimizer = optimizer_for(net)
    handle: Any = None
    meter = Meter()
    model: nn.Module = nn.Sequential(OrderedDict(net=net)) if inside else net
    if method is None:
        model = DDP(model)
    elif method.startswith("LocalSteps"):
        handle = thinwire.local(model, optimizer, method)
    else:
        model = thinwire.wrap(model, method)
        handle = thinwire.handle(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step, rank, world)).backward()
        optimizer.step()
        if handle is not None:
            meter.read(handle)
    if isinstance(handle, thinwire.LocalHandle):
        handle.finish()
    return told(net, handle, world, meter)


def die_on_rank_1() -> None:
    """As the kernel ends a worker when memory runs out: no handler runs, and the other worker is left waiting."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


class Heard:
    """What thinwire warned of inside."""

    def __enter__(self) -> list[str]:
        self.words: list[str] = []
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        return self.words

    def __exit__(self, *error: Any) -> None:
        self.words += [str(w.message) for w in self._caught or () if issubclass(w.category, thinwire.MethodWarning)]
        self._catcher.__exit__(*error)
