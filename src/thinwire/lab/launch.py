"""Starts workers through torch's own launcher, and sees them off, however it ends.

On this machine that is one `torch.distributed.run` with N processes; over emulated links it is one for each worker,
inside the worker's namespace. Where a launcher has been at work already (torchrun, or srun on a cluster), this
process is a worker itself and nothing is started.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from thinwire.lab import LabError
from thinwire.lab.network import PORT, Emulated
from thinwire.lab.record import Line, Run, follow, has_ended, rank_file, rank_files, read_steps, write_json
from thinwire.lab.worker import failure_file, work
from thinwire.plan import Network

OnStep = Callable[[Run, Line], None]


class WorkerFailed(LabError):
    """A worker ended before its run did."""


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


def launch(
    folders: Sequence[Path],
    workers: int,
    *,
    links: Network | None = None,
    resume: bool = False,
    port: int | None = None,
    on_step: OnStep = lambda *_: None,
) -> None:
    """Make the runs kept in `folders`, one after another; those that have ended are left alone."""
    waiting = [folder.resolve() for folder in folders if not has_ended(folder)]
    if already_launched():
        work(waiting, resume, on_step if leads() else lambda *_: None)
        return
    if not waiting:
        return
    for folder in waiting:
        for old in folder.glob("failure*.json"):
            old.unlink()
    order = waiting[0] / "order.json"
    write_json(order, {"folders": [str(f) for f in waiting], "resume": resume})
    steps = _steps(waiting)

    def tick() -> None:
        for run, line in iter(lambda: next(steps), None):
            on_step(run, line)

    try:
        start("thinwire.lab.worker", [str(order)], workers, waiting[0], links=links, port=port, tick=tick)
    except WorkerFailed as failure:
        raise WorkerFailed(_what_happened(waiting, str(failure))) from failure
    finally:
        order.unlink(missing_ok=True)


def start(
    module: str,
    arguments: Sequence[str],
    workers: int,
    logs: Path,
    *,
    links: Network | None = None,
    port: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Run a module on `workers` processes until all have ended; if one fails, end all and raise what the logs say."""
    program = ["-m", module, *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if links is None:
        command = [*torchrun, *_local(port), "--nproc-per-node", str(workers), *program]
        _watch([command], _environment(workers, _loopback()), logs, tick)
        return
    with Emulated(links) as network:
        commands = []
        for i in range(workers):
            where = ["--master-addr", network.address(0), "--master-port", str(PORT)]
            place = ["--nnodes", str(workers), "--node-rank", str(i), "--nproc-per-node", "1", *where]
            commands.append(network.command(i, [*torchrun, *place, *program]))
        _watch(commands, _environment(workers, network.environment()), logs, tick)


def _local(port: int | None) -> list[str]:
    if port is None:
        return ["--standalone"]  # finds a free port by itself
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise LabError(f"port {port} cannot be used ({error}): leave --port out and a free one is found") from error
    return ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port)]


def _loopback() -> dict[str, str]:
    return {"GLOO_SOCKET_IFNAME": "lo"} if os.path.exists("/sys/class/net/lo") else {}


def _environment(workers: int, more: dict[str, str]) -> dict[str, str]:
    """Cores are shared out, as processes that fight over them make every timing a lottery."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]  # the user's own modules are found
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
        "THINWIRE_LAUNCHER": str(os.getpid()),
        **more,
    }


def _watch(commands: list[list[str]], environment: dict[str, str], folder: Path, tick: Callable[[], None]) -> None:
    logs = [folder / f"launch{i}.log" for i in range(len(commands))]
    with _ended_afterwards() as agents:
        for command, log in zip(commands, logs):
            with open(log, "w") as out:
                agents.append(
                    subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
                )
        while any(agent.poll() is None for agent in agents) and not any(agent.poll() for agent in agents):
            time.sleep(0.2)
            tick()
        tick()
        failed = any(agent.poll() for agent in agents)
    if failed:
        raise WorkerFailed("\n".join(log.read_text(errors="replace") for log in logs))
    for log in logs:
        log.unlink()


@contextmanager
def _ended_afterwards() -> Iterator[list["subprocess.Popen[bytes]"]]:
    agents: list[subprocess.Popen[bytes]] = []
    try:
        yield agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # torch's launcher passes it on to its workers
        until = time.monotonic() + 8
        for agent in agents:
            try:
                agent.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(agent.pid, signal.SIGKILL)  # its workers notice that it is gone, and leave
                agent.wait()


def _steps(folders: Sequence[Path]) -> Iterator[tuple[Run, Line] | None]:
    """The first worker's steps, of one run after another, as they are written; None when there is nothing new."""
    for folder in folders:
        run = Run.read(folder)
        for line in follow(rank_file(folder, 0)):
            if line is None:
                yield None
            elif "step" in line:
                yield run, line
            elif "end" in line:
                break
    while True:
        yield None


def _what_happened(folders: Sequence[Path], logs: str) -> str:
    """One line for the user: which worker, how, at which step, and what to do."""
    folder = next((f for f in folders if not has_ended(f)), folders[-1])
    at = max((line["step"] for path in rank_files(folder) for line in read_steps(path)[-1:]), default=0)
    whole = f"at step {at} of {Run.read(folder).steps}; the other workers were ended. Records are in {folder}"
    for found in re.finditer(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*-(\d+)", logs):
        if int(found[2]) != signal.SIGTERM:  # which is how torch's launcher ends the others
            return f"worker {found[1]} was killed (signal {found[2]}) {whole}; --resume goes on"
    told = [(rank, failure_file(folder, rank)) for rank in range(Run.read(folder).workers)]
    failures = [(json.loads(path.read_text()), rank) for rank, path in told if path.exists()]
    if failures:
        first, rank = min(failures, key=lambda one: one[0]["time"])
        error = (first["error"].strip() or first["traceback"].strip().splitlines()[-1]).splitlines()[0]
        return f"worker {rank} failed {whole}, with all that it said: {error}"
    last = logs.strip().splitlines()[-1:] or ["it said nothing"]
    return f"the workers could not start: {last[0]} (all of it in {folders[0]}/launch*.log)"
