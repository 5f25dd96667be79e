"""Messages about indices whose length all workers know before they are written.

A length that depends on the data costs a collective of its own, or a second piece. A bound on it costs a few bits:
at most 2 + log2(mean gap) bits an index instead of about 1.5 + log2(mean gap).
"""

import torch
from torch import Tensor

from thinwire.exchange import bytes as wire

LENGTH = 8  # bytes that tell how many of the slots are used


def longest(picks: int, span: int) -> int:
    """The most bytes that `wire.encode_index` takes for so many indices that lie within `span` entries.

    Rice's code with its best parameter takes no more, whatever the gaps are; a bit for every entry is the
    alternative.
    """
    picks = min(picks, span)
    bits = min(span, 2 * picks + _sum_of_logarithms(picks, span)) if picks else 0
    return wire.HEADER + (bits + 7) // 8 + 1


def _sum_of_logarithms(picks: int, span: int) -> int:
    """At least picks * log2(span / picks), in integers alone: two machines' logarithms may differ in the last bit.

    Squaring finds the bits after the point one by one; eight of them are enough, rounded up.
    """
    exponent = (span // picks).bit_length() - 1
    mantissa = -((-span << 32) // (picks << exponent))  # span / picks / 2^exponent, of 32 bits, rounded up
    fraction = 0
    for _ in range(8):
        mantissa = -((-mantissa * mantissa) >> 32)
        above = mantissa >= 2 << 32
        fraction = 2 * fraction + above
        mantissa = -(-mantissa >> above)
    return exponent * picks + -(-(fraction + 1) * picks >> 8)


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
