"""Exact exchanges of factors: dAD and edAD equal the pooled gradient, and AutoDAD takes the cheapest way."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dad_worker import Recurrent, Tied, attach, batch, build, distance, distributed, gradients, loss_of, pooled
from processes import launch
from thinwire import DAD, EDAD, AutoDAD, Dense, RankDAD
from thinwire.capture.layers.factors.capture import Layers
from thinwire.comm.dry import DryComm
from thinwire.comm.threads import ThreadComm, in_threads
from thinwire.core.factors import Factors, Form, Use
from thinwire.core.products import PRODUCT
from thinwire.core.reducer import Layout, Reducer
from thinwire.step.lanes import Inline

torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_of(reducer: Reducer[Any, Any], workers: list[tuple[Tensor, Tensor]]) -> Tensor:
    layout = Layout(("w",), (torch.Size((workers[0][1].shape[1], workers[0][0].shape[1])),), torch.float64)

    def work(comm: ThreadComm) -> Tensor:
        out = layout.zeros()
        inputs, deltas = workers[comm.rank]
        reducer.reduce(Factors.linear(inputs.clone(), deltas.clone()), reducer.init(layout), comm, out)
        return out.view(layout.shapes[0])

    outs = in_threads(len(workers), work)
    assert all(torch.equal(out.isnan(), outs[0].isnan()) for out in outs)
    assert all(torch.equal(out.nan_to_num(), outs[0].nan_to_num()) for out in outs)
    return outs[0]


# ── exactness ──────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    m=st.integers(1, 6),
    n=st.integers(1, 6),
    seed=st.integers(0, 99),
    reducer=st.sampled_from([DAD(), AutoDAD(), EDAD()]),
)
def test_rows_of_any_worker_in_any_order_give_the_pooled_product(rows, m, n, seed, reducer):
    workers = [(normal(k, n, seed=seed + i), normal(k, m, seed=seed + 50 + i)) for i, k in enumerate(rows)]
    pooled_mean = sum(deltas.T @ inputs for inputs, deltas in workers) / len(workers)
    found = mean_of(reducer, workers)
    assert torch.allclose(found, pooled_mean, atol=1e-12)
    shuffled = [(a[p], d[p]) for a, d in workers for p in [torch.randperm(len(a))]]
    assert torch.allclose(mean_of(reducer, shuffled[::-1]), found, atol=1e-12)
    empty = [(torch.cat([a, normal(2, n)]), torch.cat([d, torch.zeros(2, m).double()])) for a, d in workers]
    assert torch.allclose(mean_of(reducer, empty), found, atol=1e-12)


def test_factors_and_dense_agree():
    workers = [(normal(4, 6, seed=i), normal(4, 5, seed=9 + i)) for i in range(3)]

    def dense(comm: ThreadComm) -> Tensor:
        inputs, deltas = workers[comm.rank]
        gradient = (deltas.T @ inputs).flatten()
        Dense().reduce(gradient, None, comm, gradient)
        return gradient.view(5, 6)

    assert torch.allclose(mean_of(DAD(), workers), in_threads(3, dense)[0], atol=1e-12)


def test_weighted_losses_give_the_pooled_mean_over_unequal_batches():
    """The engine divides by the number of workers, so a worker weighs its mean loss by W * rows / all rows."""
    rows = [2, 5, 1]

    def step(model: nn.Module, x: Tensor) -> None:
        (loss_of(model(x)) / len(x) * (len(rows) * len(x) / sum(rows))).backward()

    plain = build("mlp")
    everything = torch.cat([batch("mlp", rank, count) for rank, count in enumerate(rows)])
    (loss_of(plain(everything)) / sum(rows)).backward()
    for found in distributed("mlp", rows, DAD(), step=step):
        assert distance(found, gradients(plain)) < 1e-12


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_row_reaches_every_worker(bad):
    inputs = normal(3, 4)
    inputs[1, 2] = bad
    found = mean_of(DAD(), [(normal(3, 4), normal(3, 5)), (inputs, normal(3, 5))])
    assert not found[:, 2].isfinite().any()
    assert found[:, 0].isfinite().all()


# ── edAD ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ACTIVATIONS = {
    "relu in place": lambda: nn.ReLU(inplace=True),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
    "hardtanh": nn.Hardtanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "norm": lambda: nn.Sequential(nn.LayerNorm(7), nn.Identity(), nn.Dropout(0.0)),
    "none": nn.Identity,
}


def chain(activation: Any) -> nn.Sequential:
    torch.manual_seed(2)
    deep = nn.Sequential(nn.Linear(7, 7), activation())
    return nn.Sequential(nn.Linear(6, 7), activation(), deep, nn.Linear(7, 7, bias=False), nn.Linear(7, 3)).double()


def chained(start: nn.Sequential, reducer: EDAD, rows: list[int], shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    inputs = [normal(count, *shape, seed=rank) for rank, count in enumerate(rows)]
    models = [copy.deepcopy(start) for _ in rows]

    def work(comm: ThreadComm) -> tuple[Any, ...]:
        model = models[comm.rank]
        layers = attach(model, reducer, comm)
        before = comm.ledger.payload
        for _ in range(2):
            model.zero_grad()
            loss_of(model(inputs[comm.rank])).backward()
        weights = {k: v for k, v in gradients(model).items() if k in layers.ignored}
        return weights, layers.plan(), comm.ledger.payload - before

    results = in_threads(len(rows), work)
    plain = copy.deepcopy(start)
    for x in inputs:
        (loss_of(plain(x)) / len(rows)).backward()
    for weights, _, _ in results:
        assert len(weights) == 4
        assert distance(weights, {key: gradients(plain)[key] for key in weights}) < 1e-12
    return results


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_a_chain_needs_its_last_delta_alone(activation, replay):
    chained(chain(activation), EDAD(replay), [3, 2], (6,))
    chained(chain(activation), EDAD(replay), [2, 0, 1], (4, 6))


def test_chains_send_what_the_formula_says():
    widths, rows, world = [6, 7, 7, 7, 3], 4, 3
    for reducer, values in ((EDAD(), sum(widths)), (EDAD(replay=True), widths[0] + widths[-1])):
        for _, plan, _ in chained(chain(nn.Tanh), reducer, [rows] * world, (6,)):
            assert {row["mode"] for row in plan} == {"chain"}
            assert sum(row["bytes"] for row in plan) == (world - 1) * rows * values * 8
    inner = 2 * sum(widths[1:-1]) + widths[0] + widths[-1]
    model = chain(nn.Tanh)
    layers = attach(model, DAD(), DryComm(world), lane=Inline())
    loss_of(model(normal(rows, 6))).backward()
    assert sum(row["bytes"] for row in layers.plan()) == (world - 1) * rows * inner * 8


def test_what_a_chain_cannot_pass_is_refused_by_name():
    for obstacle, name in (
        (nn.Dropout(0.1), "Dropout"),
        (nn.BatchNorm1d(7), "BatchNorm1d"),
        (nn.Softmax(0), "Softmax"),
    ):
        model = nn.Sequential(nn.Linear(6, 7), obstacle, nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 3)).double()
        with pytest.raises(ValueError, match=f"{name} at '1'"):
            Layers(copy.deepcopy(model), EDAD(), DryComm(2))
        layers = attach(model, EDAD(strict=False), DryComm(2), lane=Inline())
        loss_of(model(normal(4, 6))).backward()
        modes = {row["layer"]: row["mode"] for row in layers.plan()}
        assert modes == {"0.weight": "factors", "2.weight": "chain", "4.weight": "chain"}
    with pytest.raises(ValueError, match="finds no two Linear layers in a row"):
        Layers(build("used twice"), EDAD(), DryComm(2))


class Residual(nn.Module):
    """Looks like a chain, and is not run as one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.net[0](x)
        return self.net[2](self.net[1](inner)) + inner


def test_a_branch_is_noticed_and_refused_by_name():
    model = Residual().double()
    attach(model, EDAD(), DryComm(2), lane=Inline())
    with pytest.raises(RuntimeError, match=r"net\.0\.weight is not the one it had"):
        loss_of(model(normal(3, 6))).backward()


# ── the choice by layer ────────────────────────────────────────────────────────────────────────────────────────────


def forms_of(rows: int, m: int, n: int, dtype: torch.dtype = torch.float32) -> Factors:
    inputs, deltas = torch.empty(rows, n, dtype=dtype), torch.empty(rows, m, dtype=dtype)
    return Factors((torch.Size((m, n)),), [Use(0, PRODUCT, inputs, deltas)], forms=[Form.like(inputs, deltas)])


@settings(max_examples=60, deadline=None)
@given(world=st.integers(2, 16), rows=st.integers(1, 400), m=st.integers(1, 500), n=st.integers(1, 500))
def test_the_choice_flips_where_pooled_rows_reach_the_harmonic_mean(world, rows, m, n):
    layout = Layout(("w",), (torch.Size((m, n)),))
    way = AutoDAD().ways(forms_of(rows, m, n), AutoDAD().init(layout), DryComm(world), torch.float32)[0]
    assert way.mode == ("factors" if world * rows * (m + n) < 2 * m * n else "dense")
    halved = AutoDAD().ways(
        forms_of(rows, m, n, torch.bfloat16), AutoDAD().init(layout), DryComm(world), torch.float32
    )[0]
    assert halved.mode == ("factors" if world * rows * (m + n) < 2 * 2 * m * n else "dense")


def test_the_crossover_exactly():
    layout = Layout(("w",), (torch.Size((64, 64)),))
    modes = [
        AutoDAD().ways(forms_of(rows, 64, 64), AutoDAD().init(layout), DryComm(4), torch.float32)[0].mode
        for rows in (15, 16, 17)
    ]
    assert modes == ["factors", "dense", "dense"]


def test_lossy_choices_only_for_less_than_half():
    layout = Layout(("w",), (torch.Size((256, 256)),))
    choose = lambda rows, world: (
        AutoDAD(exact=False, rank=4)
        .ways(forms_of(rows, 256, 256), AutoDAD().init(layout), DryComm(world), torch.float32)[0]
        .mode
    )
    assert choose(7, 2) == "factors"
    assert choose(8, 2) == "rank 4"
    assert choose(3, 4) == "factors"  # four workers share a basis: half of what their own columns would cost
    assert choose(8, 4) == choose(10_000, 4) == "rank 4"
    assert choose(10_000, 64) == "rank 4"  # a shared basis costs 64 workers what it costs four


def test_a_plan_stays_until_rows_have_moved_by_a_quarter():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 2))
    layers = attach(model, AutoDAD(), DryComm(4), lane=Inline())
    modes = []
    for rows in (15, 18, 19, 15, 14):
        model(torch.ones(rows, 64)).sum().backward()
        modes.append(layers.plan()[-1]["mode"])
    assert modes == ["factors", "factors", "dense", "dense", "factors"]


def test_workers_with_different_rows_plan_alike():
    rows = [1, 9, 4]
    models = [build("mlp") for _ in rows]

    def work(comm: ThreadComm) -> list[dict[str, Any]]:
        layers = attach(models[comm.rank], AutoDAD(), comm)
        loss_of(models[comm.rank](batch("mlp", comm.rank, rows[comm.rank]))).backward()
        return layers.plan()

    plans = in_threads(3, work)
    assert plans[0] == plans[1] == plans[2]
    assert [row["rows"] for row in plans[0]] == [27, 27, 27]


NETS: dict[str, tuple[Any, Any]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10)),
        lambda rows: torch.randn(rows, 300),
    ),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 128), nn.Linear(128, 10)),
        lambda rows: torch.randn(rows, 3, 8, 8),
    ),
    "gru": (lambda: Recurrent(nn.GRU(40, 64, batch_first=True), 64), lambda rows: torch.randn(rows, 6, 40)),
    "transformer": (lambda: Tied(width=96), lambda rows: torch.randint(11, (rows, 6))),
}


@pytest.mark.parametrize("net", NETS)
def test_bytes_are_those_of_the_plan_and_never_above_the_best_fixed_choice(net):
    make, feed = NETS[net]
    for world in (2, 4, 8, 16):
        for rows in (2, 8):
            sent = {}
            for reducer in (DAD(unroll=True), AutoDAD(unroll=True)):
                model, comm = make(), DryComm(world)
                layers = attach(model, reducer, comm, lane=Inline())
                for _ in range(2):  # the second step, without the question who uses weights outside their layers
                    before = comm.ledger.wire
                    model(feed(rows)).sum().backward()
                plan = layers.plan()
                sizes = 4 * sum(1 + sum(2 + sum(rule.dims) for rule in s.rules) for s in layers.exchange.slots)
                head = 3 + len(layers.exchange.slots) + len(layers.exchange.groups)  # step, mark, what was used, order
                sizes = (world - 1) * (sizes + 4 * head)
                assert comm.ledger.wire - before == pytest.approx(sum(row["bytes"] for row in plan) + sizes)
                sent[type(reducer).__name__] = comm.ledger.wire - before
            dense = sum(row["dense_bytes"] for row in plan)
            assert sent["AutoDAD"] <= 1.02 * min(dense, sent["DAD"]), (world, rows, sent, dense)


def test_a_wide_network_moves_a_fraction_of_the_bytes():
    """Four workers, 32 rows each: by the ledger, biases and all."""
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    comm = DryComm(4)
    layers = attach(model, AutoDAD(), comm, lane=Inline())
    before = comm.ledger.wire
    model(torch.randn(32, 1024)).sum().backward()
    rest = [p.grad for n, p in model.named_parameters() if n not in layers.ignored]
    for gradient in rest:
        comm.all_mean(gradient)
    everything = 2 * 3 / 4 * 4 * sum(p.numel() for p in model.parameters())
    assert everything / (comm.ledger.wire - before) >= 3.5


# ── bits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("reducer", [DAD(), AutoDAD(), RankDAD(2, feedback=True), EDAD()], ids=repr)
def test_replicas_stay_equal_to_the_bit(reducer):
    models = [build("mlp").float() for _ in range(3)]

    def work(comm: ThreadComm) -> Tensor:
        model = models[comm.rank]
        layers = attach(model, reducer, comm)
        optimizer = torch.optim.Adam([p for n, p in model.named_parameters() if n in layers.ignored])
        for step in range(50):
            optimizer.zero_grad()
            loss_of(model(batch("mlp", comm.rank, 2 + (step + comm.rank) % 3, step).float())).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for n, p in model.named_parameters() if n in layers.ignored])

    first, *others = in_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


# ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("states"))
    return launch(2, "dad_worker_gloo:everything", folder=folder, timeout=100)


@pytest.mark.parametrize("case", ["equal", "clipped, accumulated", "unequal"])
def test_training_is_that_of_plain_ddp(processes, case):
    """MLP, CNN, GRU and a transformer with tied embeddings, twenty steps and more, with momentum."""
    for name in processes[0][case]:
        one, other = (worker[case][name] for worker in processes)
        assert one["apart"] < 1e-6, (case, name, one["apart"])
        assert one["losses"] < 1e-5
        assert torch.equal(one["weights"], other["weights"])
        assert one["plan"] == other["plan"]
        # What the last step is said to have cost is the layers' part and DDP's, as is what the ledger has.
        metrics = one["metrics"]
        assert metrics["wire_bytes"] > sum(row["bytes"] for row in one["plan"])
        assert one["sent"] >= 20 * 0.9 * metrics["payload_bytes"]


@pytest.mark.parametrize("case", ["scaled", "scaled thin"])
def test_a_grad_scaler_skips_a_bad_step_on_all_ranks(processes, case):
    for worker in processes:
        plain, ours = worker[case]["plain"], worker[case]["ours"]
        assert ours[0] == plain[0]
        assert min(ours[0]) == 4.0  # it did back off
        assert ours[1].isfinite().all()
        if case == "scaled":
            assert torch.allclose(ours[1], plain[1], atol=2e-3)
    assert torch.equal(processes[0][case]["ours"][1], processes[1][case]["ours"][1])


def test_a_factored_weight_that_drifts_is_noticed(processes):
    assert all("replicas have diverged" in worker["diverged"] for worker in processes)


def test_unused_layers_with_ddp(processes):
    for worker in processes:
        plain, ours = worker["unused"]["plain"], worker["unused"]["ours"]
        assert all(torch.allclose(plain[name], ours[name], atol=1e-6) for name in plain)


def test_a_run_resumes_to_the_same_bits(processes):
    for worker in processes:
        whole, resumed = worker["saved"]
        assert torch.equal(whole, resumed)


def test_what_has_no_factors_goes_by_any_method_and_both_are_counted(processes):
    for worker in processes:
        told = worker["others"]
        assert told["rest"] == "ErrorFeedback(TopK(0.2))"
        assert 0.05 < told["density"] < 0.9
        assert math.isclose(*told["residual"], rel_tol=1e-6)
    for what in ("weights", "gradients"):
        assert torch.equal(*(worker["others"][what] for worker in processes))


def test_join_is_refused_at_the_call(processes):
    assert all(
        "RankDAD needs every worker in every backward pass" in worker["others"]["joined"] for worker in processes
    )


def test_what_a_user_should_know_is_said(processes):
    for worker in processes:
        told = worker["warned"]
        assert "RankDAD does not know Unknown as layers" in told["unknown"][0]
        assert len(told["sent"]) == 1 and "0.weight is given this worker's own data" in told["sent"][0]
        assert told["kept"] == []
        assert told["sent modes"] == ["1.weight factors", "0.weight factors"]
        assert told["kept modes"] == ["1.weight factors", "0.weight dense"]
        assert told["looked at"] == []
        assert "nothing to exchange" in told["nothing"][0]


def test_inputs_that_are_kept_do_not_change_the_gradient():
    for name in ("mlp", "conv2d", "embedding", "rnn cell"):
        for found in distributed(name, [3, 2], DAD(inputs="kept")):
            assert distance(found, pooled(name, [3, 2])) < 1e-12


def test_what_is_asked_of_the_rest_is_looked_at():
    for method in (DAD, AutoDAD, EDAD, RankDAD):
        with pytest.raises(TypeError, match="takes gradients"):
            method(rest=RankDAD(2))
        with pytest.raises(ValueError, match="inputs"):
            method(inputs="hidden")


@pytest.mark.parametrize(("bits", "off"), [(16, 0.01), (8, 0.03), (4, 0.35)])
def test_factors_in_few_bits_are_near_and_cost_that_few(bits, off):
    layout = Layout(("w",), (torch.Size((64, 96)),))
    generator = torch.Generator().manual_seed(0)
    rows = [[torch.randn(16, n, generator=generator) for n in (96, 64)] for _ in range(2)]
    wanted = sum(d.T @ a for a, d in rows) / 2

    def work(comm: ThreadComm) -> tuple[Tensor, float]:
        out = layout.zeros()
        local = Factors.linear(*rows[comm.rank])
        local.forms = [use.form() for use in local.uses]
        DAD(bits=bits).reduce(local, None, comm, out)
        return out, comm.ledger.payload

    (one, sent), (other, _) = in_threads(2, work)
    assert torch.equal(one, other)
    assert float((one.view(64, 96) - wanted).norm() / wanted.norm()) < off
    assert sent < 16 * (96 + 64) * bits / 8 + 100


@pytest.mark.parametrize("bits", [None, 16, 8, 4])
def test_a_bad_row_in_few_bits_still_reaches_every_worker(bits):
    layout = Layout(("w",), (torch.Size((4, 5)),))

    def work(comm: ThreadComm) -> Tensor:
        inputs, out = torch.ones(3, 5), layout.zeros()
        inputs[1] = math.nan if comm.rank else 1.0
        DAD(bits=bits).reduce(Factors.linear(inputs, torch.ones(3, 4)), None, comm, out)
        return out

    assert not any(out.isfinite().any() for out in in_threads(2, work))


def test_rows_of_zeros_are_not_sent():
    layout = Layout(("w",), (torch.Size((40, 50)),))

    def work(comm: ThreadComm, method: DAD) -> tuple[Tensor, float]:
        generator, out = torch.Generator().manual_seed(comm.rank), layout.zeros()
        inputs, deltas = torch.randn(30, 50, generator=generator), torch.randn(30, 40, generator=generator)
        deltas[4 + comm.rank :] = 0  # ignored targets
        method.reduce(Factors.linear(inputs, deltas), None, comm, out)
        return out, comm.ledger.payload

    (whole, all_rows), _ = in_threads(2, lambda comm: work(comm, DAD()))
    (found, few), (again, _) = in_threads(2, lambda comm: work(comm, DAD(skip_zeros=True)))
    assert torch.allclose(found, whole, atol=1e-5) and torch.equal(found, again)
    assert few - 100 < 5 / 30 * all_rows
