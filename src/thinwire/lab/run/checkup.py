"""What `thinwire doctor` looks at: each finding says what is here, or what is missing and what that costs."""

import os
import platform
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

import thinwire.kernels
from thinwire.lab import PACKAGES
from thinwire.lab.run.links import tun, veth


@dataclass(frozen=True)
class Finding:
    what: str
    verdict: Literal["fine", "note", "missing"]
    told: str


def look() -> list[Finding]:
    return [*_versions(), _device(), _interface(), _latency(), _kernels(), _emulation(), _restarts(), *_packages()]


def _versions() -> list[Finding]:
    python = f"Python {platform.python_version()}, {sys.platform}, {os.cpu_count()} cores"
    needed = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "numba"))
    gloo = dist.is_available() and dist.is_gloo_available()
    return [
        Finding("thinwire", "fine", f"{thinwire.__version__}, {python}, {needed}"),
        Finding("gloo", "fine", "torch has it")
        if gloo
        else Finding("gloo", "missing", "this torch cannot exchange on CPUs: install one from pytorch.org"),
    ]


def _device() -> Finding:
    if torch.cuda.is_available():
        return Finding("GPU", "fine", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return Finding("GPU", "note", "none here: training runs on the CPU")


def _interface() -> Finding:
    """Where gloo would listen: the address of this host's name, unless an interface is named."""
    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    if named:
        there = {name for _, name in socket.if_nameindex()}
        wrong = [one for one in named.split(",") if one not in there]
        if wrong:
            said = f"{wrong[0]} is named and does not exist; there are {', '.join(sorted(there))}"
            return Finding("interface", "missing", said)
        return Finding("interface", "fine", f"{named}, as GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME says")
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        said = f"{host} has no address: workers on several machines need export GLOO_SOCKET_IFNAME=eth0 (or yours)"
        return Finding("interface", "note", said)
    if address.startswith("127."):
        said = f"{host} is {address}, which other machines cannot reach: export GLOO_SOCKET_IFNAME=eth0 (or yours)"
        return Finding("interface", "note", said)
    return Finding("interface", "fine", f"{host} is {address}")


def _latency() -> Finding:
    """A message to this machine and back, over loopback."""
    with socket.socket() as server, socket.socket() as client:
        try:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(5)
            client.connect(server.getsockname())
            there, _ = server.accept()
            with there:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                began = time.perf_counter()
                for _ in range(100):
                    client.sendall(b"x")
                    there.sendall(there.recv(1))
                    client.recv(1)
        except OSError as error:
            return Finding("loopback", "missing", f"no connection to 127.0.0.1 ({error}): workers here cannot meet")
    took = (time.perf_counter() - began) / 100
    said = f"a round trip takes {1e6 * took:.0f} us; `thinwire probe` measures what a link carries"
    return Finding("loopback", "fine", said)


def _kernels() -> Finding:
    """Whether compiled kernels can be kept: beside the package, or where NUMBA_CACHE_DIR says."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    package = Path(thinwire.kernels.__file__).parent / "cpu"
    places = [Path(named)] if named else [package, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")]
    for place in places:
        try:
            with tempfile.NamedTemporaryFile(dir=place):
                return Finding("kernels' cache", "fine", f"kept under {place}")
        except OSError:
            continue
    said = f"nothing can be written to {' or '.join(map(str, places))}: kernels are compiled in every run; "
    return Finding("kernels' cache", "missing", said + "export NUMBA_CACHE_DIR=/a/folder/of/yours")


def _emulation() -> Finding:
    refusal = veth.missing()
    if refusal:
        return Finding("emulated links", "note", f"{refusal}; --link then predicts times in place of measuring them")
    delay = tun.missing()
    if delay:
        return Finding("emulated links", "note", f"rates can be emulated, round trips cannot: {delay}")
    return Finding("emulated links", "fine", "rates, round trips, loss and changes")


def _restarts() -> Finding:
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if os.environ.get(name) == "1":
        return Finding("restarts", "fine", f"{name}=1, as torchrun --max-restarts needs it")
    said = f"with torchrun --max-restarts, export {name}=1: workers that come back may else find stale addresses"
    return Finding("restarts", "note", said)


def _packages() -> list[Finding]:
    costs = {
        "sklearn": "the task digits has no data",
        "PIL": "the task cifar10 cannot be unpacked",
    }
    found = []
    for module, package in PACKAGES.items():
        try:
            found.append(Finding(package, "fine", version(package)))
        except PackageNotFoundError:
            found.append(Finding(package, "missing", f"{costs[module]}: pip install 'thinwire[lab]'"))
    return found
