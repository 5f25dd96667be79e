"""How indices and values are laid out in bytes.

A message about k of n entries is a header of 14 bytes, the indices, the values:

    codec and value dtype (4 bits each), parameter (8), k (48), first index (48)

The indices after the first are one of, whichever is shortest:
- `MARKS`: a bit for every position up to the last;
- `WIDTH`: the gaps between neighbours, each with as many bits as the largest needs (none at all for a run);
- `RICE`: the gaps in Rice's code (Rice and Plaunt 1971), which for indices that lie anywhere with equal chance comes
  within a few hundredths of a bit of what information theory asks for.
The values are stored as `thinwire.exchange.values` does: floating-point numbers, or a few bits each.

Decoding refuses a message that is not whole or not true to its header, and whatever it accepts is sorted, without
duplicates and below n. It cannot know bits that were flipped into another valid message: links check for that.

Variance's messages are `encode_words` (one 32-bit word an entry) and, shorter, `encode_powers`.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.exchange.values import INT4, UINT1, UINT2, UINT4, restore, store, stored_bytes
from thinwire.exchange.values import MULTIPLES as BITS  # noqa: F401
from thinwire.exchange.values import WireError as WireError
from thinwire.exchange.values import rounded as rounded
from thinwire.kernels import Survey

HEADER = 14
MARKS, WIDTH, RICE = range(3)
VALUES = (None, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, INT4, UINT1, UINT2, UINT4)
LARGEST = 2**47  # entries of a vector, so that sums of indices stay within int64
GROUP = 2**28  # entries that the index of a word can tell apart


def encode(index: Tensor, values: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sorted indices below `numel`, and a value for each, stored as `dtype`.

    Storing rounds: a caller that keeps the error sends what `rounded` gives, which arrives as it is.
    """
    if dtype not in VALUES:
        raise ValueError(f"values cannot be stored as {dtype}")
    if values.numel() != index.numel():
        raise ValueError(f"{values.numel()} values for {index.numel()} indices")
    return _message(index, numel, VALUES.index(dtype), store(values, dtype))


def encode_index(index: Tensor, numel: int) -> Tensor:
    return _message(index, numel, 0, index.new_empty(0, dtype=torch.uint8))


def decode(message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """The indices and the values, in the dtype they were stored as (float32 for those of a few bits)."""
    index, dtype, stored = _read(message, numel)
    if dtype is None:
        raise WireError("the message holds indices without values")
    return index, restore(stored, index.numel(), dtype)


def decode_index(message: Tensor, numel: int) -> Tensor:
    index, dtype, _ = _read(message, numel)
    if dtype is not None:
        raise WireError("the message holds values besides the indices")
    return index


def _message(index: Tensor, numel: int, kind: int, values: Tensor) -> Tensor:
    codec, parameter, first, gaps = WIDTH, 0, 0, values[:0]
    if index.numel():
        seen = _checked_survey(index, numel)
        codec, parameter = _shortest(index.numel() - 1, seen)
        gaps, first = _pack(index, codec, parameter, seen.high), seen.first
    header = struct.pack("<BBIHIH", codec | kind << 4, parameter, *_split(index.numel()), *_split(first))
    return torch.cat([torch.frombuffer(bytearray(header), dtype=torch.uint8).to(index.device), gaps, values])


def _split(number: int) -> tuple[int, int]:
    return number & 0xFFFFFFFF, number >> 32


def _checked_survey(index: Tensor, numel: int) -> Survey:
    seen = kernels.survey(index)
    if seen.narrowest < 0 or seen.first < 0 or seen.last >= numel or numel > LARGEST:
        raise ValueError(f"indices must be sorted, different and in [0, {numel})")
    return seen


def _shortest(gaps: int, seen: Survey) -> tuple[int, int]:
    """The codec, and its parameter: the number of bits of a gap or of its low part."""
    width = seen.widest.bit_length()
    choices = [
        (gaps * width, WIDTH, width),
        (8 * _bytes(gaps * seen.shift) + gaps + seen.high, RICE, seen.shift),
        (seen.last - seen.first, MARKS, 0),
    ]
    return min(choices)[1:]


def _bytes(bits: int) -> int:
    return (bits + 7) // 8


def _pack(index: Tensor, codec: int, parameter: int, high: int) -> Tensor:
    if codec == MARKS:
        return kernels.pack_marks(index)
    if codec == WIDTH:
        return kernels.pack_gaps(index, parameter)
    return kernels.pack_rice(index, parameter, high)


def _read(message: Tensor, numel: int) -> tuple[Tensor, torch.dtype | None, Tensor]:
    _check_bytes(message)
    if message.numel() < HEADER:
        raise WireError(f"{message.numel()} bytes are no message: the header alone has {HEADER}")
    kinds, parameter, *halves = struct.unpack("<BBIHIH", bytes(message[:HEADER].tolist()))
    count, first = halves[0] | halves[1] << 32, halves[2] | halves[3] << 32
    codec, kind = kinds & 15, kinds >> 4
    if codec > RICE or kind >= len(VALUES) or parameter > 48:
        raise WireError(f"unknown codec {codec}, parameter {parameter} or value dtype {kind}")
    if count > numel or (count and first >= numel):
        raise WireError(f"{count} indices from {first} on do not fit into {numel} entries")
    dtype = VALUES[kind]
    end = message.numel() - stored_bytes(count, dtype)
    packed = message[HEADER:end] if end >= HEADER else None
    index = None if packed is None else _unpack(packed, codec, parameter, count, first, numel)
    if index is None:
        raise WireError(f"the message does not hold {count} indices below {numel} and their values")
    return index, dtype, message[end:]


def _check_bytes(message: Tensor) -> None:
    if message.dtype != torch.uint8 or message.dim() != 1:
        raise WireError("a message is a flat tensor of bytes")


def _unpack(packed: Tensor, codec: int, parameter: int, count: int, first: int, numel: int) -> Tensor | None:
    """The indices, or None if these bytes are not those of `count` of them."""
    if not count:
        plain = (packed.numel(), codec, parameter, first) == (0, WIDTH, 0, 0)
        return packed.new_empty(0, dtype=kernels.index_dtype(numel)) if plain else None
    length, low = packed.numel(), _bytes((count - 1) * parameter)
    if codec == MARKS and parameter == 0 and length <= _bytes(numel):
        index, used = kernels.unpack_marks(packed, count, first, numel)
    elif codec == WIDTH and length == low:
        index, used = kernels.unpack_gaps(packed, count, parameter, first, numel)
    elif codec == RICE and low <= length <= low + _bytes(count + numel):
        index, used = kernels.unpack_rice(packed, count, parameter, first, numel)
    else:
        return None
    return index if (index.numel(), used) == (count, length) else None


# Variance's messages: for each group an exponent (int8) and a count (uint32), then the groups' words


def encode_words(index: Tensor, values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sorted indices into tensors of these sizes laid end to end, one 32-bit word each; and which have one.

    Those too small against the largest of their tensor have none: `kernels.pack_words` says which.
    """
    starts = _starts(tuple(sizes), index.device)
    if index.numel():
        _checked_survey(index, sum(sizes))
    tops, counts, words, kept = kernels.pack_words(index, values, starts)
    header = torch.cat([_raw(tops).view(-1, 1), _raw(counts.int()).view(-1, 4)], 1)
    return torch.cat([header.flatten(), _raw(words)]), kept


def decode_words(message: Tensor, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The indices and the values, which are powers of two."""
    starts = _starts(tuple(sizes), message.device)
    _check_bytes(message)
    head = 5 * (starts.numel() - 1)
    if message.numel() < head:
        raise WireError(f"{message.numel()} bytes do not hold the headers of {starts.numel() - 1} groups")
    header = message[:head].view(-1, 5)
    tops = header[:, 0].clone().view(torch.int8)
    counts = header[:, 1:].flatten().clone().view(torch.int32).long() & 0xFFFFFFFF
    if bool((counts > starts.diff()).any()) or message.numel() != head + 4 * int(counts.sum()):
        raise WireError("the groups of the message have not the words that their headers announce")
    words = message[head:].clone().view(torch.int32)
    index, values = kernels.unpack_words(tops, counts, words, starts, dtype)
    if index.numel() < words.numel():
        raise WireError("an index of the message leaves its group, or comes twice or out of order")
    return index, values


def encode_powers(index: Tensor, values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What `encode_words` says in fewer bytes: the exponent of each group, then the entries in the codec above.

    The sign and the 3 bits of exponent are the lowest bits of a position among sixteen times as many, so an entry
    costs 4 bits beside its gap, and not 32.
    """
    starts = _starts(tuple(sizes), index.device)
    if index.numel():
        _checked_survey(index, sum(sizes))
    tops, _, words, kept = kernels.pack_words(index, values, starts)
    places = kernels.join_powers(index, words, kept, sum(sizes))
    return torch.cat([_raw(tops), encode_index(places, 16 * sum(sizes))]), kept


def decode_powers(message: Tensor, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The indices and the values, which are powers of two."""
    starts = _starts(tuple(sizes), message.device)
    _check_bytes(message)
    groups = starts.numel() - 1
    if message.numel() < groups:
        raise WireError(f"{message.numel()} bytes do not hold the exponents of {groups} groups")
    places = decode_index(message[groups:], 16 * sum(sizes))
    index, values = kernels.split_powers(places, message[:groups].clone().view(torch.int8), starts, dtype)
    if index.numel() < places.numel():
        raise WireError("the message has two values for one entry")
    return index, values


@lru_cache(maxsize=64)  # a few models' worth, and half of the time of a message otherwise
def _starts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the groups begin, and where the last ends: one a tensor, more where a tensor is too large for one."""
    starts, end = [0], 0
    for size in sizes:
        starts += range(end + GROUP, end + size, GROUP)
        end += size
        starts.append(end)
    return torch.tensor(starts, device=device)


def _raw(x: Tensor) -> Tensor:
    """The bytes of a tensor; an empty one may have strides that no view of another dtype can have."""
    return x.contiguous().view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)
