"""LowBit, and QSGD and SignSGD going two ways: against a plain twin, and what becomes of the owners' residuals."""

import pytest
import torch
from torch import Tensor

from thinwire import QSGD, Dense, ErrorFeedback, LowBit, SignSGD
from thinwire.comm.dry import DryComm
from thinwire.comm.threads import in_threads
from thinwire.core import memory
from thread_runs import gradients, layout_of, run

SHAPES = ((30, 40), (40,), (17, 11))  # 1200 + 40 + 187 entries


def coarse(y: Tensor, bits: int, block: int, spans: list[tuple[int, int]]) -> Tensor:
    """What a code of 1 or 2 bits says about a vector, written out."""
    said = torch.zeros_like(y)
    for start, stop in spans:
        for at in range(start, stop, block):
            part = y[at : min(at + block, stop)]
            levels = torch.where(part >= 0, 1.0, -1.0).double()
            if bits == 2:
                levels[part.abs() >= 0.9816 * part.square().mean().sqrt()] *= 1.510 / 0.4528
            scale = (levels @ part) / (levels @ levels)
            said[at : min(at + block, stop)] = levels * scale.float().bfloat16().double()
    return said


@pytest.mark.parametrize("world", [1, 2, 4])  # powers of two: means are exact, and no sign hangs on rounding
@pytest.mark.parametrize("bits", [1, 2])
def test_two_ways_is_what_the_plain_twin_does(bits, world):
    layout, steps, block = layout_of(*SHAPES, dtype=torch.float64), 4, 64
    n, part = layout.numel, -(-layout.numel // world)
    grads = gradients(steps, world, n, torch.float64)
    matrices = [(0, 1200), (1240, n)]
    owed, wanted = torch.zeros(n, dtype=torch.float64), []
    for step in range(steps):
        mean, out = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        for start in range(0, n, part):
            stop = min(start + part, n)
            spans = [(max(a, start), min(b, stop)) for a, b in matrices if a < stop and b > start]
            for rank in range(world):
                mean += coarse(grads[step, rank], bits, block, spans) / world
            owed[start:stop] += mean[start:stop]
            said = coarse(owed, bits, block, spans)
            out += said
            owed -= said
        out[1200:1240] = grads[step, :, 1200:1240].mean(0)
        wanted.append(out)
    ran = run(LowBit(bits, block, smallest=100), grads, layout)
    torch.testing.assert_close(ran.out, torch.stack(wanted), rtol=1e-9, atol=1e-9)
    held = torch.cat([state.owned.part for state in ran.states])[:n]
    torch.testing.assert_close(held, owed, rtol=1e-9, atol=1e-9)


def test_vectors_and_small_tensors_are_sent_whole():
    layout = layout_of((40, 40), (40,), (10, 10))
    grads = gradients(1, 3, layout.numel)
    out = run(LowBit(1), grads, layout).out[0]
    torch.testing.assert_close(out[1600:], grads[0, :, 1600:].mean(0))
    assert (out[:1600] - grads[0, :, :1600].mean(0)).abs().max() > 0.1


@pytest.mark.parametrize("world", [2, 4, 16, 64])
def test_a_link_carries_the_coded_vector_twice_however_many_workers_there_are(world):
    layout, comm = layout_of((500, 1000)), DryComm(world)
    method = LowBit(2, 512)
    x = gradients(1, 1, layout.numel)[0, 0]
    method.reduce(x, method.init(layout), comm, torch.zeros_like(x))
    coded = layout.numel / 4 + 2 * layout.numel / 512
    assert comm.ledger.wire == pytest.approx(2 * (world - 1) / world * coded, rel=5e-3)
    assert [op for op, _ in comm.ledger.entries] == ["all_to_all", "all_gather"]


@pytest.mark.parametrize("method", [LowBit(2), QSGD(4, two_way=True), SignSGD(two_way=True)], ids=repr)
def test_shares_of_the_dense_bytes_grow_by_less_than_a_hundredth_from_4_to_64_workers(method):
    layout, shares = layout_of((500, 1000), (1000,)), []
    x = gradients(1, 1, layout.numel)[0, 0]
    for world in (4, 64):
        links = []
        for each in (method, Dense()):
            comm = DryComm(world)
            each.reduce(x.clone(), each.init(layout), comm, torch.zeros_like(x))
            links.append(comm.ledger.wire)
        shares.append(links[0] / links[1])
    assert shares[1] < 1.01 * shares[0]


@pytest.mark.parametrize("method", [LowBit(2, 64, smallest=0), QSGD(4, two_way=True), SignSGD(two_way=True)], ids=repr)
def test_what_owners_could_not_say_belongs_to_the_loss_scale_and_to_what_is_unsent(method):
    ran = run(method, gradients(2, 3, 1200), layout_of((30, 40)))
    for state in ran.states:
        (part,) = memory.unsent_tensors(state)
        before = part.clone()
        assert part.numel() == 400 and before.norm() > 0
        memory.rescale(state, 8.0)
        torch.testing.assert_close(memory.unsent_tensors(state)[0], 8 * before)


@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_another_number_of_workers_conserves_what_owners_hold(world):
    method, layout = LowBit(2, 64, smallest=0), layout_of((30, 41))
    ran = run(method, gradients(2, 3, layout.numel), layout)
    saved = [memory.save(state, layout) for state in ran.states]
    before = torch.cat([state.owned.part for state in ran.states])[: layout.numel] * 3
    parts = []
    for rank in range(world):
        state = method.init(layout)
        made = memory.new_world(saved, state, rank, world)
        memory.load(state, made, layout, same_world=False)
        parts.append(state.owned.part)
    torch.testing.assert_close(torch.cat(parts)[: layout.numel] * world, before)


@pytest.mark.parametrize("method", [LowBit(1, 64, smallest=0), LowBit(2, 64, smallest=0), LowBit(2, two_way=False)])
def test_with_feedback_a_quadratic_is_minimised(method):
    centres = gradients(1, 3, 1200, torch.float64)[0]
    layout, feedback = layout_of((30, 40), dtype=torch.float64), ErrorFeedback(method)

    def work(comm):
        state, weights = feedback.init(layout), torch.zeros(1200, dtype=torch.float64)
        out = torch.zeros_like(weights)
        for step in range(300):
            feedback.reduce(weights - centres[comm.rank], state, comm, out)
            weights -= (0.1 if step < 150 else 0.01) * out
        return weights

    weights = in_threads(3, work)[0]
    assert (weights - centres.mean(0)).norm() < 0.05 * centres.mean(0).norm()


def test_owners_feedback_lets_coarse_means_add_up():
    # The same gradient every step: over time the results add up to it, though each has two levels.
    layout, grads = layout_of((30, 40)), gradients(1, 2, 1200)
    out = run(ErrorFeedback(LowBit(1, 64, smallest=0)), grads.expand(120, 2, 1200), layout).out
    error = (out.mean(0) - grads[0].mean(0)).norm() / grads[0].mean(0).norm()
    assert error < 0.1 < (out[0] - grads[0].mean(0)).norm() / grads[0].mean(0).norm()


@pytest.mark.parametrize("method", [LowBit(2), LowBit(1.6), LowBit(4), LowBit(8)], ids=repr)
@pytest.mark.parametrize("size", [2.0**-100, 2.0**100])
def test_the_size_of_gradients_does_not_matter(method, size):
    grads, layout = gradients(2, 2, 1600), layout_of((40, 40))
    plain, scaled = run(method, grads, layout).out, run(method, grads * size, layout).out / size
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-6)


def test_nothing_but_vectors_needs_one_message():
    ran = run(LowBit(2), gradients(1, 2, 50))
    assert [op for op, _ in ran.ledgers[0].entries] == ["all_mean"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"bits": 5}, "bits must be one of 1, 1.6, 2"), ({"block": 0}, "block must lie"), ({"smallest": -1}, "smallest")],
)
def test_bad_arguments_get_one_clear_error(wrong, says):
    with pytest.raises(ValueError, match=says):
        LowBit(**wrong)
