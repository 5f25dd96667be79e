"""From what the user asked for to what will be run: defaults of the task, a link that exists, a folder to write to."""

import time
from collections.abc import Callable
from pathlib import Path

from thinwire.lab import LabError, network
from thinwire.lab.loop import OPTIMIZERS, SCHEDULES
from thinwire.lab.methods import canonical
from thinwire.lab.record import Run
from thinwire.lab.tasks import load_task
from thinwire.plan import Network, parse_rate, parse_seconds


def settle(
    *,
    method: str,
    task: str,
    model: str | None,
    data: Path,
    workers: int,
    steps: int | None = None,
    batch: int | None = None,
    optimizer: str | None = None,
    lr: float | None = None,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    schedule: str = "constant",
    seed: int = 0,
    grain: str | None = None,
    overlap: bool | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int = 0,
    link: str | None = None,
    rtt: str | None = None,
) -> Run:
    """A run with nothing left open, or the reason why it cannot be made."""
    known = load_task(task, model, data)
    steps = known.steps if steps is None else steps
    run = Run(
        method=canonical(method),
        task=task,
        model=model,
        metric=known.metric,
        workers=workers,
        steps=steps,
        batch=batch or known.batch,
        optimizer=optimizer or known.optimizer,
        lr=known.lr if lr is None else lr,
        momentum=momentum,
        weight_decay=weight_decay,
        schedule=schedule,
        seed=seed,
        grain=grain,
        overlap=overlap,
        evaluate_every=evaluate_every or max(1, steps // 20),
        checkpoint_every=checkpoint_every,
        data=str(data.resolve()),
        link=link,
        rtt=rtt,
    )
    for name, value, allowed in (
        ("--optimizer", run.optimizer, OPTIMIZERS),
        ("--schedule", run.schedule, SCHEDULES),
        ("--grain", run.grain, (None, "tensor", "bucket", "model")),
    ):
        if value not in allowed:
            raise LabError(f"{name} is {', '.join(str(a) for a in allowed if a)}, not {value}")
    for name, number in (("--workers", workers), ("--steps", steps), ("--batch", run.batch), ("--lr", run.lr)):
        if not number > 0:
            raise LabError(f"{name} must be above 0, not {number}")
    known.data.train(run.seed, 0, 0, workers, run.batch)  # says so if the batch is larger than the data
    return run


def choose_link(
    link: str | None, rtt: str | None, workers: int, say: Callable[[str], None]
) -> tuple[Network | None, bool]:
    """The network that was asked for, and whether it can be emulated; what cannot be is said, and goes on."""
    if link is None:
        if rtt is not None:
            raise LabError("--rtt needs a --link beside it: --link 100mbit --rtt 20ms")
        return None, False
    try:
        wanted = Network(parse_rate(link), workers, parse_seconds(rtt) if rtt else 0.0)
    except ValueError as error:
        raise LabError(str(error)) from error
    refusal = network.missing_rights()
    if refusal is None and wanted.rtt:
        refusal = network.missing_delay()
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
