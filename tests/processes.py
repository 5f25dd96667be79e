"""Real worker processes for tests, through torch's own launcher."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def launch(world: int, function: str, *, timeout: float = 180, **arguments: Any) -> list[Any]:
    """Run `module:function(**arguments)` of this folder on `world` gloo workers; what each returned, by rank.

    Raises AssertionError with everything they printed when one of them fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, Path(folder) / "arguments.pt")
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={world}"]
        command += [
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            str(HERE / "worker.py"),
            function,
            folder,
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")]),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its workers
            output, _ = process.communicate(timeout=30)
            raise AssertionError(f"{function} on {world} workers took more than {timeout} s:\n{output}") from None
        assert process.returncode == 0, f"{function} on {world} workers failed:\n{output}"
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
