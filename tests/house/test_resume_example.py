"""The script of docs/checkpoints.md: killed in the middle and started again, it ends as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "resume.py"


def start(folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    where = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, "--master-port", str(free_port()), str(SCRIPT)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=where)


def workers_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children if SCRIPT.name in Path(f"/proc/{child}/cmdline").read_text()]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the workers")
def test_the_script_of_the_page_goes_on_after_a_kill(tmp_path):
    straight = start(tmp_path / "straight")
    expected, words = straight.communicate(timeout=240)
    assert straight.returncode == 0, words

    broken = start(tmp_path / "broken")
    saves = tmp_path / "broken" / "checkpoints" / "method" / "latest"
    while not saves.exists() and broken.poll() is None:
        time.sleep(0.02)
    assert broken.poll() is None, "it ended before it could be killed"
    os.kill(workers_of(broken.pid)[-1], signal.SIGKILL)
    broken.communicate(timeout=240)
    assert broken.returncode != 0

    again = start(tmp_path / "broken")
    found, words = again.communicate(timeout=240)
    assert again.returncode == 0, words
    assert "goes on after step" in found
    assert found.splitlines()[-1] == expected.splitlines()[-1]
