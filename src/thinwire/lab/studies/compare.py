"""The same task, seeds and data order under several methods, one after another, over the same link."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.lab import LabError
from thinwire.lab.records.record import Run, has_ended, rank_file, write_json
from thinwire.lab.records.spellings import DDP, NOTHING, PLAIN, canonical, label, method_of
from thinwire.lab.records.summary import Records, Target, default_target, summarise
from thinwire.lab.run.launch import OnStep, WorkerFailed, already_launched, launch
from thinwire.lab.run.links.spelling import Link

DEFAULT = {  # what is compared unless somebody asks for other methods, with a line on each
    "DDP": "torch's all-reduce of the whole gradient",
    "DDP('fp16')": "the same in 16 bits: torch's own hook",
    "Cast(Dense())": "thinwire's mean of the whole gradient in 16 bits",
    "ErrorFeedback(PowerSGD(4))": "two thin factors of every matrix; the rest is sent later",
    "ErrorFeedback(TopK(0.01))": "the largest hundredth of each worker's gradient; the rest is sent later",
    "LocalSteps(ErrorFeedback(RandomBlock(0.1)), every=1, ahead=True)": "one random window, the same on all workers",
    "ErrorFeedback(ExDyna(0.01))": "the largest hundredth, each worker in a partition of its own",
    "Variance(2.0)": "an entry once the samples agree on its sign",
    "RankDAD(4)": "each layer's inputs and deltas at rank 4; the rest is sent later",
    "LocalSteps(ErrorFeedback(PowerSGD(4)), every=5)": "five steps alone, then the change in two thin factors",
}


def folder_name(method: str, position: int) -> str:
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", method).strip("-")
    return f"{position:02d}-{plain[:60]}"


def prepare(out: Path, template: Run, methods: Sequence[str], resume: bool) -> list[Path]:
    """A folder for each method, with the settings of its run."""
    spelled = list(dict.fromkeys(canonical(method) for method in methods))
    if not spelled:
        raise LabError("there is nothing to compare: give at least one --method")
    folders = []
    for position, method in enumerate(spelled):
        folders.append(out / folder_name(method, position))
        keep_settings(folders[-1], replace(template, method=method), resume)
    return folders


def keep_settings(folder: Path, run: Run, resume: bool) -> None:
    """Write down what is going to be run; records of another run are never overwritten, nor is one made up."""
    if rank_file(folder, 0).exists():
        if not resume:
            raise LabError(f"{folder} holds records already: go on with --resume, or choose another folder with --out")
        kept = Run.read(folder)
        if replace(kept, method=label(kept.method)) != run:
            raise LabError(f"{folder} was made with other settings: resume with the same, or choose another --out")
    run.write(folder)


def check_resumable(out: Path | None) -> None:
    """Refuse to go on with nothing; but not under a launcher, which uses the same words when it starts again."""
    if out is None:
        raise LabError("--resume goes on with what is in a folder: name it with --out")
    if not already_launched() and not any(out.glob("run.json")) and not any(out.glob("*/run.json")):
        raise LabError(f"{out} holds no run to go on with: leave --resume out to begin one, or mend --out")


def run_all(
    folders: Sequence[Path],
    workers: int,
    *,
    links: Link | None,
    resume: bool,
    port: int | None = None,
    on_step: OnStep = lambda *_: None,
) -> dict[Path, str]:
    """Make all runs. One that fails does not take the others with it; what each of those said."""
    failed: dict[Path, str] = {}
    if already_launched():
        launch(folders, workers, resume=resume, on_step=on_step)  # rank 0 tells the others what there is to run
        return failed
    while True:
        left = [folder for folder in folders if folder not in failed and not has_ended(folder)]
        if not left:
            return failed
        try:
            launch(left, workers, links=links, resume=resume, port=port, on_step=on_step)
        except WorkerFailed as failure:
            broken = next(folder for folder in left if not has_ended(folder))
            if broken == left[0] and not rank_file(broken, 0).exists():
                raise  # nothing started, so nothing else would
            failed[broken] = str(failure)


def conclude(
    out: Path,
    folders: Sequence[Path],
    failed: dict[Path, str],
    *,
    link: Link | None,
    emulated: bool,
    target: float | None,
) -> dict[str, Any]:
    """`summary.json`: every method, the target they are timed to, and which one won."""
    records = [Records.read(folder) for folder in folders if folder not in failed]
    if not records:
        raise LabError(f"no method could be run: {next(iter(failed.values()), '')}")
    goal = Target(records[0].run.metric, target) if target is not None else default_target(records)
    network = link.network(records[0].run.workers) if link else None
    predicted = None if emulated else network
    methods = [summarise(one, goal, predicted) for one in records]
    run = records[0].run
    summary = {
        "task": run.task,
        "model": run.model,
        "workers": run.workers,
        "link": repr(link) if link else None,
        "rtt_s": network and network.rtt,
        "emulated": emulated,
        "target": goal and {"metric": goal.metric, "value": goal.value},
        "methods": methods,
        "failed": {folder.name: said for folder, said in failed.items()},
    }
    summary["winner"] = sentence(summary)
    write_json(out / "summary.json", summary)
    return summary


def sentence(summary: dict[str, Any]) -> str:
    """Which method won on this link, and by how much."""
    methods = [m for m in summary["methods"] if m["method"] != repr(NOTHING)]
    if not methods:
        return "Nothing was exchanged, so there is nothing to compare."
    goal = summary["target"]
    where = f"On a link of {summary['link']}" if summary["link"] else "On this machine, without a slow link,"
    told = "is predicted to reach" if methods[0]["predicted"] else "reached"
    touched = sorted((m for m in methods if m["seconds_to_target"] is not None), key=lambda m: m["seconds_to_target"])
    arrived = [m for m in touched if m["holds_target"]]
    lost = [m["method"] for m in touched if not m["holds_target"]]
    side = "above" if goal and goal["metric"] == "loss" else "below"
    fell = f" {', '.join(lost)} came to it and ended {side}." if lost else ""
    if not goal or not arrived:
        return f"{where} no method came to the target{f' ({_goal(goal)})' if goal else ''}: take more --steps.{fell}"
    best = arrived[0]
    said = f"{where} {best['method']} {told} {_goal(goal)} first, in {best['seconds_to_target']:.1f} s"
    rivals = []
    for kind, called in ((PLAIN, "plain DDP"), (DDP("fp16"), "DDP's fp16 hook")):
        rival = next((m for m in methods if m["method"] == repr(kind)), None)
        if rival is None or rival is best:
            continue
        if not rival["holds_target"]:
            rivals.append(f"{called} did not get there in {rival['seconds']:.1f} s")
        else:
            rivals.append(f"{rival['seconds_to_target'] / best['seconds_to_target']:.1f} times sooner than {called}")
    fewer = _fewer(best, methods)
    said = ", ".join([said, *rivals]) + (f", with {fewer}" if fewer else "")
    compressed = any(not _is_baseline(m) for m in methods)
    return said + (". Compression does not pay here." if compressed and _is_baseline(best) else ".") + fell


def _is_baseline(told: dict[str, Any]) -> bool:
    try:
        return isinstance(method_of(told["method"]), DDP)
    except LabError:
        return False  # a record of somebody else's method


def _fewer(best: dict[str, Any], methods: list[dict[str, Any]]) -> str | None:
    plain = next((m for m in methods if m["method"] == repr(PLAIN)), None)
    if plain is None or plain is best or not best["wire_bytes_a_step"]:
        return None
    ratio = plain["wire_bytes_a_step"] / best["wire_bytes_a_step"]
    return f"{ratio:.0f} times fewer bytes a step than plain DDP" if ratio >= 1.5 else None


def _goal(goal: dict[str, Any]) -> str:
    value = goal["value"]
    return (
        f"{100 * value:.1f} % validation accuracy" if goal["metric"] == "accuracy" else f"validation loss {value:.3f}"
    )
