"""Real worker processes for tests, through torch's own launcher.

Starting a worker takes seconds, nearly all of them spent importing torch. So the workers of one world size stay, and
take one call after another, each with a process group of its own. A call that fails ends them, and the next one
starts others.
"""

import atexit
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
_STANDING: dict[int, "Session"] = {}


def launch(world: int, function: str, *, timeout: float = 180, fresh: bool = False, **arguments: Any) -> list[Any]:
    """Run `module:function(**arguments)` of this folder on `world` gloo workers; what each returned, by rank.

    Raises AssertionError with everything they printed when one of them fails. fresh: in processes of its own, for
    what ends its process or must find none of what earlier calls have left.
    """
    if fresh:
        session = Session(world)
        try:
            return session.call(function, arguments, timeout)
        finally:
            session.end()
    if world not in _STANDING or not _STANDING[world].stands:
        _STANDING[world] = Session(world)
    return _STANDING[world].call(function, arguments, timeout)


@atexit.register
def end_all() -> None:
    for session in _STANDING.values():
        session.end()


class Session:
    """`world` workers that wait for calls. A call is a folder; what is in it says how far each worker is."""

    def __init__(self, world: int) -> None:
        self.world, self._folder, self._numbers = world, tempfile.TemporaryDirectory(), itertools.count()
        self._log = open(Path(self._folder.name, "log"), "w+")  # noqa: SIM115  # as long as the session
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={world}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(HERE / "worker.py"), self._folder.name]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")]),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self._process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def stands(self) -> bool:
        return self._process.poll() is None

    def call(self, function: str, arguments: dict[str, Any], timeout: float) -> list[Any]:
        folder = Path(self._folder.name, f"call{next(self._numbers)}")
        folder.mkdir()
        printed = self._log.seek(0, os.SEEK_END)
        torch.save((function, arguments), folder / "call.part")
        (folder / "call.part").rename(folder / "call.pt")
        until = time.monotonic() + timeout
        while len(list(folder.glob("*.result"))) < self.world:
            late, failed = time.monotonic() > until, list(folder.glob("*.failed"))
            if late or failed or not self.stands:
                self.end(patience=0 if late else 10)  # the launcher tells how each of them ended
                self._log.seek(printed)
                what = f"took more than {timeout} s" if late else "failed"
                raise AssertionError(f"{function} on {self.world} workers {what}:\n{self._log.read()}")
            time.sleep(0.01)
        return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(self.world)]

    def end(self, patience: float = 0) -> None:
        """End the launcher, which ends its workers; if it is about to end anyway, only after some seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience)
        if self.stands:
            self._process.terminate()
            self._process.wait(timeout=60)
