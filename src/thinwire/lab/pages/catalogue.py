"""Every method with its paper, what it needs and what it keeps, told by the methods themselves."""

import inspect
import sys
from dataclasses import MISSING, dataclass, fields
from typing import Any

from torch import Tensor

from thinwire.core import memory
from thinwire.core.factors import Factors
from thinwire.core.reducer import Moments, Reducer
from thinwire.spelling import NAMES

SEES = {
    Tensor: "the gradient",
    Moments: "the gradient and its per-sample squares",
    Factors: "each layer's inputs and deltas",
}


@dataclass(frozen=True)
class Entry:
    spelling: str
    about: str
    paper: str
    sees: str
    keeps: str


def catalogue() -> list[Entry]:
    return [_entry(name, method) for name, method in sorted(NAMES.items())]


def _entry(name: str, method: type[Reducer[Any, Any]]) -> Entry:
    """A method's module says in its first line what it does, and in the next paragraph which paper it is from."""
    alone = len(_reducers_of(method)) == 1
    told = (sys.modules[method.__module__].__doc__ if alone else inspect.getdoc(method)) or ""
    paragraphs = [" ".join(part.split()) for part in told.split("\n\n")]
    paper = paragraphs[1] if alone and len(paragraphs) > 1 else ""
    return Entry(_spelling(name, method), paragraphs[0], paper.split(". ")[0], SEES[method.wants], _keeps(method))


def _reducers_of(method: type) -> list[type]:
    module = sys.modules[method.__module__]
    return [value for value in NAMES.values() if value.__module__ == module.__name__]


def _spelling(name: str, method: type[Reducer[Any, Any]]) -> str:
    parts = []
    for f in fields(method):  # type: ignore[arg-type]
        if f.default is MISSING and f.default_factory is MISSING:
            parts.append(f.name)
        else:
            parts.append(f"{f.name}={f.default!r}" if f.default is not MISSING else f"{f.name}=...")
    return f"{name}({', '.join(parts)})"


def _keeps(method: type[Reducer[Any, Any]]) -> str:
    """The fields of its state that hold one value per gradient entry, or what else there is."""
    made = inspect.signature(method.init).return_annotation
    if not hasattr(made, "__dataclass_fields__"):
        return "nothing" if made is None else "what its parts keep"
    whole = [f.name for f in fields(made) if memory.place(f) in ("summed", "averaged")]
    return f"a vector for each of: {', '.join(whole)}" if whole else "nothing as large as the gradient"
