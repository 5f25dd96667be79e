"""The command line: it teaches by example, and bad input gets one line, code 2, and leaves nothing behind."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

import forked
from lab_runs import write_run
from thinwire import kernels
from thinwire.cli import main as cli
from thinwire.cli.study import counted
from thinwire.doors.ddp import warm_kernels
from thinwire.lab.run import launch, settings
from thinwire.lab.run.links import tun, veth
from thinwire.spelling import NAMES


def thinwire(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["thinwire", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code or 0  # type: ignore[return-value]


BAD = {
    "unknown task": (["train", "--task", "digitss"], "did you mean digits"),
    "unknown model": (["train", "--task", "digits", "--model", "gpt"], "mlp, cnn"),
    "unknown method": (["train", "--method", "TopKay(0.1)"], "TopK"),
    "no literal": (["train", "--method", "TopK(__import__('os'))"], "TopK"),
    "bad density": (["train", "--method", "ErrorFeedback(TopK(0))"], "density"),
    "unknown link": (["train", "--link", "fast"], "100mbit"),
    "unknown time": (["train", "--link", "1mbit", "--rtt", "soon"], "1ms"),
    "rtt alone": (["train", "--rtt", "1ms"], "--link"),
    "unknown option": (["train", "--turbo"], "--help"),
    "unknown command": (["race"], "--help"),
    "no number": (["train", "--steps", "many"], "--help"),
    "no steps": (["train", "--steps", "0"], "--steps"),
    "no workers": (["compare", "--workers", "0"], "--workers"),
    "bad optimizer": (["train", "--optimizer", "lion"], "sgd, adamw"),
    "bad schedule": (["train", "--schedule", "square"], "cosine"),
    "bad grain": (["train", "--grain", "layer"], "tensor, bucket, model"),
    "batch too large": (["train", "--batch", "5000"], "--batch"),
    "missing data": (["train", "--task", "cifar10", "--data", "nowhere"], "thinwire data cifar10"),
    "nothing to fetch": (["data", "digits"], "nothing to fetch"),
    "no folder": (["report", "nowhere"], "no folder"),
    "no model": (["plan", "no_such_module:make_model"], "make_model"),
    "no rate": (["plan", "digits", "--link", "slow"], "100mbit"),
    "unknown plan method": (["plan", "digits", "--method", "Nope()"], "no method"),
    "unknown study": (["study", "everything"], "sparse"),
    "no target": (["compare", "--target", "abc"], "--target is a number"),
    "one worker to plan for": (["plan", "digits", "--workers", "1"], "--workers must be 2 or more"),
    "less than no time": (["plan", "digits", "--compute-ms", "-4"], "--compute-ms must be 0 or more"),
    "no rows": (["plan", "digits", "--rows", "0"], "--rows"),
    "a baseline to plan for": (["plan", "digits", "--method", "DDP"], "in every plan"),
    "a model with arguments": (["plan", "torch.nn:Linear"], "takes no arguments"),
    "nothing to resume": (["train", "--resume", "--out", "new"], "new holds no run to go on with"),
    "nothing to resume from": (["compare", "--resume"], "--out"),
    "no stages": (["study", "frontier", "--screen", "40,20"], "--screen"),
    "no share": (["study", "frontier", "--keep", "2"], "--keep"),
    "no optimizers": (["study", "frontier", "--optimizers", "sgd,lion"], "sgd, adamw, muon"),
    "no clip": (["train", "--clip", "0"], "--clip must be above 0"),
    "no beta": (["train", "--beta2", "1"], "--beta2 must be below 1"),
    "muon without matrices": (["train", "--task", "speech", "--optimizer", "muon", "--data", "nowhere"], "speech"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_leaves_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words, told = BAD[case]
    assert thinwire(monkeypatch, *words) == 2
    said = capsys.readouterr()
    assert told in said.err and len(said.err.strip().splitlines()) == 1 and said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for command in ("train", "compare"):
        assert thinwire(monkeypatch, command, "--method", "DDP", "--out", str(tmp_path / "file" / "runs")) == 2
        assert "--out" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_another_program_on_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert thinwire(monkeypatch, "train", "--port", str(port), "--out", str(tmp_path / "run")) == 2
    starting, said = capsys.readouterr().err.strip().splitlines()
    assert f"port {port}" in said and starting == "starting 2 workers ..."


def test_a_damaged_record_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "DDP")
    lines = (tmp_path / "rank1.jsonl").read_text().splitlines()
    lines[5] = lines[5][:20]
    (tmp_path / "rank1.jsonl").write_text("\n".join(lines) + "\n")
    assert thinwire(monkeypatch, "report", str(tmp_path)) == 2
    assert "rank1.jsonl, line 6" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_records_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "DDP")
    before = (tmp_path / "rank0.jsonl").read_text()
    assert thinwire(monkeypatch, "train", "--method", "DDP", "--out", str(tmp_path)) == 2
    assert "--resume" in capsys.readouterr().err
    assert (tmp_path / "rank0.jsonl").read_text() == before


def test_every_method_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert thinwire(monkeypatch, "methods") == 0
    told = capsys.readouterr().out
    for name in NAMES:
        assert f"{name}(" in told
    assert "NeurIPS 2019" in told and "residual" in told


@pytest.mark.parametrize(
    "command", ["train", "compare", "study", "plan", "probe", "report", "methods", "data", "doctor"]
)
def test_help_of_every_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert thinwire(monkeypatch, command, "--help") == 0
    told = capsys.readouterr().out
    assert command in told and ("Example" in told or command == "methods")


def test_data_sets_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert thinwire(monkeypatch, "data") == 0
    told = capsys.readouterr().out
    assert "cifar10" in told and "133 MB" in told and "resnet20" in told


def test_a_plan_says_when_not_to_compress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    method = ("--method", "ErrorFeedback(TopK(0.01))", "--compute-ms", "50")
    assert thinwire(monkeypatch, "plan", "digits", "--link", "1mbit", *method) == 0
    assert "Use ErrorFeedback(TopK(0.01))" in capsys.readouterr().out
    assert thinwire(monkeypatch, "plan", "digits", "--link", "100gbit", *method) == 0
    assert "Do not compress" in capsys.readouterr().out


def test_a_plan_advises_nothing_that_forgets_what_it_does_not_send(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--link", "1mbit", "--compute-ms", "50", "--method", "RandomBlock(0.1)")
    assert thinwire(monkeypatch, "plan", "digits", *words) == 0
    said = capsys.readouterr()
    assert "Use RandomBlock" not in said.out and "Not advised" in said.err and "RandomBlock(0.1)" in said.err
    assert thinwire(monkeypatch, "plan", "digits", *words, "--method", "ErrorFeedback(RandomBlock(0.1))") == 0
    assert "Use ErrorFeedback(RandomBlock(0.1))" in capsys.readouterr().out


def test_half_a_millisecond_is_not_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert thinwire(monkeypatch, "plan", "digits", "--link", "100gbit", "--method", "Dense()") == 0
    told = capsys.readouterr().out
    assert " ms a step" in told and " 0 ms a step" not in told


def test_answers_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "DDP")
    plan = ["plan", "digits", "--method", "ErrorFeedback(TopK(0.01))", "--scale"]
    for words, key in (
        (["methods"], "spelling"),
        (["data"], "digits"),
        (["report", str(tmp_path)], "report"),
        (["doctor"], "what"),
        (plan, "seconds_by_workers"),
    ):
        assert thinwire(monkeypatch, *words, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert key in (told[0] if isinstance(told, list) else told)


@pytest.mark.usefixtures("forked")
def test_answers_of_runs_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--steps", "4", "--workers", "1", "--json"]
    assert thinwire(monkeypatch, "train", *words, "--out", str(tmp_path / "a"), "--method", "DDP") == 0
    assert json.loads(capsys.readouterr().out)["method"] == "DDP"
    assert thinwire(monkeypatch, "compare", *words, "--out", str(tmp_path / "b"), "--method", "DDP('none')") == 0
    assert json.loads(capsys.readouterr().out)["methods"][0]["method"] == "DDP('none')"


@pytest.mark.parametrize(
    ("left", "says"),
    [("nothing", "Nothing was written"), ("records", "no checkpoint was"), ("checkpoint", "--resume goes on")],
)
def test_a_run_that_is_stopped_promises_only_what_there_is(
    left: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(folders: list[Path], *_: object, **__: object) -> None:
        if left != "nothing":
            write_run(folders[0], "DDP", ended=False)
        if left == "checkpoint":
            (folders[0] / "checkpoints").mkdir()
            (folders[0] / "checkpoints" / "latest").write_text("step10")
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "launch", stopped)
    assert thinwire(monkeypatch, "train", "--method", "DDP", "--out", str(tmp_path / "run")) == 130
    said = capsys.readouterr().err
    assert says in said and ("--resume" in said) == (left == "checkpoint")


def test_what_many_cells_say_is_said_once() -> None:
    assert counted(["needs processes", "failed", "needs processes"]) == {"needs processes": 2, "failed": 1}


@pytest.mark.parametrize("kind", [veth, tun])
def test_without_rights_the_message_begins_with_what_is_needed(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "refused", lambda *_: "ip netns add: Operation not permitted")
    assert str(kind.missing()).startswith("emulated links need Linux and the rights of root")


def test_kernels_that_are_cached_are_not_worth_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "warm", lambda *_: 3.0)  # slow, but nothing was compiled
    warm_kernels.__wrapped__(0, torch.device("cpu"))
    assert caplog.text == ""
    monkeypatch.setattr(kernels, "warm", lambda *_: float(numba.njit(lambda x: x + 1)(2)))
    warm_kernels.__wrapped__(0, torch.device("cpu"))
    before, after = [record.getMessage() for record in caplog.records]
    assert before == "compiling kernels, once on this machine ..." and "compiling kernels took 3.0 s" in after


def test_that_kernels_are_being_compiled_is_said_before_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = numba.njit(lambda x: x.nothing)
    monkeypatch.setattr(kernels, "warm", lambda *_: broken(2))
    with pytest.raises(numba.core.errors.NumbaError):  # so nothing is said after it
        warm_kernels.__wrapped__(0, torch.device("cpu"))
    assert [record.getMessage() for record in caplog.records] == ["compiling kernels, once on this machine ..."]


def test_a_typo_in_the_example_is_one_line() -> None:
    example = Path(__file__).parent.parent.parent / "examples" / "train.py"
    code, said = forked.workers(1, [str(example), "ErrorFeedback(TopKay(0.01))"], dict(os.environ))
    assert code == 1 and "did you mean TopK" in said and len(said.splitlines()) == 1


def test_a_report_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", "DDP")
    assert thinwire(monkeypatch, "report", str(tmp_path), "--out", str(tmp_path / "page.html")) == 0
    assert 10_000 < (tmp_path / "page.html").stat().st_size < 500_000
    assert "page.html" in capsys.readouterr().out


@pytest.mark.usefixtures("forked")
def test_without_rights_a_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings, "missing_rights", lambda _: "links cannot be emulated here")
    out = tmp_path / "runs"
    words = ["--link", "1mbit", "--steps", "4", "--method", "DDP", "--out", str(out)]
    assert thinwire(monkeypatch, "compare", *words) == 0
    said = capsys.readouterr()
    assert "predicted" in said.err and "predicted" in said.out
    summary = json.loads((out / "summary.json").read_text())
    assert summary["methods"][0]["predicted"] and summary["methods"][0]["step_s"] > 8 * 340_008 / 1e6
