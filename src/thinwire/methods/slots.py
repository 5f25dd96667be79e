"""Messages about indices whose length all workers know before they are written.

A length that depends on the data costs a collective of its own, or a second piece. A bound on it costs a few bits:
at most 2 + log2(mean gap) bits an index instead of about 1.5 + log2(mean gap).
"""

import math

import torch
from torch import Tensor

from thinwire import wire

LENGTH = 8  # bytes that tell how many of the slots are used


def longest(picks: int, span: int) -> int:
    """The most bytes that `wire.encode_index` takes for so many indices that lie within `span` entries.

    Rice's code with its best parameter takes no more, whatever the gaps are; a bit for every entry is the
    alternative.
    """
    picks = min(picks, span)
    bits = min(span, picks * (2 + math.log2(span / picks))) if picks else 0
    return wire.HEADER + math.ceil(bits / 8) + 1


def size(picks: int, span: int) -> int:
    return LENGTH + longest(picks, span)


def fill(index: Tensor, numel: int, size: int) -> Tensor:
    """Indices below `numel`, in `size` bytes."""
    body = wire.encode_index(index, numel)
    message = body.new_zeros(size)
    message[:LENGTH] = torch.tensor([body.numel()]).view(torch.uint8)
    message[LENGTH : LENGTH + body.numel()] = body
    return message


def read(message: Tensor, numel: int) -> Tensor:
    length = int(message[:LENGTH].clone().view(torch.int64))
    return wire.decode_index(message[LENGTH : LENGTH + length], numel)
