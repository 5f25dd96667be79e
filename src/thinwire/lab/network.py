"""Links that are really slow: every worker in a network namespace of its own, behind a shaped link.

    worker 0 [eth0 tbf] ---- [p0 tbf] +--------+
    worker 1 [eth0 tbf] ---- [p1 tbf] | switch |     the switch has a namespace too, so no route leads out
    ...                               +--------+

Both ends are shaped, so a worker neither sends nor receives faster than its link. The bucket of the shaper
holds 128 KiB at every rate: below the kernel's 64 KiB segments it would cut them up and lose most of a
gigabit, and one size for all rates keeps the interfaces' counters comparable.

Names carry the process id and its start time, so runs do not meet, and a run that was killed without a
chance to clean up is recognised and swept away by the next one.
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
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from thinwire.lab import LabError
from thinwire.plan import Network

BURST = "128kb"
PORT = 29500  # free in every new namespace
INTERFACE = "eth0"
INSIDE = "THINWIRE_LINK"  # tells a worker that it lives behind an emulated link
_NAME = re.compile(r"^thinwire-(\d+)-(\d+)-(switch|probe|w\d+)$")


class NoRights(LabError):
    """This user or this kernel cannot make network namespaces."""


class Emulated:
    """`with Emulated(network) as links:` makes the links; leaving the block removes them."""

    def __init__(self, network: Network) -> None:
        if network.workers > 250:
            raise LabError(f"an emulated link takes up to 250 workers, not {network.workers}")
        self.network = network
        self.switch = f"{_stem()}-switch"
        self.hosts = [f"{_stem()}-w{i}" for i in range(network.workers)]

    def __enter__(self) -> "Emulated":
        sweep()
        atexit.register(self.remove)
        self.handlers = _exit_on_signals()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()
        atexit.unregister(self.remove)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _make(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for i, host in enumerate(self.hosts):
            _run("ip", "netns", "add", host)
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run(
                "ip",
                "-n",
                self.switch,
                "link",
                "add",
                f"p{i}",
                "type",
                "veth",
                "peer",
                "name",
                INTERFACE,
                "netns",
                host,
            )
            _run("ip", "-n", self.switch, "link", "set", f"p{i}", "master", "br0", "up")
            _run("ip", "-n", host, "addr", "add", f"{self.address(i)}/24", "dev", INTERFACE)
            _run("ip", "-n", host, "link", "set", INTERFACE, "up")
            self._shape(host, INTERFACE, self.network.rtt / 2)  # half on the way there, half on the way back
            self._shape(self.switch, f"p{i}", 0.0)

    def _shape(self, namespace: str, interface: str, delay: float) -> None:
        add = ["tc", "-n", namespace, "qdisc", "add", "dev", interface]
        place = ["root"]
        if delay > 0:
            _run(*add, "root", "handle", "1:", "netem", "delay", f"{delay * 1e6:.0f}us", "limit", "100000")
            place = ["parent", "1:", "handle", "2:"]
        rate = f"{self.network.rate:.0f}bit"
        _run(*add, *place, "tbf", "rate", rate, "burst", BURST, "latency", "50ms")

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

    def remove(self) -> None:
        for name in [*self.hosts, self.switch]:
            _remove(name)


def sent_bytes() -> int | None:
    """What this process's own link has sent so far, by the interface's counter; None if nothing is emulated."""
    if INSIDE not in os.environ:
        return None
    with open(f"/sys/class/net/{os.environ[INSIDE]}/statistics/tx_bytes") as counter:
        return int(counter.read())


def missing_rights() -> str | None:
    """Why links cannot be emulated here, in one line, or None where they can."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return "links are emulated with the commands ip and tc: install the package iproute2"
    refusal = _refused("tbf", "rate", "1gbit", "burst", BURST, "latency", "50ms")
    if refusal:
        return f"links cannot be emulated here ({refusal}): it takes Linux and the rights of root"
    return None


def missing_delay() -> str | None:
    """Why the kernel cannot hold packets back, which a round-trip time needs, or None where it can."""
    refusal = _refused("netem", "delay", "1ms")
    return refusal and f"this kernel cannot delay packets ({refusal}): it has no netem"


def _refused(*shaper: str) -> str | None:
    """What is said when a namespace with such a shaper is tried; None if it works."""
    probe = f"{_stem()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", *shaper)
    except NoRights as refusal:
        return str(refusal)
    finally:
        _remove(probe)
    return None


def sweep() -> list[str]:
    """Remove the namespaces of runs that are no more, with any process left in them; their names."""
    gone = []
    for name in namespaces():
        found = _NAME.match(name)
        if found and _started(int(found[1])) != int(found[2]):
            _remove(name)
            gone.append(name)
    return gone


def namespaces() -> list[str]:
    """All namespaces that some run of thinwire has made and not yet removed."""
    if not shutil.which("ip"):
        return []
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if _NAME.match(line.split(maxsplit=1)[0])]


def _remove(name: str) -> None:
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    if inside.returncode != 0:
        return  # never made, or gone already
    for pid in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)  # a process keeps its namespace alive, and nobody waits for it now
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _exit_on_signals() -> dict[signal.Signals, Any]:
    """Let a polite kill unwind the stack, as Ctrl-C does, so that links are removed; the handlers before."""
    if threading.current_thread() is not threading.main_thread():
        return {}

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    return {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}


def _stem() -> str:
    return f"thinwire-{os.getpid()}-{_started(os.getpid())}"


def _started(pid: int) -> int:
    """When a process began, in clock ticks since boot: with its id, a name that no later process has."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[19])
    except OSError:
        return -1


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NoRights(f"{' '.join(command[:6])} ...: {said[-1] if said else 'failed'}")
