"""Files that are there whole or not at all."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from thinwire.lab import LabError


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Written beside, then put in place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise LabError(f"{path} cannot be written ({error.strerror}): choose another folder with --out") from error
