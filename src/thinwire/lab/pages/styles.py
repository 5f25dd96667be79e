"""Which style and which short name each method has on a page."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.lab.pages.pieces import Series


@dataclass(frozen=True)
class Style:
    slot: int
    label: str

    def series(
        self, name: str, x: Sequence[float] = (), y: Sequence[float | None] = (), tips: Sequence[str] = ()
    ) -> Series:
        return Series(name, x, y, self.slot, self.label, tips)


def styles(names: Sequence[str], plain: str | None = "DDP") -> dict[str, Style]:
    """A slot for each name, in their order; `plain` is the one that others are compared to, and grey."""
    labels = [short(name) for name in names]
    told = [label if labels.count(label) == 1 else name for label, name in zip(labels, names)]
    others = [name for name in names if name != plain]
    return {name: Style(0 if name == plain else 1 + others.index(name), label) for name, label in zip(names, told)}


def short(name: str) -> str:
    """A name that fits beside a line: without the memory around a method, local steps as people say them."""
    head, parts = _parts(name)
    if head == "ErrorFeedback" and len(parts) == 1:
        return short(parts[0])
    if head == "LocalSteps" and parts:
        every = next((part for part in parts if part.startswith("every=")), "")
        more = [part for part in parts[1:] if part != every]
        return " ".join([short(parts[0]), every.replace("every=", "every ") or "in local steps", *more])
    return name


def _parts(text: str) -> tuple[str, list[str]]:
    """What stands before the parentheses, and the arguments in them; a text of another form has no arguments."""
    head, opened, rest = text.partition("(")
    if not opened or not rest.endswith(")"):
        return text, []
    parts, depth, begin, inside = [], 0, 0, rest[:-1]
    for place, letter in enumerate(inside):
        depth += (letter in "([") - (letter in ")]")
        if depth < 0:
            return text, []  # the last parenthesis is not the first one's
        if letter == "," and depth == 0:
            parts.append(inside[begin:place].strip())
            begin = place + 1
    return head, [*parts, inside[begin:].strip()]
