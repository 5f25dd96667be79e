"""Ranks that disagree hear of it, every one of them, before a wrong sum or a hang can follow."""

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Comm
from thinwire.exchange import MessageRoom, gather_bytes

_MASK = (1 << 62) - 1
_PIECE = 2**15  # words looked at at once, so that they stay in the cache


class Disagreement(RuntimeError):
    """The workers do not run the same thing; the message names what differs."""


def compare(description: dict[str, str], comm: Comm, device: torch.device) -> None:
    """Raise on every rank if the ranks describe themselves differently."""
    everyone = told_by_all(description, comm, device)
    for key in description:
        told = [theirs.get(key, "nothing") for theirs in everyone]
        other = next((rank for rank, word in enumerate(told) if word != told[0]), None)
        if other is not None:
            raise Disagreement(
                f"the ranks disagree about the {key}: rank 0 has {_short(told[0], told[other])}, "
                f"rank {other} has {_short(told[other], told[0])}. Start every rank with the same script and settings."
            )


def told_by_all(words: dict[str, Any], comm: Comm, device: torch.device) -> list[dict[str, Any]]:
    """What every rank says, by rank: anything that JSON knows."""
    mine = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8).to(device)
    messages = gather_bytes(mine, comm, MessageRoom())
    assert messages is not None  # there was no limit
    return [json.loads(bytes(message.tolist())) for message in messages]


def check_alike(told: dict[str, list[int]], words: Iterable[str]) -> None:
    """Raise, on every rank alike, if the ranks differ in one of `words`."""
    for word in words:
        if len(set(told[word])) > 1:
            raise Disagreement(_lost(word, told[word]))


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that differs, almost surely, when one bit of one tensor does, or two values change places."""
    total = 0
    for position, tensor in enumerate(tensors):
        raw = tensor.detach().contiguous().view(-1)
        if raw.is_complex():
            raw = torch.view_as_real(raw).view(-1)
        # Eight bytes as two words: numbers that differ in their highest bits alone, as 1.0 and 2.0, must weigh enough.
        words = raw.view({2: torch.int16, 4: torch.int32, 8: torch.int32}.get(raw.element_size(), torch.uint8))
        total += (2 * position + 1) * (int(words.sum(dtype=torch.int64)) + 3 * _weighted(words))
    return (total & _MASK) + 1  # never 0, which stands for "not looked at"


def _weighted(words: Tensor) -> int:
    """The words, each weighted by its place."""
    total = 0
    weights = torch.arange(1, 2 * min(_PIECE, words.numel()) + 1, 2, device=words.device)
    for piece in words.split(_PIECE):
        total = (total * 1_000_003 + int((piece.long() * weights[: len(piece)]).sum())) & _MASK
    return total


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
