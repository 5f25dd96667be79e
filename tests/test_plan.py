"""The planner: the bytes of the method itself, the seconds of the network, and an honest recommendation."""

import math

import pytest
import torch
from torch import nn

from thinwire.comm.threads import in_threads
from thinwire.core.reducer import Layout
from thinwire.exchange.price import ROLL_CALL, _made_up, prices
from thinwire.plan import (
    Cost,
    Network,
    break_even,
    dense,
    dry_run,
    layout_of,
    predict,
    recommend,
    scaling,
    smallest_ratio,
)
from thinwire.spelling import parse

LAYOUT = Layout(("weight", "bias"), (torch.Size([300, 200]), torch.Size([300])))


def test_a_ring_takes_the_time_of_its_bytes_and_its_messages() -> None:
    network = Network(8e6, 4, rtt=0.1)  # a megabyte a second
    assert network.seconds([("all_mean", 1_000_000)], rings=True) == pytest.approx(1.5 + 6 * (0.1 + 0.0008))
    assert network.seconds([("all_gather", 1_000_000)], rings=True) == pytest.approx(3.0 + 3 * (0.1 + 0.0008))
    assert network.trips([("all_mean", 1_000_000), ("all_gather", 9)], rings=True) == 9
    assert Network(8e6, 1).seconds([("all_mean", 1000), ("all_gather", 1000), ("broadcast", 9)]) == 0


def test_between_sites_messages_go_to_everybody_at_once() -> None:
    network = Network(8e6, 4, rtt=0.1)
    assert network.seconds([("all_mean", 1_000_000)]) == pytest.approx(1.5 + 2 * 0.1 + 6 * 0.0008)
    assert network.seconds([("all_gather", 1_000_000)]) == pytest.approx(3.0 + 0.1 + 3 * 0.0008)
    assert network.seconds([("all_mean", 100)]) == pytest.approx(0.1 + 3 * 0.0009)
    assert network.trips([("all_mean", 1_000_000), ("all_gather", 9), ("all_mean", 9)]) == 4


@pytest.mark.parametrize(
    "method", ["Dense()", "Cast(Dense())", "ErrorFeedback(TopK(0.01))", "ErrorFeedback(PowerSGD(2))", "Variance()"]
)
def test_a_dry_run_costs_what_the_method_costs_for_real(method: str) -> None:
    """The same collectives as among four workers that each hold the made-up gradient's like."""
    cost = dry_run(parse(method), LAYOUT, 4)
    reducer = parse(method)

    def work(comm):  # type: ignore[no-untyped-def]
        state, out = reducer.init(LAYOUT), LAYOUT.zeros()
        for step in range(6):
            comm.ledger.clear()
            reducer.reduce(_made_up(reducer.wants, LAYOUT, 32, seed=step), state, comm, out)
        # What has a memory calls the roll before it touches it.
        return [("all_gather", ROLL_CALL)] * (state is not None) + comm.ledger.entries

    for entries in in_threads(4, work):
        assert [op for op, _ in entries] == [op for op, _ in cost.entries]
        assert sum(size for _, size in entries) == pytest.approx(cost.payload, rel=0.02)


def test_dense_costs_every_entry_and_sparse_costs_less() -> None:
    assert dry_run(parse("Dense()"), LAYOUT, 2).payload == 4 * LAYOUT.numel
    assert dry_run(parse("Cast(Dense())"), LAYOUT, 2).payload == 2 * LAYOUT.numel
    sparse = dry_run(parse("ErrorFeedback(TopK(0.01))"), LAYOUT, 2)
    assert sparse.payload < 0.1 * 4 * LAYOUT.numel and sparse.memory >= 4 * LAYOUT.numel


def test_what_has_no_factors_goes_the_dense_way() -> None:
    cost = dry_run(parse("DAD()"), LAYOUT, 2, rows=10)
    assert ("all_mean", 4 * 300) in cost.entries
    assert cost.payload >= 4 * 10 * (300 + 200) + 4 * 300


def test_the_break_even_rate_is_where_both_take_the_same_time() -> None:
    network, half = Network(1e8, 4), dense(LAYOUT, 2, "bf16")
    method = Cost("m", (("all_gather", 1000),), local=0.01, memory=0)
    rate = break_even(method, half, network, compute=0.005)
    at = Network(rate, 4)
    assert method.step(at, 0.005) == pytest.approx(half.step(at, 0.005), rel=1e-2)
    assert break_even(Cost("heavy", (("all_gather", 10**9),), 1.0, 0), half, network, 0.0) == 0
    assert break_even(Cost("free", (), 0.0, 0), half, network, 0.0) == math.inf


def test_ddp_hides_its_exchange_behind_the_backward_pass() -> None:
    network, compute = Network(1e9, 4), 1.0
    assert dense(LAYOUT, 4, "plain DDP").step(network, compute) == compute
    assert Cost("m", (("all_mean", 4 * LAYOUT.numel),), 0.0, 0).step(network, compute) > compute


def told(rate: float, compute: float, *methods: Cost) -> str:
    network = Network(rate, 8)
    return recommend(predict(methods, LAYOUT, network, compute), network, compute)


def test_the_recommendation_says_when_not_to_compress() -> None:
    method = Cost("Small()", (("all_gather", 500),), local=0.002, memory=0)
    assert "Do not compress: plain DDP" in told(1e11, 0.1, method)
    slow = told(1e6, 0.1, method)
    assert "Use Small()" in slow and "backward passes" in slow
    heavy = Cost("Heavy()", (("all_gather", 500),), local=10.0, memory=0)
    assert "bfloat16" in told(2e7, 0.01, heavy) and "Use" not in told(2e7, 0.01, heavy)
    assert "Do not compress" in told(1e6, 0.1)  # nothing to choose from but bfloat16


def test_a_gather_pays_above_half_as_many_times_as_there_are_workers() -> None:
    for workers in (2, 8, 64, 256):
        ratio, numel = smallest_ratio(workers), 10**9  # so much that frames do not count
        network = Network(1e9, workers)
        ring = network.seconds([("all_mean", 4 * numel)])
        assert network.seconds([("all_gather", round(4 * numel / ratio))]) == pytest.approx(ring, rel=1e-4)
        half = network.seconds([("all_mean", 2 * numel)])
        gathered = network.seconds([("all_gather", round(4 * numel / smallest_ratio(workers, 16)))])
        assert gathered == pytest.approx(half, rel=1e-3)


def test_a_table_over_numbers_of_workers() -> None:
    table = scaling([parse("ErrorFeedback(TopK(0.01))")], LAYOUT, Network(1e8, 8), [2, 16, 64])
    assert list(table) == ["plain DDP", "bf16 all-reduce", "ErrorFeedback(TopK(0.01))"]
    ring, _, gather = table.values()
    assert ring[2] < 2.5 * ring[0] and gather[2] > 30 * gather[0]  # what is gathered grows with the workers


@pytest.mark.parametrize("method", ["ErrorFeedback(TopK(0.01))", "ErrorFeedback(ExDyna(0.01))", "Variance()", "DAD()"])
def test_several_numbers_of_workers_cost_what_each_costs_alone(method: str) -> None:
    """Dry runs that share the memory for a gradient leave nothing in it for the next."""
    together = prices(parse(method), LAYOUT, [2, 256, 8])
    for cost, world in zip(together, [2, 256, 8], strict=True):
        alone = dry_run(parse(method), LAYOUT, world)
        assert (cost.entries, cost.memory, cost.called) == (alone.entries, alone.memory, alone.called)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to exchange"):
        layout_of(frozen)
    assert layout_of(nn.Linear(2, 3)).numel == 9


def test_the_advice_says_when_latency_is_the_limit() -> None:
    method = Cost("Small()", (("all_gather", 500),), local=0.002, memory=0)
    layout, far, near = Layout(("w",), (torch.Size([10**6]),)), Network(1e8, 4, rtt=0.1), Network(1e6, 4, rtt=1e-4)
    assert "exchange less often" in recommend(predict([method], layout, far, 0.01), far, 0.01)
    assert "exchange less often" not in recommend(predict([method], layout, near, 0.01), near, 0.01)


def test_half_a_millisecond_is_not_nothing() -> None:
    fast = Network(1e12, 2)
    assert "0.5 ms" in recommend(predict([], LAYOUT, fast, 0.0005), fast, 0.0005)


def test_plain_ddp_goes_by_rings_and_dense_does_not() -> None:
    far = Network(1e8, 8, rtt=0.04)
    ours, ddp = dry_run(parse("Dense()"), LAYOUT, 8), dense(LAYOUT, 4, "plain DDP")
    assert ours.trips(far) <= 2 and ddp.trips(far) == 14 and ours.exchange(far) < 0.3 * ddp.exchange(far)


def test_the_roll_call_rides_where_trips_cost_much() -> None:
    cost = dry_run(parse("ErrorFeedback(TopK(0.01))"), LAYOUT, 4)
    assert cost.trips(Network(1e8, 4, rtt=0.04)) == 1 and cost.trips(Network(1e8, 4, rtt=1e-4)) == 2
    assert dry_run(parse("ErrorFeedback(PowerSGD(2))"), LAYOUT, 4).trips(Network(1e8, 4, rtt=0.04)) == 2
