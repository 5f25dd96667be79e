"""Programs, forked by the server of `processes` in place of interpreters that import torch for seconds each.

`Popen` is what `subprocess.Popen` is to the lab's launcher; a worker finds the environment, the files, the socket and
the network namespace that it would have found. The fixture `forked` puts it in place. What a program prints and what it
complains of are one text. A launcher that is forked itself forks its workers in turn: see `launcher`.
"""

import ctypes
import importlib
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from processes import environment, server
from thinwire.lab.run import processes
from thinwire.lab.run.meeting import LISTENER

PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_REC_SLAVE, MNT_DETACH = 0x4000 | 0x80000, 2


_context = server  # what starts processes: here the server, in a launcher that was forked the launcher itself


class Popen:
    def __init__(
        self,
        command: list[str],
        *,
        env: dict[str, str],
        stderr: Any,
        stdout: Any = None,
        stdin: Any = None,
        start_new_session: bool = False,
        pass_fds: tuple[int, ...] = (),
        text: bool = False,
        launcher: bool = False,
    ) -> None:
        """As `subprocess.Popen`; `launcher`: what it starts as workers of the lab is forked from it."""
        self.said = tempfile.NamedTemporaryFile("r") if stderr == PIPE else None  # noqa: SIM115  as long as this lives
        heard = self.said.name if self.said else stderr.name
        if isinstance(heard, int):  # a temporary file without a name
            heard = f"/proc/{os.getpid()}/fd/{heard}"
        listener = socket.socket(fileno=os.dup(pass_fds[0])) if pass_fds else None
        mine, theirs = socket.socketpair() if stdin == PIPE else (None, None)
        given = (command, env, os.getcwd(), heard, start_new_session, listener, theirs, launcher)
        self.process = _context().Process(target=main, args=given)
        with mock.patch.dict(os.environ, environment()):  # the first start also starts the server
            self.process.start()
        for handed in filter(None, (listener, theirs)):
            handed.close()
        self.stdin = mine.makefile("w") if mine else None
        self.pid, self.terminate, self.kill = self.process.pid, self.process.terminate, self.process.kill

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutExpired("a forked worker", timeout or 0.0)
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        self.wait(timeout)
        return None, self.said.read() if self.said else ""


def workers(world: int, script: list[str], env: dict[str, str], timeout: float = 240) -> tuple[int, str]:
    """A script with its arguments on as many workers, as torchrun starts it: the worst exit code, and what was said."""
    started = start(world, script, env)
    said = "".join(one.communicate(timeout)[1] for one in started)
    return max(abs(one.poll() or 0) for one in started), said


def start(world: int, script: list[str], env: dict[str, str]) -> list[Popen]:
    """The same, and whoever asks for it waits for them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    started = []
    for rank in map(str, range(world)):
        own = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": str(world)}
        started.append(Popen([sys.executable, *script], env=place | own, stderr=PIPE))
    return started


def main(
    command: list[str],
    env: dict[str, str],
    folder: str,
    heard: str,
    new_session: bool,
    listener: socket.socket | None,
    said_to: socket.socket | None,
    launcher: bool,
) -> None:
    if new_session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    out = os.open(heard, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if said_to:
        os.dup2(said_to.detach(), 0)
        sys.stdin = open(0)  # noqa: SIM115  the server closed the one it had
    if listener:
        os.environ[LISTENER] = str(listener.detach())
    if launcher:
        global _context
        _context = partial(get_context, "fork")
        processes.subprocess = sys.modules[__name__]  # type: ignore[assignment]
    if command[:3] == ["ip", "netns", "exec"]:
        enter(command[3])
        command = command[4:]
    if command[1] == "-m":
        sys.argv = command[2:]
        importlib.import_module(command[2]).main()
    else:
        sys.argv = command[1:]
        sys.path.insert(0, str(Path(command[1]).parent))
        runpy.run_path(command[1], run_name="__main__")


def enter(namespace: str) -> None:
    """As `ip netns exec` does it: into the namespace, with a /sys that shows what is in there."""
    libc = ctypes.CDLL(None, use_errno=True)

    def must(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"namespace {namespace} cannot be entered")

    with open(f"/run/netns/{namespace}") as there:
        must(libc.setns(there.fileno(), CLONE_NEWNET))
    must(libc.unshare(CLONE_NEWNS))
    must(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC_SLAVE), None))
    libc.umount2(b"/sys", MNT_DETACH)  # which may not be mounted
    must(libc.mount(namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None))
