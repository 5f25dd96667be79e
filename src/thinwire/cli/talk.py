"""What every command says, and where: answers on stdout, everything else on stderr."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.lab import LabError

Json = Annotated[bool, typer.Option("--json", help="print the answer as JSON, for programs")]


class Told:
    """Rich's two consoles, made when the first word is said; and what a command is about to write."""

    def __init__(self) -> None:
        self.place, self.folders = Path(), list[Path]()

    def __getattr__(self, name: str) -> Any:
        from rich.console import Console

        if name == "console":
            self.console = Console(width=None if sys.stdout.isatty() else 118)  # a table in a log needs no terminal
        elif name == "notes":
            self.notes = Console(stderr=True)
        else:
            raise AttributeError(name)
        return self.__dict__[name]

    def answer(self, data: Any, *shown: Any, as_json: bool) -> None:
        """The answer of a command: JSON, or what people read."""
        if as_json:
            print(json.dumps(data))
            return
        for one in shown:
            self.console.print(one, soft_wrap=isinstance(one, str))

    def note(self, text: str) -> None:
        if leads():
            self.notes.print(text, style="yellow", soft_wrap=True, markup=False, highlight=False)

    def error(self, text: str) -> None:
        self.notes.print(text, style="red", soft_wrap=True, markup=False, highlight=False)

    def kept(self) -> str:
        """What a run that was stopped has left, and what goes on with it."""
        from thinwire.lab.records.record import has_ended

        started = [folder for folder in self.folders if (folder / "rank0.jsonl").exists()]
        if not started:
            return "Nothing was written."
        saved = any((folder / "checkpoints" / "latest").exists() for folder in started)
        if saved or any(map(has_ended, started)):
            return f"Its records are kept in {self.place}; --resume goes on with what was saved."
        return f"Its records are kept in {self.place}; no checkpoint was (--checkpoint-every), so a run begins anew."


told = Told()


def leads() -> bool:
    """Whether this process is alone, or the first of those that torchrun or srun has started."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def loading() -> None:
    """The first word within a second: torch takes longer than that to load."""
    if "torch" not in sys.modules and leads():
        print("thinwire: loading torch ...", file=sys.stderr, flush=True)


def numbers(text: str, option: str, example: str, most: float = float("inf")) -> list[float]:
    """Numbers above 0 with commas between them."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise LabError(f"{option} are numbers with commas between them, {example}, not {text}") from error
    if not all(0 < number < most for number in found):
        raise LabError(f"{option} must be above 0, not {text}")
    return found


def typed(words: list[str]) -> str:
    """The command, without what says where things lie on this machine."""
    left, places, flags = [], ("--out", "--data", "--page-in"), ("--page", "--json", "--resume")
    for before, word in zip(["", *words], words):
        if word in (*places, *flags) or before in places or word.startswith(tuple(f"{place}=" for place in places)):
            continue
        left.append(word)
    return shlex.join(["thinwire", *left])
