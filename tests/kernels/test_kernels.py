"""Fast kernels against their plain-torch twins, and the twins against the obvious.

Equality is to the bit. NaN compares equal to NaN whatever its payload, which no kernel looks at.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import reference

SIZES = [0, 1, 2, 7, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049, 4093, 4099, 20011]
FLOATS = [torch.float32, torch.float64]
HALVES = [torch.bfloat16, torch.float16]


def vector(kind: str, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + n)
    x = torch.randn(n, generator=g, dtype=torch.float64)
    if kind == "ties":
        x = (2 * x).round() / 2
    if kind == "sparse":
        x[torch.rand(n, generator=g) < 0.95] = 0
    if kind == "tiny":
        x *= 1e-42
    if kind == "wild":
        places = torch.randint(max(n, 1), (n // 10 + 1,), generator=g)[: n // 10 + (n > 0)]
        odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -1e-45], dtype=torch.float64)
        x[places] = odd[torch.randint(len(odd), places.shape, generator=g)]
    return x.to(dtype)


KINDS = ["normal", "ties", "sparse", "tiny", "wild"]


def bits(x: Tensor) -> Tensor:
    if not x.dtype.is_floating_point:
        return x
    x = torch.where(x.isnan(), math.nan, x)
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def identical(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(bits(a), bits(b))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(identical, a, b))
    return a == b or (a != a and b != b)


def check_twins(monkeypatch: pytest.MonkeyPatch, work: Callable[..., Any], *inputs: Any) -> Any:
    """`work` gives the same, and leaves the same behind, with either set of kernels."""
    outcomes = []
    for name in ("reference", "cpu"):
        monkeypatch.setenv("THINWIRE_KERNELS", name)
        mine = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
        outcomes.append((work(*mine), mine))
    assert identical(*outcomes), f"{work} differs: {outcomes}"
    return outcomes[1][0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_selection_equals_its_reference(monkeypatch: pytest.MonkeyPatch, n: int, kind: str, dtype: torch.dtype) -> None:
    x = vector(kind, n, dtype)
    for threshold in (0.0, 0.5, 2.5, 1e-42, 1e300, math.inf, math.nan, -1.0):
        check_twins(monkeypatch, kernels.select, x, threshold)
        check_twins(monkeypatch, kernels.select, x, threshold, n // 3, n - n // 5)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_the_references(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x, y = vector("wild", 129, dtype), vector("normal", 129, dtype, seed=1)
    check_twins(monkeypatch, kernels.select, x, 1.0, 3, 100)
    check_twins(monkeypatch, kernels.top_k, x, 20)
    check_twins(monkeypatch, kernels.variance_step, y, x.square(), x, x.square(), 1.0, 0.5)
    check_twins(monkeypatch, kernels.pack_signs, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_ranking_equals_its_reference(monkeypatch: pytest.MonkeyPatch, n: int, kind: str, dtype: torch.dtype) -> None:
    x = vector(kind, n, dtype)
    for k in {0, 1, 2, n // 1000, n // 100, n // 9, n // 2, n - 1, n, n + 5}:
        check_twins(monkeypatch, kernels.top_k, x, k)
        if 1 <= k <= n:
            check_twins(monkeypatch, kernels.kth_magnitude, x, k)
    for density in (0.0, 0.001, 0.1, 1.0):
        check_twins(monkeypatch, kernels.quantile, x, density, 1000)
    check_twins(monkeypatch, kernels.finite, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_variance_step_equals_its_reference(monkeypatch: pytest.MonkeyPatch, n: int, dtype: torch.dtype) -> None:
    for kind in KINDS:
        r, mean = vector("normal", n, dtype), vector(kind, n, dtype, seed=1)
        v, square = (vector(kind, n, dtype, seed=s).square() for s in (2, 3))
        for alpha, zeta in ((1.0, 0.999), (0.0, 1.0), (1.7, 0.1)):
            check_twins(monkeypatch, kernels.variance_step, r, v, mean, square, alpha, zeta)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("n", SIZES[1:])
def test_gathering_and_scattering_equal_their_references(
    monkeypatch: pytest.MonkeyPatch, n: int, kind: torch.dtype, dtype: torch.dtype
) -> None:
    x = vector("wild", n, dtype)
    index = kernels.random_k(n, n // 3, 5).to(kind)
    values = vector("normal", n // 3)
    check_twins(monkeypatch, kernels.gather, x, index)
    check_twins(monkeypatch, kernels.take, x, index)
    check_twins(monkeypatch, kernels.scatter_add, x, index, values, 1 / 3)
    parts = [(index, values), (index[:1], values[:1]), (index[:0], values[:0])]
    check_twins(monkeypatch, lambda out: kernels.fill_sparse(out, parts, 1 / 7), x)


@pytest.mark.parametrize("n", SIZES)
def test_packing_equals_its_reference(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    for dtype in FLOATS:
        packed = check_twins(monkeypatch, kernels.pack_signs, vector("wild", n, dtype))
        assert packed.numel() == math.ceil(n / 8)
        check_twins(monkeypatch, kernels.unpack_signs, packed, n, dtype)
    codes = torch.randint(-(2**62), 2**62, (n,), generator=torch.Generator().manual_seed(n))
    for width in (0, 1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 48):
        for kind in (torch.int64, torch.int32, torch.uint8):
            packed = check_twins(monkeypatch, kernels.pack_bits, codes.to(kind), width)
        packed = kernels.pack_bits(codes, width)
        assert packed.numel() == math.ceil(n * width / 8)
        again = check_twins(monkeypatch, kernels.unpack_bits, packed, n, width)
        assert torch.equal(again.long(), codes & ((1 << width) - 1))


@pytest.mark.parametrize("n", SIZES[1:])
def test_gaps_equal_their_reference(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    for k in {1, 2, n // 100, n // 3, n - 1, n} - {0}:
        for kind in (torch.int32, torch.int64):
            index = kernels.random_k(n, min(k, n), 3).to(kind)
            first, count, span = int(index[0]), index.numel(), int(index[-1] - index[0])
            seen = check_twins(monkeypatch, kernels.survey, index)
            best, high = seen.shift, seen.high
            between = index.long().diff() - 1
            costs = {s: (count - 1) * s + int((between >> s).sum()) for s in range(16)}
            assert costs[best] == min(costs.values()) and high == int((between >> best).sum())

            marks = check_twins(monkeypatch, kernels.pack_marks, index)
            again, used = check_twins(monkeypatch, kernels.unpack_marks, marks, count, first, n)
            assert torch.equal(again.to(kind), index) and used == marks.numel() == math.ceil(span / 8)
            check_twins(monkeypatch, kernels.unpack_marks, marks, count, first, first + 1 + span // 2)
            check_twins(monkeypatch, kernels.unpack_marks, marks, max(count // 2, 1), first, n)
            for width in (0, 1, 5, 15):
                packed = check_twins(monkeypatch, kernels.pack_gaps, index, width)
                check_twins(monkeypatch, kernels.unpack_gaps, packed, count, width, first, n)
                packed = check_twins(monkeypatch, kernels.pack_rice, index, width, int((between >> width).sum()))
                again, used = check_twins(monkeypatch, kernels.unpack_rice, packed, count, width, first, n)
                assert torch.equal(again.to(kind), index) and used == packed.numel()
                check_twins(monkeypatch, kernels.unpack_rice, packed, count, width, first, first + 1 + span // 2)


def test_survey_sees_what_is_not_sorted_or_not_different(monkeypatch: pytest.MonkeyPatch) -> None:
    for index in ([3, 1], [1, 1], [0, 5, 4, 9]):
        assert check_twins(monkeypatch, lambda x: kernels.survey(x).narrowest < 0, torch.tensor(index))


@given(st.binary(max_size=40), st.integers(1, 70), st.integers(0, 48), st.integers(1, 10**12), st.data())
@settings(max_examples=150, deadline=None)
def test_unpacking_any_bytes_stays_inside(
    packed: bytes, count: int, width: int, numel: int, data: st.DataObject
) -> None:
    message = torch.frombuffer(bytearray(packed or b"\0"), dtype=torch.uint8)
    first = data.draw(st.integers(0, numel - 1))

    def check(unpack: Callable[..., Any], *how: int) -> None:
        index, used = check_twins(patch, unpack, message, count, *how, first, numel)
        places = index.tolist()
        assert places[0] == first and places == sorted(set(places)) and places[-1] < numel
        assert len(places) <= count and 0 <= used <= message.numel()

    with pytest.MonkeyPatch.context() as patch:
        check(kernels.unpack_marks)
        if message.numel() * 8 >= (count - 1) * width:
            check(kernels.unpack_rice, width)
            check(kernels.unpack_gaps, width)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30, 1e-38])
def test_words_equal_their_reference(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scale: float) -> None:
    values = [vector(kind, 3001, dtype).nan_to_num(0, 1e30, -1e30) for kind in KINDS]
    values = torch.cat([*values, 1.5 * 2.0 ** torch.arange(-20, 20, dtype=dtype)]) * scale
    values.nan_to_num_(0, 3e38, -3e38)
    ends = [3001 * (i + 1) for i in range(len(KINDS))] + [2**28 + 3001 * len(KINDS)]
    starts = torch.tensor([0, 0, *ends, ends[-1]])  # empty groups first and last
    index = torch.arange(values.numel())
    index[-40:] += 2**28 - 40  # as far as a word can point
    for kind in (torch.int32, torch.int64):
        packed = check_twins(monkeypatch, kernels.pack_words, index.to(kind), values, starts)
        tops, counts, words, kept = packed
        again, decoded = check_twins(monkeypatch, kernels.unpack_words, tops, counts, words, starts, dtype)
        assert torch.equal(again.long(), index[kept])
        places = check_twins(monkeypatch, kernels.join_powers, index.to(kind), words, kept, ends[-1])
        joined = check_twins(monkeypatch, kernels.split_powers, places, tops, starts, dtype)
        assert torch.equal(joined[0], again) and torch.equal(joined[1], decoded)
        twice = torch.cat([places[:9], places[8:]])
        assert check_twins(monkeypatch, kernels.split_powers, twice, tops, starts, dtype)[0].numel() == 9
        group = torch.searchsorted(starts, index, right=True) - 1
        ratio = decoded.double() / values[kept].double()
        free = values[kept].abs().double() < 1.5 * 2.0 ** tops[group][kept].double()
        assert bool(((ratio > 0) & (ratio <= 4 / 3 + 1e-9)).all())
        assert bool((ratio[free] > 2 / 3).all())
        assert counts.sum() == kept.sum() == words.numel()
        for g in range(len(starts) - 1):
            mine = (values * (group == g)).abs()
            if mine.max() >= 2.0**-135 if mine.numel() else False:
                assert bool(kept[mine.argmax()])


def test_words_are_laid_out_as_specified() -> None:
    index = torch.tensor([5, 6, 105, 100 + 2**28 - 1])
    values = torch.tensor([-1.9, 0.001, 4.0, 0.26])
    tops, counts, words, kept = kernels.pack_words(index, values, torch.tensor([0, 100, 100 + 2**28]))
    assert (tops.tolist(), counts.tolist(), kept.tolist()) == ([0, 2], [1, 2], [True, False, True, True])
    assert [w & 0xFFFFFFFF for w in words.tolist()] == [1 << 31 | 5, 5, 4 << 28 | 2**28 - 1]


# The obvious


def test_selection_is_what_it_says() -> None:
    x = torch.tensor([1.0, -3.0, math.nan, 0.5, math.inf, -2.0, 2.0])
    assert kernels.select(x, 2.0).tolist() == [1, 4, 5, 6]
    assert kernels.select(x, 2.0, 2, 6).tolist() == [4, 5]
    assert kernels.select(x, 2.0).dtype == torch.int32
    values = kernels.take(x, kernels.select(x, 2.0, 0, 4))
    assert (values.tolist(), x[1].item(), x[5].item()) == ([-3.0], 0.0, -2.0)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-40, math.inf, math.nan]), max_size=200), st.data())
@settings(max_examples=80, deadline=None)
def test_top_k_is_a_stable_sort(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(values)))
    order = sorted(range(len(values)), key=lambda i: (values[i] != values[i], -abs(values[i]), i))
    assert kernels.top_k(torch.tensor(values), k).tolist() == sorted(order[:k])


def test_top_k_is_exact_where_the_sample_misleads() -> None:
    n = 300_000
    x = vector("normal", n)
    x[1000:1400] = 50.0  # a cluster that the sample sees one entry of
    x[100_000:] = 0.0
    flat = torch.full((n,), 0.25)
    for y in (x, flat, torch.zeros(n), x * 0 + x.sign()):
        for k in (1, 250, 399, 401, 30_000):
            assert torch.equal(kernels.top_k(y, k), reference.top_k(y, k))


def test_quantile_is_near() -> None:
    x = vector("normal", 1_000_003)
    for density in (0.1, 0.01, 0.001):
        share = kernels.select(x, kernels.quantile(x, density)).numel() / x.numel()
        assert 0.6 * density < share < 1.6 * density
    rows = torch.zeros(1024, 1024)
    rows[:, 7] = 1.0  # a plain stride would see this column always or never
    assert kernels.quantile(rows.flatten(), 0.0005) == 1.0
    assert kernels.quantile(rows.flatten(), 0.002) == 0.0


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=60, deadline=None)
def test_random_k_draws_different_positions_alike_everywhere(n: int, key: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    with pytest.MonkeyPatch.context() as patch:
        index = check_twins(patch, kernels.random_k, n, k, key).tolist()
    assert len(set(index)) == k and index == sorted(index)
    assert all(0 <= i < n for i in index)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (10, 3), (100, 5), (1000, 37)])
def test_random_k_is_uniform(n: int, k: int) -> None:
    draws = 3000
    counts = np.zeros(n)
    pairs: Counter[tuple[int, int]] = Counter()
    for key in range(draws):
        index = kernels.random_k(n, k, key * 0x9E3779B97F4A7C15)
        counts[index.numpy()] += 1
        pairs[int(index[0]), int(index[-1])] += 1
    expected = draws * k / n
    chi = ((counts - expected) ** 2 / (expected * (1 - k / n))).sum() * (n - 1) / n
    assert abs(chi - (n - 1)) < 5 * math.sqrt(2 * (n - 1))
    if n == 10:  # all but the rarest of the pairs of a smallest and a largest turn up
        assert len(pairs) == sum(1 for a in range(10) for b in range(a + 2, 10))


def test_random_k_reaches_large_domains() -> None:
    index = kernels.random_k(2**40, 1000, 1)
    assert index.dtype == torch.int64 and len(set(index.tolist())) == 1000
    assert 2**38 < int(index.float().mean()) < 3 * 2**38


def test_bad_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(10)
    with pytest.raises(IndexError):
        kernels.take(x, torch.tensor([10]))
    with pytest.raises(IndexError):
        kernels.gather(x, torch.tensor([3, 10]))
    with pytest.raises(IndexError):
        kernels.scatter_add(x, torch.tensor([-1], dtype=torch.int32), torch.ones(1))
    with pytest.raises(IndexError, match="no range"):
        kernels.select(x, 1.0, 3, 11)
    with pytest.raises(ValueError, match="different lengths"):
        kernels.variance_step(x, torch.ones(9), x, x, 1.0, 1.0)
    with pytest.raises(ValueError, match="do not hold"):
        kernels.unpack_bits(torch.zeros(1, dtype=torch.uint8), 3, 3)
    with pytest.raises(ValueError, match="cannot draw"):
        kernels.random_k(3, 4, 0)
    with pytest.raises(ValueError, match="no magnitude"):
        kernels.kth_magnitude(x, 0)
    monkeypatch.setenv("THINWIRE_KERNELS", "quick")
    with pytest.raises(ValueError, match="may be reference, cpu or gpu"):
        kernels.select(x, 1.0)


def test_views_and_strides_are_taken_as_they_are() -> None:
    base = vector("normal", 1000)
    assert torch.equal(kernels.select(base[1::2], 1.0), reference.select(base[1::2], 1.0))
    part = base[3:997]
    before = base.clone()
    index = kernels.select(part, 1.0)
    values = kernels.take(part, index)
    before[3:997][index] = 0
    assert torch.equal(base, before) and values.numel() > 100


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nothing_is_compiled_after_warm(dtype: torch.dtype) -> None:
    """Each compiled function has, after warm, every signature that a step can call it with."""
    from numba.core.dispatcher import Dispatcher

    from thinwire.kernels.cpu import gaps, pack, rank, select, sparse, words

    assert kernels.warm(dtype) >= 0
    functions = [
        f
        for module in (gaps, pack, rank, select, sparse, words)
        for f in vars(module).values()
        if isinstance(f, Dispatcher)
    ]
    known = {f: len(f.signatures) for f in functions}
    x, y, r, v = (vector("normal", 5000, dtype, seed=s) for s in range(4))
    kernels.finite(x)
    kernels.variance_step(r, v.abs(), x, y.square(), 1.5, 0.999)
    kernels.top_k(x, 5), kernels.top_k(x, 4000), kernels.kth_magnitude(x, 5)
    for index in (kernels.top_k(x, 50), kernels.top_k(x, 50).long(), kernels.random_k(5000, 9, 3)):
        kernels.fill_sparse(y, [(index, kernels.gather(x, index))], 0.25)
        kernels.take(x, index)
        count, first = index.numel(), int(index[0])
        _, _, shift, high, *_ = kernels.survey(index)
        kernels.unpack_rice(kernels.pack_rice(index, shift, high), count, shift, first, 5000)
        kernels.unpack_gaps(kernels.pack_gaps(index, 13), count, 13, first, 5000)
        kernels.unpack_marks(kernels.pack_marks(index), count, first, 5000)
        starts = torch.tensor([0, 5000])
        tops, counts, sent, kept = kernels.pack_words(index, x[index], starts)
        kernels.unpack_words(tops, counts, sent, starts, dtype)
        kernels.split_powers(kernels.join_powers(index, sent, kept, 5000), tops, starts, dtype)
        kernels.clear(y, index)
    kernels.select(x, kernels.quantile(x, 0.01), 10, 4000)
    kernels.unpack_signs(kernels.pack_signs(x), 5000, dtype)
    kernels.unpack_bits(kernels.pack_bits(torch.arange(16, dtype=torch.uint8), 4), 16, 4)
    assert {f: len(f.signatures) for f in functions} == known
