"""The script of docs/checkpoints.md: killed in the middle and started again, it ends as if nothing had happened.

Its workers are forked, as those of other examples are: torchrun has a test in `test_docs.py`, and is slow to begin.
They make 200 steps of its 500; `--all` takes the script as it is.
"""

import os
import signal
import time
from pathlib import Path

import pytest

import forked

SCRIPT = Path(__file__).parents[2] / "examples" / "resume.py"
STEPS = 500 if os.environ.get("THINWIRE_TEST_ALL") else 200


def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[forked.Popen]:
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    text = SCRIPT.read_text()
    assert text.count("range(done, 500)") == 1
    (folder / SCRIPT.name).write_text(text.replace("range(done, 500)", f"range(done, {STEPS})"))
    where = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    return forked.start(2, [SCRIPT.name], where)


def ended(workers: list[forked.Popen]) -> str:
    """What they said, if all went well."""
    said = "".join(one.communicate(timeout=120)[1] for one in workers)
    assert all(one.poll() == 0 for one in workers), said
    return said


def result(said: str) -> str:
    (line,) = (line for line in said.splitlines() if line.startswith("accuracy"))
    return line


@pytest.mark.timeout(600)
def test_the_script_of_the_page_goes_on_after_a_kill(tmp_path, monkeypatch):
    expected = ended(start(tmp_path / "straight", monkeypatch))

    broken = start(tmp_path / "broken", monkeypatch)
    saves = tmp_path / "broken" / "checkpoints" / "method" / "latest"
    while not saves.exists() and all(one.poll() is None for one in broken):
        time.sleep(0.02)
    assert all(one.poll() is None for one in broken), "it ended before it could be killed"
    os.kill(broken[-1].pid, signal.SIGKILL)
    assert broken[-1].wait(60) == -signal.SIGKILL
    assert broken[0].wait(60) != 0, "it went on without the other"

    found = ended(start(tmp_path / "broken", monkeypatch))
    assert "goes on after step" in found and "goes on after step" not in expected
    assert result(found) == result(expected)
