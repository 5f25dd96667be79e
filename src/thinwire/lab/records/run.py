"""A run's settings, in one place: the command line, `run.json`, reports and the docs are made of them."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from thinwire.lab import LabError
from thinwire.lab.records.files import write_json

OPTIMIZERS = ("sgd", "adamw", "muon")
SCHEDULES = ("constant", "cosine", "linear")
METRICS = ("accuracy", "loss")
GRAINS = ("tensor", "bucket", "model")


@dataclass(frozen=True)
class Setting:
    """What is known of a setting beside its name, type and default."""

    help: str
    names: tuple[str, ...] = ()  # of its option, where they are not the field's own name
    choices: tuple[str, ...] = ()
    above: float | None = None
    below: float | None = None
    least: float | None = None
    by_task: bool = False  # where nothing is asked for, the task decides
    told: str = "if changed"  # in the command that makes a run again: "always", "if changed" or "never"


def setting(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(help, **more)})


@dataclass(frozen=True)
class Run:
    """Everything that decides how a run goes, apart from the machine."""

    method: str = setting("Dense()", "a method, as `thinwire methods` spells it, or DDP, DDP('fp16')", told="always")
    task: str = setting("digits", "digits, stdlib, cifar10, ..., or my_module:make_task", told="always")
    model: str | None = setting(None, "the task's net: mlp, cnn, 10M, resnet20, ...", names=("--model", "--size"))
    metric: str = "accuracy"  # by which the task is judged: accuracy or loss
    workers: int = setting(
        2, "processes on this machine; under torchrun, as many as it started", above=0, told="always"
    )
    steps: int = setting(300, "optimizer steps", above=0, by_task=True, told="always")
    batch: int = setting(32, "samples a worker takes in a step", above=0, by_task=True, told="always")
    optimizer: str = setting(
        "sgd", "sgd, adamw, or muon (hidden matrices; adamw for the rest)", choices=OPTIMIZERS, by_task=True,
        told="always",
    )  # fmt: skip
    lr: float = setting(0.1, "learning rate", above=0, by_task=True, told="always")
    muon_lr: float = setting(0.02, "learning rate of muon's matrices", above=0)
    momentum: float = setting(0.9, "momentum of sgd", least=0, below=1)
    beta2: float = setting(0.999, "beta2 of adamw", least=0, below=1)
    weight_decay: float = setting(0.0, "weight decay of the optimizer", least=0)
    clip: float | None = setting(None, "clip the gradient to this norm", above=0)
    schedule: str = setting("constant", "learning-rate schedule: constant, cosine or linear", choices=SCHEDULES)
    seed: int = setting(0, "decides weights and data order", told="always")
    grain: str | None = setting(None, "what a method gets at once: a tensor, a bucket or the model", choices=GRAINS)
    overlap: bool | None = setting(None, "exchange while the backward pass runs", names=("--overlap/--no-overlap",))
    evaluate_every: int = setting(
        50, "evaluate after so many steps; a twentieth of the run if not given", above=0, by_task=True
    )
    checkpoint_every: int = setting(0, "save after so many steps; 0: never", least=0, told="never")
    data: str = setting("", "where data sets are kept; a cache folder if not given", told="never")
    link: str | None = setting(None, "emulate a link: 100mbit, or '20mbit up 100mbit down, 40ms, 0.1% loss'")
    rtt: str | None = setting(None, "round-trip time of the emulated link: 1ms, 40ms, ...")

    @staticmethod
    def read(folder: Path) -> "Run":
        path = folder / "run.json"
        try:
            kept = json.loads(path.read_text())
            run = Run(**{f.name: kept[f.name] for f in fields(Run) if f.name in kept})
            if wrong := next((f.name for f in fields(Run) if not _fits(getattr(run, f.name), f)), None):
                raise ValueError(f"its {wrong} is {getattr(run, wrong)!r}")
            if run.metric not in METRICS:
                raise ValueError(f"its metric is {run.metric!r}")
            check(vars(run))
            return run
        except FileNotFoundError as error:
            raise LabError(f"{folder} holds no run (there is no run.json in it)") from error
        except (ValueError, TypeError, AttributeError, RecursionError, OSError, LabError) as error:
            raise LabError(f"{path} cannot be read ({error}): remove the folder and run again") from error

    def write(self, folder: Path) -> None:
        write_json(folder / "run.json", asdict(self))

    def command(self) -> str:
        """The command that makes this run again."""
        words = ["thinwire", "train"]
        for f, s in settings():
            value = getattr(self, f.name)
            if s.told == "never" or value is None or (s.told == "if changed" and value == f.default):
                continue
            if isinstance(value, bool):
                words.append(f"--{f.name}" if value else f"--no-{f.name}")
            else:
                words += [option_name(f), f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join(words)


def settings() -> list[tuple[Field[Any], Setting]]:
    """The fields that somebody may ask for, with what is known of them."""
    return [(f, f.metadata["setting"]) for f in fields(Run) if "setting" in f.metadata]


def option_name(f: Field[Any]) -> str:
    names: tuple[str, ...] = f.metadata["setting"].names
    return names[0] if names else f"--{f.name.replace('_', '-')}"


def check(asked: Mapping[str, Any]) -> None:
    """Refuse what no run can have. This needs nothing but the numbers, so it comes before anything heavy is loaded."""
    for f, s in settings():
        value, name = asked.get(f.name), option_name(f)
        if value is None:
            continue
        if s.choices and value not in s.choices:
            raise LabError(f"{name} is {', '.join(s.choices)}, not {value}")
        if s.above is not None and not value > s.above:
            raise LabError(f"{name} must be above {s.above:g}, not {value}")
        if s.least is not None and not value >= s.least:
            raise LabError(f"{name} must be {s.least:g} or more, not {value}")
        if s.below is not None and not value < s.below:
            raise LabError(f"{name} must be below {s.below:g}, not {value}")
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            raise LabError(f"{name} must be a finite number, not {value}")
    if asked.get("rtt") is not None and asked.get("link") is None:
        raise LabError("--rtt needs a --link beside it: --link 100mbit --rtt 20ms")


def table() -> str:
    """The settings as a Markdown table, for the docs."""
    lines = ["| option | default | |", "| --- | --- | --- |"]
    for f, s in settings():
        default = "the task's" if s.by_task else "-" if f.default in (None, "") else f"`{f.default}`"
        lines.append(f"| `{' '.join(s.names) or option_name(f)}` | {default} | {s.help} |")
    return "\n".join(lines) + "\n"


def _fits(value: Any, f: Field[Any]) -> bool:
    """Whether a value out of a file is of the field's type, as JSON has it."""
    if isinstance(value, bool):
        return f.type in (bool, bool | None)
    return isinstance(value, f.type) or (f.type in (float, float | None) and isinstance(value, int))  # type: ignore
