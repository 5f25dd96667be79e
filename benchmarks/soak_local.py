"""Lives of local steps, in threads: collectives that break, full disks, resumes, other numbers of workers."""

import errno
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from thinwire.comm.protocol import PeerFailed
from thinwire.comm.threads import ThreadComm, in_threads
from thinwire.step import sets
from thinwire.testing.atomicity import Breaking, Breaks

Case = dict[str, Any]
EXACT = ("Dense()", "ErrorFeedback(TopK(1.0))")
METHODS = (
    *EXACT,
    *("ErrorFeedback(TopK(0.1))", "ErrorFeedback(TopK(0.1, agree=True))", "ErrorFeedback(RandomBlock(0.1))"),
    *("ErrorFeedback(ExDyna(0.05))", "ErrorFeedback(PowerSGD(2))", "ErrorFeedback(LowBit(2, block=64, smallest=0))"),
    *("ErrorFeedback(SignSGD())", "ErrorFeedback(QSGD(4))", "ErrorFeedback(Cast(TopK(0.1), bits=4))", "DGC(0.1)"),
    *("Momentum(ErrorFeedback(TopK(0.1)))", "Warmup(ErrorFeedback(TopK(0.1)), steps=2)", "ErrorFeedback(GTopK(0.1))"),
)
LOOPS = ("plain", "closure", "accumulate", "skip")
FAULTS = (None, None, "wire", "disk")


def drawn(rng: random.Random) -> Case:
    every = rng.choice((1, 1, 2, 3))
    lives = [
        {
            "world": rng.randint(1, 4),
            "rounds": rng.randint(1, 4),
            "loop": rng.choice(LOOPS),
            "fault": rng.choice(FAULTS),
            "rank": rng.randrange(4),
            "at": rng.randrange(4),
        }
        for _ in range(rng.randint(1, 4))
    ]
    frozen = rng.random() < 0.3
    return {
        "door": "local", "method": rng.choice(METHODS), "every": every, "seed": rng.randrange(1000), "frozen": frozen,
        "lives": lives,
    }  # fmt: skip


def train(case: Case, life: Case, number: int, folder: Path, comm: ThreadComm) -> Tensor:
    """One life of one worker; its parameters at the end."""
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.ReLU(), nn.Linear(10, 3))
    weights = torch.Generator().manual_seed(case["seed"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=weights))
    if case["frozen"]:
        model[0].requires_grad_(False)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.05, momentum=0.5)
    handle = thinwire.local(model, optimizer, case["method"], case["every"], comm=comm)
    if number:
        handle.load(folder)
    data = torch.Generator().manual_seed(1000 * case["seed"] + 10 * number + comm.rank)
    hit = comm.rank == life["rank"] % comm.world
    if life["fault"] == "disk":
        _save_on_a_full_disk(handle, folder, hit)
    whole = comm.transport
    for step in range(life["rounds"] * case["every"]):
        breaks = life["fault"] == "wire" and step == 0 and hit
        if breaks:
            comm.transport = Breaking(whole, life["at"])  # type: ignore[assignment]
        try:
            _step(model, optimizer, life["loop"], step, data)
        except (Breaks, PeerFailed):
            if life["fault"] != "wire":
                raise
        finally:
            comm.transport = whole
    comm.renew()  # a fault of another rank may have come after this one's last collective
    handle.finish()
    handle.save(folder)
    handle.detach()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loop: str, step: int, data: torch.Generator) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        for x in torch.randn(2 if loop == "accumulate" else 1, 8, 6, generator=data):
            loss = (model(x) - x[:, :3]).square().mean()
            loss.backward()
        return loss.detach()

    if loop == "skip" and step % 2:
        closure()  # its gradient is thrown away, and the step is taken with the next one
    if loop == "closure":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def _save_on_a_full_disk(handle: thinwire.LocalHandle, folder: Path, hit: bool) -> None:
    before = sets.write_state

    def full(state: dict[str, Any], path: Path) -> sets.Entry:
        if state["rank"] == FULL["rank"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return before(state, path)

    rank = handle.capture.comm.rank
    if hit:
        FULL["rank"] = rank
    handle.capture.comm.all_mean(torch.zeros(1))
    if hit:
        sets.write_state = full
    handle.capture.comm.all_mean(torch.zeros(1))
    try:
        handle.save(folder)
    except thinwire.CheckpointError as error:
        if "No space left" not in str(error):
            raise
    else:
        raise AssertionError("a save on a full disk was told as done")
    finally:
        handle.capture.comm.all_mean(torch.zeros(1))
        if hit:
            sets.write_state = before
        handle.capture.comm.all_mean(torch.zeros(1))


FULL = {"rank": -1}


def lived(case: Case) -> list[Tensor]:
    """The parameters after each life, which all workers must have alike."""
    ends = []
    with tempfile.TemporaryDirectory() as name:
        for number, life in enumerate(case["lives"]):
            found = in_threads(life["world"], lambda comm, n=number, one=life: train(case, one, n, Path(name), comm))
            if not all(torch.equal(one, found[0]) for one in found):
                raise AssertionError(f"replicas differ after life {number}: {life}")
            if not bool(found[0].isfinite().all()):
                raise AssertionError(f"life {number} ended with no numbers: {life}")
            ends.append(found[0])
    return ends


def calmed(case: Case) -> Case | None:
    """The case without what leaves no trace; None where something may: a broken exchange goes with the next one."""
    if any(life["fault"] == "wire" for life in case["lives"]):
        return None
    return case | {"lives": [life | {"fault": None} for life in case["lives"]]}
