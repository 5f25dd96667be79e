"""What the workers of test_atomicity.py run: training in which one step is broken off, on one rank or on all."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire
from ddp_cases import BUCKETS, Failed, batches, loss_of, net, weights
from thinwire.testing.atomicity import Breaking


def many(calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The results of several cases, one after another."""
    results: list[Any] = []
    for name, arguments in calls:
        try:
            results.append(globals()[name](**arguments))
        except Exception as error:
            results.append(Failed(f"{arguments}: {type(error).__name__}: {error}"))
    return results


class Checkpointed(nn.Module):
    """A net whose blocks run their own backward passes inside the one under way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.net[:3], x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.net[3:], x, use_reentrant=True)


def through_ddp(
    spelling: str, at: int, alone: bool, overlap: bool = False, blocks: bool = False
) -> tuple[Tensor, Tensor, list[str]]:
    """Weights after 6 steps: of a run in which step 4 fails and is tried again, and of one in which nothing fails.

    blocks: in checkpointed blocks, and several buckets.
    """
    found, told = [], []
    for broken in (True, False):
        warnings.simplefilter("ignore", thinwire.MethodWarning)
        options = {"bucket_cap_mb": BUCKETS[6]} if blocks else {}
        ddp = thinwire.wrap(Checkpointed() if blocks else net(), thinwire.parse(spelling), overlap=overlap, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
        handle = thinwire.handle(ddp)
        for number, batch in enumerate(batches(6)):
            if broken and number == 4:
                told.append(_fails(handle, at, alone, lambda ddp=ddp, batch=batch: loss_of(ddp, batch).backward()))
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()
        found.append(weights(ddp))
        handle.detach()
    return found[0], found[1], told


def through_local_steps(spelling: str, at: int, alone: bool) -> tuple[Tensor, Tensor, list[str]]:
    """The same for local steps: the exchange fails in the optimizer's step, and the next one makes up for it."""
    found, told = [], []
    for broken in (True, False):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        handle = thinwire.local(model, optimizer, thinwire.parse(spelling), every=1)
        for number, batch in enumerate(batches(6)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if broken and number == 4:
                told.append(_fails(handle, at, alone, optimizer.step))
            else:
                optimizer.step()
        handle.finish()
        found.append(weights(model))
        handle.detach()
    return found[0], found[1], told


def _fails(handle: Any, at: int, alone: bool, work: Any) -> str:
    """What a step says that fails at its collective number `at`; afterwards the transport is whole again."""
    comms = [handle.capture.comm]
    if getattr(handle, "layers", None) is not None:
        comms = [handle.layers.comm]
    whole = [comm.transport for comm in comms]
    before = handle.state_dict()
    if not alone or dist.get_rank() == 0:
        for comm in comms:
            comm.transport = Breaking(comm.transport, at)
    try:
        work()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    for comm, transport in zip(comms, whole, strict=True):
        comm.transport = transport
    same = thinwire.testing.same_state(before["groups"], handle.state_dict()["groups"])
    return said if same else f"another state, after {said}"


def throws_away(spelling: str, passes: int, fails: bool) -> tuple[Tensor, Tensor]:
    """Weights after steps before some of which gradients are made and cleared unused: with them, and without.

    passes: how many add up before they are cleared. fails: one more breaks off after them, on one rank.
    """
    found = []
    for spike in (True, False):
        ddp = thinwire.wrap(net(), thinwire.parse(spelling))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
        for number, batch in enumerate(batches(8)):
            if spike and number in (3, 5):
                for _ in range(passes):
                    (1e3 * loss_of(ddp, batch)).backward()
                if fails:
                    _fails(thinwire.handle(ddp), 1, True, lambda ddp=ddp, batch=batch: loss_of(ddp, batch).backward())
                optimizer.zero_grad()
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()
        found.append(weights(ddp))
        thinwire.handle(ddp).detach()
    return found[0], found[1]


def broken_off(spelling: str) -> tuple[list[str], Tensor]:
    """What each step says when a hook of the user fails in the fourth backward pass, on rank 1; the last weights."""
    ddp = thinwire.wrap(net(), thinwire.parse(spelling))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    said = []
    for number, batch in enumerate(batches(7)):
        optimizer.zero_grad()
        hit = number == 3 and dist.get_rank() == 1
        hook = ddp.register_forward_hook(_fails_on_the_way_back) if hit else None
        loss = loss_of(ddp, batch)
        if hook is not None:
            hook.remove()
        try:
            loss.backward()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            optimizer.step()
            said.append("")
    found = weights(ddp).clone()
    thinwire.handle(ddp).detach()
    return said, found


def _fails_on_the_way_back(module: nn.Module, inputs: Any, output: Tensor) -> None:
    def refuses(gradient: Tensor) -> None:
        raise ValueError("the user's own")

    output.register_hook(refuses)
