"""One state for all ranks, for checkpoints that a framework writes on one of them."""

import hashlib
import io
from typing import Any

import torch

from thinwire.exchange import MessageRoom, gather_bytes
from thinwire.step import sets
from thinwire.step.checkpoints import CheckpointError
from thinwire.step.files import Together

_KEYS = {"thinwire", "sha256"}


def pack(state: dict[str, Any], together: Together) -> dict[str, Any]:
    """The states of all ranks, the same on each: one entry of bytes, whose name and kind no step changes."""
    out = io.BytesIO()
    torch.save(state, out)
    mine = torch.frombuffer(out.getbuffer(), dtype=torch.uint8).to(together.device)
    with together.guarded("gathering the states of all ranks"):
        parts = gather_bytes(mine, together.comm, MessageRoom())
    assert parts is not None  # there was no limit
    whole = io.BytesIO()
    torch.save([part.cpu() for part in parts], whole)
    return {"thinwire": whole.getvalue(), "sha256": hashlib.sha256(whole.getvalue()).hexdigest()}


def unpack(packed: Any) -> list[dict[str, Any]]:
    if not isinstance(packed, dict) or not packed.keys() >= _KEYS or not isinstance(packed["thinwire"], bytes):
        raise CheckpointError("this is not what handle.gathered().state_dict() made: load it into what has saved it")
    if hashlib.sha256(packed["thinwire"]).hexdigest() != packed["sha256"]:
        raise CheckpointError("the gathered state is damaged: take an earlier checkpoint")
    parts = sets.read_state(io.BytesIO(packed["thinwire"]))
    return [sets.read_state(io.BytesIO(part.numpy().tobytes())) for part in parts]
