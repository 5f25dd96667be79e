"""PowerSGD: exact where the gradient has low rank, safe where it has none, and its error is the worker's own."""

import pytest
import torch

from thinwire import ErrorFeedback, PowerSGD
from thinwire.comm.threads import in_threads
from thread_runs import gradients, layout_of, run


def low_rank(*shape: int, rank: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(shape[0], rank, generator=generator, dtype=torch.float64)
    return left @ torch.randn(rank, shape[1], generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("world", [1, 3])
def test_four_matrices_of_rank_1_and_one_shape_come_back_exactly_at_rank_1(world):
    sizes = [1.0, 1e-4, 300.0, 0.05]
    mean = torch.cat([s * low_rank(12, 9, rank=1, seed=i).flatten() for i, s in enumerate(sizes)])
    shares = torch.linspace(0.5, 1.5, world, dtype=torch.float64) if world > 1 else torch.ones(1)
    g = (shares[:, None] * mean)[None]
    out = run(PowerSGD(1), g, layout_of(*[(12, 9)] * 4, dtype=torch.float64)).out[0]
    for got, want in zip(out.split(108), mean.split(108)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12 * want.abs().max().item())


def test_a_matrix_of_rank_r_comes_back_exactly_at_rank_r_from_workers_that_differ():
    parts = torch.stack([low_rank(20, 15, rank=1, seed=i).flatten() for i in range(3)])
    out = run(PowerSGD(3), parts[None], layout_of((20, 15), dtype=torch.float64)).out[0]
    torch.testing.assert_close(out, parts.mean(0))


def slowly(g: torch.Tensor, shapes: list[tuple[int, int]], right: list[torch.Tensor]) -> torch.Tensor:
    """The paper's algorithm, matrix by matrix, with error feedback."""
    steps, world, _ = g.shape
    error, outs = torch.zeros_like(g[0]), []
    for step in range(steps):
        error = error + g[step]
        out, start = torch.zeros_like(g[0, 0]), 0
        for i, (rows, columns) in enumerate(shapes):
            stop = start + rows * columns
            m = error[:, start:stop].view(world, rows, columns)
            p, _ = torch.linalg.qr((m @ right[i]).mean(0))
            q = m.mT @ p
            error[:, start:stop] -= (p @ q.mT).reshape(world, -1)
            right[i] = q.mean(0)
            out[start:stop] = (p @ right[i].T).flatten()
            start = stop
        outs.append(out)
    return torch.stack(outs)


def test_it_follows_the_paper_matrix_by_matrix():
    # Two shapes in turn, so that equal shapes lie at unequal distances too.
    shapes = [(8, 6), (8, 6), (5, 12), (8, 6), (8, 6), (5, 12), (8, 6)]
    layout = layout_of(*shapes, dtype=torch.float64)
    g = gradients(6, 3, layout.numel, torch.float64)
    method = PowerSGD(2)
    first = method.init(layout)
    by_shape = {(b.rows, b.columns): list(q) for b, q in zip(first.batches, first.right)}
    right = [by_shape[shape].pop(0) for shape in shapes]
    torch.testing.assert_close(run(ErrorFeedback(method), g, layout).out, slowly(g, shapes, right))


def test_the_error_is_this_workers_own_and_not_its_distance_from_the_mean():
    # Of its own gradient, a worker sent all that lies in the space of the result, whatever the others have there.
    g = gradients(1, 3, 300, torch.float64)
    ran = run(PowerSGD(2), g, layout_of((20, 15), dtype=torch.float64))
    space = torch.linalg.svd(ran.out[0].view(20, 15)).U[:, :2]
    for rank in range(3):
        assert (space.T @ ran.left[rank, 0].view(20, 15)).abs().max() < 1e-12
        assert (space.T @ g[0, rank].view(20, 15)).abs().max() > 0.1


def test_the_warm_start_finds_the_best_approximation():
    matrix = low_rank(30, 20, rank=20).flatten()
    g = matrix.expand(60, 1, 600)
    out = run(PowerSGD(2), g, layout_of((30, 20), dtype=torch.float64)).out
    u, s, v = torch.linalg.svd(matrix.view(30, 20))
    best = ((u[:, :2] * s[:2]) @ v[:2]).flatten()
    errors = (out - matrix).norm(dim=1)
    assert errors[-1] == pytest.approx((best - matrix).norm().item(), rel=1e-3)
    assert errors[-1] < 0.95 * errors[0]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_dead_layer_gives_no_nan_and_wakes_up(rank):
    layout = layout_of((16, 12), (16, 12), (12,))
    g = gradients(220, 2, layout.numel)
    g[:200, :, : 16 * 12] = 0
    ran = run(ErrorFeedback(PowerSGD(rank)), g, layout)
    assert ran.out.isfinite().all()
    assert (ran.out[:200, : 16 * 12] == 0).all()
    assert (ran.out[200:, : 16 * 12] != 0).any()


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_the_size_of_gradients_does_not_matter(size):
    layout = layout_of((16, 12))
    g = gradients(5, 2, layout.numel)
    usual, scaled = run(PowerSGD(2), g, layout).out, run(PowerSGD(2), g * size, layout).out
    torch.testing.assert_close(scaled / size, usual, rtol=1e-3, atol=1e-4)


def test_two_messages_a_step_with_vectors_in_the_first():
    layout = layout_of((40, 30), (30,), (40, 30), (5, 5, 4), (3, 3), ())
    ledger = run(PowerSGD(2), gradients(3, 2, layout.numel), layout).ledgers[0]
    first = 2 * (40 + 40 + 5) + 30 + 9 + 1  # P of three matrices; two vectors; a matrix too small to gain
    second = 2 * (30 + 30 + 20)
    assert ledger.entries == [("all_mean", 4 * first), ("all_mean", 4 * second)] * 3
    assert ledger.picked == 3 * (first + second)


def test_vectors_and_matrices_that_would_not_gain_are_exact():
    layout = layout_of((7,), (4, 4), (), (2, 50), dtype=torch.float64)
    g = gradients(2, 3, layout.numel, torch.float64)
    ran = run(PowerSGD(4), g, layout)
    torch.testing.assert_close(ran.out, g.mean(1))
    assert (ran.left == 0).all()


def test_a_vector_inside_a_larger_buffer_is_read_and_written_in_its_place():
    layout = layout_of((8, 6), (3,), (8, 6))
    g = gradients(1, 2, layout.numel)
    expected = run(PowerSGD(1), g, layout)

    def work(comm):
        buffer, outs = torch.full((200,), 7.0), torch.full((200,), 7.0)
        method, x, out = PowerSGD(1), buffer[13 : 13 + layout.numel], outs[5 : 5 + layout.numel]
        x.copy_(g[0, comm.rank])
        method.reduce(x, method.init(layout), comm, out)
        assert (buffer[:13] == 7).all() and (buffer[13 + layout.numel :] == 7).all()
        assert (outs[:5] == 7).all() and (outs[5 + layout.numel :] == 7).all()
        return out, x

    for rank, (out, left) in enumerate(in_threads(2, work)):
        torch.testing.assert_close(out, expected.out[0])
        torch.testing.assert_close(left, expected.left[rank, 0])


@pytest.mark.parametrize("rank", [0, -1])
def test_there_is_no_rank_below_1(rank):
    with pytest.raises(ValueError, match="rank must be 1 or more"):
        PowerSGD(rank)
