"""Random-k, hard threshold and deep gradient compression against their plain descriptions."""

import math

import pytest
import torch

from thinwire import DGC, Dense, ErrorFeedback, Momentum, RandomK, Threshold, TopK
from thinwire.comm.threads import in_threads
from thinwire.core import memory
from thread_runs import gradients, layout_of, run

# ── random-k ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("n", "density"), [(1, 0.1), (10, 0.01), (103, 0.1), (50, 0.9)])
def test_random_k_sends_exactly_k_different_entries(n, density):
    out = run(RandomK(density), torch.ones(20, 2, n)).out
    assert ((out == 1).sum(1) == max(1, math.floor(density * n + 1e-9))).all()
    assert ((out == 0) | (out == 1)).all()


def test_random_k_chooses_every_entry_equally_often():
    n, steps = 40, 3000
    times = (run(RandomK(0.1), torch.ones(steps, 1, n)).out > 0).sum(0)
    deviation = math.sqrt(steps * 0.1 * 0.9)
    assert ((times - steps * 0.1).abs() < 4.5 * deviation).all()


def test_workers_that_draw_alike_average_and_those_that_draw_apart_add_up():
    g = gradients(30, 3, 60, torch.float64)
    alike = run(RandomK(0.2), g)
    picked = alike.out != 0
    torch.testing.assert_close(alike.out, g.mean(1) * picked)
    apart = run(RandomK(0.2, agree=False), g)
    torch.testing.assert_close(g.mean(1), apart.out + apart.left.mean(0))
    assert (apart.left == 0).sum((1, 2)).eq(12 * 30).all()
    assert not torch.equal(apart.left[0] == 0, apart.left[1] == 0)


@pytest.mark.parametrize("agree", [True, False])
def test_random_k_sends_values_only(agree):
    entries = run(RandomK(0.1, agree=agree), gradients(2, 2, 500)).ledgers[0].entries
    assert entries == [("all_mean" if agree else "all_gather", 200)] * 2


@pytest.mark.parametrize("agree", [True, False])
def test_rescaled_random_k_is_unbiased(agree):
    x = gradients(1, 2, 20, torch.float64)
    out = run(RandomK(0.25, agree=agree, rescale=True), x.tile(10).expand(300, 2, 200)).out.view(3000, 20)
    spread = out.std(0) / math.sqrt(3000)
    assert ((out.mean(0) - x.mean(1)[0]).abs() < 4.5 * spread).all()


@pytest.mark.parametrize("agree", [True, False])
def test_random_k_of_everything_is_dense_to_the_bit(agree):
    g = gradients(2, 3, 30)
    assert torch.equal(run(RandomK(1.0, agree=agree), g).out, run(Dense(), g).out)


# ── threshold ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_threshold_sends_what_reaches_it():
    g = gradients(5, 3, 200, torch.float64)
    g[0, 0, :2] = torch.tensor([1.25, -1.25])  # exactly at it counts
    chosen = g.abs() >= 1.25
    own = run(Threshold(1.25), g)
    torch.testing.assert_close(own.out, (g * chosen).mean(1))
    assert torch.equal(own.left.transpose(0, 1) == 0, chosen)
    union = run(Threshold(1.25, agree=True), g)
    torch.testing.assert_close(union.out, g.mean(1) * chosen.any(1))


@pytest.mark.parametrize("agree", [True, False])
def test_a_threshold_that_nothing_reaches_sends_nothing(agree):
    ran = run(Threshold(100.0, agree=agree), gradients(3, 3, 50))
    assert (ran.out == 0).all() and ran.ledgers[0].picked == 0


def test_the_threshold_of_a_density_follows_the_rule():
    n, density = 4000, 0.01
    g = gradients(1, 1, n) * 0.05
    out = run(Threshold(density=density), g).out[0]
    assert torch.equal(out != 0, g[0, 0].abs() >= 1 / (2 * math.sqrt(40)))


def test_the_threshold_follows_the_loss_scale():
    g, layout = gradients(1, 1, 300), layout_of((300,))
    state = Threshold(1.0).init(layout)
    memory.rescale(state, 1024.0)

    def work(comm):
        out = torch.empty(300)
        Threshold(1.0).reduce(g[0, 0] * 1024, state, comm, out)
        return out / 1024

    assert torch.equal(in_threads(1, work)[0], run(Threshold(1.0), g).out[0])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "either a threshold or the density"),
        ({"threshold": 1.0, "density": 0.1}, "either a threshold or the density"),
        ({"threshold": 0.0}, "threshold must be a magnitude above 0"),
        ({"threshold": math.inf}, "threshold must be a magnitude above 0"),
        ({"density": 0.0}, "density must lie above 0"),
    ],
)
def test_bad_thresholds_get_one_clear_error(wrong, says):
    with pytest.raises(ValueError, match=says):
        Threshold(**wrong)


# ── deep gradient compression ──────────────────────────────────────────────────────────────────────────────────


def slowly(g: torch.Tensor, matrices: int, k: int, momentum: float, nesterov: bool) -> torch.Tensor:
    """The paper's algorithm with an exact threshold; the first `matrices` entries are sparse, the rest vectors."""
    steps, world, n = g.shape
    u, v, outs = torch.zeros(world, n), torch.zeros(world, n), []
    u, v = u.to(g.dtype), v.to(g.dtype)
    for step in range(steps):
        if nesterov:
            u = momentum * (u + g[step])
            v = v + u + g[step]
        else:
            u = momentum * u + g[step]
            v = v + u
        sent = torch.zeros_like(v, dtype=torch.bool)
        sent.scatter_(1, v[:, :matrices].abs().topk(k, dim=1).indices, True)
        u = u.masked_fill(sent, 0)
        sent[:, matrices:] = True
        outs.append((v * sent).mean(0))
        v = v.masked_fill(sent, 0)
    return torch.stack(outs)


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_follows_the_paper(nesterov):
    layout = layout_of((20, 10), (7,), (), dtype=torch.float64)
    g = gradients(12, 3, 208, torch.float64)
    ran = run(DGC(0.05, nesterov=nesterov, sample=1.0), g, layout)
    torch.testing.assert_close(ran.out, slowly(g, 200, 10, 0.9, nesterov))


def test_dgc_conserves_velocities():
    layout = layout_of((30, 10), (10,), dtype=torch.float64)
    g = gradients(20, 2, 310, torch.float64)
    for agree in (False, True):
        ran = run(DGC(0.02, agree=agree, momentum=0.0), g, layout)
        kept = sum(state.residual for state in ran.states) / 2
        torch.testing.assert_close(g.mean(1).sum(0), ran.out.sum(0) + kept)


def test_dgc_of_everything_is_momentum():
    g = gradients(10, 2, 60, torch.float64)
    velocity, wanted = torch.zeros(60, dtype=torch.float64), []
    for mean in g.mean(1):
        velocity = 0.9 * velocity + mean
        wanted.append(velocity)
    torch.testing.assert_close(run(DGC(1.0), g, layout_of((10, 6), dtype=torch.float64)).out, torch.stack(wanted))


def test_dgc_sends_vectors_whole_and_with_momentum():
    layout = layout_of((50, 20), (20,), dtype=torch.float64)
    g = gradients(6, 2, 1020, torch.float64)
    vectors = run(DGC(0.01), g, layout).out[:, 1000:]
    wanted = run(Momentum(Dense()), g[:, :, 1000:]).out
    torch.testing.assert_close(vectors, wanted)


@pytest.mark.parametrize("sample", [0.01, 0.1])
def test_dgc_never_sends_more_than_k_and_seldom_much_less(sample):
    layout = layout_of((200, 100))
    g = gradients(10, 1, 20000) * torch.linspace(0.01, 3, 20000)  # larger towards the end
    sent = (run(DGC(0.01, sample=sample), g, layout).out != 0).sum(1)
    assert (sent <= 200).all() and (sent >= 160).float().mean() > 0.8


def test_dgc_of_mostly_zeros_sends_no_zeros():
    g = torch.zeros(1, 2, 1000)
    g[:, :, ::100] = 1.0
    ran = run(DGC(0.5), g, layout_of((50, 20)))
    assert torch.equal(ran.out[0], g[0, 0]) and ran.ledgers[0].picked == 10


def test_dgc_clips_every_workers_gradient_to_its_share():
    g = gradients(1, 4, 50, torch.float64)
    g[0, 1] *= 1e-4  # short enough already
    out = run(DGC(1.0, clip=1.0), g, layout_of((10, 5), dtype=torch.float64)).out[0]
    clipped = [x * min(1.0, 0.5 / x.norm().item()) for x in g[0]]
    torch.testing.assert_close(out, torch.stack(clipped).mean(0))


def test_the_union_of_choices_is_masked_on_every_worker():
    g = gradients(1, 2, 100, torch.float64)
    ran = run(DGC(0.05, agree=True), g, layout_of((10, 10), dtype=torch.float64))
    sent = ran.out[0] != 0
    assert sent.sum() > 5
    for state in ran.states:
        assert torch.equal(state.velocity == 0, sent) and torch.equal(state.residual == 0, sent)


def test_without_momentum_dgc_is_top_k_with_feedback():
    g = gradients(8, 3, 200)
    plain = run(ErrorFeedback(TopK(0.1)), g, layout_of((20, 10)))
    assert torch.equal(run(DGC(0.1, momentum=0.0, sample=1.0), g, layout_of((20, 10))).out, plain.out)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"density": 0.0}, "density must lie above 0"),
        ({"momentum": 1.0}, "momentum must lie between 0 and 1"),
        ({"clip": 0.0}, "clip must be a norm above 0"),
        ({"sample": 0.0}, "sample must lie above 0"),
    ],
)
def test_bad_arguments_get_one_clear_error(wrong, says):
    with pytest.raises(ValueError, match=says):
        DGC(**wrong)
