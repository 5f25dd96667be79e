"""Real worker processes for tests.

Importing torch takes seconds, and a worker would do nothing else for most of its life. So a server imports once what
workers need, and forks them when a test calls: a worker starts in milliseconds, and knows nothing of earlier calls.
"""

import itertools
import os
import socket
import tempfile
import time
from functools import cache
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import worker

HERE = Path(__file__).parent
_NUMBERS = itertools.count()


def launch(world: int, function: str, *, timeout: float = 180, **arguments: Any) -> list[Any]:
    """Run `module:function(**arguments)` of this folder on `world` gloo workers; what each returned, by rank.

    Raises AssertionError with everything they printed when one of them fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save((function, arguments), folder / "call.pt")
        place = (_store().port, f"call{next(_NUMBERS)}")
        workers = [server().Process(target=worker.main, args=(rank, world, place, name)) for rank in range(world)]
        with mock.patch.dict(os.environ, environment()):  # the first start also starts the server
            for process in workers:
                process.start()
        try:
            late = _wait_for(workers, timeout)
            ended = [process.exitcode for process in workers]
        finally:
            _end(workers)
        if any(code != 0 for code in ended):
            what = f"took more than {timeout} s" if late else "failed"
            how = "\n".join(f"rank {i}: exit code {'none' if c is None else c}" for i, c in enumerate(ended))
            printed = "\n".join((folder / f"{rank}.log").read_text() for rank in range(world))
            raise AssertionError(f"{function} on {world} workers {what}:\n{how}\n{printed}")
        return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(world)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for(workers: list[ForkServerProcess], timeout: float) -> bool:
    """Wait until all have ended, or one has failed and the others had time to say so; whether it took too long."""
    until = time.monotonic() + timeout
    failed = False
    while left := [process for process in workers if process.exitcode is None]:
        if not failed and any(process.exitcode for process in workers):
            failed, until = True, min(until, time.monotonic() + 5)
        if time.monotonic() > until:
            return not failed
        connection.wait([process.sentinel for process in left], timeout=max(0.0, until - time.monotonic()))
    return False


def _end(workers: list[ForkServerProcess]) -> None:
    for process in workers:
        process.kill()
        process.join()
        process.close()


@cache
def server() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    return context


@cache
def _store() -> dist.TCPStore:
    """Where the workers of all calls meet, each call under a name of its own."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment() -> dict[str, str]:
    path = [str(HERE), str(HERE.parents[1] / "src")]
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), "TORCH_CPP_LOG_LEVEL": "ERROR"}
