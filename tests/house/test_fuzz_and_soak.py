"""`make fuzz` and `make soak` still run: a few cases of each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | {"COLUMNS": "200"})


def test_a_few_cases_of_every_fuzzer(tmp_path: Path) -> None:
    done = run("fuzz.py", "--cases", 25, "--seed", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 fuzzers found nothing" in done.stdout


def test_a_case_that_was_written_runs_again(tmp_path: Path) -> None:
    case = {"fuzzer": "spelling", "base": 0, "changes": [["insert", 0.5, "((((", 1]]}
    (tmp_path / "case.json").write_text(json.dumps(case))
    done = run("fuzz.py", "--case", tmp_path / "case.json")
    assert done.returncode == 0 and "goes well" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["nothing", "wires"])
def test_a_fuzzer_that_is_not_there(name: str) -> None:
    done = run("fuzz.py", name)
    assert done.returncode == 2 and f"there is no fuzzer {name}" in done.stderr


def test_a_few_cases_of_the_soak(tmp_path: Path) -> None:
    done = run("soak.py", "--seconds", 2, "--seed", 1, "--out", tmp_path)
    assert done.returncode == 0 and "the laws held in all" in done.stdout, done.stdout + done.stderr
