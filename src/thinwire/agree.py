"""Ranks that disagree hear of it, every one of them, before a wrong sum or a hang can follow."""

import json
from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.exchange import Room, gather_bytes


class Disagreement(RuntimeError):
    """The workers do not run the same thing; the message names what differs."""


def compare(description: dict[str, str], comm: Comm, device: torch.device) -> None:
    """Raise on every rank if the ranks describe themselves differently."""
    mine = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8).to(device)
    messages = gather_bytes(mine, comm, Room())
    assert messages is not None  # there was no limit
    everyone = [json.loads(bytes(message.tolist())) for message in messages]
    for key in description:
        told = [theirs.get(key, "nothing") for theirs in everyone]
        other = next((rank for rank, word in enumerate(told) if word != told[0]), None)
        if other is not None:
            raise Disagreement(
                f"the ranks disagree about the {key}: rank 0 has {_short(told[0], told[other])}, "
                f"rank {other} has {_short(told[other], told[0])}. Start every rank with the same script and settings."
            )


def roll_call(comm: Comm, step: int, finite: bool, mark: int, device: torch.device) -> bool:
    """Whether every rank's gradient is finite. Raises on every rank if one is at another step or has diverged.

    One message of 24 bytes. It comes before any state is touched, so that a step with an overflow on one
    rank can be as if it had not been, on all of them.
    """
    mine = torch.tensor([step, finite, mark], dtype=torch.int64, device=device)
    steps, finites, marks = comm.all_gather(mine).T.tolist()
    for what, values in (("step", steps), ("parameters", marks)):
        if len(set(values)) > 1:
            raise Disagreement(_lost(what, values))
    return all(finites)


def checksum(parameters: Iterable[Tensor]) -> int:
    """A number that differs, almost surely, when one bit of one parameter does."""
    total = 0
    for position, parameter in enumerate(parameters):
        raw = parameter.detach().contiguous().view(-1)
        words = raw.view({2: torch.int16, 4: torch.int32, 8: torch.int64}.get(raw.element_size(), torch.uint8))
        total += (2 * position + 1) * int(words.sum(dtype=torch.int64))
    return (total & ((1 << 62) - 1)) + 1  # never 0, which stands for "not looked at"


def _lost(what: str, values: list[int]) -> str:
    common = max(set(values), key=values.count)
    strays = [rank for rank, value in enumerate(values) if value != common]
    if what == "step":
        return (
            f"the ranks are at different steps: {dict(enumerate(values))}. Did rank {strays[0]} skip a batch, or "
            "resume from another checkpoint? Every rank must call backward() equally often."
        )
    return (
        f"the replicas have diverged: the parameters of rank {strays[0]} are no longer those of the others. "
        "Something changed them on that rank alone (a seed, a buffer, an in-place edit). Restart from a checkpoint."
    )


def _short(text: str, other: str, width: int = 160) -> str:
    """`text` from shortly before where it begins to differ from `other`."""
    same = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
    start = max(0, same - 40) if len(text) > width else 0
    cut = text[start : start + width]
    return f"{'…' if start else ''}{cut}{'…' if start + width < len(text) else ''}" or "nothing"
