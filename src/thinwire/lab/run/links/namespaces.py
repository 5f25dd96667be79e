"""A network namespace for every worker, removed again however a run ends.

Names carry the process id and its start time, so runs do not meet. A small shell waits beside the run: when the
run is killed without a chance to clean up, it ends what lives in the namespaces and removes them. If that is killed
too, the next run recognises what was left and sweeps it away.
"""

import atexit
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

from thinwire.lab import LabError
from thinwire.lab.run.links.spelling import Link

PORT = 29500  # free in every new namespace
INTERFACE = "eth0"
INSIDE = "THINWIRE_LINK"  # tells a worker that it lives behind an emulated link
_NAME = re.compile(r"^thinwire-(\d+)-(\d+)-(switch|probe|w\d+)$")
_GUARD = """cat > /dev/null
for name; do
    for pid in $(ip netns pids "$name" 2> /dev/null); do kill -9 "$pid"; done
    ip netns del "$name" 2> /dev/null
done"""

Self = TypeVar("Self", bound="Hosts")


class NoRights(LabError):
    """This user or this kernel cannot make network namespaces."""


class Hosts(ABC):
    """`with Hosts(link, workers) as hosts:` makes namespaces and joins them; leaving the block removes them."""

    def __init__(self, link: Link, workers: int) -> None:
        if workers > 250:
            raise LabError(f"an emulated link takes up to 250 workers, not {workers}")
        self.link = link.check(workers)
        self.hosts = [f"{stem()}-w{i}" for i in range(workers)]
        self.namespaces = self.hosts

    @abstractmethod
    def connect(self) -> None:
        """Join the namespaces, which are there by now."""

    def disconnect(self) -> None:  # noqa: B027  most have nothing to do: what is inside a namespace goes with it
        """Undo what would outlive the namespaces."""

    def check(self) -> None:  # noqa: B027  the kernel's links do not fail
        """Raise a LabError if the links are no more."""

    def trust(self) -> str:
        """Up to where the links can be believed on this machine, in one line, where that is in question."""
        return ""

    def __enter__(self: Self) -> Self:
        sweep()
        atexit.register(self.remove)
        self.handlers = _exit_on_signals()
        self.guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "thinwire-links", *self.namespaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            for name in self.namespaces:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            self.connect()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()
        atexit.unregister(self.remove)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def remove(self) -> None:
        for name in self.namespaces:
            remove(name)
        self.disconnect()
        if self.guard.stdin:
            self.guard.stdin.close()
        self.guard.wait()

    def address(self, worker: int) -> str:
        """An address of the range set aside for benchmarks."""
        return f"198.18.0.{worker + 1}"

    def command(self, worker: int, command: Sequence[str]) -> list[str]:
        """`command`, run where worker `worker` lives."""
        return ["ip", "netns", "exec", self.hosts[worker], *command]

    def environment(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE, INSIDE: INTERFACE}

    def sent(self) -> list[int]:
        """What every worker's link has sent so far, by the interfaces' own counters."""
        show = ["-s", "-j", "link", "show", INTERFACE]
        told = [subprocess.run(["ip", "-n", host, *show], capture_output=True, text=True) for host in self.hosts]
        return [int(json.loads(one.stdout)[0]["stats64"]["tx"]["bytes"]) for one in told]


def sent_bytes() -> int | None:
    """What this process's own link has sent so far, by the interface's counter; None if nothing is emulated."""
    if INSIDE not in os.environ:
        return None
    with open(f"/sys/class/net/{os.environ[INSIDE]}/statistics/tx_bytes") as counter:
        return int(counter.read())


def refused(*commands: Sequence[str]) -> str | None:
    """What is said when commands are tried in a namespace of their own, named by "NAMESPACE"; None if they work."""
    probe = f"{stem()}-probe"
    try:
        run("ip", "netns", "add", probe)
        for command in commands:
            run(*(probe if word == "NAMESPACE" else word for word in command))
    except NoRights as refusal:
        return str(refusal)
    finally:
        remove(probe)
    return None


def sweep() -> list[str]:
    """Remove the namespaces of runs that are no more, with any process left in them; their names."""
    gone = []
    for name in namespaces():
        found = _NAME.match(name)
        if found and _started(int(found[1])) != int(found[2]):
            remove(name)
            gone.append(name)
    return gone


def namespaces() -> list[str]:
    """All namespaces that some run of thinwire has made and not yet removed."""
    if not shutil.which("ip"):
        return []
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if _NAME.match(line.split(maxsplit=1)[0])]


def remove(name: str) -> None:
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    if inside.returncode != 0:
        return  # never made, or gone already
    for pid in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)  # a process keeps its namespace alive, and nobody waits for it now
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def stem() -> str:
    return f"thinwire-{os.getpid()}-{_started(os.getpid())}"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NoRights(f"{' '.join(command[:6])} ...: {said[-1] if said else 'failed'}")


def _exit_on_signals() -> dict[signal.Signals, Any]:
    """Let a polite kill unwind the stack, as Ctrl-C does, so that links are removed; the handlers before."""
    if threading.current_thread() is not threading.main_thread():
        return {}

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    return {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}


def _started(pid: int) -> int:
    """When a process began, in clock ticks since boot: with its id, a name that no later process has."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[19])
    except OSError:
        return -1
