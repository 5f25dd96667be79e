"""Few columns for a gradient: projections with known error, the rank that was asked for, and what they show."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dad_worker import batch, build, distance, distributed, loss_of, pooled
from thinwire import RankDAD, parse
from thinwire.capture.layers.factors.capture import Layers
from thinwire.comm.cast import CastComm
from thinwire.comm.dry import DryComm
from thinwire.comm.threads import ThreadComm, in_threads
from thinwire.core import memory
from thinwire.core.factors import Factors, Form, Use
from thinwire.core.products import LOOKUP, PRODUCT, Convolution
from thinwire.core.reducer import Layout
from thinwire.methods.dad import spectrum as introspect
from thinwire.methods.dad.columns import Thin, compress
from thinwire.step.lanes import Inline

torch.set_num_threads(1)
sizes = st.integers(1, 12)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def thin(
    gradient: Tensor, rank: int, iterations: int = 1, tolerance: float = 0.0, seed: int = 7, extra: int = 0
) -> Thin:
    rank = min(rank, *gradient.shape)
    start = normal(gradient.shape[1], max(gradient.shape), seed=seed)[:, : min(rank + extra, *gradient.shape)]
    return compress(lambda p: gradient @ p, lambda q: gradient.T @ q, start, rank, iterations, tolerance)


def error(gradient: Tensor, found: Thin) -> float:
    return float(torch.linalg.vector_norm(gradient - found.left @ found.right.T) / torch.linalg.vector_norm(gradient))


def decaying(m: int, n: int, seed: int = 0) -> Tensor:
    """A matrix whose singular values fall by half from one to the next."""
    u, v = torch.linalg.qr(normal(m, m, seed=seed)).Q, torch.linalg.qr(normal(n, n, seed=seed + 1)).Q
    k = min(m, n)
    return u[:, :k] * 0.5 ** torch.arange(k) @ v[:, :k].T


def mean_of(reducer: RankDAD, locals_: list[Factors], layout: Layout) -> list[Tensor]:
    def work(comm: ThreadComm) -> Tensor:
        out = layout.zeros()
        reducer.reduce(locals_[comm.rank], reducer.init(layout), comm, out)
        return out

    return in_threads(len(locals_), work)


# ── the factored form ──────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30, deadline=None)
@given(rows=sizes, m=sizes, n=sizes, rank=sizes, seed=st.integers(0, 99))
def test_a_product_is_applied_without_being_formed(rows, m, n, rank, seed):
    inputs, deltas = normal(rows, n, seed=seed), normal(rows, m, seed=seed + 1)
    local, gradient = Factors.linear(inputs, deltas), deltas.T @ inputs
    assert torch.allclose(local.right(0, normal(n, rank)), gradient @ normal(n, rank))
    assert torch.allclose(local.left(0, normal(m, rank)), gradient.T @ normal(m, rank))
    assert math.isclose(float(introspect.energy(inputs, deltas)), float(gradient.square().sum()), rel_tol=1e-9)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [(3,), (2, 3), (2, 1, 2)])
def test_convolutions_and_lookups_are_applied_without_being_formed(groups, kernel):
    rule = Convolution((2,) * len(kernel), (1,) * len(kernel), (1,) * len(kernel), groups)
    images, shape = normal(3, 4, *(5 for _ in kernel)), torch.Size((6, 4 // groups, *kernel))
    convolve = getattr(torch.nn.functional, f"conv{len(kernel)}d")
    weight = normal(*shape).requires_grad_()
    out = convolve(images, weight, None, rule.stride, rule.padding, rule.dilation, groups)
    deltas = normal(*out.shape, seed=3)
    (gradient,) = torch.autograd.grad(out, weight, deltas)
    check_rule(Factors((shape,), [Use(0, rule, images, deltas)]), gradient)

    indices = torch.tensor([4, 0, 4, 2], dtype=torch.int32)
    gradient = torch.zeros(5, 3, dtype=torch.float64).index_add_(0, indices, normal(4, 3))
    check_rule(Factors((torch.Size((5, 3)),), [Use(0, LOOKUP, indices, normal(4, 3))]), gradient)


def check_rule(local: Factors, gradient: Tensor) -> None:
    matrix = gradient.flatten(1)
    p, q = normal(matrix.shape[1], 2), normal(matrix.shape[0], 2)
    assert torch.allclose(local.right(0, p), matrix @ p)
    assert torch.allclose(local.left(0, q), matrix.T @ q)
    out = torch.full_like(gradient, 9.0)
    local.multiply(0, out, 0.5)
    assert torch.allclose(out, 0.5 * gradient)


# ── the iteration ──────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=40, deadline=None)
@given(m=sizes, n=sizes, rank=sizes, iterations=st.integers(1, 4), seed=st.integers(0, 99), extra=st.integers(0, 4))
def test_what_is_sent_is_a_projection(m, n, rank, iterations, seed, extra):
    """So the error is never above 1, and its square is what the energy lacks."""
    gradient = normal(m, n, seed=seed)
    found = thin(gradient, rank, iterations, extra=extra)
    units = found.left / found.spectrum
    assert found.left.shape == (m, min(rank, m, n))
    assert torch.allclose(units.T @ units, torch.eye(units.shape[1], dtype=torch.float64), atol=1e-8)
    assert torch.allclose(found.left @ found.right.T, units @ units.T @ gradient, atol=1e-8)
    rest = float((gradient - found.left @ found.right.T).square().sum())
    assert math.isclose(rest, float(gradient.square().sum() - found.spectrum.square().sum()), abs_tol=1e-9)
    assert error(gradient, found) <= 1 + 1e-12


@pytest.mark.parametrize("true", [1, 3, 6])
def test_enough_columns_reproduce_the_gradient_and_count_its_rank(true):
    gradient = normal(20, true) @ normal(true, 15, seed=1)
    for rank in (true, true + 3):
        found = thin(gradient, rank, tolerance=1e-6)
        assert error(gradient, found) < 1e-9
        assert int((found.spectrum > 0).sum()) == true
        assert found.left.shape[1] == rank  # as many columns as were asked for, not one fewer


def test_the_error_falls_to_the_optimum():
    gradient = decaying(30, 24)
    values = torch.linalg.svdvals(gradient)
    for rank in (1, 4):
        optimum = float(values[rank:].norm() / values.norm())
        errors = [error(gradient, thin(gradient, rank, iterations)) for iterations in (1, 2, 8)]
        assert errors[0] >= errors[1] >= errors[2] >= optimum - 1e-12
        assert errors[2] <= optimum * 1.001


def test_more_columns_are_never_worse():
    gradient = normal(25, 18)
    errors = [error(gradient, thin(gradient, rank)) for rank in range(1, 19)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(errors))


def test_extra_columns_take_most_of_the_distance_to_the_optimum():
    gradient = decaying(60, 50)
    values = torch.linalg.svdvals(gradient)
    optimum = float(values[4:].norm() / values.norm())
    few = [error(gradient, thin(gradient, 4, seed=seed)) for seed in range(10)]
    more = [error(gradient, thin(gradient, 4, seed=seed, extra=4)) for seed in range(10)]
    assert max(more) < 2 * optimum < max(few)


def test_scaling_scales_and_rotating_rows_changes_nothing():
    inputs, deltas = normal(9, 12), normal(9, 10, seed=1)
    turn = torch.linalg.qr(normal(9, 9, seed=5)).Q
    one = thin(deltas.T @ inputs, 3)
    other = thin((turn @ deltas).T @ (turn @ inputs), 3)
    larger = thin(1e3 * deltas.T @ inputs, 3)
    assert torch.allclose(one.left @ one.right.T, other.left @ other.right.T)
    assert torch.allclose(1e3 * one.left @ one.right.T, larger.left @ larger.right.T)


def test_one_iteration_beats_the_published_one_which_can_be_worse_than_nothing():
    inputs = normal(32, 60) @ (0.7 ** torch.arange(60).double()).diag()
    deltas = normal(32, 40, seed=1) @ (0.7 ** torch.arange(40).double()).diag()
    gradient, local = deltas.T @ inputs, Factors.linear(inputs, deltas)
    published = RankDAD.published(9, iterations=1)
    left, right = published.columns(local, 0, torch.Generator().manual_seed(0), gradient)
    assert left.shape[1] == 8
    worse = float((gradient - left @ right.T).norm() / gradient.norm())
    assert worse > 1 > error(gradient, thin(gradient, 8))
    assert parse(repr(published)) == published
    with pytest.raises(ValueError, match="at least 2"):
        RankDAD.published(1)


# ── the exchange ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_mean_is_that_of_the_workers_own_columns():
    layout = Layout(("w",), (torch.Size((14, 17)),), torch.float64)
    fall = 0.4 ** torch.arange(9, dtype=torch.float64)[:, None]
    factors = [(fall * normal(9, 17, seed=w), fall * normal(9, 14, seed=w + 50)) for w in range(3)]
    outs = mean_of(RankDAD(3, iterations=30, basis="own"), [Factors.linear(a, d) for a, d in factors], layout)
    best = torch.zeros(14, 17, dtype=torch.float64)
    for inputs, deltas in factors:
        u, s, vh = torch.linalg.svd(deltas.T @ inputs)  # cut to three columns, the best there is of rank three
        best += (u[:, :3] * s[:3]) @ vh[:3] / 3
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.allclose(outs[0].view(14, 17), best, atol=1e-6)


EDGES = {
    "no gradient": (torch.zeros(6, 9), normal(6, 8)),
    "one row that counts": (torch.cat([normal(1, 9), torch.zeros(5, 9)]), normal(6, 8)),
    "duplicated rows": (normal(1, 9).expand(6, 9), normal(1, 8).expand(6, 8)),
    "fewer rows than columns asked for": (normal(2, 9), normal(2, 8)),
    "a thin layer": (normal(6, 9), normal(6, 2)),
    "no rows": (normal(0, 9), normal(0, 8)),
    "a single output": (normal(6, 9), normal(6, 1)),
}


@pytest.mark.parametrize(("inputs", "deltas"), EDGES.values(), ids=EDGES)
@pytest.mark.parametrize(
    "reducer", [RankDAD(4), RankDAD(1), RankDAD(4, feedback=False), RankDAD(4, basis="shared")], ids=repr
)
def test_degenerate_gradients(inputs, deltas, reducer):
    inputs, deltas = inputs.double(), deltas.double()
    layout = Layout(("w",), (torch.Size((deltas.shape[1], inputs.shape[1])),), torch.float64)
    outs = mean_of(reducer, [Factors.linear(inputs.clone(), deltas.clone()) for _ in range(2)], layout)
    gradient = (deltas.T @ inputs).flatten()
    assert torch.equal(outs[0], outs[1])
    if torch.linalg.matrix_rank(gradient.view(layout.shapes[0])) <= reducer.rank:
        assert torch.allclose(outs[0], gradient, atol=1e-9)
    assert float((outs[0] - gradient).norm()) <= float(gradient.norm()) + 1e-9


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("reducer", [RankDAD(2), RankDAD(2, feedback=False), RankDAD(2, basis="shared")], ids=repr)
def test_a_bad_row_reaches_all_workers_and_leaves_no_trace_in_their_memory(bad, reducer):
    layout = Layout(("w",), (torch.Size((8, 9)),), torch.float64)

    def work(comm: ThreadComm) -> tuple[Tensor, Tensor, Tensor]:
        def run(with_accident: bool) -> tuple[Tensor, Tensor]:
            state = reducer.init(layout)
            accident, out = layout.zeros(), layout.zeros()
            for step in range(3):
                inputs, deltas = normal(6, 9, seed=step + 10 * comm.rank), normal(6, 8, seed=step + 50)
                reducer.reduce(Factors.linear(inputs, deltas), state, comm, out)
                if step == 1 and with_accident:
                    broken = normal(6, 9)
                    if comm.rank == 1:
                        broken[3, 4] = bad
                    reducer.reduce(Factors.linear(broken, normal(6, 8)), state, comm, accident)
                    state.step -= 1  # the number of the step is the only thing it may change
            return accident, out

        accident, after = run(True)
        return accident, after, run(False)[1]

    for accident, after, without in in_threads(2, work):
        assert not accident.isfinite().any()
        assert torch.equal(after, without)


def test_biases_are_exact_and_so_is_a_layer_with_few_rows():
    for found in distributed("mlp", [4, 4], RankDAD(1)):
        wanted = pooled("mlp", [4, 4])
        assert (
            distance({k: v for k, v in found.items() if "bias" in k}, {k: wanted[k] for k in wanted if "bias" in k})
            < 1e-12
        )
    for found in distributed("mlp", [2, 2], RankDAD(2)):
        assert distance(found, pooled("mlp", [2, 2])) < 1e-12


@pytest.mark.parametrize("name", ["mlp on sequences", "conv2d", "tied transformer", "gru cell"])
def test_with_all_columns_every_layer_kind_is_exact(name):
    for found in distributed(name, [3, 2], RankDAD(100, tolerance=0.0)):
        assert distance(found, pooled(name, [3, 2])) < 1e-9


def test_feedback_sends_later_what_it_could_not_send_now():
    """The mean of many steps of one gradient approaches that gradient; without feedback it never does."""
    layout = Layout(("w",), (torch.Size((10, 12)),), torch.float64)
    inputs, deltas = normal(6, 12), normal(6, 10, seed=1)
    gradient = (deltas.T @ inputs).flatten()

    def off(reducer: RankDAD) -> float:
        state, total, out = reducer.init(layout), layout.zeros(), layout.zeros()
        for _ in range(30):
            reducer.reduce(Factors.linear(inputs, deltas), state, DryComm(1), out)
            total += out / 30
        return float((total - gradient).norm() / gradient.norm())

    assert off(RankDAD(3, feedback=False)) > 0.2
    assert off(RankDAD(3)) < 0.05
    assert off(RankDAD(3, basis="shared")) < 0.05


def test_a_warm_start_finds_what_one_iteration_cannot():
    gradient = decaying(30, 24)
    inputs = torch.eye(24, dtype=torch.float64)[:24]
    layout = Layout(("w",), (torch.Size((30, 24)),), torch.float64)
    off = {}
    for warm in (True, False):
        reducer = RankDAD(4, warm_start=warm, feedback=False)
        state, out = reducer.init(layout), layout.zeros()
        for _ in range(5):
            reducer.reduce(Factors.linear(inputs, gradient.T.contiguous()), state, DryComm(1), out)
        off[warm] = float((out.view(30, 24) - gradient).norm() / gradient.norm())
    optimum = float(torch.linalg.svdvals(gradient)[4:].norm() / gradient.norm())
    assert off[True] < optimum * 1.001
    assert off[True] < off[False]


# ── what it shows ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_ranks_of_known_spectra():
    flat, steep = torch.ones(5), torch.tensor([1.0, 1e-4, 1e-5])
    assert introspect.numerical_rank(flat) == introspect.stable_rank(flat) == 5
    assert math.isclose(introspect.entropy_rank(flat), 5, rel_tol=1e-9)
    assert introspect.directions_for(flat, 0.9) == 5
    assert introspect.directions_for(torch.tensor([3.0, 1.0]), 0.9) == 1
    assert introspect.numerical_rank(steep) == 1
    assert math.isclose(introspect.stable_rank(steep), 1, rel_tol=1e-6)
    nothing = torch.zeros(3)
    assert (
        introspect.numerical_rank(nothing) == introspect.stable_rank(nothing) == introspect.entropy_rank(nothing) == 0
    )
    assert introspect.directions_for(nothing, 0.5) == 0


def test_overlap_is_one_for_the_same_directions_and_none_for_others():
    eye = torch.eye(6).double()
    same, apart, half = (torch.stack([eye[:2], eye[i : i + 2]]) for i in (0, 3, 1))
    assert math.isclose(float(introspect.overlap(same)), 1)
    assert math.isclose(float(introspect.overlap(3 * apart)), 0)
    assert math.isclose(float(introspect.overlap(half)), 0.5)


def test_metrics_tell_each_layers_ranks_and_what_was_captured():
    reducer = RankDAD(4, iterations=20, tolerance=1e-6)
    layout = Layout(("some.weight",), (torch.Size((12, 14)),), torch.float64)
    shared = [normal(3, 14), normal(3, 12, seed=1)]

    def work(comm: ThreadComm) -> dict[str, float]:
        state, out = reducer.init(layout), layout.zeros()
        mix = normal(7, 3, seed=comm.rank + 5)
        local = Factors.linear(mix @ shared[0], mix @ shared[1])
        reducer.reduce(local, state, comm, out)
        return reducer.metrics(state)

    for rank, told in enumerate(in_threads(2, work)):
        mix = normal(7, 3, seed=rank + 5)
        gradient = (mix @ shared[1]).T @ (mix @ shared[0])
        values = torch.linalg.svdvals(gradient)
        assert told["some.weight/rank"] == 3
        assert math.isclose(told["some.weight/captured"], 1, rel_tol=1e-9)
        assert math.isclose(told["some.weight/overlap"], 1, rel_tol=1e-6)
        assert math.isclose(told["some.weight/stable_rank"], introspect.stable_rank(values), rel_tol=1e-6)
        assert math.isclose(told["some.weight/entropy_rank"], introspect.entropy_rank(values), rel_tol=1e-6)
        assert math.isclose(told["some.weight/spectrum_0"], float(values[0]), rel_tol=1e-9)


def test_metrics_and_plan_of_a_model_name_its_layers():
    model = build("mlp")
    layers = Layers(model, RankDAD(2, basis="own"), DryComm(4), lane=Inline())
    layers.install(model)
    assert layers.plan() == []
    loss_of(model(batch("mlp", 0, 5))).backward()
    told = layers.metrics()
    assert 1 <= told["0.weight/entropy_rank"] <= 2
    assert 0 < told["2.weight/captured"] <= 1
    rows = {row["layer"]: row for row in layers.plan()}
    assert rows["0.weight"]["mode"] == "rank 2"
    assert rows["0.weight"]["bytes"] == 3 * 2 * (6 + 9) * 8
    assert rows["0.weight"]["dense_bytes"] == 2 * 3 / 4 * 6 * 9 * 8
    # One small message of sizes, and then what the plan says.
    sizes = 4 * (3 + 3 + 1 + 3 * (1 + 2 + 4)) + 4 * 3
    assert told["payload_bytes"] == sum(row["bytes"] for row in rows.values()) / 3 + sizes


def test_bad_parameters_are_refused():
    for wrong in ({"rank": 0}, {"iterations": 0}, {"tolerance": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RankDAD(**wrong)


def test_forms_count_their_bytes():
    form = Form.like(torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(3, 5))
    assert form.nbytes(DryComm(2)) == 3 * 4 * 2 + 3 * 5 * 4
    assert form.nbytes(CastComm(DryComm(2), torch.bfloat16)) == 2 * 3 * 9
    assert Form.of(form.numbers(), PRODUCT) == form


def test_the_published_iteration_converges_when_it_is_given_time():
    """So what is compared with is that iteration, and not a strawman."""
    gradient = decaying(20, 16)
    local = Factors.linear(torch.eye(16, dtype=torch.float64), gradient.T.contiguous())
    left, right = RankDAD.published(5, iterations=40).columns(local, 0, torch.Generator().manual_seed(0), gradient)
    optimum = float(torch.linalg.svdvals(gradient)[4:].norm())
    assert float((gradient - left @ right.T).norm()) < 1.01 * optimum


def test_what_was_not_sent_is_conserved_with_another_number_of_workers():
    method, layout = RankDAD(1), Layout(("weight",), (torch.Size([6, 5]),))
    saved = []
    for value in (1.0, 2.0):
        state = method.init(layout)
        state.residual, state.kept_back, state.start = torch.full((30,), value), [True], torch.ones(25)
        saved.append(memory.save(state, layout))
    joined = method.init(layout)
    memory.load(joined, memory.new_world(saved, method.init(layout), 0, 1), layout, same_world=False)
    assert torch.equal(joined.residual, torch.full((30,), 3.0)) and joined.kept_back == [True]
    assert joined.start is None  # whose basis would it be?


def test_the_bytes_of_a_shared_basis_do_not_grow_with_the_workers():
    layout = Layout(("w",), (torch.Size((40, 60)),))

    def wire(method: RankDAD, world: int) -> float:
        comm, state, out = DryComm(world), method.init(layout), layout.zeros()
        method.reduce(Factors.linear(normal(200, 60).float(), normal(200, 40).float()), state, comm, out)
        before = comm.ledger.wire  # the first step also agrees on sizes
        local = Factors.linear(normal(200, 60).float(), normal(200, 40).float())
        local.forms = [use.form() for use in local.uses]
        method.reduce(local, state, comm, out)
        assert comm.ledger.wire - before == method.ways(local_forms(), state, comm, torch.float32)[0].wire
        return comm.ledger.wire - before

    def local_forms() -> Factors:
        local = Factors.linear(normal(200, 60).float(), normal(200, 40).float())
        local.forms = [use.form() for use in local.uses]
        return local

    assert wire(RankDAD(2), 2) == wire(RankDAD(2, basis="own"), 2) == 2 * 100 * 4
    assert wire(RankDAD(2, basis="own"), 64) == 63 * 2 * 100 * 4
    assert wire(RankDAD(2), 64) == pytest.approx(2 * 63 / 64 * 2 * (60 + 2 * 40) * 4)


@pytest.mark.parametrize("basis", ["own", "shared"])
def test_fewer_columns_are_sent_where_few_hold_the_energy(basis):
    layout = Layout(("steep", "flat"), (torch.Size((30, 24)),) * 2, torch.float64)

    def work(comm: ThreadComm) -> list[int]:
        method = RankDAD(6, energy=0.9, basis=basis)
        state, out = method.init(layout), layout.zeros()
        for _ in range(4):
            steep = 0.1 ** torch.arange(24, dtype=torch.float64)[:, None] * torch.eye(24, dtype=torch.float64)
            uses = [Use(0, PRODUCT, steep, normal(24, 30)), Use(1, PRODUCT, normal(24, 24), normal(24, 30, seed=1))]
            method.reduce(Factors(layout.shapes, uses), state, comm, out)
        return state.ranks

    for steep, flat in in_threads(2, work):
        assert steep <= 3 and flat == 6


@pytest.mark.parametrize("world", [2, 3])
def test_after_a_change_of_the_wire_nothing_is_lost(world):
    """Columns rounded to half precision: what the wire did not carry is in the residual too."""
    layout = Layout(("w",), (torch.Size((12, 10)),))

    def work(comm: ThreadComm) -> tuple[Tensor, Tensor, Tensor]:
        state, out, total, handed = RankDAD(2).init(layout), layout.zeros(), layout.zeros(), layout.zeros()
        for step in range(5):
            local = Factors.linear(normal(30, 10, seed=step + 9 * comm.rank).float(), normal(30, 12, seed=step).float())
            local.add(0, handed.view(12, 10))
            RankDAD(2).reduce(local, state, CastComm(comm, torch.bfloat16), out)
            total += out
        return handed, total, state.residual

    handed, totals, residuals = (torch.stack(parts) for parts in zip(*in_threads(world, work), strict=True))
    assert torch.equal(totals[0], totals[-1])
    off = handed.mean(0) - totals[0] - residuals.mean(0)
    assert float(off.abs().max()) < (1e-4 if world == 2 else 0.3) * float(handed.abs().max())  # a mean is rounded too
