"""From what the user asked for to what will be run: defaults of the task, a link that exists, a folder to write to."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thinwire.lab import LabError
from thinwire.lab.records.run import Run, check, settings
from thinwire.lab.records.spellings import canonical
from thinwire.lab.run.links.emulated import missing_rights
from thinwire.lab.run.links.spelling import Link, read_link
from thinwire.lab.tasks import load_task
from thinwire.lab.tasks.data import default_folder


def settle(asked: Mapping[str, Any]) -> Run:
    """A run with nothing left open, or the reason why it cannot be made. `asked`: the settings that were given."""
    check(asked)
    asked = {f.name: asked[f.name] for f, s in settings() if asked.get(f.name) is not None}
    data = Path(asked.get("data") or default_folder())
    task = load_task(asked.get("task", "digits"), asked.get("model"), data)
    steps = asked.get("steps", task.steps)
    by_task = {"steps": steps, "batch": task.batch, "optimizer": task.optimizer, "lr": task.lr}
    by_task["evaluate_every"] = max(1, steps // 20)
    settled = by_task | asked | {"metric": task.metric, "data": str(data.resolve())}
    link = read_link(asked.get("link"), asked.get("rtt"))
    settled |= {"link": repr(link) if link else None, "rtt": None}
    settled["method"] = canonical(settled.get("method", "Dense()"))
    run = Run(**settled)
    task.data.train(run.seed, 0, 0, run.workers, run.batch)  # says so if the batch is larger than the data
    return run


def choose_link(
    link: str | None, rtt: str | None, workers: int, say: Callable[[str], None]
) -> tuple[Link | None, bool]:
    """The link that was asked for, and whether it can be emulated; what cannot be is said, and goes on."""
    wanted = read_link(link, rtt)
    if wanted is None:
        return None, False
    refusal = missing_rights(wanted.check(workers))
    if refusal:
        say(f"{refusal}. The run goes on at full speed; times for the link are predicted.")
    return wanted, refusal is None


def out_folder(given: Path | None, kind: str, task: str) -> Path:
    """Where to write; a new folder under runs/ unless one is given."""
    folder = given or Path("runs", f"{kind}-{task.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LabError(f"{folder} cannot be written ({error.strerror}): choose another folder with --out") from error
    return folder
