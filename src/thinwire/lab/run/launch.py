"""Makes runs: starts workers, follows what they write, and says in one line what went wrong.

Where a launcher has been at work already (torchrun, or srun on a cluster), this process is a worker itself and
nothing is started.
"""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from thinwire.lab.records.record import Line, Run, follow, has_ended, rank_file, rank_files, read_steps, write_json
from thinwire.lab.run.links.spelling import Link
from thinwire.lab.run.meeting import LIMIT, already_launched, leads, limit
from thinwire.lab.run.processes import WorkerFailed, start
from thinwire.lab.run.worker import failure_file, work

OnStep = Callable[[Run, Line], None]


def launch(
    folders: Sequence[Path],
    workers: int,
    *,
    links: Link | None = None,
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
    patience = _Patience(waiting, limit())

    def tick(processes: "list[subprocess.Popen[bytes]]") -> None:
        for run, line in iter(lambda: next(steps), None):
            on_step(run, line)
        patience.look(processes)

    try:
        start("thinwire.lab.run.worker", [str(order)], workers, waiting[0], links=links, port=port, tick=tick)
    except _StandStill:
        raise
    except WorkerFailed as failure:
        raise WorkerFailed(_what_happened(waiting, failure), failure.codes) from failure
    finally:
        order.unlink(missing_ok=True)


class _StandStill(WorkerFailed):
    """No worker has written anything for too long."""


class _Patience:
    """Ends runs in which nothing moves: a worker that was stopped, or waits for ever, must not hold all others."""

    def __init__(self, folders: Sequence[Path], seconds: float) -> None:
        self.folders, self.seconds = folders, seconds
        self.seen, self.since = -1, time.monotonic()

    def look(self, processes: "list[subprocess.Popen[bytes]]") -> None:
        written = sum(path.stat().st_size for folder in self.folders for path in rank_files(folder))
        if not written or written != self.seen:  # whoever has not joined yet is named by the others: see `meet`
            self.seen, self.since = written, time.monotonic()
        elif time.monotonic() - self.since > self.seconds:
            raise _StandStill(self._who(processes))

    def _who(self, processes: "list[subprocess.Popen[bytes]]") -> str:
        folder = next((f for f in self.folders if not has_ended(f)), self.folders[-1])
        at = {rank: _last_step(rank_file(folder, rank)) for rank in range(len(processes))}
        stopped = [rank for rank, one in enumerate(processes) if _state(one.pid) in "Tt"]
        behind = [rank for rank in at if at[rank] < max(at.values())]
        names = ", ".join(str(rank) for rank in stopped or behind) or "none of them alone"
        why = "has been stopped" if stopped else "is behind"
        said = f"nothing has moved for {self.seconds:g} s at step {max(at.values())}: worker {names} {why}"
        return f"{said}; all were ended. {LIMIT} sets how long to wait; --resume goes on. Records are in {folder}"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def _last_step(path: Path) -> int:
    return max((line["step"] for line in read_steps(path)[-1:]), default=0) if path.exists() else 0


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


def _what_happened(folders: Sequence[Path], failure: WorkerFailed) -> str:
    """One line for the user: which worker, how, at which step, and what to do."""
    folder = next((f for f in folders if not has_ended(f)), folders[-1])
    at = max((_last_step(path) for path in rank_files(folder)), default=0)
    whole = f"at step {at} of {Run.read(folder).steps}; the other workers were ended. Records are in {folder}"
    for rank, code in failure.codes.items():
        if code < 0 and -code != signal.SIGTERM:  # which is how we end the others
            return f"worker {rank} was killed (signal {-code}) {whole}; --resume goes on"
    told = [(rank, failure_file(folder, rank)) for rank in range(Run.read(folder).workers)]
    failures = [(json.loads(path.read_text()), rank) for rank, path in told if path.exists()]
    if failures:
        first, rank = min(failures, key=lambda one: one[0]["time"])
        error = (first["error"].strip() or first["traceback"].strip().splitlines()[-1]).splitlines()[0]
        return f"worker {rank} failed {whole}, with all that it said: {error}"
    last = str(failure).strip().splitlines()[-1:] or ["it said nothing"]
    return f"the workers could not start: {last[0]} (all of it in {folders[0]}/launch*.log)"
