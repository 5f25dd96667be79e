"""The tasks, by name. A task of one's own is `--task my_module:make_task`."""

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from thinwire.lab import LabError

if TYPE_CHECKING:
    from thinwire.lab.tasks.base import Task as Task


@dataclass(frozen=True)
class Entry:
    """A task without what makes it, so that names can be looked up before torch is loaded."""

    maker: str  # module:function, in this folder
    models: tuple[str, ...]  # the first one is the default
    about: str
    fetched: str = "nothing"  # how much there is to download


_GREY = ("cnn", "mlp")
TASKS = {
    "digits": Entry("digits:make_task", ("mlp", "cnn"), "1 797 handwritten digits, 8 x 8; nothing to fetch"),
    "stdlib": Entry(
        "stdlib:make_task", ("0.8M", "0.1M", "10M", "25M"), "a byte-level GPT on Python's own library; nothing to fetch"
    ),
    "cifar10": Entry(
        "images:cifar10", ("resnet8", "resnet20", "vgg", "resnet8-half"), "60 000 colour pictures, 32 x 32", "133 MB"
    ),
    "fashion": Entry("images:fashion", _GREY, "70 000 pictures of clothes, 28 x 28", "31 MB"),
    "mnist": Entry("images:mnist", _GREY, "70 000 handwritten digits, 28 x 28", "11 MB"),
    "speech": Entry("speech:make_task", ("gru",), "640 utterances of nine speakers, a GRU", "6 MB"),
}


def load_task(name: str, model: str | None, data: Path) -> "Task":
    """The task called `name`; `module:function` calls that function, which returns a Task."""
    if ":" in name:
        from thinwire.lab.tasks.base import Task

        made = load_object(name, "task")()
        if not isinstance(made, Task):
            raise LabError(f"{name} returned a {type(made).__name__}: it must return a thinwire.lab.tasks.Task")
        return made
    check_task(name, model)
    module, _, function = TASKS[name].maker.partition(":")
    made = getattr(importlib.import_module(f"thinwire.lab.tasks.{module}"), function)
    return cast("Task", made(model or TASKS[name].models[0], data))


def check_task(name: str, model: str | None) -> None:
    """Refuse a name that no task or model has; cheap enough to come before anything else."""
    if ":" in name:
        return
    entry = TASKS.get(name)
    if entry is None:
        raise LabError(
            f"there is no task {name!r}{_guess(name, TASKS)}: take {', '.join(TASKS)} or my_module:make_task"
        )
    if model is not None and model not in entry.models:
        raise LabError(f"{name} has no model {model!r}{_guess(model, entry.models)}: take {', '.join(entry.models)}")


def __getattr__(name: str) -> Any:
    if name == "Task":
        return importlib.import_module("thinwire.lab.tasks.base").Task
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_object(spelled: str, what: str) -> Callable[[], Any]:
    """`module:function`, looked up from the current folder as well."""
    module, _, function = spelled.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise LabError(f"no {what} {spelled!r}: {error}; write my_module:make_{what}, run from its folder") from error
    if not callable(found):
        raise LabError(f"{spelled} is no function: write my_module:make_{what}")
    return found


def _guess(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
