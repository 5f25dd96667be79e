"""QSGD and SignSGD: the codes mean what they say, and what they do not say stays behind."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import QSGD, Dense, ErrorFeedback, SignSGD
from thinwire.comm.threads import in_threads
from thread_runs import gradients, layout_of, run


def units(x: torch.Tensor, method: QSGD) -> torch.Tensor:
    """The size of one level, entry by entry."""
    parts = [part.norm(float("inf") if method.norm == "max" else 2).expand_as(part) for part in x.split(method.bucket)]
    return torch.cat(parts) / (2 ** (method.bits - 1) - 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.integers(1, 70), st.integers(1, 100), st.sampled_from(["max", "l2"]), st.booleans())
def test_every_entry_becomes_a_level_next_to_it(bits, bucket, n, norm, nearest):
    method = QSGD(bits, bucket, "nearest" if nearest else "stochastic", norm)
    g = gradients(1, 1, n, torch.float64, seed=n)
    ran = run(method, g)
    if ran.ledgers[0].fallbacks:
        return
    x, out, unit = g[0, 0], ran.out[0], units(g[0, 0], method)
    assert ((out / unit).round() - out / unit).abs().max() < 1e-9
    assert ((out - x).abs() <= unit * (0.5 + 1e-9 if nearest else 1 + 1e-9)).all()
    if nearest:
        assert ((out - x).abs() <= x.abs() * (1 + 1e-9)).all()  # so the error is smaller than the gradient


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_stochastic_rounding_is_unbiased(norm):
    x = gradients(1, 1, 64, torch.float64)
    method = QSGD(3, bucket=32, norm=norm)
    out = run(method, x.tile(10).expand(400, 1, 640)).out.view(4000, 64)  # buckets are drawn apart, as steps are
    unit = units(x[0, 0], method)
    level = (x[0, 0] / unit).abs() % 1
    deviation = unit * (level * (1 - level) / 4000).sqrt()
    assert ((out.mean(0) - x[0, 0]).abs() <= 4.5 * deviation + 1e-12).all()


def test_workers_and_steps_round_apart():
    x = gradients(1, 1, 200).expand(2, 3, 200)
    left = run(QSGD(2), x).left
    different = {tuple(left[rank, step].tolist()) for rank in range(3) for step in range(2)}
    assert len(different) == 6


def test_what_codes_do_not_say_stays_behind():
    g = gradients(1, 3, 100, torch.float64)
    ran = run(QSGD(4), g)
    torch.testing.assert_close(g.mean(1)[0], ran.out[0] + ran.left[:, 0].mean(0))
    assert ran.left.abs().max() > 0


@pytest.mark.parametrize(("bits", "bucket"), [(2, 512), (4, 512), (8, 100), (5, 7)])
def test_bytes_are_a_unit_a_bucket_and_bits_an_entry(bits, bucket):
    n = 1001
    ledger = run(QSGD(bits, bucket), gradients(1, 2, n)).ledgers[0]
    assert ledger.entries == [("all_gather", -(-n // bucket) * 4 + -(-n * bits // 8))]


def test_many_workers_average_everything_when_that_is_cheaper():
    g = gradients(1, 10, 600)
    ran = run(QSGD(8), g)
    assert ran.ledgers[0].fallbacks == 1 and torch.equal(ran.out, run(Dense(), g).out)
    assert run(QSGD(2), g).ledgers[0].fallbacks == 0


@pytest.mark.parametrize("method", [QSGD(4, rounding="nearest"), SignSGD(), QSGD(8)])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_size_of_gradients_does_not_matter(method, size):
    g = gradients(2, 2, 300)
    torch.testing.assert_close(run(method, g * size).out / size, run(method, g).out, rtol=1e-3, atol=1e-3)


def test_signs_times_the_mean_magnitude_of_each_parameter():
    layout = layout_of((4, 5), (3,), ())
    g = gradients(1, 3, layout.numel, torch.float64)
    wanted = torch.zeros(3, layout.numel, dtype=torch.float64)
    for rank in range(3):
        parts = g[0, rank].split(layout.sizes)
        wanted[rank] = torch.cat([part.sign() * part.abs().mean() for part in parts])
    ran = run(SignSGD(), g, layout)
    torch.testing.assert_close(ran.out[0], wanted.mean(0))
    torch.testing.assert_close(ran.left[:, 0], g[0] - wanted)


def test_a_sign_takes_one_bit():
    layout = layout_of((30, 30), (30,))
    ledger = run(SignSGD(), gradients(1, 2, 930), layout).ledgers[0]
    assert ledger.entries == [("all_gather", 2 * 4 + -(-930 // 8))]


@pytest.mark.parametrize(
    "method", [SignSGD(), QSGD(2, rounding="nearest"), QSGD(4), QSGD(4, bucket=16, rounding="nearest", norm="l2")]
)
def test_with_feedback_a_quadratic_is_minimised(method):
    # Two workers whose minima differ; only their mean is stationary.
    centres = gradients(1, 2, 50, torch.float64)[0]
    layout = layout_of((50,), dtype=torch.float64)
    feedback = ErrorFeedback(method)

    def work(comm):
        state, weights = feedback.init(layout), torch.zeros(50, dtype=torch.float64)
        out = torch.zeros_like(weights)
        for step in range(400):
            feedback.reduce(weights - centres[comm.rank], state, comm, out)
            weights -= (0.1 if step < 200 else 0.01) * out
        return weights

    weights = in_threads(2, work)[0]
    assert (weights - centres.mean(0)).norm() < 0.05 * centres.mean(0).norm()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"bits": 1}, "bits must lie between 2 and 16"),
        ({"bits": 17}, "bits must lie between 2 and 16"),
        ({"bucket": 0}, "bucket must be 1 entry or more"),
        ({"rounding": "down"}, "rounding must be"),
        ({"norm": "l1"}, "norm must be"),
    ],
)
def test_bad_arguments_get_one_clear_error(wrong, says):
    with pytest.raises(ValueError, match=says):
        QSGD(**wrong)
