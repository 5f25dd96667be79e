"""Reducers made of reducers."""

import pytest
import torch

from thinwire import (
    DGC,
    QSGD,
    Cast,
    Dense,
    ErrorFeedback,
    Momentum,
    PowerSGD,
    RandomBlock,
    Route,
    SignSGD,
    Threshold,
    TopK,
    Warmup,
)
from thread_runs import gradients, layout_of, run

# ── warm-up ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "method", [TopK(0.1), PowerSGD(1), SignSGD(), RandomBlock(0.1, agree=False), Threshold(1.0), QSGD(2)]
)
def test_a_dense_warm_up_is_dense_and_leaves_no_residual(method):
    layout = layout_of((12, 5))
    g = gradients(6, 3, 60)
    ran = run(Warmup(ErrorFeedback(method), steps=4), g, layout)
    assert torch.equal(ran.out[:4], run(Dense(), g[:4], layout).out)
    assert torch.equal(ran.out[4:], run(ErrorFeedback(method), g[4:], layout).out)
    dense = run(Warmup(ErrorFeedback(method), steps=4), g[:4], layout)
    assert all((state.inner.residual == 0).all() for state in dense.states)
    assert dense.ledgers[0].entries == [("all_mean", 240)] * 4


def test_a_schedule_divides_the_steps_evenly():
    warm = Warmup(TopK(0.01), steps=6, densities=(1.0, 0.5, 0.1))
    assert [warm.density_at(step) for step in range(8)] == [1.0, 1.0, 0.5, 0.5, 0.1, 0.1, None, None]
    picked = (run(warm, gradients(8, 1, 100)).out != 0).sum(1)
    assert picked.tolist() == [100, 100, 50, 50, 10, 10, 1, 1]


def test_a_schedule_loses_nothing():
    g = gradients(8, 2, 100, torch.float64)
    ran = run(Warmup(ErrorFeedback(TopK(0.01)), steps=5, densities=(1.0, 0.5, 0.1)), g)
    kept = sum(state.inner.residual for state in ran.states) / 2
    torch.testing.assert_close(g.mean(1).sum(0), ran.out.sum(0) + kept)


@pytest.mark.parametrize("method", [DGC(0.1), Momentum(ErrorFeedback(TopK(0.1))), Momentum(ErrorFeedback(PowerSGD(1)))])
def test_momentum_goes_on_through_a_dense_warm_up(method):
    layout = layout_of((12, 5), dtype=torch.float64)
    g = gradients(5, 2, 60, torch.float64)
    out = run(Warmup(method, steps=5), g, layout).out
    torch.testing.assert_close(out, run(Momentum(Dense()), g, layout).out)


def test_a_warm_up_reaches_through_casts_and_routes():
    layout = layout_of((40, 30), (30,), dtype=torch.float64)
    g = gradients(2, 2, 1230, torch.float64)
    method = Warmup(Route(ErrorFeedback(Cast(TopK(0.01)))), steps=1, densities=(0.5,))
    sent = (run(method, g, layout).out != 0).sum(1)
    assert sent[0] > 600 and 30 <= sent[1] <= 30 + 24
    dense = run(Warmup(Route(ErrorFeedback(Cast(TopK(0.01)))), steps=1), g, layout).out[0]
    torch.testing.assert_close(dense, g.mean(1)[0], atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Warmup(TopK(0.1), steps=0), "steps must be 1 or more"),
        (lambda: Warmup(TopK(0.1), steps=5, densities=(0.5, 0.0)), "density must lie above 0"),
        (lambda: Warmup(PowerSGD(1), steps=5, densities=(0.5,)), "has no density to warm up"),
        (lambda: Warmup(Threshold(1.0), steps=5, densities=(0.5,)), "has no density to warm up"),
        (lambda: Warmup(TopK(0.1), steps=1, densities=(0.5, 0.2)), "at least as many steps"),
    ],
)
def test_bad_warm_ups_get_one_clear_error(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# ── route ──────────────────────────────────────────────────────────────────────────────────────────────────────

MIXED = ((30, 40), (30,), (3, 3), (), (40, 30), (0,))


def test_vectors_and_small_tensors_are_exact_and_matrices_go_the_other_way():
    layout = layout_of(*MIXED)
    g = gradients(3, 2, layout.numel)
    ran = run(Route(ErrorFeedback(TopK(0.01)), smallest=100), g, layout)
    small = torch.zeros(layout.numel, dtype=torch.bool)
    small[1200:1240] = True
    assert torch.equal(ran.out[:, small], run(Dense(), g[:, :, small]).out)
    matrices = g.masked_fill(small, 0)
    torch.testing.assert_close(ran.out[:, ~small], run(ErrorFeedback(TopK(0.01)), matrices, layout).out[:, ~small])
    assert ran.ledgers[0].entries[0] == ("all_mean", 4 * 40)


def test_what_the_rest_leaves_behind_stays_for_the_memory_outside():
    layout = layout_of(*MIXED, dtype=torch.float64)
    g = gradients(6, 3, layout.numel, torch.float64)
    ran = run(ErrorFeedback(Route(TopK(0.01), rest=SignSGD(), smallest=100)), g, layout)
    kept = sum(state.residual for state in ran.states) / 3
    torch.testing.assert_close(g.mean(1).sum(0), ran.out.sum(0) + kept)
    assert (kept[1200:1239] != 0).all()  # of the scalar, a sign and a magnitude say all


def test_where_there_is_only_one_kind_only_one_message_goes():
    vectors, matrix = layout_of((20,), (3,)), layout_of((40, 30))
    assert run(Route(RandomBlock(0.1)), gradients(1, 2, 23), vectors).ledgers[0].entries == [("all_mean", 92)]
    assert run(Route(RandomBlock(0.1)), gradients(1, 2, 1200), matrix).ledgers[0].entries == [("all_mean", 480)]


def test_a_rest_with_a_memory_is_refused():
    with pytest.raises(ValueError, match="put it around the Route"):
        Route(TopK(0.1), rest=ErrorFeedback(QSGD()))
    with pytest.raises(ValueError, match="smallest must be a number of entries"):
        Route(TopK(0.1), smallest=-1)


# ── cast ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("inner", "floats"), [(Dense(), 1000), (RandomBlock(0.1), 100), (RandomBlock(0.1, agree=False), 100)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_take_two_bytes(inner, floats, dtype):
    ledger = run(Cast(inner, dtype=dtype), gradients(1, 2, 1000)).ledgers[0]
    assert ledger.payload == 2 * floats


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("inner", [Dense(), TopK(0.1), TopK(0.1, agree=True), RandomBlock(0.1), PowerSGD(2)])
def test_with_feedback_rounding_is_made_good(inner, dtype):
    layout = layout_of((20, 10), dtype=torch.float64)
    g = gradients(1, 2, 200, torch.float64).expand(50, 2, 200)
    ran = run(ErrorFeedback(Cast(inner, dtype=dtype)), g, layout)
    kept = sum(state.residual for state in ran.states) / 2
    # What workers round themselves is kept; what the sum rounds is not, and is random: far below 50 roundings.
    epsilon = 2**-8 if dtype == "bfloat16" else 2**-11
    wrong = (g.mean(1).sum(0) - ran.out.sum(0) - kept).abs().max()
    assert wrong < 50 * epsilon * g.abs().max()
    gathered = isinstance(inner, TopK) and not inner.agree
    if gathered:
        assert wrong < 1e-9


def test_what_is_too_large_for_half_precision_is_sent_in_parts():
    g = torch.zeros(4, 2, 10)
    g[0, :, 3] = 150_000.0
    ran = run(ErrorFeedback(Cast(TopK(0.1), dtype="float16")), g)
    assert ran.out.isfinite().all() and ran.out[0, 3] == 65504
    assert ran.out[:, 3].sum() == 150_000
    dense = run(Cast(Dense(), dtype="float16"), g)
    assert dense.out.isfinite().all()


def test_infinity_passes_a_cast_as_infinity():
    g = torch.zeros(1, 2, 4)
    g[0, 0, 1] = torch.inf
    assert run(Cast(Dense(), dtype="float16"), g).out[0].tolist() == [0, torch.inf, 0, 0]


def test_only_half_precision_can_be_cast_to():
    with pytest.raises(ValueError, match="dtype must be 'bfloat16' or 'float16'"):
        Cast(Dense(), dtype="int8")
