"""How workers find each other: by a store that listens where they are and nowhere else.

torch's own store listens on every interface of the machine, and its elastic rendezvous unpickles what anybody sends
to it. Workers that the lab starts meet at a store of their own instead, on a socket that is bound to the one address
they need: loopback, or the first worker's end of an emulated link. Workers that torchrun or srun has started meet as
these say.
"""

import os
import socket
import subprocess
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from thinwire.lab import LabError

PORT = 29500  # of a cluster's first node, if nobody says another
LISTENER = "THINWIRE_LISTENER"  # the number of an open socket, for the first worker
LAUNCHER = "THINWIRE_LAUNCHER"  # the process id of what has started a worker
LIMIT = "THINWIRE_TIMEOUT"  # seconds that workers wait for each other


def limit() -> float:
    """Seconds that workers wait for each other: THINWIRE_TIMEOUT, or half an hour, as torch has it."""
    said = os.environ.get(LIMIT, "1800")
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise LabError(f"{LIMIT} is a number of seconds above 0, not {said!r}")
    return seconds


def already_launched() -> bool:
    """Whether this process is one of several that torchrun or srun has started; srun's names are translated."""
    task_count = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" not in os.environ and "SLURM_STEP_ID" in os.environ and int(task_count) > 1:
        if "MASTER_ADDR" not in os.environ:
            nodes = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True).stdout.split()
            os.environ["MASTER_ADDR"] = nodes[0] if nodes else "localhost"
        os.environ.setdefault("MASTER_PORT", str(PORT))
        os.environ.update(
            RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=task_count, LOCAL_RANK=os.environ.get("SLURM_LOCALID", "0")
        )
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leads() -> bool:
    """Whether this process prepares folders and prints: alone, or the first of those that were started."""
    return not already_launched() or os.environ["RANK"] == "0"


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket for the first worker's store, bound to one address; a free port unless one is given."""
    try:
        return socket.create_server((address, port))
    except (OSError, OverflowError) as error:
        raise LabError(f"port {port} cannot be used ({error}): leave --port out and a free one is found") from error


def meet() -> tuple[dist.Store, int, int]:
    """The store that all workers share, this worker's rank, and how many there are."""
    if LAUNCHER not in os.environ:
        store, rank, world = next(rendezvous("env://"))
        return store, rank, world
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = None
    if rank == 0:
        given = os.environ.get(LISTENER)
        listener = (socket.socket(fileno=int(given)) if given else listen(address, port)).detach()
    patience = timedelta(seconds=limit())
    store = dist.TCPStore(address, port, world, rank == 0, patience, wait_for_workers=False, master_listen_fd=listener)
    _call_the_roll(store, rank, world, patience)
    return store, rank, world


def _call_the_roll(store: dist.Store, rank: int, world: int, patience: timedelta) -> None:
    """Wait until all are there, or say who is not."""
    keys = [f"thinwire-here-{one}" for one in range(world)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, patience)
    except (RuntimeError, dist.DistError) as error:
        absent = [str(one) for one, key in enumerate(keys) if not store.check([key])]
        said = f"worker {', '.join(absent)} has not joined the others within {patience.total_seconds():g} s"
        raise LabError(f"{said} ({LIMIT} sets how long they wait)") from error


def join_group(backend: str, store: dist.Store, rank: int, world: int) -> None:
    """A process group over `store` in which nobody waits for longer than the limit."""
    patience = timedelta(seconds=limit())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
