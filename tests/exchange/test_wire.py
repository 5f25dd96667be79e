"""Messages come back as they went, cost what information theory asks, and are refused when they are not whole."""

import math
import struct
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.exchange import bytes as wire
from thinwire.exchange.bytes import WireError

VALUES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int4]
KERNELS = ["cpu", "reference"]


@pytest.fixture(params=KERNELS, autouse=True)
def _chosen_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", request.param)


def entropy_bytes(n: int, k: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / 8


def draw(n: int, k: int, seed: int = 0) -> Tensor:
    return kernels.random_k(n, k, seed)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000, 100_003])
@pytest.mark.parametrize("density", [0, 1e-4, 0.001, 0.01, 0.1, 0.4, 0.5, 0.9, 1])
def test_indices_come_back_at_the_price_of_their_information(n: int, density: float) -> None:
    k = min(n, max(1, int(n * density))) if density else 0
    index = draw(n, k, seed=n)
    message = wire.encode_index(index, n)
    assert torch.equal(wire.decode_index(message, n), index)
    if density <= 0.5:
        assert message.numel() <= 1.1 * entropy_bytes(n, k) + 16


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001, 0.0001])
def test_indices_of_a_large_vector_stay_at_the_limit(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "cpu")
    n = 4_000_037
    index = draw(n, int(n * density))
    message = wire.encode_index(index, n)
    assert torch.equal(wire.decode_index(message, n), index)
    assert message.numel() <= 1.03 * entropy_bytes(n, index.numel()) + 16


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("k", [0, 1, 2, 777])
def test_values_come_back_as_rounded(k: int, dtype: torch.dtype) -> None:
    n = 5000
    index = draw(n, k).to(torch.int64)
    for scale in (1.0, 1e-30, 1e30 if dtype != torch.float16 else 1e3):
        values = torch.randn(k, generator=torch.Generator().manual_seed(k)) * scale
        sent = wire.rounded(values, dtype)
        got_index, got = wire.decode(wire.encode(index, values, n, dtype), n)
        assert got_index.dtype == torch.int32 and torch.equal(got_index.long(), index)
        assert torch.equal(got.to(sent.dtype), sent)
        assert torch.equal(wire.rounded(sent, dtype), sent)  # what has been rounded arrives as it is
        assert got.dtype == (torch.float32 if dtype in wire.BITS else dtype)
        if dtype in wire.BITS and k:
            assert bool(((values - sent).abs() <= values.abs().max() / (2 ** (wire.BITS[dtype] - 1) - 1)).all())


def test_a_run_and_everything_cost_the_header() -> None:
    n = 10**6
    for index in (torch.arange(500_000, 600_000), torch.arange(n)):
        message = wire.encode_index(index, n)
        assert message.numel() == wire.HEADER
        assert torch.equal(wire.decode_index(message, n).long(), index)


def test_a_selection_of_nothing_is_a_message() -> None:
    x = torch.zeros(100)
    index = kernels.select(x, 1.0)
    values = kernels.take(x, index)
    got, told = wire.decode(wire.encode(index, values, 100), 100)
    assert got.numel() == told.numel() == 0
    assert wire.encode_words(index, values, [100])[0].numel() == 5


def test_vectors_beyond_32_bits() -> None:
    n = 2**40
    index = torch.tensor([0, 5, 2**31, 2**33 + 7, n - 1])
    got = wire.decode_index(wire.encode_index(index, n), n)
    assert got.dtype == torch.int64 and torch.equal(got, index)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_indices_and_values_come_back(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 10**6))
    index = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=60)))
    values = data.draw(st.lists(st.floats(width=32), min_size=len(index), max_size=len(index)))
    message = wire.encode(torch.tensor(index, dtype=torch.int64), torch.tensor(values, dtype=torch.float32), n)
    got, told = wire.decode(message, n)
    assert got.tolist() == index
    assert torch.equal(told.view(torch.int32), torch.tensor(values, dtype=torch.float32).view(torch.int32))


@pytest.mark.parametrize("index", [[3, 3], [4, 2], [-1, 2], [0, 10]])
def test_indices_that_are_not_sorted_different_and_inside_are_refused(index: list[int]) -> None:
    with pytest.raises(ValueError, match="sorted, different"):
        wire.encode(torch.tensor(index), torch.ones(2), 10)
    with pytest.raises(ValueError, match="sorted, different"):
        wire.encode_words(torch.tensor(index), torch.ones(2), [4, 6])


def test_calls_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="3 values for 2 indices"):
        wire.encode(torch.tensor([1, 2]), torch.ones(3), 10)
    with pytest.raises(ValueError, match="cannot be stored"):
        wire.encode(torch.tensor([1]), torch.ones(1), 10, torch.int64)
    both, plain = wire.encode(torch.tensor([1]), torch.ones(1), 10), wire.encode_index(torch.tensor([1]), 10)
    with pytest.raises(WireError, match="without values"):
        wire.decode(plain, 10)
    with pytest.raises(WireError, match="values besides"):
        wire.decode_index(both, 10)


# What is not a message


def check_accepted_or_refused(message: Tensor, numel: int) -> bool:
    """Whatever the bytes: a WireError, or indices that are sorted, different and inside, with their values."""
    before = message.clone()
    try:
        index, values = wire.decode(message, numel)
    except WireError:
        return False
    places = index.tolist()
    assert places == sorted(set(places)) and all(0 <= i < numel for i in places)
    assert values.numel() == index.numel()
    assert torch.equal(message, before)
    return True


def every_codec(n: int = 1000) -> list[Tensor]:
    runs = torch.cat([torch.arange(10, 60), torch.arange(70, 90)])
    chosen = [draw(n, 5), draw(n, 100), draw(n, 600), torch.arange(0, n, 4), runs, draw(n, 0), draw(n, 1)]
    messages = [
        wire.encode(index, torch.randn(index.numel()), n, dtype)
        for index, dtype in zip(chosen, [*VALUES, torch.float32], strict=True)
    ]
    assert {int(m[0]) & 15 for m in messages} == {wire.MARKS, wire.WIDTH, wire.RICE}
    return messages


def test_a_message_cut_or_lengthened_is_refused() -> None:
    for message in every_codec():
        assert check_accepted_or_refused(message, 1000)
        for length in {0, 1, 13, 14, message.numel() // 2, message.numel() - 1} & set(range(message.numel())):
            assert not check_accepted_or_refused(message[:length], 1000)
        assert not check_accepted_or_refused(torch.cat([message, message.new_zeros(1)]), 1000)


def test_a_message_for_a_larger_vector_is_refused() -> None:
    for message in every_codec():
        index, _ = wire.decode(message, 1000)
        if index.numel():
            assert not check_accepted_or_refused(message, int(index[-1]))


def test_a_count_beyond_the_bytes_is_refused_before_anything_is_allocated() -> None:
    for codec in range(3):
        for count in (2**40, 10**12):
            header = struct.pack("<BBIHIH", codec | 1 << 4, 20, count & 0xFFFFFFFF, count >> 32, 0, 0)
            message = torch.frombuffer(bytearray(header + bytes(50)), dtype=torch.uint8)
            assert not check_accepted_or_refused(message, 2**46)


@given(st.integers(0, 6), st.integers(0, 2**30), st.integers(1, 255), st.integers(1, 2000))
@settings(max_examples=300, deadline=None)
def test_a_flipped_byte_is_refused_or_harmless(which: int, place: int, flip: int, numel: int) -> None:
    message = every_codec()[which]
    message[place % message.numel()] ^= flip
    check_accepted_or_refused(message, numel)


@given(st.binary(max_size=80), st.integers(1, 2**33))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_or_harmless(content: bytes, numel: int) -> None:
    check_accepted_or_refused(torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8), numel)


@given(st.integers(0, 2), st.integers(0, 48), st.integers(0, 200), st.integers(0, 5000), st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_plausible_headers_over_any_bytes(codec: int, parameter: int, count: int, first: int, content: bytes) -> None:
    header = struct.pack("<BBIHIH", codec | 5 << 4, parameter, count, 0, first, 0)
    check_accepted_or_refused(torch.frombuffer(bytearray(header + content), dtype=torch.uint8), 4000)


def test_what_is_no_flat_tensor_of_bytes_is_refused() -> None:
    for wrong in (torch.zeros(20), torch.zeros(2, 20, dtype=torch.uint8)):
        with pytest.raises(WireError, match="flat tensor of bytes"):
            wire.decode(wrong, 10)
        with pytest.raises(WireError, match="flat tensor of bytes"):
            wire.decode_words(wrong, [10])


# Words


def naive_words(index: list[int], values: list[float], sizes: list[int]) -> tuple[dict[int, float], int]:
    """The specification, one entry at a time: decoded values by index, and the length of the message."""
    sent, length = {}, 0
    for start, size in zip(accumulate([0, *sizes]), sizes, strict=False):
        for begin in range(start, start + max(size, 1), wire.GROUP):
            end = min(begin + wire.GROUP, start + size)
            mine = {i: v for i, v in zip(index, values, strict=True) if begin <= i < end}
            length += 5
            largest = max(map(abs, mine.values()), default=0.0)
            if not largest:
                continue
            top = max(-128, min(127, math.floor(math.log2(largest))))
            for i, v in mine.items():
                if v:
                    exponent = math.floor(math.log2(abs(v)))
                    exponent += abs(v) / 2.0**exponent >= 1.5
                    exponent = min(exponent, top)
                    if top - exponent <= 7:
                        sent[i] = math.copysign(2.0**exponent, v)
                        length += 4
    return sent, length


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_words_come_back_as_specified(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 5, 300, 2**28, 2**28 + 10]), min_size=1, max_size=5))
    n = sum(sizes)
    index = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=40))) if n else []
    exponents = st.integers(-12, 12)
    values = [
        data.draw(st.sampled_from([1.0, 1.25, 1.5, 1.75, -1.0, -1.6, 0.0])) * 2.0 ** data.draw(exponents) for _ in index
    ]
    sent, length = naive_words(index, values, sizes)
    message, kept = wire.encode_words(torch.tensor(index, dtype=torch.int64), torch.tensor(values), sizes)
    assert message.numel() == length
    assert [i for i, k in zip(index, kept.tolist(), strict=True) if k] == list(sent)
    got, told = wire.decode_words(message, sizes)
    assert dict(zip(got.tolist(), told.tolist(), strict=True)) == sent


def test_no_words_at_all() -> None:
    nothing = torch.empty(0, dtype=torch.int32)
    message, kept = wire.encode_words(nothing, torch.empty(0), [3, 4])
    assert message.tolist() == [0] * 10 and kept.numel() == 0
    index, values = wire.decode_words(message, [3, 4], torch.float64)
    assert index.numel() == 0 and values.dtype == torch.float64
    message, kept = wire.encode_words(nothing, torch.empty(0), [])
    assert message.numel() == 0 and wire.decode_words(message, [])[0].numel() == 0


def check_words_accepted_or_refused(message: Tensor, sizes: list[int]) -> bool:
    try:
        index, values = wire.decode_words(message, sizes)
    except WireError:
        return False
    places = index.tolist()
    assert places == sorted(set(places)) and all(0 <= i < sum(sizes) for i in places)
    assert bool(values.isfinite().all()) and values.numel() == index.numel()
    return True


def test_words_that_are_not_whole_are_refused() -> None:
    sizes = [50, 100]
    index = torch.arange(0, 150, 7)
    message, _ = wire.encode_words(index, torch.ones(index.numel()), sizes)
    assert check_words_accepted_or_refused(message, sizes)
    for length in (0, 4, 9, 10, message.numel() - 4, message.numel() - 1):
        assert not check_words_accepted_or_refused(message[:length], sizes)
    assert not check_words_accepted_or_refused(message, [49, 101])  # 49 would leave its group
    assert not check_words_accepted_or_refused(message, [50, 97])
    twice = message.clone()
    twice[14:18] = twice[10:14]
    assert not check_words_accepted_or_refused(twice, sizes)
    assert not check_words_accepted_or_refused(message, [150])


@given(st.binary(max_size=100), st.lists(st.integers(0, 60), max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_or_harmless_words(content: bytes, sizes: list[int]) -> None:
    check_words_accepted_or_refused(torch.tensor(list(content), dtype=torch.uint8), sizes)


@given(st.integers(0, 2**20), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_a_flipped_byte_is_refused_or_harmless_in_words(place: int, flip: int) -> None:
    index = torch.arange(0, 150, 7)
    message, _ = wire.encode_words(index, torch.ones(index.numel()), [50, 100])
    message[place % message.numel()] ^= flip
    check_words_accepted_or_refused(message, [50, 100])
