"""Variance-based compression, its hybrid and Strom, against loops over entries written from the rules."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import Layout, Reducer, Strom, Variance, VarianceStrom
from thinwire.comm import Comm, Ledger
from thinwire.comm.threads import in_threads
from thinwire.core import memory
from thinwire.core.reducer import Moments
from thinwire.exchange import bytes as wire
from thread_runs import layout_of

EXACT = Variance(2.0, quantise=False)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Ran(NamedTuple):
    out: Tensor  # [steps, entries]
    states: list[Any]
    ledgers: list[Ledger]
    sent: Tensor  # [workers, steps], how many entries


def samples(steps: int, world: int, batch: int, numel: int, seed: int = 0, mean: float = 0.3) -> Tensor:
    """Gradients of samples, already divided by the batch size: some entries drift, some do not."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, world, batch, numel, generator=generator, dtype=torch.float64)
    scale = torch.randn(numel, generator=generator, dtype=torch.float64).exp()
    drift = mean * torch.randn(numel, generator=generator, dtype=torch.float64)
    return (noise + drift) * scale / batch


def run(reducer: Reducer[Any, Any], parts: Tensor, layout: Layout | None = None, states: Any = None) -> Ran:
    """`parts` is [steps, workers, samples, entries]; every worker must agree with the first."""
    steps, world, _, numel = parts.shape
    layout = layout or layout_of((numel,), dtype=parts.dtype)

    def work(comm: Comm) -> tuple[Tensor, Any, Ledger, Tensor]:
        state = reducer.init(layout) if states is None else states[comm.rank]
        outs, sent = torch.full((steps, numel), math.nan, dtype=parts.dtype), []
        for step in range(steps):
            mine, before = parts[step, comm.rank], comm.ledger.picked
            mean, square = mine.sum(0), mine.square().sum(0)
            reducer.reduce(Moments(mean, square) if reducer.wants is Moments else mean, state, comm, outs[step])
            assert not mean.any()
            sent.append(comm.ledger.picked - before)
        return outs, state, comm.ledger, torch.tensor(sent)

    outs, found, ledgers, sent = zip(*in_threads(world, work), strict=True)
    assert all(torch.equal(out, outs[0]) for out in outs)
    return Ran(outs[0], list(found), list(ledgers), torch.stack(sent))


# ── loops over entries ───────────────────────────────────────────────────────────────────────────────────────────────


def naive(alpha: float, zeta: float, parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Section 3 of the algorithm for one worker, without the quantiser: what is sent, r and v."""
    r, v = [0.0] * parts.shape[-1], [0.0] * parts.shape[-1]
    sent = torch.zeros(len(parts), parts.shape[-1], dtype=parts.dtype)
    for step, batch in enumerate(parts):
        for i in range(parts.shape[-1]):
            r[i] += float(batch[:, i].sum())
            v[i] += float(batch[:, i].square().sum())
            if r[i] * r[i] > alpha * v[i]:
                sent[step, i] = r[i]
                r[i] = v[i] = 0.0
            else:
                v[i] *= zeta
    return sent, torch.tensor(r, dtype=parts.dtype), torch.tensor(v, dtype=parts.dtype)


def naive_quanta(alpha: float, zeta: float, tau: float, parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r, v = [0.0] * parts.shape[-1], [0.0] * parts.shape[-1]
    sent = torch.zeros(len(parts), parts.shape[-1], dtype=parts.dtype)
    for step, batch in enumerate(parts):
        for i in range(parts.shape[-1]):
            r[i] += float(batch[:, i].sum())
            v[i] += float(batch[:, i].square().sum())
            if abs(r[i]) > tau and r[i] * r[i] > alpha * v[i]:
                quantum = math.copysign(tau, r[i])
                sent[step, i] = quantum
                v[i] = max(v[i] - 2 * abs(r[i]) * tau + tau * tau, 0.0)
                r[i] -= quantum
            else:
                v[i] *= zeta
    return sent, torch.tensor(r, dtype=parts.dtype), torch.tensor(v, dtype=parts.dtype)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("alpha", "zeta"), [(0.0, 1.0), (1.0, 0.999), (2.0, 0.9), (5.0, 0.5)])
def test_it_is_the_loop_over_entries(alpha, zeta, world):
    parts = samples(8, world, 6, 50)
    ran = run(Variance(alpha, zeta, quantise=False), parts)
    by_loop = [naive(alpha, zeta, parts[:, rank]) for rank in range(world)]
    torch.testing.assert_close(ran.out, sum(sent for sent, _, _ in by_loop) / world, rtol=1e-12, atol=1e-15)
    for state, (_, r, v) in zip(ran.states, by_loop, strict=True):
        torch.testing.assert_close(state.r, r, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(state.v, v, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("alpha", "tau"), [(0.0, 0.4), (1.0, 0.1), (2.0, 0.4)])
def test_the_hybrid_is_the_loop_over_entries(alpha, tau, world):
    parts = samples(8, world, 6, 50)
    ran = run(VarianceStrom(alpha, 0.9, tau), parts)
    by_loop = [naive_quanta(alpha, 0.9, tau, parts[:, rank]) for rank in range(world)]
    torch.testing.assert_close(ran.out, sum(sent for sent, _, _ in by_loop) / world, rtol=1e-12, atol=1e-15)
    for state, (_, r, v) in zip(ran.states, by_loop, strict=True):
        torch.testing.assert_close(state.r, r, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(state.v, v, rtol=1e-12, atol=1e-14)


# ── the criterion ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_alpha_zero_is_the_dense_mean():
    parts = samples(4, 3, 5, 40)
    torch.testing.assert_close(run(Variance(0.0, quantise=False), parts).out, parts.sum(2).mean(1))


@given(batch=st.integers(2, 9), alpha=st.floats(0.1, 12))
@settings(max_examples=40, deadline=None)
def test_identical_samples_are_sent_at_once_if_alpha_is_below_the_batch_size(batch, alpha):
    parts = torch.full((1, 1, batch, 3), 1 / 16, dtype=torch.float64)  # r^2 = B v exactly
    assert bool(run(Variance(alpha, quantise=False), parts).out.any()) == (alpha < batch)


def test_one_sample_is_never_sent_on_its_first_step():
    assert not run(Variance(1.0, quantise=False), samples(1, 1, 1, 100)).sent.any()


def test_opposite_samples_are_never_sent():
    one = samples(6, 1, 1, 30)
    ran = run(Variance(0.5, 0.5, quantise=False), torch.cat([one, -one], 2))
    assert not ran.sent.any() and not ran.out.any()


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**10])
@pytest.mark.parametrize("method", [EXACT, Variance(1.0), Variance(1.0, feedback=True, packing="words")])
def test_a_power_of_two_in_the_loss_changes_no_decision(method, scale):
    parts = samples(10, 2, 6, 80).float()
    plain, scaled = run(method, parts), run(method, parts * scale)
    assert torch.equal(plain.sent, scaled.sent) and plain.sent.any()
    assert torch.equal(plain.out * scale, scaled.out)


def test_v_is_the_plain_sum_of_squares_while_nothing_fades_and_nothing_is_sent():
    parts = samples(5, 1, 4, 20, mean=0)
    ran = run(Variance(1e9, 1.0, quantise=False), parts)
    assert not ran.sent.any()
    torch.testing.assert_close(ran.states[0].v, parts.square().sum((0, 1, 2)))
    torch.testing.assert_close(ran.states[0].r, parts.sum((0, 1, 2)))


@pytest.mark.parametrize("zeta", [0.5, 0.9])
def test_noise_fades_until_the_entry_goes(zeta):
    alpha = 3.0
    parts = torch.zeros(40, 1, 1, 1, dtype=torch.float64)
    parts[0] = 1.0  # r = v = 1: to go after the smallest t with 1 > alpha * zeta^t
    wanted = math.ceil(math.log(1 / alpha) / math.log(zeta))
    ran = run(Variance(alpha, zeta, quantise=False), parts)
    assert ran.sent[0].nonzero().flatten().tolist() == [wanted]


def test_the_sent_set_shrinks_as_alpha_grows():
    parts, before = samples(1, 1, 8, 400), None
    for alpha in (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0):
        now = run(Variance(alpha, quantise=False), parts).out[0] != 0
        assert before is None or bool((before | ~now).all())
        before = now
    assert not before.any()  # r^2 <= B v


# Ratios of a simulation apart from this code: 64 samples, 600 steps, the first 200 left out.
RATIOS = {
    "noise": {1.0: 17, 1.5: 60, 2.0: 155, 4.0: 1233},
    "spikes": {1.0: 103, 1.5: 550, 2.0: 798, 4.0: 4178},
    "drift": {1.0: 2.6, 1.5: 3.3, 2.0: 4.0, 4.0: 6.9},
}


def draw(kind: str, numel: int, generator: torch.Generator) -> Moments:
    """Mean and squares of 64 samples, drawn without drawing these where there is a shorter way."""
    if kind == "spikes":  # one sample in 6400 has a gradient at all
        mean, square = torch.zeros(numel), torch.zeros(numel)
        count = int(torch.poisson(torch.tensor(numel * 64 / 6400.0), generator=generator))
        where = torch.randint(0, numel, (count,), generator=generator)
        spike = torch.randn(count, generator=generator) / 64
        return Moments(mean.index_add_(0, where, spike), square.index_add_(0, where, spike.square()))
    noise = torch.randn(numel, generator=generator) / 8
    # The sum of squares about the mean is chi-squared with 63 degrees of freedom, and apart from the mean.
    rest = 2 * torch._standard_gamma(torch.full((numel,), 31.5), generator=generator)
    mean = noise + (0.1 if kind == "drift" else 0.0)
    return Moments(mean, (64 * mean.square() + rest) / 64**2)


@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 4.0])
def test_streams_of_noise_spikes_and_drift_compress_as_simulated(kind, alpha):
    wanted = RATIOS[kind][alpha]
    numel = 20_000 if wanted > 500 else 2_000  # so that thousands are sent
    method = Variance(alpha, quantise=False)
    generator = torch.Generator().manual_seed(0)

    def work(comm: Comm) -> int:
        state, out, before = method.init(layout_of((numel,))), torch.zeros(numel), 0
        for step in range(600):
            before = comm.ledger.picked if step == 200 else before
            method.reduce(draw(kind, numel, generator), state, comm, out)
        return comm.ledger.picked - before

    ratio = 400 * numel / in_threads(1, work)[0]
    assert wanted * 0.85 < ratio < wanted * 1.15


# ── the quantiser ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_quantised_values_are_powers_of_two_near_what_they_stand_for():
    parts = samples(1, 1, 8, 500)
    layout = layout_of((20, 10), (300,), dtype=torch.float64)
    exact, ran = run(Variance(0.5, quantise=False), parts, layout).out[0], run(Variance(0.5), parts, layout)
    for true, told in zip(exact.split([200, 300]), ran.out[0].split([200, 300]), strict=True):
        sent = told != 0
        top = 2.0 ** math.floor(math.log2(true.abs().max()))
        size = told[sent].abs()
        assert torch.equal(torch.frexp(size).mantissa, torch.full_like(size, 0.5))
        assert size.max() == top and size.min() >= top / 128
        ratio = told[sent] / true[sent]
        below = true[sent].abs() < top
        assert bool(((ratio[below] > 2 / 3) & (ratio[below] <= 4 / 3)).all())
        assert bool(((ratio[~below] > 1 / 2) & (ratio[~below] <= 1)).all())
        assert bool((true.abs()[(true != 0) & ~sent] < top / 128).all())  # only those had no word


def heavy_tailed() -> Tensor:
    """Two samples that agree, about entries of many sizes: all sure, some too small for a word beside the largest."""
    sizes = torch.logspace(0, 4, 64, 10, dtype=torch.float64)
    return torch.stack([sizes, 1.1 * sizes])[None, None]


def test_entries_too_small_for_a_word_keep_waiting_or_are_reset_and_the_loss_is_told():
    parts = heavy_tailed()
    total, squares = parts.sum((0, 1, 2)), parts.square().sum((0, 1, 2))
    small = run(Variance(1.0), parts).out[0] == 0
    assert 10 < int(small.sum()) < 54
    for method in (Variance(1.0), Variance(1.0, on_underflow="reset"), Variance(1.0, feedback=True)):
        ran = run(method, parts)
        state, out = ran.states[0], ran.out[0]
        kept = method.on_underflow == "keep"
        torch.testing.assert_close(state.r[small], total[small] * kept)
        torch.testing.assert_close(state.v[small], squares[small] * kept)
        torch.testing.assert_close(state.r[~small], (total - out)[~small] * method.feedback)
        assert not state.v[~small].any()
        lost = torch.linalg.vector_norm(total - out - state.r)
        told = method.metrics(state)
        assert told["lost_norm"] == pytest.approx(float(lost), rel=1e-9)
        assert told["held_fraction"] == pytest.approx(float(small.double().mean()))
        assert (lost == 0) == method.conserves


@pytest.mark.parametrize("method", [EXACT, Variance(1.0, feedback=True), VarianceStrom(1.0, tau=0.2), Strom(0.2)])
def test_what_was_handed_in_is_sent_or_still_there(method):
    parts = samples(12, 3, 6, 60)
    ran = run(method, parts)
    held = torch.stack([state.r for state in ran.states]).mean(0)
    assert method.conserves and ran.sent.any() and held.any()
    torch.testing.assert_close(ran.out.sum(0) + held, parts.sum((0, 2)).mean(0), rtol=1e-11, atol=1e-13)


def test_a_32_bit_word_for_each_entry_and_five_bytes_for_each_tensor():
    parts, layout = samples(1, 2, 8, 600), layout_of((300,), (20, 15), dtype=torch.float64)
    ran = run(Variance(1.0, packing="words"), parts, layout)
    # The first step asks for room, eight bytes, and sends the longest message of all in a second collective.
    assert [size for _, size in ran.ledgers[0].entries] == [8, 10 + 4 * int(ran.sent.max())]


# ── Strom ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_hybrid_with_alpha_zero_is_strom():
    parts = samples(10, 2, 5, 80)
    hybrid, strom = run(VarianceStrom(0.0, tau=0.3), parts), run(Strom(0.3), parts)
    assert torch.equal(hybrid.out, strom.out) and strom.sent.any()
    for a, b in zip(hybrid.states, strom.states, strict=True):
        assert torch.equal(a.r, b.r)


def test_a_quantum_leaves_r_squared_minus_v_as_it_was():
    tau, parts = 0.25, samples(1, 1, 6, 300)
    state = run(VarianceStrom(1.5, tau=tau), parts).states[0]
    r, v = parts.sum((0, 1, 2)), parts.square().sum((0, 1, 2))
    sent = (r.abs() > tau) & (r.square() > 1.5 * v)
    whole = sent & (state.v > 0)
    assert whole.any() and (sent & ~whole).any()
    torch.testing.assert_close((state.r.square() - state.v)[whole], (r.square() - v)[whole])
    torch.testing.assert_close((r - state.r)[sent].abs(), torch.full_like(r[sent], tau))


def test_exactly_a_quantum_is_not_more_than_one():
    assert not run(Strom(0.5), torch.tensor([0.5, -0.5, 0.5]).view(1, 1, 1, 3)).sent.any()
    assert run(Strom(0.5), torch.tensor([0.51, -0.51, 0.5]).view(1, 1, 1, 3)).out.tolist() == [[0.5, -0.5, 0.0]]


@pytest.mark.parametrize("method", [Strom(0.2), VarianceStrom(1.0, tau=0.2), Variance(1.0)])
def test_memory_follows_a_change_of_the_loss_scale(method):
    parts = samples(8, 2, 6, 60).float()
    straight = run(method, parts)
    first = run(method, parts[:4])
    for state in first.states:
        memory.rescale(state, 1024.0)
    second = run(method, parts[4:] * 1024, states=first.states)
    assert torch.equal(torch.cat([first.out, second.out / 1024]), straight.out)


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", [0, 1, 2**28 - 1, 2**28, 2**29 + 5])
@pytest.mark.parametrize(
    ("encode", "decode"), [(wire.encode_words, wire.decode_words), (wire.encode_powers, wire.decode_powers)]
)
def test_messages_hold_every_sign_exponent_and_index(place, sign, encode, decode):
    """Entries past 2^28 of one tensor are those of another group."""
    for step in range(8):
        values = torch.tensor([sign * 2.0**-step, 1.0])
        index = torch.tensor([place, 2**29 + 100])
        message, kept = encode(index, values, [2**29 + 200])
        got, told = decode(message, [2**29 + 200])
        assert kept.all() and got.tolist() == index.tolist() and told.tolist() == values.tolist()


@pytest.mark.parametrize(
    "method",
    [
        Variance(1.0),
        Variance(1.0, packing="words"),
        Variance(1.5, quantise=False),
        VarianceStrom(0.5, tau=0.1),
        Strom(0.1),
    ],
)
@pytest.mark.parametrize("damage", ["short", "long", "empty", "flipped"])
def test_a_message_that_is_not_whole_is_refused_on_all_workers(method, damage, monkeypatch):
    from thinwire import exchange

    plain = exchange.gather_bytes

    def damaged(*args: Any, **kwargs: Any) -> list[Tensor] | None:
        messages = plain(*args, **kwargs)
        assert messages is not None
        bad = messages[1].clone()
        if damage == "flipped":
            bad[1:5] ^= 0xFF  # counts, in both kinds of message
        changed = {"short": bad[:-1], "long": torch.cat([bad, bad[:3]]), "empty": bad[:0], "flipped": bad}
        return [messages[0], changed[damage], *messages[2:]]

    monkeypatch.setattr(exchange, "gather_bytes", damaged)
    parts = samples(1, 3, 6, 60).float()

    def work(comm: Comm) -> bool:
        state, mine = method.init(layout_of((60,))), parts[0, comm.rank]
        local = Moments(mine.sum(0), mine.square().sum(0)) if method.wants is Moments else mine.sum(0)
        try:
            method.reduce(local, state, comm, torch.zeros(60))
        except wire.WireError:
            return True
        return False

    assert in_threads(3, work) == [True] * 3


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_gaps_say_what_words_say_and_nothing_else_is_accepted(data):
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    index = torch.tensor(sorted(data.draw(st.sets(st.integers(0, sum(sizes) - 1))))) if sum(sizes) else torch.empty(0)
    real = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
    values = torch.tensor(data.draw(st.lists(real, min_size=len(index), max_size=len(index))), dtype=torch.float32)
    words, in_words = wire.encode_words(index.long(), values, sizes)
    gaps, in_gaps = wire.encode_powers(index.long(), values, sizes)
    assert torch.equal(in_words, in_gaps)
    for one, other in zip(wire.decode_words(words, sizes), wire.decode_powers(gaps, sizes), strict=True):
        assert one.tolist() == other.tolist()
    for length in range(gaps.numel()):
        with pytest.raises(wire.WireError):
            wire.decode_powers(gaps[:length], sizes)
    damaged = gaps.clone()
    damaged[data.draw(st.integers(0, gaps.numel() - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = wire.decode_powers(damaged, sizes)[0]
    except wire.WireError:
        return
    assert bool((found.diff() > 0).all()) and (not len(found) or (found[0] >= 0 and found[-1] < sum(sizes)))


def test_two_values_for_one_entry_are_refused():
    twice = torch.cat([torch.zeros(1, dtype=torch.uint8), wire.encode_index(torch.tensor([32, 33]), 160)])
    with pytest.raises(wire.WireError, match="two values"):
        wire.decode_powers(twice, [10])


def test_an_entry_sent_both_up_and_down_is_refused(monkeypatch):
    twice = wire.encode_index(torch.tensor([6, 7]), 20)
    monkeypatch.setattr("thinwire.exchange.gather_bytes", lambda *args, **kwargs: [twice])
    with pytest.raises(wire.WireError, match="both up and down"):
        run(Strom(0.1), samples(1, 1, 3, 10))


@pytest.mark.parametrize("silent", [{0}, {1}, {0, 1, 2}])
@pytest.mark.parametrize("method", [Variance(1.0), EXACT, VarianceStrom(1.0, tau=0.1), Strom(0.1)])
def test_workers_with_nothing_to_send_send_nothing(method, silent):
    parts = samples(3, 3, 6, 30)
    for rank in silent:
        parts[:, rank] = 0
    ran = run(method, parts)
    assert not ran.sent[list(silent)].any() and bool(ran.out.any()) == (len(silent) < 3)


@pytest.mark.parametrize(
    "method", [Variance(1.0), Variance(1.0, quantise=False), VarianceStrom(0.0, tau=1e-2), Strom(1e-2)]
)
def test_a_dense_mean_where_that_costs_less_changes_no_decision(method, monkeypatch):
    """It carries what would have been sent, and no more: else the next step would begin anew, and be dense again."""
    monkeypatch.setattr("thinwire.exchange.dense_bytes", lambda x, comm: 0)
    parts = samples(5, 3, 4, 60)
    ran = run(method, parts)
    assert ran.ledgers[0].fallbacks == 5
    if isinstance(method, Variance):
        by_loop = [naive(method.alpha, method.zeta, parts[:, rank]) for rank in range(3)]
    else:
        by_loop = [naive_quanta(0.0, 0.999, method.tau, parts[:, rank]) for rank in range(3)]
    torch.testing.assert_close(ran.out, sum(sent for sent, _, _ in by_loop) / 3, rtol=1e-10, atol=1e-14)
    for state, (_, r, _) in zip(ran.states, by_loop, strict=True):
        torch.testing.assert_close(state.r, r, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: Variance(-1.0), "alpha"),
        (lambda: Variance(math.nan), "alpha"),
        (lambda: Variance(zeta=0.0), "zeta"),
        (lambda: Variance(zeta=1.5), "zeta"),
        (lambda: Variance(on_underflow="forget"), "on_underflow"),
        (lambda: Variance(packing="tight"), "packing"),
        (lambda: VarianceStrom(tau=0.0), "tau"),
        (lambda: VarianceStrom(alpha=math.inf), "alpha"),
        (lambda: Strom(-0.1), "tau"),
    ],
)
def test_options_out_of_range_are_refused_by_name(make, hint):
    with pytest.raises(ValueError, match=hint):
        make()
