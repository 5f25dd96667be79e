"""ExDyna's rules one by one, its balance, and what it sends."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import ErrorFeedback, ExDyna, TopK
from thinwire.comm.dry import DryComm
from thinwire.comm.threads import in_threads
from thinwire.core import memory
from thinwire.exchange import bytes as wire
from thinwire.exchange import slots
from thinwire.methods.exdyna import partitions, published
from thinwire.methods.exdyna.partitions import Blocks
from thinwire.methods.exdyna.picks import REPORT
from thread_runs import gradients, layout_of, run

SIZES = (1, 31, 32, 1023, 32767, 32768, 65535, 10**6, 104729)
WORKERS = (1, 2, 3, 4, 7, 8, 64)


# Parts 1 and 2: structure


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("cut", [partitions.cut, published.cut])
def test_partitions_cover_everything_once(numel, workers, cut):
    blocks = cut(numel, workers)
    shares = partitions.fair_shares(blocks.count, workers)
    edges = partitions.bounds(blocks, shares)
    assert sum(shares) == blocks.count and max(shares) - min(shares) <= 1
    assert edges[0] == 0 and edges[-1] == numel and edges == sorted(edges)
    if numel >= 4 * workers:
        assert min(shares) >= 1 and len(set(edges)) == workers + 1


def test_no_block_of_ours_is_larger_than_the_others():
    for numel in SIZES:
        for workers in WORKERS:
            blocks = partitions.cut(numel, workers)
            last = numel - blocks.start(blocks.count - 1)
            assert 0 < last <= blocks.size  # the published cut gives the last one up to 32767 entries more


def test_the_published_cut():
    assert published.cut(11_173_962, 8) == Blocks(11_173_962, 1024, 10_912)
    assert published.cut(65_535, 4) == Blocks(65_535, 1024, 32)  # half of it in the last block


@given(
    shares=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    data=st.data(),
)
def test_no_rule_loses_a_block(shares, data):
    count = sum(shares)
    loads = data.draw(st.lists(st.integers(0, 10_000), min_size=len(shares), max_size=len(shares)))
    by_block = data.draw(st.lists(st.integers(0, 10_000), min_size=count, max_size=count))
    moved, moved_loads = partitions.move_pairwise(shares, [float(load) for load in loads])
    theirs = published.move(shares, loads, Blocks(count * 32, count, 32))
    for after in (moved, theirs, partitions.recut(shares, [float(load) for load in by_block])):
        assert sum(after) == count and min(after) >= 1 and len(after) == len(shares)
    assert sum(moved_loads) == pytest.approx(sum(loads))
    quarter = count / (4 * len(shares))
    assert all(after >= min(before, quarter) for before, after in zip(shares, theirs))


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_workers_look_at_every_partition_in_turn(workers):
    method, numel = ExDyna(0.5, control="official", blocks=40), 700  # without slots: all that is seen is picked
    state, x = method.init(layout_of((numel,))), torch.ones(numel)
    method.prepare(state, workers)
    state.control.set(0.5)
    looked = []
    for step in range(workers):
        state.step = step
        owned = [tuple(method.pick(x, state, rank).index.tolist()) for rank in range(workers)]
        assert sorted(i for part in owned for i in part) == list(range(numel))
        looked.append(owned)
    for rank in range(workers):
        assert len({step[rank] for step in looked}) == workers


# Part 2: balance


def settled(rule, loads, workers, steps=500, seed=0):
    """The mean f of the last steps, and block moves a step, with Poisson counts of these loads."""
    generator = torch.Generator().manual_seed(seed)
    blocks, shares = Blocks(32 * len(loads), len(loads), 32), partitions.fair_shares(len(loads), workers)
    smooth, imbalance, moves = [], [], []
    for _ in range(steps):
        counts = torch.poisson(loads, generator=generator).long()
        picks = [int(part.sum()) for part in counts.split(shares)]
        imbalance.append(workers * max(picks) / sum(picks))
        before = shares
        if rule == "pairwise":
            shares, smooth = partitions.move_pairwise(shares, partitions.smoothed(smooth, picks))
        elif rule == "recut":
            smooth = partitions.smoothed(smooth, counts.tolist())
            shares = partitions.recut(shares, smooth)
        else:
            shares = published.move(shares, picks, blocks)
        moves.append(partitions.moves(before, shares))
    return sum(imbalance[-20:]) / 20, sum(moves[-100:]) / 100


def profile(name, picks=50_000, blocks=1024):
    place = torch.arange(blocks)
    layers = torch.randn(32, generator=torch.Generator().manual_seed(1)).exp().repeat_interleave(blocks // 32)
    front = torch.where(place < blocks // 10, 0.5 / (blocks // 10), 0.5 / (blocks - blocks // 10))
    shape = {"ramp": torch.linspace(1.8, 0.2, blocks), "layers": layers, "front": front, "even": torch.ones(blocks)}
    return shape[name] / shape[name].sum() * picks


@pytest.mark.parametrize("name", ["ramp", "layers", "front"])
def test_loads_are_balanced_where_the_published_rule_is_stuck(name):
    for rule in ("recut", "pairwise"):
        assert settled(rule, profile(name), workers=8)[0] <= 1.15
    assert settled("official", profile(name), workers=8)[0] > 1.5


@pytest.mark.parametrize("rule", ["recut", "pairwise"])
def test_even_loads_are_left_alone(rule):
    imbalance, moves = settled(rule, profile("even", picks=16_000), workers=8)
    assert imbalance <= 1.05 and moves < 0.1


def test_three_loads_that_the_published_rule_never_moves():
    loads, blocks = [1500, 1000, 500], Blocks(32 * 300, 300, 32)
    assert published.move([100, 100, 100], loads, blocks) == [100, 100, 100]
    shares, _ = partitions.move_pairwise([100, 100, 100], [float(load) for load in loads])
    assert shares[0] < 100 < shares[2]
    by_block = [load / 100 for load in loads for _ in range(100)]
    assert partitions.recut([100, 100, 100], by_block) == [67, 83, 150]


def test_the_published_rule_moves_one_block_where_the_mean_lies_between():
    blocks = Blocks(32 * 200, 200, 32)
    assert published.move([100, 100], [1200, 800], blocks) == [99, 101]
    assert published.move([100, 100], [800, 1200], blocks) == [101, 99]
    assert published.move([175, 25], [800, 1200], blocks) == [175, 25]  # a quarter of the fair share


# What is sent


@pytest.mark.parametrize("topology", ["recut", "pairwise", "official", "static"])
def test_picks_are_exclusive_and_at_their_threshold(topology):
    control = "official" if topology == "official" else "fast"
    method, workers, numel = ExDyna(0.05, topology=topology, control=control), 3, 2000
    state, x = method.init(layout_of((numel,))), gradients(1, workers, numel)[0]
    method.prepare(state, workers)
    state.control.set(2.3)
    reports = [method.pick(x[rank], state, rank) for rank in range(workers)]
    union = method.union(state, reports)
    assert torch.equal(union, torch.unique(union)) and union.numel() == sum(r.index.numel() for r in reports)
    edges = partitions.bounds(method._blocks(numel, workers), state.shares)
    for rank, report in enumerate(reports):
        own = torch.arange(edges[rank], edges[rank + 1])
        assert torch.equal(report.index.long(), own[x[rank, own].abs() >= 2.3])


def test_over_full_workers_keep_their_largest():
    method, numel = ExDyna(0.01), 1000
    state, x = method.init(layout_of((numel,))), gradients(1, 1, numel)[0, 0]
    method.prepare(state, 2)
    state.control.set(1e-3)
    report = method.pick(x, state, 0)
    low, high = 0, partitions.bounds(method._blocks(numel, 2), state.shares)[1]
    assert report.above > report.index.numel() > 0
    rest = x[low:high].clone()
    rest[report.index.long()] = 0
    assert x[report.index].abs().min() >= rest.abs().max()


@pytest.mark.parametrize(
    ("density", "method"),
    [(density, method) for density in (0.3, 0.05, 0.01) for method in ("recut", "official")]
    if os.environ.get("THINWIRE_TEST_ALL")
    else [(0.3, "recut"), (0.05, "official"), (0.01, "recut")],
)
def test_nothing_is_lost_in_three_hundred_steps(density, method):
    exdyna = ExDyna.official(density) if method == "official" else ExDyna(density)
    grads = gradients(300, 3, 600, torch.float64)
    grads[100:] *= 30  # dense steps, forced picks, full slots
    grads[200:] *= 1e-3
    ran = run(ErrorFeedback(exdyna), grads)
    held = torch.stack([state.residual for state in ran.states]).mean(0)
    handed = grads.mean(1).sum(0)
    size = grads.abs().mean(1).sum(0)
    assert ((ran.out.sum(0) + held - handed).abs() / size).max() < 1e-12


def test_what_was_sent_is_gone_on_every_worker_and_nothing_else():
    grads = gradients(1, 4, 3000)
    ran = run(ExDyna(0.02), grads)
    sent = ran.out[0] != 0
    assert 0 < sent.sum() < 3000
    for rank in range(4):
        assert (ran.left[rank, 0][sent] == 0).all()
        assert torch.equal(ran.left[rank, 0][~sent], grads[0, rank][~sent])


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_tiny_models_and_single_workers_are_sent_whole(numel, workers):
    grads = gradients(4, workers, numel)
    for method in (ExDyna(0.5), ExDyna.official(0.5)):
        ran = run(ErrorFeedback(method), grads)
        torch.testing.assert_close(ran.out, grads.mean(1))
        assert not any(state.residual.any() for state in ran.states)


@pytest.mark.parametrize(("density", "workers"), [(1.0, 4), (0.01, 1)])
def test_everything_is_sent_where_that_is_cheaper(density, workers):
    grads = gradients(3, workers, 2000)
    ran = run(ErrorFeedback(ExDyna(density)), grads)
    torch.testing.assert_close(ran.out, grads.mean(1))
    assert ran.ledgers[0].fallbacks == 3 and ran.ledgers[0].collectives == 3


def test_a_step_is_two_collectives_and_the_bytes_are_those_announced():
    method, workers, numel, steps = ExDyna(0.02), 4, 5000, 12
    grads = gradients(steps, workers, numel)

    def work(comm):
        reducer = ErrorFeedback(method)
        state, out = reducer.init(layout_of((numel,))), torch.zeros(numel)
        for step in range(steps):
            method.prepare(state.inner, workers)
            announced = method.message(state.inner)
            comm.ledger.clear()
            reducer.reduce(grads[step, comm.rank].clone(), state, comm, out)
            entries = comm.ledger.entries
            first = [("all_gather", 8)] if step == 0 else []  # the threshold that all agree on
            assert entries == [*first, ("all_gather", announced), ("all_mean", 4 * sum(state.inner.picks))]
            assert int((out != 0).sum()) == sum(state.inner.picks)

    in_threads(workers, work)


@given(
    st.integers(1, 3000).flatmap(
        lambda span: st.tuples(st.just(span), st.lists(st.integers(0, span - 1), max_size=200, unique=True))
    )
)
def test_slots_hold_any_indices(case):
    span, index = case
    index = torch.tensor(sorted(index), dtype=torch.int32)
    for offset in (0, 10**6):
        numel = span + offset
        assert wire.encode_index(index + offset, numel).numel() <= slots.longest(index.numel(), span)
        message = slots.fill(index + offset, numel, slots.size(max(1, index.numel()), span))
        assert torch.equal(slots.read(message, numel), index + offset)


def test_traffic_does_not_build_up():
    for workers in (2, 4, 16):
        grads = gradients(50, workers, 3000)
        ran = run(ErrorFeedback(ExDyna(0.02)), grads)
        assert (ran.out[30:] != 0).float().mean() < 0.02 * 1.1
        if workers >= 4:
            union = run(ErrorFeedback(TopK(0.02, agree=True)), grads)
            assert (union.out[30:] != 0).float().mean() > 0.02 * 1.5


# The rest of a method's life


def test_metrics():
    method, workers = ErrorFeedback(ExDyna(0.02)), 4
    grads = gradients(20, workers, 5000)
    ran = run(method, grads)
    told = method.metrics(ran.states[0])
    sent, inner = int((ran.out[-1] != 0).sum()), ran.states[0].inner
    assert told["picks"] == sent and told["build_up"] == sent / 100
    assert told["imbalance"] == workers * max(inner.picks) / sent and 1 <= told["imbalance"] <= workers
    assert 1 <= told["load_imbalance"] <= workers
    assert told["threshold"] == inner.control.threshold and told["block_moves"] == inner.moved >= 0
    dense = ErrorFeedback(ExDyna(1.0))
    assert dense.metrics(run(dense, grads[:1]).states[0])["picks"] == 5000


def test_another_number_of_workers_keeps_the_threshold_and_deals_anew():
    method, layout = ExDyna(0.02), layout_of((5000,))
    state = run(method, gradients(10, 4, 5000)).states[0]
    saved, fresh = memory.save(state, layout), method.init(layout)
    memory.load(fresh, saved, layout, same_world=False)
    assert fresh.control == state.control and fresh.shares == [] and fresh.step == 0 and fresh.fullest == 0

    def go_on(comm):
        mine, out = method.init(layout), torch.zeros(5000)
        memory.load(mine, saved, layout, same_world=False)
        method.reduce(gradients(1, 2, 5000)[0, comm.rank], mine, comm, out)
        return out

    first, second = in_threads(2, go_on)
    assert torch.equal(first, second) and first.any()


def test_a_dry_run_tells_the_bytes():
    method = ExDyna(0.01)
    state, comm, out = method.init(layout_of((10_000,))), DryComm(64), torch.zeros(10_000)
    for step in range(5):
        method.reduce(gradients(1, 1, 10_000, seed=step)[0, 0], state, comm, out)
    assert REPORT < comm.ledger.entries[-2][1] < 200


def test_the_official_preset_is_spelled_out():
    assert ExDyna.official(0.1) == ExDyna(0.1, topology="official", control="official")


@pytest.mark.parametrize(
    "wrong", [{"density": 0}, {"topology": "ring"}, {"control": "slow"}, {"blocks": 0}], ids=lambda w: next(iter(w))
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ExDyna(**{"density": 0.1, **wrong})
