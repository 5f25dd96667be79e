"""The command line: it teaches by example, and bad input gets one line, code 2, and leaves nothing behind."""

import json
import socket
import sys
from pathlib import Path

import pytest

from lab_runs import write_run
from thinwire import cli
from thinwire.lab import network
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
    said = capsys.readouterr().err
    assert f"port {port}" in said and len(said.strip().splitlines()) == 1


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


@pytest.mark.parametrize("command", ["train", "compare", "study", "plan", "probe", "report", "methods", "data"])
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


def test_a_report_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", "DDP")
    assert thinwire(monkeypatch, "report", str(tmp_path), "--out", str(tmp_path / "page.html")) == 0
    assert (tmp_path / "page.html").stat().st_size > 1_000_000
    assert "page.html" in capsys.readouterr().out


def test_without_rights_a_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "missing_rights", lambda: "links cannot be emulated here")
    out = tmp_path / "runs"
    words = ["--link", "1mbit", "--steps", "4", "--method", "DDP", "--out", str(out)]
    assert thinwire(monkeypatch, "compare", *words) == 0
    said = capsys.readouterr()
    assert "predicted" in said.err and "predicted" in said.out
    summary = json.loads((out / "summary.json").read_text())
    assert summary["methods"][0]["predicted"] and summary["methods"][0]["step_s"] > 8 * 340_008 / 1e6
