"""The same task, seeds and data order under several methods, one after another, over the same link."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.lab import LabError
from thinwire.lab.launch import OnStep, WorkerFailed, already_launched, launch
from thinwire.lab.methods import BASELINES, canonical
from thinwire.lab.record import Run, has_ended, rank_file, write_json
from thinwire.lab.summary import Records, Target, summarise
from thinwire.plan import Network, spell_rate

DEFAULT = (
    "DDP",
    "DDP-fp16",
    "Cast(Dense())",
    "ErrorFeedback(PowerSGD(4))",
    "ErrorFeedback(TopK(0.01))",
    "RandomBlock(0.1)",  # with feedback it would need a learning rate of its own
    "ErrorFeedback(ExDyna(0.01))",
    "Variance()",
    "RankDAD(4)",
    "ErrorFeedback(PowerSGD(4)) every 5",
)


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
    """Write down what is going to be run; records of another run are never overwritten."""
    if rank_file(folder, 0).exists():
        if not resume:
            raise LabError(f"{folder} holds records already: go on with --resume, or choose another folder with --out")
        if Run.read(folder) != run:
            raise LabError(f"{folder} was made with other settings: resume with the same, or choose another --out")
    run.write(folder)


def run_all(
    folders: Sequence[Path],
    workers: int,
    *,
    links: Network | None,
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
    network: Network | None,
    emulated: bool,
    target: float | None,
) -> dict[str, Any]:
    """`summary.json`: every method, the target they are timed to, and which one won."""
    records = [Records.read(folder) for folder in folders if folder not in failed]
    if not records:
        raise LabError(f"no method could be run: {next(iter(failed.values()), '')}")
    goal = Target(records[0].run.metric, target) if target is not None else default_target(records)
    predicted = network if network and not emulated else None
    methods = [summarise(one, goal, predicted) for one in records]
    run = records[0].run
    summary = {
        "task": run.task,
        "model": run.model,
        "workers": run.workers,
        "link": network and spell_rate(network.rate),
        "rtt_s": network and network.rtt,
        "emulated": emulated,
        "target": goal and {"metric": goal.metric, "value": goal.value},
        "methods": methods,
        "failed": {folder.name: said for folder, said in failed.items()},
    }
    summary["winner"] = sentence(summary)
    write_json(out / "summary.json", summary)
    return summary


def default_target(records: Sequence[Records]) -> Target | None:
    """Near what plain DDP ended with, or the first method if there is no plain DDP."""
    for one in sorted(records, key=lambda r: r.run.method != "DDP"):
        judged = [line["value"] for line in one.evaluations() if line["value"] is not None]
        if judged:
            return Target.near(one.run.metric, judged[-1])
    return None


def sentence(summary: dict[str, Any]) -> str:
    """Which method won on this link, and by how much."""
    methods = [m for m in summary["methods"] if m["method"] != "no-exchange"]
    goal = summary["target"]
    where = f"On a link of {summary['link']}" if summary["link"] else "On this machine, without a slow link,"
    told = "is predicted to reach" if methods[0]["predicted"] else "reached"
    arrived = sorted((m for m in methods if m["seconds_to_target"] is not None), key=lambda m: m["seconds_to_target"])
    if not goal or not arrived:
        return f"{where} no method came to the target{f' ({_goal(goal)})' if goal else ''}: take more --steps."
    best = arrived[0]
    said = f"{where} {best['method']} {told} {_goal(goal)} first, in {best['seconds_to_target']:.1f} s"
    rivals = []
    for name, called in (("DDP", "plain DDP"), ("DDP-fp16", "DDP's fp16 hook")):
        rival = next((m for m in methods if m["method"] == name), None)
        if rival is None or rival is best:
            continue
        if rival["seconds_to_target"] is None:
            rivals.append(f"{called} did not get there in {rival['seconds']:.1f} s")
        else:
            rivals.append(f"{rival['seconds_to_target'] / best['seconds_to_target']:.1f} times sooner than {called}")
    fewer = _fewer(best, methods)
    said = ", ".join([said, *rivals]) + (f", with {fewer}" if fewer else "")
    compressed = any(m["method"] not in BASELINES for m in methods)
    return said + (". Compression does not pay here." if compressed and best["method"] in BASELINES else ".")


def _fewer(best: dict[str, Any], methods: list[dict[str, Any]]) -> str | None:
    plain = next((m for m in methods if m["method"] == "DDP"), None)
    if plain is None or plain is best or not best["wire_bytes_a_step"]:
        return None
    ratio = plain["wire_bytes_a_step"] / best["wire_bytes_a_step"]
    return f"{ratio:.0f} times fewer bytes a step than plain DDP" if ratio >= 1.5 else None


def _goal(goal: dict[str, Any]) -> str:
    value = goal["value"]
    return (
        f"{100 * value:.1f} % validation accuracy" if goal["metric"] == "accuracy" else f"validation loss {value:.3f}"
    )
