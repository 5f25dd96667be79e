"""Memories before a method: nothing is lost, momentum is momentum, and Adam is Adam."""

import pytest
import torch

from processes import launch
from thinwire import (
    QSGD,
    Adam,
    Cast,
    Dense,
    ErrorFeedback,
    Momentum,
    PowerSGD,
    RandomBlock,
    Route,
    TopK,
    memory,
)
from thinwire.comm.threads import in_threads
from thinwire.core.reducer import Moments, Reducer
from thread_runs import gradients, layout_of, run

# ── error feedback ─────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_not_sent_waits():
    g = torch.tensor([[[3.0, 2.0, 1.0]], [[0.0, 0.0, 0.5]], [[0.0, 0.0, 0.0]]])
    ran = run(ErrorFeedback(TopK(1 / 3)), g)
    assert ran.out.tolist() == [[3, 0, 0], [0, 2, 0], [0, 0, 1.5]]
    assert (ran.left == 0).all()


def test_decay_forgets():
    g = torch.zeros(2, 1, 100)
    g[0, 0, :2] = torch.tensor([3.0, 2.0])
    out = run(ErrorFeedback(TopK(0.01), decay=0.5), g).out
    assert out[:, :2].tolist() == [[3, 0], [0, 1]] and (out[:, 2:] == 0).all()
    assert not ErrorFeedback(TopK(0.5), decay=0.5).conserves


# ── momentum ───────────────────────────────────────────────────────────────────────────────────────────────────


def trajectory(optimizer: torch.optim.Optimizer, weight: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    seen = []
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
        seen.append(weight.detach().clone())
    return torch.stack(seen)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("inner", [Dense(), ErrorFeedback(Dense()), ErrorFeedback(TopK(1.0))])
def test_momentum_before_everything_is_sent_is_momentum_after(nesterov, masking, inner):
    g = gradients(15, 3, 20, torch.float64)
    out = run(Momentum(inner, 0.9, nesterov=nesterov, masking=masking), g).out
    plain, usual = (torch.zeros(20, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours = trajectory(torch.optim.SGD([plain], lr=0.1), plain, out)
    torchs = torch.optim.SGD([usual], lr=0.1, momentum=0.9, nesterov=nesterov)
    torch.testing.assert_close(ours, trajectory(torchs, usual, g.mean(1)))


@pytest.mark.parametrize("method", [TopK(0.1), TopK(0.1, agree=True), RandomBlock(0.1), PowerSGD(1)])
@pytest.mark.parametrize("masking", [False, True])
def test_momentum_conserves_velocities(method, masking):
    """Sum of all u that were added = sum of results + residual."""
    layout = layout_of((12, 10), dtype=torch.float64)
    g, added = gradients(12, 2, 120, torch.float64), []

    class Noting(ErrorFeedback):
        def reduce(self, x, state, comm, out, /):
            added.append(x.clone())
            super().reduce(x, state, comm, out)

    ran = run(Momentum(Noting(method), masking=masking), g, layout)
    assert len(added) == 24
    kept = sum(state.inner.residual for state in ran.states) / 2
    torch.testing.assert_close(sum(added) / 2, ran.out.sum(0) + kept)


def test_velocity_is_forgotten_where_something_that_had_waited_is_sent():
    g = torch.zeros(3, 1, 4)
    g[0, 0] = torch.tensor([8.0, 4.0, 1.0, 0.0])
    g[1, 0] = torch.tensor([0.0, 4.0, 1.0, 0.0])
    method = Momentum(ErrorFeedback(TopK(0.25)), momentum=0.5)
    first = run(method, g[:1]).states[0]
    assert first.velocity.tolist() == [8, 4, 1, 0]  # the first entry did not wait, and keeps its momentum
    second = run(method, g[:2]).states[0]
    assert second.velocity.tolist() == [4, 0, 1.5, 0]  # the second one waited
    assert run(method, g[:2]).out[1].tolist() == [0, 4 + 6, 0, 0]
    kept = run(Momentum(ErrorFeedback(TopK(0.25)), momentum=0.5, masking=False), g[:2]).states[0]
    assert kept.velocity.tolist() == [4, 6, 1.5, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_velocity_is_forgotten_also_where_rounding_stays_behind(dtype):
    g = gradients(20, 2, 200)
    plain = run(Momentum(ErrorFeedback(TopK(0.05))), g).states
    cast = run(Momentum(ErrorFeedback(Cast(TopK(0.05), dtype=dtype))), g).states
    for a, b in zip(plain, cast, strict=True):
        assert (a.velocity == 0).sum() > 5
        assert ((a.velocity == 0) == (b.velocity == 0)).float().mean() > 0.97


def test_what_is_sent_every_step_keeps_its_momentum():
    layout = layout_of((20, 10), (10,), dtype=torch.float64)
    g = gradients(6, 2, 210, torch.float64)
    out = run(Momentum(ErrorFeedback(Route(TopK(0.05), smallest=0))), g, layout).out
    torch.testing.assert_close(out[:, 200:], run(Momentum(Dense()), g[:, :, 200:]).out)


# ── Adam ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("inner", [Dense(), ErrorFeedback(Dense())])
def test_adam_before_everything_is_sent_is_adamw_by_sgd(inner):
    g = gradients(30, 1, 20, torch.float64)
    updates = run(Adam(inner, betas=(0.8, 0.95), eps=1e-6), g).out
    start = gradients(1, 1, 20, torch.float64, seed=5)[0, 0]
    ours, torchs = (start.clone().requires_grad_() for _ in range(2))
    by_sgd = trajectory(torch.optim.SGD([ours], lr=0.01, weight_decay=0.1), ours, updates)
    adamw = torch.optim.AdamW([torchs], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    torch.testing.assert_close(by_sgd, trajectory(adamw, torchs, g[:, 0]))


def test_adam_averages_the_workers_own_updates_and_keeps_the_rest():
    g = gradients(10, 3, 50, torch.float64)
    alone = torch.stack([run(Adam(Dense()), g[:, rank : rank + 1]).out for rank in range(3)])
    torch.testing.assert_close(run(Adam(Dense()), g).out, alone.mean(0))
    ran = run(Adam(ErrorFeedback(TopK(0.1))), g)
    kept = sum(state.inner.residual for state in ran.states) / 3
    torch.testing.assert_close(alone.mean(0).sum(0), ran.out.sum(0) + kept)


@pytest.mark.parametrize("method", [Adam(ErrorFeedback(TopK(0.2))), Momentum(ErrorFeedback(TopK(0.2)))])
def test_a_change_of_the_loss_scale_comes_out_again(method):
    g, layout = gradients(10, 1, 40, torch.float64), layout_of((40,), dtype=torch.float64)
    scales = [1.0, 1.0, 1024.0, 1024.0, 1024.0, 512.0, 512.0, 2.0**16, 2.0**16, 2.0**16]

    def work(comm):
        state, scale, outs = method.init(layout), 1.0, []
        for grad, now in zip(g[:, 0], scales):
            if now != scale:
                memory.rescale(state, now / scale)
                scale = now
            out = torch.empty(40, dtype=torch.float64)
            method.reduce(grad * now, state, comm, out)
            outs.append(out / now)
        return torch.stack(outs)

    torch.testing.assert_close(in_threads(1, work)[0], run(method, g).out)


def test_under_ddp_thresholds_and_updates_follow_the_loss_scale():
    for spelling in ("Adam(ErrorFeedback(TopK(0.1)))", "ErrorFeedback(Threshold(0.1))"):
        calls = [("laws", {"spelling": spelling, "steps": 8}), ("follows_the_scale", {"spelling": spelling})]
        for plain, scaled in launch(2, "ddp_cases:many", calls=calls):
            torch.testing.assert_close(plain["unsent"], scaled, rtol=1e-3, atol=1e-5)


def test_updates_are_small_where_gradients_were_always_zero():
    g = gradients(5, 2, 30)
    g[:, :, :10] = 0
    out = run(Adam(ErrorFeedback(TopK(1.0))), g).out
    assert out.isfinite().all() and (out[:, :10] == 0).all()


# ── bad arguments ──────────────────────────────────────────────────────────────────────────────────────────────


class WantsMoments(Reducer):
    wants = Moments

    def init(self, layout, /):
        return None

    def reduce(self, local, state, comm, out, /):
        raise AssertionError("not to be called")


@pytest.mark.parametrize("wrapper", [ErrorFeedback, Momentum, Adam, Cast, Route])
def test_what_wants_more_than_gradients_is_refused(wrapper):
    with pytest.raises(TypeError, match="WantsMoments wants Moments"):
        wrapper(WantsMoments())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ErrorFeedback(QSGD(), decay=0.0), "decay must lie above 0"),
        (lambda: Momentum(Dense(), momentum=1.0), "momentum must lie between 0 and 1"),
        (lambda: Adam(Dense(), betas=(0.9, 1.0)), "betas must be two numbers"),
        (lambda: Adam(Dense(), betas=(0.9,)), "betas must be two numbers"),
        (lambda: Adam(Dense(), eps=0.0), "eps must be above 0"),
    ],
)
def test_bad_arguments_get_one_clear_error(make, says):
    with pytest.raises(ValueError, match=says):
        make()
