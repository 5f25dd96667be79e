"""Lives of a model from `wrap`, in gloo processes: gradients, squares, factors; loops, faults, kills, other worlds."""

import errno
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch._dynamo  # which every first step of an optimizer imports
import torch.distributed as dist
from soak_steps import LOOPS, net, weights
from torch import Tensor

import thinwire
from thinwire.comm.protocol import PeerFailed
from thinwire.kernels import warm
from thinwire.step import sets
from thinwire.testing.atomicity import Breaking, Breaks

warm()  # here, so that workers are forked with kernels that are loaded
Case = dict[str, Any]
EXACT = ("Dense()", "TopK(1.0)", "ErrorFeedback(TopK(1.0))", "DAD(inputs='sent')")
ONCE = (
    "DAD(inputs='sent')",
    "RankDAD(2)",
    "RankDAD(2, rest=ErrorFeedback(TopK(0.2)))",
    "AutoDAD(inputs='sent')",
    "Variance()",
)
METHODS = (
    *EXACT,
    *ONCE[1:],
    *(
        "ErrorFeedback(TopK(0.1))",
        "ErrorFeedback(ExDyna(0.05))",
        "ErrorFeedback(PowerSGD(2))",
        "ErrorFeedback(LowBit(2))",
    ),
    *("DGC(0.1)", "Momentum(ErrorFeedback(RandomBlock(0.1)))"),
)
FAULTS = (None, None, "wire", "method", "inf", "disk", "kill", "stop")
LIMIT = 90.0  # seconds that a life may take
STOPPED = 0.3  # seconds that a process stands still


def drawn(rng: random.Random) -> Case:
    method = rng.choice(METHODS)
    loops = [name for name in LOOPS if name != "penalty" or method not in ONCE]  # which differentiate once, and say so
    lives = [
        {
            "world": rng.randint(1, 3),
            "steps": rng.randint(2, 5),
            "loop": rng.choice(loops),
            "fault": rng.choice(FAULTS),
            "rank": rng.randrange(3),
            "at": rng.randrange(2),
            "data": rng.randrange(1000),
        }
        for _ in range(rng.randint(1, 3))
    ]
    return {
        "door": "wrap", "method": method, "seed": rng.randrange(1000), "frozen": rng.random() < 0.3,
        "overlap": rng.random() < 0.3, "cuts": rng.random() < 0.5, "lives": lives,
    }  # fmt: skip


def calmed(case: Case) -> Case:
    """The case without what must leave no trace: a step that fails is tried again, a life that is killed never was."""
    kept = [life for life in case["lives"] if life["fault"] != "kill"]
    return case | {"lives": [life if life["fault"] == "inf" else life | {"fault": None} for life in kept]}


def lived(case: Case) -> list[Tensor]:
    """The parameters after each life that was not killed, which all workers must have alike."""
    ends = []
    with tempfile.TemporaryDirectory() as name:
        folder, store = Path(name), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for number, life in enumerate(case["lives"]):
            found = _run(case, life, number, folder, store.port)
            if life["fault"] == "kill":
                continue
            if not all(torch.equal(one, found[0]) for one in found):
                raise AssertionError(f"replicas differ after life {number}: {life}")
            if not bool(found[0].isfinite().all()):
                raise AssertionError(f"life {number} ended with no numbers: {life}")
            ends.append(found[0])
    return ends


def _run(case: Case, life: Case, number: int, folder: Path, port: int) -> list[Tensor]:
    """The parameters of each worker; of a life that is killed none, once the others have said so and ended."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["soak_wrap"])
    each = [(case, life, number, rank, folder, port) for rank in range(life["world"])]
    workers = [context.Process(target=_worker, args=one) for one in each]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, PYTHONPATH=path):  # the server that forks them does not know this folder
        for worker in workers:
            worker.start()
    try:
        until, waits = time.monotonic() + LIMIT, folder / f"{number}.stopped"
        while any(worker.is_alive() for worker in workers):
            if time.monotonic() > until:
                raise AssertionError(f"life {number} took more than {LIMIT:.0f} s: {life}")
            if waits.exists() and time.time() - waits.stat().st_mtime > STOPPED:  # again and again: it may not be yet
                stopped = workers[int(waits.read_text())]
                with suppress(ProcessLookupError):  # it may end before it is told to go on
                    os.kill(stopped.pid, signal.SIGCONT)
            time.sleep(0.01)
        killed = life["rank"] % life["world"] if life["fault"] == "kill" else None
        for rank in range(life["world"]):
            said = folder / f"{number}.{rank}.error"
            if killed is None and said.exists():
                raise AssertionError(f"rank {rank} of life {number}: {life}\n{said.read_text()}")
            # DDP itself sends when it has rebuilt its buckets, and then torch says that a peer is gone.
            heard = said.read_text() if said.exists() else ""
            if killed not in (None, rank) and "PeerFailed" not in heard and "by peer" not in heard:
                raise AssertionError(f"rank {rank} of life {number} was not told that rank {killed} died: {life}")
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    if killed is not None:
        return []
    return [torch.load(folder / f"{number}.{rank}.end", weights_only=True) for rank in range(life["world"])]


def _worker(case: Case, life: Case, number: int, rank: int, folder: Path, port: int) -> None:
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        store = dist.PrefixStore(f"life{number}", dist.TCPStore("127.0.0.1", port, is_master=False))
        limit = timedelta(seconds=LIMIT / 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=life["world"], timeout=limit)
        torch.save(_train(case, life, number, rank, folder), folder / f"{number}.{rank}.end")
        dist.barrier()
    except BaseException:
        (folder / f"{number}.{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(0)  # what is left of a broken group may hang


def _train(case: Case, life: Case, number: int, rank: int, folder: Path) -> Tensor:
    bare, hit = net(case["seed"]), rank == life["rank"] % life["world"]
    if case["frozen"]:
        bare[0].requires_grad_(False)

    def wrap(model: torch.nn.Module) -> Any:
        cuts = {"bucket_cap_mb": 0.001} if case["cuts"] else {}
        return thinwire.wrap(model, case["method"], overlap=case["overlap"], **cuts)

    model = wrap(bare)
    optimizer = torch.optim.SGD((p for p in bare.parameters() if p.requires_grad), 0.05, momentum=0.5)
    handle, kept = thinwire.handle(model), folder / "model.pt"
    if kept.exists():
        before = torch.load(kept, weights_only=True)
        bare.load_state_dict(before["model"])
        optimizer.load_state_dict(before["optimizer"])
        handle.load(folder / "sets")
    if life["fault"] == "disk":
        _save_on_a_full_disk(handle, folder / "sets", hit)
    data = torch.Generator().manual_seed(1000 * life["data"] + rank)
    take = LOOPS[life["loop"]](model, optimizer, wrap)
    for step in range(life["steps"]):
        batches = torch.randn(2, 12, 6, generator=data)
        # The first step is dense, since DDP's buckets have not settled: the method cannot fail in it.
        fault = life["fault"] if step == max(1, life["steps"] - 2 + life["at"] % 2) else None
        if fault == "kill" and hit:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop" and hit:
            (folder / f"{number}.being").write_text(str(rank))
            (folder / f"{number}.being").rename(folder / f"{number}.stopped")
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault in ("wire", "method"):
            _fails(handle, fault, hit, life["at"], lambda x=batches[0]: model(x).square().mean().backward())
            optimizer.zero_grad()
        take(batches, float("inf") if fault == "inf" and hit else 1.0)
    handle.save(folder / "sets")
    if rank == 0:
        torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    return weights(bare)


def _fails(handle: Any, fault: str, hit: bool, at: int, backward: Any) -> None:
    """A backward pass in which a collective, or the method, raises on one rank: it is an error on all, or on none."""
    comm = handle.capture.comm if handle.layers is None else handle.layers.comm
    steps = handle.capture if handle.layers is None else handle.layers.steps
    whole, method = comm.transport, steps.reducer
    if hit:
        if fault == "wire":
            comm.transport = Breaking(whole, at)
        else:
            steps.reducer = _Raises(method)
    try:
        backward()
    except (Breaks, PeerFailed):
        pass
    finally:
        comm.transport, steps.reducer = whole, method


class _Raises:
    """A method whose exchange fails before it has sent anything."""

    def __init__(self, method: Any):
        self.method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    def reduce(self, *_: Any) -> None:
        raise Breaks("in the method")


def _save_on_a_full_disk(handle: Any, folder: Path, hit: bool) -> None:
    before = sets.write_state

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    sets.write_state = full if hit else before
    try:
        handle.save(folder)
    except thinwire.CheckpointError as error:
        if "No space left" not in str(error):
            raise
    else:
        raise AssertionError("a save on a full disk was told as done")
    finally:
        sets.write_state = before
