"""What all fuzzers share: a case, what one is drawn from, and changes of bytes and of texts."""

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

Case = dict[str, Any]  # {"base": a seed, "changes": [...]}, as JSON holds it


class Wrong(Exception):
    """A broken thing was accepted and gave what it must not, or a whole one was refused."""


class Fuzzer(ABC):
    errors: tuple[type[Exception], ...]  # which are promised where something is broken

    def __init__(self, folder: Path):
        self.folder = folder

    @abstractmethod
    def draw(self, rng: random.Random) -> Case:
        """A case; one in ten has no changes, and must then give what it was made from."""

    @abstractmethod
    def run(self, case: Case) -> None:
        """Raises Wrong, one of `errors`, or nothing."""


def how_many(rng: random.Random) -> int:
    return rng.choice((0, 1, 1, 1, 1, 2, 2, 3, 5, 8))


def change_of_bytes(rng: random.Random, focus: int = 16) -> list[Any]:
    """A change that `changed_bytes` makes; half of them near the beginning, where the headers are."""
    at = rng.randrange(focus) / 1e6 if rng.random() < 0.5 else rng.random()
    kind = rng.choice(("flip", "flip", "set", "cut", "drop", "add", "ones", "shuffle"))
    return [kind, at, rng.randrange(256), rng.randrange(1, 9)]


def changed_bytes(raw: bytes, change: list[Any]) -> bytes:
    kind, where, value, size = change
    data = bytearray(raw)
    at = min(round(where * 1e6) if where < 1e-4 else int(where * len(data)), max(0, len(data) - 1))
    if kind == "add" or not data:
        data[at:at] = bytes([value]) * size
    elif kind == "flip":
        data[at] ^= 1 << value % 8
    elif kind == "set":
        data[at] = value
    elif kind == "cut":
        del data[at:]
    elif kind == "drop":
        del data[at : at + size]
    elif kind == "ones":
        data[at : at + size] = b"\xff" * len(data[at : at + size])
    else:
        data[at : at + size] = data[at : at + size][::-1]
    return bytes(data)


def change_of_text(rng: random.Random, words: list[str]) -> list[Any]:
    kind = rng.choice(("delete", "insert", "insert", "replace", "replace", "repeat", "cut"))
    return [kind, rng.random(), rng.choice(words), rng.randrange(1, 9)]


def changed_text(text: str, change: list[Any]) -> str:
    kind, where, word, size = change
    at = int(where * (len(text) + 1))
    if kind == "delete":
        return text[:at] + text[at + size :]
    if kind == "insert":
        return text[:at] + word + text[at:]
    if kind == "replace":
        return text[:at] + word + text[at + size :]
    if kind == "repeat":
        return text[:at] + text[at : at + size] * size + text[at + size :]
    return text[:at]


def json_junk(rng: random.Random) -> Any:
    """Something that JSON can hold and no field expects."""
    return rng.choice(
        (None, True, "", "x", "1", -1, 0, 1, 2**70, 1e308, -0.5, [], [1], {}, {"a": 1}, [[]], "nan", float("nan"),
         float("inf"), "\x00", "a" * 300)
    )  # fmt: skip
