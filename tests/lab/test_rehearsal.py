"""A rehearsal, whose workers are threads, is what processes would have done."""

import json
import sys
from pathlib import Path

import pytest

from thinwire.cli import main as cli
from thinwire.lab import LabError
from thinwire.lab.records.record import Run, read_steps
from thinwire.lab.records.spellings import canonical, method_of
from thinwire.lab.run.optimizers import rate_at
from thinwire.lab.run.rehearsal import refuse, rehearse, rehearse_all
from thinwire.lab.studies.compare import run_all
from thinwire.lab.tasks import load_task

METHODS = [  # that do not depend on the order of the parameters, which is DDP's own
    "Dense()",
    "ErrorFeedback(TopK(0.05))",
    "ErrorFeedback(Threshold(0.01))",
    "Variance()",
    "ErrorFeedback(TopK(0.1)) every 4",
    "ErrorFeedback(TopK(0.1)) every 2 ahead",
    "Dense() every 3 outer 0.7 0.9",
]


def a_run(method: str, **other: object) -> Run:
    settings = {
        "workers": 2,
        "steps": 12,
        "batch": 8,
        "lr": 0.02,
        "evaluate_every": 6,
        "grain": "model",
        "overlap": False,
    }
    return Run(canonical(method), "digits", "mlp", **settings | other)  # type: ignore[arg-type]


@pytest.mark.usefixtures("forked")
def test_it_trains_as_processes_do(tmp_path: Path) -> None:
    folders = []
    for number, method in enumerate(METHODS):
        folders.append(tmp_path / "processes" / str(number))
        a_run(method).write(folders[-1])
    assert not run_all(folders, 2, links=None, resume=False)
    for number, method in enumerate(METHODS):
        folder = tmp_path / "threads" / str(number)
        a_run(method).write(folder)
        rehearse(a_run(method), load_task("digits", "mlp", tmp_path), folder)
        real, told = (read_steps(f / "rank0.jsonl") for f in (folders[number], folder))
        for one, other in zip(real, told, strict=True):
            if "validation_loss" in one:
                assert one["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-6), method
            if one["step"] > 2:  # DDP settles its buckets in the first ones
                assert one["payload_bytes"] == pytest.approx(other["payload_bytes"], rel=0.01), method


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("method", ["ErrorFeedback(TopK(0.05))", "Variance()"])
def test_each_tensor_by_itself_is_what_processes_do_at_that_grain(method: str, tmp_path: Path) -> None:
    real, told = tmp_path / "processes", tmp_path / "threads"
    for folder in (real, told):
        a_run(method, grain="tensor").write(folder)
    assert not run_all([real], 2, links=None, resume=False)
    rehearse(a_run(method, grain="tensor"), load_task("digits", "mlp", tmp_path), told)
    one, other = (read_steps(f / "rank0.jsonl")[-1] for f in (real, told))
    assert one["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-6)
    assert one["payload_bytes"] == pytest.approx(other["payload_bytes"], rel=0.01)


@pytest.mark.usefixtures("forked")
def test_runs_of_one_process_do_not_know_of_one_another(tmp_path: Path) -> None:
    same = [tmp_path / name for name in ("first", "second")]
    bad = tmp_path / "bad"
    for folder in same:
        a_run("ErrorFeedback(RandomK(0.05))").write(folder)
    a_run("Dense()", batch=10**6).write(bad)  # more than the data has: it ends its process
    failed = rehearse_all([same[0], bad, same[1]], 1, lambda *_: None)
    assert set(failed) == {bad} and "Dense() failed" in failed[bad] and "batch" in failed[bad]
    first, second = (read_steps(folder / "rank0.jsonl") for folder in same)
    assert len(first) == 13 and [line["loss"] for line in first[1:]] == [line["loss"] for line in second[1:]]


def test_one_that_was_ended_is_made_again(tmp_path: Path) -> None:
    """In an interpreter, as people have it; those of the other tests are forked."""
    a_run("Dense()").write(tmp_path)
    (tmp_path / "rank0.jsonl").write_text('{"start": 0}\n' + '{"step": 1, "loss": 2.0, "seconds": 0.1}\n' * 5)
    heard: list[int] = []
    assert not rehearse_all([tmp_path], 1, lambda _, line: heard.append(line.get("step", 0)))
    steps = [line["step"] for line in read_steps(tmp_path / "rank0.jsonl")]
    assert steps == list(range(13))
    assert [step for step in heard if step][-12:] == steps[1:]


@pytest.mark.usefixtures("forked")
def test_several_at_once_and_what_cannot_be_is_said(tmp_path: Path) -> None:
    methods = ["Dense()", "RankDAD()", "ErrorFeedback(TopK(0.1)) every 4"]
    folders = [tmp_path / str(number) for number in range(3)]
    for folder, method in zip(folders, methods, strict=True):
        a_run(method).write(folder)
    seen: set[str] = set()
    failed = rehearse_all(folders, 2, lambda run, line: seen.add(run.method))
    assert set(failed) == {folders[1]} and "needs processes" in failed[folders[1]]
    assert seen == {"Dense()", "LocalSteps(ErrorFeedback(TopK(0.1)), every=4)"}
    assert "needs processes" in str(refuse(a_run("DDP-fp16"))) and "grain" in str(
        refuse(a_run("Dense()", grain="bucket"))
    )


@pytest.mark.parametrize(
    ("old", "spelled"),
    [
        ("Dense() every 3 outer 0.7 0.9", "LocalSteps(Dense(), every=3, outer=Outer(0.7, 0.9, nesterov=True))"),
        ("Dense() every 3 outer 0.7 0", "LocalSteps(Dense(), every=3, outer=Outer(0.7))"),
        ("Dense() every 3", "LocalSteps(Dense(), every=3)"),
        ("ErrorFeedback(Dense()) every 1 ahead", "LocalSteps(ErrorFeedback(Dense()), every=1, ahead=True)"),
        ("Dense", "Dense()"),
        ("DDP-fp16", "DDP('fp16')"),
        ("no-exchange", "DDP('none')"),
        ("DDP()", "DDP"),
        ("DDP('powersgd', 2)", "DDP('powersgd', rank=2)"),
    ],
)
def test_the_forms_of_version_0_1_are_read_and_there_is_one_spelling(old: str, spelled: str) -> None:
    assert canonical(old) == spelled == canonical(spelled)
    assert repr(method_of(spelled)) == spelled


@pytest.mark.parametrize(
    "method",
    [
        "Dense() every 3 outer 0.7",
        "Dense() every 0",
        "Dense() every now and then",
        "DDP every 3",
        "DDP('fp8')",
        "Outer(0.7)",
        "Dense() every 3 outer x 0.9",
        "Dense() every 3 outer 0.7 2",
        "Dense() every 1 ahead",
        "ErrorFeedback(Dense()) every 1 ahead outer 0.7 0.9",
    ],
)
def test_a_bad_outer_step_or_lead_is_refused(method: str) -> None:
    with pytest.raises(LabError):
        canonical(method)


@pytest.mark.usefixtures("forked")
def test_a_study_of_chosen_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "study",
        "frontier",
        "--rehearse",
        "--steps",
        "10",
        "--seeds",
        "2",
        "--rates",
        "1,0.3",
        "--out",
        str(tmp_path),
    ]
    words += ["--method", "Dense()", "--method", "Dense() every 5 outer 0.7 0.9"]
    monkeypatch.setattr(sys, "argv", ["thinwire", *words])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    dense, local = json.loads((tmp_path / "study.json").read_text())["results"]
    assert len(dense["values"]) == 2 and len(dense["unchosen"]) == 1
    assert local["factors"]["outer"] == "0.7 0.9" and local["wire"] < 0.3 * dense["wire"]
    assert "Report" in capsys.readouterr().out


@pytest.mark.parametrize(("schedule", "end"), [("constant", 1.0), ("cosine", 0.1), ("linear", 0.0)])
def test_learning_rates_go_up_and_down_as_the_schedule_says(schedule: str, end: float) -> None:
    run = a_run("Dense()", schedule=schedule, steps=1000)
    rates = [rate_at(step, run) for step in range(1000)]
    assert max(rates) == pytest.approx(1.0) and rates[-1] == pytest.approx(end, abs=0.002) and min(rates) > 0
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert schedule == "constant" or rates[:50] == pytest.approx([(step + 1) / 50 for step in range(50)])
