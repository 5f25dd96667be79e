"""Starts worker processes and sees them off, however it ends.

Nothing is opened for that beyond loopback, or beyond the emulated links: see `meeting`.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from thinwire.lab import LabError
from thinwire.lab.run.links.emulated import emulate
from thinwire.lab.run.links.namespaces import PORT, Hosts
from thinwire.lab.run.links.spelling import Link
from thinwire.lab.run.meeting import LAUNCHER, LIMIT, LISTENER, limit, listen

LOOPBACK = "127.0.0.1"
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


class WorkerFailed(LabError):
    """A worker ended before its run did; `codes` are those of the workers that have failed, by rank."""

    code = 1

    def __init__(self, said: str, codes: dict[int, int] | None = None) -> None:
        super().__init__(said)
        self.codes = codes or {}


def start(
    module: str,
    arguments: Sequence[str],
    workers: int,
    logs: Path,
    *,
    links: Link | None = None,
    port: int | None = None,
    tick: Callable[["list[subprocess.Popen[bytes]]"], None] = lambda _: None,
) -> None:
    """Run a module on `workers` processes until all have ended; if one fails, end all and raise what the logs say."""
    command = [sys.executable, "-m", module, *arguments]
    if links is None:
        with listen(LOOPBACK, port or 0) as listener:
            here = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
            place = _place(workers, LOOPBACK, listener.getsockname()[1]) | here
            _watch([command] * workers, place, logs, tick, listener=listener)
        return
    with emulate(links, workers) as hosts:
        if trust := hosts.trust():
            print(trust, file=sys.stderr)
        commands = [hosts.command(i, command) for i in range(workers)]
        place = _place(workers, hosts.address(0), PORT) | hosts.environment()
        _watch(commands, place, logs, tick, hosts=hosts)


def _place(workers: int, address: str, port: int) -> dict[str, str]:
    """What workers find in their environment. Cores are shared out: to fight over them makes timings a lottery."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]  # the user's own modules are found
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        LAUNCHER: str(os.getpid()),
        LIMIT: str(limit() + 15),  # the launcher sees all of them, so it speaks first
    }


def _watch(
    commands: list[list[str]],
    place: dict[str, str],
    folder: Path,
    tick: "Callable[[list[subprocess.Popen[bytes]]], None]",
    *,
    listener: socket.socket | None = None,
    hosts: Hosts | None = None,
) -> None:
    logs = [folder / f"launch{i}.log" for i in range(len(commands))]
    with _ended_afterwards() as workers:
        for rank, (command, log) in enumerate(zip(commands, logs)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            handed: tuple[int, ...] = ()
            if listener and rank == 0:
                handed = (listener.fileno(),)
                own[LISTENER] = str(listener.fileno())
            with open(log, "w") as out:
                workers.append(
                    subprocess.Popen(
                        command, env=place | own, stdout=out, stderr=out, start_new_session=True, pass_fds=handed
                    )
                )
        if listener:
            listener.close()  # the first worker has it now
        while any(one.poll() is None for one in workers) and not any(one.poll() for one in workers):
            time.sleep(0.2)
            tick(workers)
            if hosts:
                hosts.check()
        tick(workers)
        codes = {rank: one.returncode for rank, one in enumerate(workers) if one.poll()}
    if codes:
        raise WorkerFailed("\n".join(log.read_text(errors="replace") for log in logs), codes)
    for log in logs:
        log.unlink()


@contextmanager
def _ended_afterwards() -> Iterator[list["subprocess.Popen[bytes]"]]:
    workers: list[subprocess.Popen[bytes]] = []
    try:
        yield workers
    finally:
        for one in workers:
            if one.poll() is None:
                one.terminate()
        until = time.monotonic() + 8
        for one in workers:
            try:
                one.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(one.pid, signal.SIGKILL)  # with what it may have started
                one.wait()
