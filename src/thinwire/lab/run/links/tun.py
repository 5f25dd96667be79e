"""Links with latency, loss and moods: every worker has a TUN device, and a process of ours forwards the packets."""

import contextlib
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from thinwire.lab import LabError
from thinwire.lab.run.links.namespaces import INTERFACE, Hosts, refused, run
from thinwire.lab.run.links.spelling import Link
from thinwire.plan import spell_rate

DEVICE = "/dev/net/tun"
_SETIFF, _SETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_INFO, _HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUM, _LONG_TCP4 = 1, 2  # offloads: what the kernel may leave to the device
PACKET = 1500
MANY = 44  # packets in the longest piece that the kernel hands over
PIECE = 0.001  # seconds that a piece takes on its link at most


class Routed(Hosts):
    """Workers that meet in the forwarder; `able` is what it can do here, `told()` what it has done."""

    def __init__(self, link: Link, workers: int) -> None:
        super().__init__(link, workers)
        self.forwarder: subprocess.Popen[str] | None = None
        self.able: dict[str, float] | None = None

    def connect(self) -> None:
        timelines = [self.link.timeline(i) for i in range(len(self.hosts))]
        devices: list[int] = []
        try:
            for i, host in enumerate(self.hosts):
                devices.append(self._device(i, host, max(now.up or 0.0 for now in timelines[i])))
            self.forwarder = subprocess.Popen(
                [sys.executable, "-m", "thinwire.lab.run.links.forwarder"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=devices,
                start_new_session=True,  # Ctrl-C is for the launcher, which then says so
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            for device in devices:
                os.close(device)
        order = {
            "devices": devices,
            "timelines": [[asdict(now) for now in line] for line in timelines],
            "hosts": self.hosts,
            "addresses": [self.address(i) for i in range(len(self.hosts))],
        }
        self.able = self._ask(json.dumps(order))

    def _device(self, worker: int, host: str, rate: float) -> int:
        device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
        kind = struct.pack("16sH", b"thinwire%d", _TUN | _NO_INFO | _HEADER)
        name = fcntl.ioctl(device, _SETIFF, kind)[:16].rstrip(b"\0").decode()
        fcntl.ioctl(device, _SETOFFLOAD, _CHECKSUM | _LONG_TCP4)
        run("ip", "link", "set", name, "netns", host, "name", INTERFACE)
        run("ip", "-n", host, "addr", "add", f"{self.address(worker)}/24", "dev", INTERFACE)
        longest = min(MANY, max(1, int(rate * PIECE / 8 / PACKET)))
        options = ["mtu", str(PACKET), "txqueuelen", "1000", "gso_max_segs", str(longest), "up"]
        run("ip", "-n", host, "link", "set", INTERFACE, *options)
        return device

    def _ask(self, line: str) -> Any:
        assert self.forwarder and self.forwarder.stdin and self.forwarder.stdout and self.forwarder.stderr
        with contextlib.suppress(BrokenPipeError):
            self.forwarder.stdin.write(line + "\n")
            self.forwarder.stdin.flush()
        answer = self.forwarder.stdout.readline()
        if not answer:
            raise LabError(f"the forwarder of the link has failed: {self.forwarder.stderr.read().strip()[-500:]}")
        return json.loads(answer)

    def told(self) -> dict[str, Any]:
        """What has passed so far: bytes by worker, packets, those lost and those that found a queue full."""
        answer: dict[str, Any] = self._ask("tell")
        return answer

    def check(self) -> None:
        if self.forwarder and self.forwarder.poll() is not None:
            assert self.forwarder.stderr
            raise LabError(f"the forwarder of the link has failed: {self.forwarder.stderr.read().strip()[-500:]}")

    def disconnect(self) -> None:
        if self.forwarder and self.forwarder.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.forwarder.stdin.close()
            try:
                self.forwarder.wait(3)
            except subprocess.TimeoutExpired:
                self.forwarder.kill()
                self.forwarder.wait()
            self.forwarder = None

    def trust(self) -> str:
        """Up to where the link can be believed on this machine, in one line."""
        if self.able is None:
            return ""
        asked = sum(self.link.timeline(i)[0].up or 0.0 for i in range(len(self.hosts)))
        able, packets = self.able["rate"], self.able["packets"]
        line = f"emulated links: this machine carries {spell_rate(able, 3)} and {packets:,.0f} packets a second in all"
        if asked > able:
            return f"{line}; {spell_rate(asked)} are asked for: read times on it as too long"
        return f"{line}; {spell_rate(asked)} are asked for"


def missing() -> str | None:
    """Why links cannot have latency here, in one line, or None where they can."""
    if not shutil.which("ip"):
        return "links are emulated with the command ip: install the package iproute2"
    refusal = refused()
    if refusal:
        return f"emulated links need Linux and the rights of root ({refusal})"
    try:
        os.close(os.open(DEVICE, os.O_RDWR))
    except OSError as error:
        return f"links with latency need {DEVICE}, which cannot be opened ({error.strerror})"
    return None
