"""Random block keeps every rule that the study of it rests on."""

import math

import pytest
import torch

from thinwire import Dense, ErrorFeedback, RandomBlock
from thinwire.core import memory
from thinwire.core.reducer import count
from thinwire.methods import random_block
from thread_runs import gradients, layout_of, run

ONES = torch.ones


@pytest.fixture
def start_at(monkeypatch):
    """Lets a test say where windows start."""

    def place(start: int) -> None:
        monkeypatch.setattr(random_block, "mix64", lambda *words: start)

    return place


def windows(method: RandomBlock, steps: int, n: int, world: int = 1) -> torch.Tensor:
    """Which entries were sent, by step."""
    return run(method, ONES(steps, world, n)).out > 0


# ── the window ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 2, 7, 103])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.5, 0.97])
def test_a_window_holds_exactly_k_entries_side_by_side_on_a_circle(n, density):
    k = count(density, n)
    sent = windows(RandomBlock(density), 50, n)
    assert (sent.sum(1) == k).all()
    edges = (sent != sent.roll(1, dims=1)).sum(1)
    assert (edges == (0 if k == n else 2)).all()


@pytest.mark.parametrize(("n", "k"), [(103, 10), (10, 3), (7, 1), (5, 4)])
def test_every_entry_is_in_k_of_the_n_windows(n, k, start_at):
    times = torch.zeros(n)
    for start in range(n):
        start_at(start)
        times += windows(RandomBlock(k / n), 1, n)[0]
    assert (times == k).all()  # the first, the last and the n mod k at the end included


def test_starts_are_uniform():
    n, steps = 20, 4000
    first = windows(RandomBlock(1 / n), steps, n).float().argmax(1)
    expected = steps / n
    chi_square = ((torch.bincount(first, minlength=n) - expected) ** 2 / expected).sum()
    assert chi_square < 43.8  # the 0.1 % point with 19 degrees of freedom


def test_the_error_is_what_was_not_sent_exactly(start_at):
    n, k = 13, 4
    x = gradients(1, 1, n, torch.float64)
    errors, means = [], torch.zeros(n, dtype=torch.float64)
    for start in range(n):
        start_at(start)
        errors.append((x[0, 0] - run(RandomBlock(k / n), x).out[0]).square().sum())
        means += run(RandomBlock(k / n, rescale=True), x).out[0] / n
    expected = (1 - k / n) * x.square().sum()
    torch.testing.assert_close(torch.stack(errors).mean(), expected)
    torch.testing.assert_close(means, x[0, 0])  # unbiased


def test_waits_are_geometric():
    n, k, steps = 50, 5, 6000
    sent = windows(RandomBlock(k / n), steps, n)
    waits = torch.cat([column.nonzero().flatten().diff() for column in sent.T]).double()
    assert waits.mean() == pytest.approx(n / k, rel=0.03)
    assert (waits == 1).double().mean() == pytest.approx(k / n, rel=0.1)


@pytest.mark.parametrize(("n", "k"), [(103, 10), (100, 10), (7, 3), (5, 5)])
def test_round_robin_lets_nobody_wait_longer_than_a_round(n, k):
    turns = math.ceil(n / k)
    sent = windows(RandomBlock(k / n, order="round_robin"), 4 * turns, n)
    for column in sent.T:
        at = column.nonzero().flatten()
        assert at[0] < turns and at.diff().max() <= turns


def test_own_windows_of_round_robin_lie_side_by_side():
    sent = windows(RandomBlock(0.1, agree=False, order="round_robin"), 5, 100, world=4)
    assert (sent.sum(1) == 40).all()


# ── what is shared ─────────────────────────────────────────────────────────────────────────────────────────────


def test_density_1_is_the_dense_mean_to_the_bit():
    g = gradients(3, 3, 57)
    assert torch.equal(run(RandomBlock(1.0), g).out, run(Dense(), g).out)
    assert torch.equal(run(RandomBlock(1.0, agree=False), g).out, run(Dense(), g).out)


def test_workers_that_share_windows_do_what_one_would_on_the_mean():
    g = gradients(40, 4, 30, torch.float64)
    many = run(ErrorFeedback(RandomBlock(0.1)), g)
    one = run(ErrorFeedback(RandomBlock(0.1)), g.mean(1, keepdim=True))
    torch.testing.assert_close(many.out, one.out, atol=1e-14, rtol=0)


def test_own_windows_unite_to_the_expected_size():
    q, world = 0.1, 4
    sent = windows(RandomBlock(q, agree=False), 400, 200, world)
    assert sent.float().mean().item() == pytest.approx(1 - (1 - q) ** world, abs=0.02)


def test_own_windows_that_overlap_add_up_and_are_divided_by_all_workers():
    out = run(RandomBlock(0.9, agree=False), ONES(20, 2, 10)).out
    assert set(out.unique().tolist()) <= {0.0, 0.5, 1.0} and (out == 1).any()
    out = run(RandomBlock(0.5, agree=False), ONES(20, 3, 10, dtype=torch.float64)).out
    torch.testing.assert_close(out.sum(1), torch.full((20,), 5.0, dtype=torch.float64))


def test_gathering_more_than_a_ring_would_carry_falls_back_to_everything():
    g = gradients(2, 5, 20)
    ran = run(RandomBlock(0.5, agree=False), g)
    assert torch.equal(ran.out, run(Dense(), g).out) and ran.ledgers[0].fallbacks == 2


def test_windows_stay_shared_when_a_worker_has_no_gradient():
    g = ONES(30, 3, 40)
    g[:, 1] = 0
    sent = run(RandomBlock(0.1), g).out
    assert torch.equal(sent > 0, windows(RandomBlock(0.1), 30, 40))
    assert ((sent > 0).sum(1) == 4).all()


def test_steps_seeds_and_layouts_draw_apart():
    base = windows(RandomBlock(0.01), 20, 1000)
    assert len({tuple(row.nonzero().flatten().tolist()) for row in base}) > 15
    assert not torch.equal(base, windows(RandomBlock(0.01, seed=1), 20, 1000))
    other = layout_of((500,), (500,))
    assert not torch.equal(base, run(RandomBlock(0.01), ONES(20, 1, 1000), other).out > 0)


# ── what is kept ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("agree", [True, False])
def test_nothing_is_lost_on_any_worker(agree):
    g = gradients(25, 3, 41, torch.float64).mul(1000).round()  # integers, so that sums are exact
    ran = run(ErrorFeedback(RandomBlock(0.1, agree=agree)), g)
    kept = sum(state.residual for state in ran.states)
    torch.testing.assert_close(g.sum((0, 1)), ran.out.sum(0) * 3 + kept, atol=1e-8, rtol=0)
    if agree:
        inside = ran.out[-1] != 0
        assert all((state.residual[inside] == 0).all() for state in ran.states)


def test_without_feedback_no_memory_is_allocated():
    ran = run(RandomBlock(0.1), gradients(2, 1, 50))
    assert memory.entry_tensors(ran.states[0]) == {}


def test_only_values_are_sent():
    ledger = run(RandomBlock(0.1), gradients(3, 2, 1000)).ledgers[0]
    assert ledger.entries == [("all_mean", 400)] * 3 and ledger.picked == 300
    ledger = run(RandomBlock(0.1, agree=False), gradients(3, 2, 1000)).ledgers[0]
    assert ledger.entries == [("all_gather", 400)] * 3


def test_small_tensors_by_themselves_are_sent_more_densely():
    sizes = [10, 1000, 25]
    picked = sum(run(RandomBlock(0.01), gradients(1, 1, n)).ledgers[0].picked for n in sizes)
    assert picked == 1 + 10 + 1  # against 10 for the whole


# ── how it behaves ─────────────────────────────────────────────────────────────────────────────────────────────


def growth(curvature: float, n: int, feedback: bool, start_at) -> float:
    """By what E[(x, e) (x, e)^T] of one coordinate of a quadratic grows a step, over all windows of size 1."""
    method = ErrorFeedback(RandomBlock(1 / n)) if feedback else RandomBlock(1 / n)
    second_moments = torch.zeros(4, 4, dtype=torch.float64)
    for start in range(n):
        start_at(start)
        columns = []
        for weight, residual in ((1.0, 0.0), (0.0, 1.0)):
            g = torch.zeros(1, 1, n, dtype=torch.float64)
            g[0, 0, 0] = curvature * weight + (residual if feedback else 0)
            ran = run(method, g)
            kept = ran.states[0].residual[0] if feedback else torch.tensor(0.0, dtype=torch.float64)
            columns.append(torch.stack([weight - ran.out[0, 0], kept]))
        step = torch.stack(columns, dim=1)
        second_moments += torch.kron(step, step) / n
    return torch.linalg.eigvals(second_moments).abs().max().item()


@pytest.mark.parametrize("n", [2, 10, 50])
def test_with_feedback_the_stable_learning_rate_shrinks_with_the_density(n, start_at):
    p = 1 / n
    limit = 2 * p / (2 - p)
    assert growth(0.9 * limit, n, True, start_at) < 1
    assert growth(1.1 * limit, n, True, start_at) > 1
    assert growth(1.9, n, False, start_at) < 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"density": 0}, "density must lie above 0"),
        ({"density": 1.1}, "density must lie above 0"),
        ({"density": math.nan}, "density must lie above 0"),
        ({"density": 0.1, "order": "sorted"}, "order must be"),
        ({"density": 0.1, "order": "round_robin", "rescale": True}, "is not random"),
    ],
)
def test_bad_arguments_get_one_clear_error(wrong, says):
    with pytest.raises(ValueError, match=says):
        RandomBlock(**wrong)
