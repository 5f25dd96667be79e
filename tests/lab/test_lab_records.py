"""Records, and what is worked out from them."""

import contextlib
import io
import json
import runpy
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lab_runs import read_json, write_run
from thinwire.lab import LabError
from thinwire.lab.pages.report import render, winner
from thinwire.lab.pages.show import comparison
from thinwire.lab.records.record import (
    Recorder,
    Run,
    follow,
    has_ended,
    keep_until,
    rank_file,
    read_lines,
    read_steps,
    write_json,
)
from thinwire.lab.records.summary import Records, Target, summarise
from thinwire.lab.run.links.spelling import Link
from thinwire.lab.studies.compare import conclude, default_target, folder_name, keep_settings, prepare, sentence
from thinwire.plan import Network


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rank0.jsonl")
    recorder.write({"step": 1, "loss": float("nan"), "seconds": float("inf")})
    assert read_lines(tmp_path / "rank0.jsonl") == [{"step": 1, "loss": None, "seconds": None}]


def test_a_torn_last_line_is_dropped_and_a_bad_one_before_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in read_steps(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(LabError, match="line 2"):
        read_steps(path)
    path.write_text('{"step": 1}\n[1, 2]\n{"step": 3}\n')
    with pytest.raises(LabError, match="line 2"):
        read_steps(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LabError, match="cannot be read"):
        read_steps(path)


def test_a_growing_file_is_followed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    lines = follow(path)
    assert next(lines) is None
    path.write_text('{"step": 1}\n{"ste')
    assert next(lines) == {"step": 1}
    assert next(lines) is None
    with open(path, "a") as file:
        file.write('p": 2}\n')
    assert next(lines) == {"step": 2}
    assert next(lines) is None
    keep_until(path, 1)  # as a run that resumes does
    assert next(lines) == {"step": 1}
    assert next(lines) is None


def test_steps_after_a_checkpoint_are_forgotten(tmp_path: Path) -> None:
    write_run(tmp_path, "DDP")
    assert has_ended(tmp_path)
    keep_until(rank_file(tmp_path, 0), 20)
    assert read_steps(rank_file(tmp_path, 0))[-1]["step"] == 20
    assert not has_ended(tmp_path)


def test_settings_come_back_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    run = Run("Dense()", "digits", lr=0.125, overlap=True)
    run.write(tmp_path)
    assert Run.read(tmp_path) == run
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(LabError, match="run again"):
        Run.read(tmp_path)
    with pytest.raises(LabError, match="no run"):
        Run.read(tmp_path / "nothing")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="--out"):
        write_json(tmp_path / "file" / "summary.json", {})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_summary_adds_up_what_the_records_say(tmp_path: Path) -> None:
    write_run(tmp_path, "ErrorFeedback(TopK(0.01))", wire=1000.0, measured=1020.0)
    told = summarise(Records.read(tmp_path), Target("accuracy", 0.5), None)
    assert told["validation"] == 1.0 and told["test"] == 0.9
    assert told["steps"] == 40 and told["ended"] and not told["diverged"]
    assert told["seconds"] == pytest.approx(4.0) and told["step_s"] == pytest.approx(0.1)
    assert told["wire_bytes"] == pytest.approx(40 * 1500) and told["measured_bytes"] == pytest.approx(40 * 1530)
    assert told["wire_bytes_a_step"] == pytest.approx(1500) and told["payload_bytes_a_step"] == pytest.approx(500)
    assert told["bytes_per_worker"]["wire_bytes"] == [pytest.approx(40_000), pytest.approx(80_000)]
    assert told["seconds_split"] == {
        "compute": pytest.approx(0.03),
        "capture": pytest.approx(0.01),
        "select": pytest.approx(0.02),
        "exchange": pytest.approx(0.03),
        "apply": pytest.approx(0.01),
    }
    assert told["steps_to_target"] == 16 and told["seconds_to_target"] == pytest.approx(1.6)
    assert told["wire_bytes_to_target"] == pytest.approx(16_000)


def test_a_killed_run_has_a_summary_too(tmp_path: Path) -> None:
    write_run(tmp_path, "DDP", ended=False)
    told = summarise(Records.read(tmp_path), None, None)
    assert not told["ended"] and told["steps"] == 40 and told["seconds_to_target"] is None
    assert told["seconds_split"] == {"whole step": pytest.approx(0.1)}


def test_times_of_a_link_that_cannot_be_emulated_are_predicted(tmp_path: Path) -> None:
    write_run(tmp_path, "ErrorFeedback(TopK(0.01))", wire=1000.0)
    told = summarise(Records.read(tmp_path), Target("accuracy", 0.5), Network(80_000, 2, 0.01))
    step = 0.1 - 0.03 + 8 * 1000 / 80_000 + 2 * 0.01
    assert told["predicted"] and told["step_s"] == pytest.approx(step)
    assert told["seconds"] == pytest.approx(40 * step) and told["seconds_to_target"] == pytest.approx(16 * step)


def test_a_run_that_ends_worse_than_it_began_has_diverged(tmp_path: Path) -> None:
    write_run(tmp_path, "DDP", validation_loss=9.0)
    assert summarise(Records.read(tmp_path), None, None)["diverged"]


def test_the_target_is_near_what_plain_ddp_came_to(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "ErrorFeedback(TopK(0.01))", speed=0.5)
    write_run(tmp_path / "b", "DDP", speed=0.8)
    records = [Records.read(tmp_path / name) for name in ("a", "b")]
    assert default_target(records) == Target("accuracy", pytest.approx(0.89))
    assert default_target(records[:1]) == Target("accuracy", pytest.approx(0.59))
    assert Target.near("loss", 2.0) == Target("loss", pytest.approx(2.04))
    assert Target("loss", 2.0).reached(1.9) and not Target("loss", 2.0).reached(2.1)
    assert not Target("loss", 2.0).reached(None)


def compared(tmp_path: Path, link: str | None = "100mbit", emulated: bool = True) -> dict[str, object]:
    """DDP in 4.0 s, its fp16 hook in 2.0 s, TopK in 1.0 s, and one that never gets there."""
    runs = {"DDP": (0.1, 8e5), "DDP-fp16": (0.05, 4e5), "ErrorFeedback(TopK(0.01))": (0.025, 1e4)}
    folders = []
    for i, (method, (step_s, wire)) in enumerate(runs.items()):
        folders.append(tmp_path / folder_name(method, i))
        write_run(folders[-1], method, step_s=step_s, wire=wire)
    folders.append(tmp_path / folder_name("SignSGD()", 3))
    write_run(folders[-1], "SignSGD()", speed=0.2)
    asked = Link.parse(link) if link else None
    return conclude(tmp_path, folders, {}, link=asked, emulated=emulated, target=None)


def test_a_comparison_ends_in_a_sentence_that_says_who_won(tmp_path: Path) -> None:
    summary = compared(tmp_path)
    assert summary["winner"] == (
        "On a link of 100mbit ErrorFeedback(TopK(0.01)) reached 99.0 % validation accuracy first, in 0.9 s, "
        "4.0 times sooner than plain DDP, 2.0 times sooner than DDP's fp16 hook, "
        "with 80 times fewer bytes a step than plain DDP."
    )
    assert read_json(tmp_path / "summary.json")["winner"] == summary["winner"] == winner(tmp_path)
    assert winner(tmp_path / "nowhere") == ""
    never = summary["methods"][3]  # type: ignore[index]
    assert never["seconds_to_target"] is None and never["method"] == "SignSGD()"
    needed = {"method", "validation", "train_loss", "steps", "seconds", "seconds_split", "payload_bytes", "wire_bytes"}
    needed |= {"measured_bytes", "seconds_to_target", "wire_bytes_to_target", "diverged"}
    assert needed <= never.keys()


def test_the_sentence_is_honest_about_predictions_and_baselines(tmp_path: Path) -> None:
    assert "is predicted to reach" in str(compared(tmp_path / "a", emulated=False)["winner"])
    write_run(tmp_path / "b" / "0", "DDP", step_s=0.01)
    write_run(tmp_path / "b" / "1", "ErrorFeedback(TopK(0.01))", step_s=0.1)
    told = conclude(tmp_path, [tmp_path / "b" / "0", tmp_path / "b" / "1"], {}, link=None, emulated=False, target=None)
    assert told["winner"].endswith("Compression does not pay here.") and "without a slow link, DDP" in told["winner"]


def test_nobody_wins_a_target_that_nobody_reaches(tmp_path: Path) -> None:
    summary = compared(tmp_path)
    for method in summary["methods"]:  # type: ignore[attr-defined]
        method["seconds_to_target"] = None
    assert "no method came to the target" in sentence(summary)


def test_a_method_that_only_touched_the_target_does_not_win(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "DDP", step_s=0.1)
    write_run(tmp_path / "1", "ErrorFeedback(TopK(0.01))", step_s=0.01)
    path = tmp_path / "1" / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("step") == 40:  # there at step 36, and away again at the last look
            line["validation_accuracy"] = 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folders = [tmp_path / "0", tmp_path / "1"]
    summary = conclude(tmp_path, folders, {}, link=None, emulated=False, target=0.95)
    assert [m["holds_target"] for m in summary["methods"]] == [True, False]
    assert "DDP reached 95.0 %" in summary["winner"]
    assert summary["winner"].endswith("ErrorFeedback(TopK(0.01)) came to it and ended below.")
    console = Console(width=200, file=io.StringIO())
    console.print(comparison(summary))
    assert "(0.4)" in console.file.getvalue() and "did not hold it" in console.file.getvalue()  # type: ignore
    alone = conclude(tmp_path, folders[1:], {}, link=None, emulated=False, target=0.95)
    assert "no method came to the target" in alone["winner"] and "ended below" in alone["winner"]


def test_a_loss_that_is_not_held_ends_above_the_target(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "DDP", metric="loss")
    write_run(tmp_path / "1", "ErrorFeedback(TopK(0.01))", step_s=0.01, metric="loss")
    path = tmp_path / "1" / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("step") == 40:
            line["validation_loss"] = 1.9
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = conclude(tmp_path, [tmp_path / "0", tmp_path / "1"], {}, link=None, emulated=False, target=0.5)
    assert "DDP reached validation loss 0.500" in summary["winner"]
    assert summary["winner"].endswith("ErrorFeedback(TopK(0.01)) came to it and ended above.")


DAMAGE = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=3), st.just([]), st.just({}))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_records_are_an_error_that_names_the_line_or_are_read(data: st.DataObject) -> None:
    """Any field of any line, or of the settings, missing or replaced: a summary or an error of ours, nothing else."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, "DDP", steps=10, workers=1)
        path = rank_file(folder, 0)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        target = data.draw(st.sampled_from([*lines, settings_of := json.loads((folder / "run.json").read_text())]))
        key = data.draw(st.sampled_from(sorted(target)))
        if data.draw(st.booleans()):
            del target[key]
        else:
            target[key] = data.draw(DAMAGE)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "run.json").write_text(json.dumps(settings_of))
        with contextlib.suppress(LabError):
            render([records := Records.read(folder)], "")
            summarise(records, Target("accuracy", 0.5), None)


@pytest.mark.parametrize("key", ["step_s", "seconds", "loss"])
def test_a_line_that_lacks_a_number_is_named(tmp_path: Path, key: str) -> None:
    write_run(tmp_path, "DDP", steps=10)
    path = rank_file(tmp_path, 0)
    lines = path.read_text().splitlines()
    lines[5] = json.dumps({k: v for k, v in json.loads(lines[5]).items() if k != key})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(LabError, match=f"rank0.jsonl, line 6 is damaged .it has no {key}"):
        Records.read(tmp_path)


def test_settings_of_version_0_1_are_read(tmp_path: Path) -> None:
    kept = {"method": "ErrorFeedback(TopK(0.1)) every 4", "task": "digits", "model": None, "metric": "accuracy"}
    kept |= {"workers": 2, "steps": 40, "batch": 32, "optimizer": "sgd", "lr": 1, "momentum": 0.9, "unknown": 3}
    (tmp_path / "run.json").write_text(json.dumps(kept))
    run = Run.read(tmp_path)
    assert run.lr == 1 and run.clip is None
    write_run(tmp_path, "DDP")
    (tmp_path / "run.json").write_text(json.dumps(kept))
    assert Records.read(tmp_path).run.method == "LocalSteps(ErrorFeedback(TopK(0.1)), every=4)"


def test_the_command_of_a_run_makes_it_again() -> None:
    """Whatever a run's settings are: its command, read by the command line, asks for the same ones."""
    from thinwire.cli import options

    run = Run("LocalSteps(Dense(), every=3)", "digits", "mlp", optimizer="muon", muon_lr=0.03, clip=1.5, overlap=False)
    run = replace(run, schedule="linear", beta2=0.95, grain="tensor", link="10mbit", rtt="1ms", evaluate_every=7)
    asked: dict[str, object] = {}
    app = typer.Typer()
    app.command()(options.with_settings()(lambda given: asked.update(given)))
    app(shlex.split(run.command())[2:], standalone_mode=False)
    told = {name: value for name, value in vars(run).items() if name not in ("metric", "data", "checkpoint_every")}
    assert {name: asked[name] for name in told} == told


def test_the_docs_have_the_settings_of_a_run() -> None:
    docs = Path(__file__).parent.parent.parent / "docs"
    maker = runpy.run_path(str(docs / "make_options.py"))
    text = (docs / "lab.md").read_text()
    assert maker["page"](text) == text, "run python docs/make_options.py"
    assert "`--muon-lr`" in text and "`--overlap/--no-overlap`" in text


def test_records_are_never_overwritten(tmp_path: Path) -> None:
    template = Run("DDP", "digits")
    folders = prepare(tmp_path, template, ["DDP", "Dense", "Dense()"], resume=False)
    assert [Run.read(f).method for f in folders] == ["DDP", "Dense()"]  # one spelling for one method
    rank_file(folders[0], 0).write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(LabError, match="--resume"):
        prepare(tmp_path, template, ["DDP"], resume=False)
    prepare(tmp_path, template, ["DDP"], resume=True)
    with pytest.raises(LabError, match="other settings"):
        keep_settings(folders[0], Run("DDP", "digits", lr=3.0), resume=True)
    with pytest.raises(LabError, match="did you mean"):
        prepare(tmp_path, template, ["TopKK(0.1)"], resume=False)
