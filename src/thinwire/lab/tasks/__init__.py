"""The tasks, by name. A task of one's own is `--task my_module:make_task`."""

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from thinwire.lab import LabError
from thinwire.lab.tasks import digits, images, speech, stdlib
from thinwire.lab.tasks.base import Task as Task


@dataclass(frozen=True)
class Entry:
    make: Callable[[str, Path], Task]
    models: Iterable[str]  # the first one is the default
    about: str


TASKS = {
    "digits": Entry(digits.make_task, digits.MODELS, "1 797 handwritten digits, 8 x 8; nothing to fetch"),
    "stdlib": Entry(stdlib.make_task, stdlib.SIZES, "a byte-level GPT on Python's own library; nothing to fetch"),
    "cifar10": Entry(images.cifar10, images.CIFAR_MODELS, "60 000 colour pictures, 32 x 32"),
    "fashion": Entry(images.fashion, images.GREY_MODELS, "70 000 pictures of clothes, 28 x 28"),
    "mnist": Entry(images.mnist, images.GREY_MODELS, "70 000 handwritten digits, 28 x 28"),
    "speech": Entry(speech.make_task, speech.MODELS, "640 utterances of nine speakers, a GRU"),
}


def load_task(name: str, model: str | None, data: Path) -> Task:
    """The task called `name`; `module:function` calls that function, which returns a Task."""
    if ":" in name:
        made = load_object(name, "task")()
        if not isinstance(made, Task):
            raise LabError(f"{name} returned a {type(made).__name__}: it must return a thinwire.lab.tasks.Task")
        return made
    entry = TASKS.get(name)
    if entry is None:
        raise LabError(
            f"there is no task {name!r}{_guess(name, TASKS)}: take {', '.join(TASKS)} or my_module:make_task"
        )
    names = list(entry.models)
    model = model or names[0]
    if model not in names:
        raise LabError(f"{name} has no model {model!r}{_guess(model, names)}: take {', '.join(names)}")
    return entry.make(model, data)


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
