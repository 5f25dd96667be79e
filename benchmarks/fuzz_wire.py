"""Messages: whatever the bytes, the decoders of thinwire.exchange refuse them or give indices and values that fit."""

import os
import random
from pathlib import Path
from typing import Any

import torch
from fuzz_things import Case, Fuzzer, Wrong, change_of_bytes, changed_bytes, how_many
from torch import Tensor

from thinwire import kernels
from thinwire.exchange import bytes as wire
from thinwire.exchange.values import FEW, FewBits, WireError

SIZES = (1, 7, 64, 300, 5000)
KINDS = ("pairs", "index", "words", "powers", "few", "blocks")


class Wire(Fuzzer):
    errors = (WireError, ValueError)

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.made: dict[tuple[str, int], tuple[Any, bytes, Any]] = {}

    def draw(self, rng: random.Random) -> Case:
        changes = [change_of_bytes(rng) for _ in range(how_many(rng))]
        return {"kind": rng.choice(KINDS), "base": rng.randrange(500), "changes": changes}

    def run(self, case: Case) -> None:
        key = (case["kind"], case["base"])
        if key not in self.made:
            self.made[key] = _made(*key)
        about, raw, right = self.made[key]
        for change in case["changes"]:
            raw = changed_bytes(raw, change)
        message = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        told = [_decoded(case["kind"], message, about, name) for name in ("reference", "cpu")]
        first = next((one for one in told if isinstance(one, Exception)), None)
        if first is not None and not all(type(one) is type(first) for one in told):
            raise Wrong(f"plain and compiled kernels differ: {told}")
        if first is not None:
            if raw == self.made[key][1]:
                raise Wrong(f"a whole message is refused: {first}")
            raise first
        if not _same(told[0], told[1]):
            raise Wrong("plain and compiled kernels read different things")
        if raw == self.made[key][1] and not _same(told[0], right):
            raise Wrong("a whole message came back as something else")
        _check(case["kind"], told[0], about)


def _made(kind: str, base: int) -> tuple[Any, bytes, Any]:
    """What a decoder must know, a message, and what it says."""
    rng, generator = random.Random(f"{kind} {base}"), torch.Generator().manual_seed(base)
    numel = rng.choice(SIZES)
    count = rng.choice((0, 1, numel // 50, numel // 3, numel))
    index = torch.randperm(numel, generator=generator)[:count].sort().values
    if rng.random() < 0.3:
        index = torch.arange(count)
    index, values = index.int(), torch.randn(count, generator=generator)
    if kind == "pairs":
        dtype = rng.choice(wire.VALUES[1:])
        right = (index, wire.restore(wire.store(values, dtype), count, dtype))
        return numel, _raw(wire.encode(index, values, numel, dtype)), right
    if kind == "index":
        return numel, _raw(wire.encode_index(index, numel)), (index,)
    if kind in ("words", "powers"):
        sizes = (numel // 3, numel - numel // 3)
        encode, decode = (
            (wire.encode_words, wire.decode_words) if kind == "words" else (wire.encode_powers, wire.decode_powers)
        )
        message, kept = encode(index, values, sizes)
        found = decode(message, sizes)
        if not torch.equal(found[0], index[kept]):
            raise Wrong("a whole message of words lost an index")
        return sizes, _raw(message), found
    if kind == "few":
        bits = rng.choice(list(FEW))
        codec = FewBits(bits)
        message = codec.encode(values)
        return (bits, count), _raw(message), (codec.decode(message, count, torch.float32),)
    bits, block = rng.choice(kernels.BITS), rng.choice((8, 64, 100))
    blocks = kernels.blocks_of(((0, numel),), bits, block, torch.device("cpu"))
    x, out = torch.randn(numel, generator=generator), torch.zeros(numel)
    message = torch.zeros(blocks.nbytes, dtype=torch.uint8)
    kernels.encode_blocks(x, blocks, message)
    kernels.decode_blocks(message.unsqueeze(0), blocks, out)
    return (bits, block, numel), _raw(message), (out,)


def _raw(message: Tensor) -> bytes:
    return message.numpy().tobytes()


def _decoded(kind: str, message: Tensor, about: Any, name: str) -> Any:
    os.environ["THINWIRE_KERNELS"] = name
    try:
        if kind == "pairs":
            return wire.decode(message, about)
        if kind == "index":
            return (wire.decode_index(message, about),)
        if kind == "words":
            return wire.decode_words(message, about)
        if kind == "powers":
            return wire.decode_powers(message, about)
        if kind == "few":
            return (FewBits(about[0]).decode(message, about[1], torch.float32),)
        bits, block, numel = about
        blocks, out = kernels.blocks_of(((0, numel),), bits, block, torch.device("cpu")), torch.zeros(numel)
        kernels.decode_blocks(message.unsqueeze(0), blocks, out)
        return (out,)
    except (WireError, ValueError) as error:
        return error
    finally:
        del os.environ["THINWIRE_KERNELS"]


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """To the bit, where a NaN is a NaN: which one is left to the processor."""
    return all(
        a.shape == b.shape and torch.equal(a.nan_to_num(3.0), b.nan_to_num(3.0)) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(one, other, strict=True)
    )


def _check(kind: str, told: tuple[Tensor, ...], about: Any) -> None:
    if kind in ("few", "blocks"):
        wanted = about[1] if kind == "few" else about[2]
        if told[0].numel() != wanted:
            raise Wrong(f"{told[0].numel()} values where {wanted} were asked for")
        return
    index, numel = told[0].long(), about if isinstance(about, int) else sum(about)
    if index.numel() and not (int(index[0]) >= 0 and int(index[-1]) < numel and bool((index.diff() > 0).all())):
        raise Wrong(f"indices out of order or not below {numel}")
    if len(told) > 1 and told[1].numel() != index.numel():
        raise Wrong(f"{told[1].numel()} values for {index.numel()} indices")
