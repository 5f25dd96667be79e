"""`make fuzz` and `make soak` still run: a few cases of each."""

import json
import os
import sys
from pathlib import Path

import pytest

import forked

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: object) -> tuple[int, str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    program = forked.Popen(command, env=os.environ | {"COLUMNS": "200"}, stderr=forked.PIPE)
    _, said = program.communicate(timeout=280)
    return program.poll() or 0, said


def test_a_few_cases_of_every_fuzzer(tmp_path: Path) -> None:
    code, said = run("fuzz.py", "--cases", 25, "--seed", 1, "--out", tmp_path)
    assert code == 0 and "5 of 5 fuzzers found nothing" in said, said


def test_a_case_that_was_written_runs_again(tmp_path: Path) -> None:
    case = {"fuzzer": "spelling", "base": 0, "changes": [["insert", 0.5, "((((", 1]]}
    (tmp_path / "case.json").write_text(json.dumps(case))
    code, said = run("fuzz.py", "--case", tmp_path / "case.json")
    assert code == 0 and "goes well" in said, said


@pytest.mark.parametrize("name", ["nothing", "wires"])
def test_a_fuzzer_that_is_not_there(name: str) -> None:
    code, said = run("fuzz.py", name)
    assert code == 2 and f"there is no fuzzer {name}" in said


def test_a_few_cases_of_the_soak(tmp_path: Path) -> None:
    code, said = run("soak.py", "--seconds", 2, "--seed", 1, "--out", tmp_path)
    assert code == 0 and "the laws held in all" in said, said
