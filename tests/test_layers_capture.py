"""Factors are taken from the backward pass of any model, whatever it does, and every gradient is the pooled one."""

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dad_worker import ARCHITECTURES, attach, batch, build, distance, distributed, gradients, loss_of, pooled
from thinwire import DAD, MethodWarning, RankDAD
from thinwire.capture.factored import Factored
from thinwire.capture.layers import Layers
from thinwire.comm.crew import CrewComm, crew
from thinwire.comm.dry import DryComm
from thinwire.lane import Beside, Inline

torch.set_num_threads(1)
CPU = torch.device("cpu")
ROWS = ([4], [3, 3], [2, 5, 1], [3, 0, 2, 4])


@pytest.mark.filterwarnings("ignore::thinwire.reducer.MethodWarning")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_the_pooled_ones(name):
    """One to four workers, equal and unequal batches, a worker with no rows at all."""
    for rows in ROWS:
        if name in ("used twice", "all else") and 0 in rows:
            continue  # these two cannot run on no rows, with or without thinwire
        for found in distributed(name, rows, DAD(unroll=True)):
            assert distance(found, pooled(name, rows)) < 1e-12


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_trainable_parameter_goes_exactly_one_way(name):
    model = build(name)
    expected = {n for n, p in model.named_parameters() if p.requires_grad}
    layers = Layers(model, DAD(unroll=True), DryComm(2))
    by_factors = [slot.weight for slot in layers.engine.slots]
    by_ddp = [p for n, p in model.named_parameters() if n not in layers.ignored and p.requires_grad]
    everyone = [id(p) for p in by_factors + by_ddp]
    assert len(everyone) == len(set(everyone)) == len(expected)
    assert by_factors and by_ddp  # DDP refuses a model that leaves it nothing
    names = {n for n, p in model.named_parameters(remove_duplicate=False) if any(p is w for w in by_factors)}
    assert names == set(layers.ignored)  # also the second name of a tied weight


def test_what_cannot_be_captured_stays_with_ddp():
    layers = Layers(build("all else"), DAD(), DryComm(2))
    assert set(layers.ignored) == {"first.weight", "last.weight"}
    layers = Layers(build("tied transformer"), DAD(), DryComm(2))
    assert not any("attention" in name for name in layers.ignored)
    layers = Layers(build("fused gru"), DAD(), DryComm(2))
    assert layers.ignored == ["head.weight"]  # unless it is unrolled


def test_weights_with_hooks_of_the_user_stay_with_ddp():
    model = build("mlp")
    model[0].weight.register_hook(lambda gradient: gradient)
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert Layers(model, DAD(), DryComm(2)).ignored == ["4.weight"]


def test_a_weight_used_outside_its_layer_is_exact_and_said_to_be_dense():
    with pytest.warns(MethodWarning, match=r"embedding\.weight is used outside its layer"):
        distributed("tied by a function", [3, 2], DAD())


@pytest.mark.filterwarnings("ignore::thinwire.reducer.MethodWarning")
def test_a_use_outside_the_layer_is_exact_in_every_step_and_averaged_once_known():
    models = [build("tied by a function") for _ in range(2)]
    wanted = [pooled("tied by a function", [3, 3], step)["embedding.weight"] for step in range(3)]

    def work(comm: CrewComm) -> tuple[list[float], list[str]]:
        model, off = models[comm.rank], []
        layers = attach(model, DAD(), comm)
        for step in range(3):
            model.zero_grad()
            loss_of(model(batch("tied by a function", comm.rank, 3, step))).backward()
            off.append(float((model.embedding.weight.grad - wanted[step]).abs().max()))
        return off, [row["mode"] for row in layers.plan() if row["layer"] == "embedding.weight"]

    for off, modes in crew(2, work):
        assert max(off) < 1e-12
        assert modes == ["dense"]


# ── accumulation ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["mlp", "mlp on grids", "conv2d", "gru cell"])
@pytest.mark.parametrize("silently", [True, False])
def test_micro_batches_add_up_to_one_batch(name, silently):
    """In no_sync nothing is sent until the last; without it every micro-batch is exchanged, to the same effect."""
    sent: list[int] = []

    def work(comm: CrewComm) -> dict[str, Tensor | None]:
        model = models[comm.rank]
        layers = attach(model, DAD(), comm)
        start = comm.ledger.payload
        for step in range(3):
            model.require_backward_grad_sync = step == 2 or not silently
            loss_of(model(batch(name, comm.rank, 2, step))).backward()
            sent.append(comm.ledger.payload - start)
            if silently and step < 2:
                assert all(slot.weight.grad is None for slot in layers.engine.slots)
        return {slot.names[0]: slot.weight.grad for slot in layers.engine.slots}

    models = [build(name) for _ in range(2)]
    wanted = [pooled(name, [2, 2], step) for step in range(3)]
    for found in crew(2, work):
        total = {key: sum(part[key] for part in wanted) for key in found}
        assert distance(found, total) < 1e-12
    assert sorted(sent)[:4] == [0] * 4 if silently else min(sent) > 0


def test_several_forward_passes_before_one_backward_pass_and_the_other_way_round():
    def work(comm: CrewComm) -> tuple[Any, Any]:
        model = models[comm.rank]
        attach(model, DAD(), comm)
        first, second = (batch("mlp", comm.rank, rows, rows) for rows in (2, 3))
        (loss_of(model(first)) + loss_of(model(second))).backward()
        together = gradients(model)
        model.zero_grad()
        out = model(first)
        loss_of(out).backward(retain_graph=True)
        loss_of(out).backward()
        return together, gradients(model)

    models = [build("mlp") for _ in range(2)]
    plain = build("mlp")
    for rank in range(2):
        for rows in (2, 3):
            loss_of(plain(batch("mlp", rank, rows, rows))).div(2).backward()
    weights = ("0.weight", "2.weight", "4.weight")
    both = {key: value for key, value in gradients(plain).items() if key in weights}
    plain.zero_grad()
    for rank in range(2):
        loss_of(plain(batch("mlp", rank, 2, 2))).backward()  # twice, halved
    twice = {key: value for key, value in gradients(plain).items() if key in weights}
    for together, again in crew(2, work):
        assert distance(together, both) < 1e-12
        assert distance(again, twice) < 1e-12


def test_forward_passes_that_nobody_differentiates_cost_nothing():
    def work(comm: CrewComm) -> list[int]:
        model = models[comm.rank]
        layers = attach(model, DAD(), comm)
        sent = []
        for _ in range(2):
            before = comm.ledger.payload
            with torch.no_grad():
                model(batch("mlp", 5, 9))
            model(batch("mlp", 5, 9))  # with a graph, but dropped
            loss_of(model(batch("mlp", comm.rank, 2))).backward()
            sent.append(comm.ledger.payload - before)
        assert [row["rows"] for row in layers.plan()] == [4, 4, 4]
        return sent

    models = [build("mlp") for _ in range(2)]
    crew(2, work)


# ── order ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Branches(nn.Module):
    """Three branches, of which a worker may leave one out or take them in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for i in order:
            x = x + torch.tanh(self.parts[i](x))
        return x


ORDERS = {
    "one left out": ([0, 1, 2], [0, 2]),
    "another order": ([0, 1, 2], [2, 0, 1]),
    "nothing in common": ([0, 1], [2]),
    "one twice": ([0, 1, 2], [1, 0, 1]),
    "nobody's": ([0, 2], [2, 0]),
}


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("lane", [Inline, lambda: Beside(CPU)], ids=["inline", "beside"])
def test_workers_may_use_different_layers_in_different_orders(orders, lane, monkeypatch):
    monkeypatch.setattr("thinwire.capture.layers.COALESCED", 1)  # a message for each layer
    torch.manual_seed(3)
    start = Branches().double()

    def work(comm: CrewComm) -> list[dict[str, Tensor | None]]:
        model = copy.deepcopy(start)
        attach(model, DAD(), comm, lane=lane())
        found = []
        for _ in range(3):  # the order of the second step is that of the first one's arrivals
            model.zero_grad()
            loss_of(model(batch("mlp", comm.rank, 2 + comm.rank), orders[comm.rank])).backward()
            found.append({f"parts.{i}.weight": model.parts[i].weight.grad for i in range(3)})
        return found

    plain = copy.deepcopy(start)
    for rank, order in enumerate(orders):
        (loss_of(plain(batch("mlp", rank, 2 + rank), order)) / 2).backward()
    wanted = {f"parts.{i}.weight": plain.parts[i].weight.grad for i in range(3)}
    for steps in crew(2, work, timeout=20):
        for found in steps:
            assert distance(found, wanted) < 1e-12
            assert all((found[key] is None) == (wanted[key] is None) for key in wanted)


class Allocations(TorchDispatchMode):
    """The storages, at least so large, that come into being."""

    def __init__(self, nbytes: int, known: list[Tensor]):
        super().__init__()
        self.nbytes, self.kept = nbytes, [t.untyped_storage() for t in known]
        self.made: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self.nbytes:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in [other.data_ptr() for other in self.kept]:
                    self.made.append(str(function))
                    self.kept.append(storage)  # kept, so that its address is not used again
        return result


def test_gradients_appear_only_at_the_end_and_the_local_one_is_never_formed():
    """During the backward pass there is one tensor as large as a weight, and that is the result."""
    model = nn.Sequential(nn.Linear(310, 370), nn.ReLU(), nn.Linear(370, 290))
    seen: list[bool] = []

    def boundary(name: str, delta: Tensor) -> Tensor:
        seen.append(model[0].weight.grad is None and model[2].weight.grad is None)
        return delta

    layers = Layers(model, DAD(), DryComm(3), lane=Inline(), boundary=boundary)
    layers.install(model)
    loss = model(torch.ones(3, 310)).sum()
    with Allocations(4 * 370 * 290, [model[0].weight, model[2].weight]) as watch:
        loss.backward()
    assert watch.made == ["aten.empty.memory_format"], watch.made
    assert seen == [True]  # on the way down from the second layer; below the first there is nobody
    assert model[0].weight.grad is not None

    layers.unwrap()
    loss = model(torch.ones(3, 310)).sum()
    with Allocations(4 * 370 * 290, [model[0].weight, model[2].weight]) as watch:
        loss.backward()
    assert len(watch.made) >= 2  # so the watch sees what autograd makes


class Counting:
    """A lane that knows how many jobs have been handed in and not been waited for."""

    def __init__(self) -> None:
        self.inner, self.open, self.most = Beside(CPU), 0, 0

    def submit(self, work: Callable[[], Tensor]) -> Any:
        self.open += 1
        self.most = max(self.most, self.open)
        done: Future[Tensor] = self.inner.submit(work)
        lane = self

        class Waited:
            def wait(self) -> Tensor:
                lane.open -= 1
                return done.wait()

        return Waited()

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize(("cap", "most"), [(1, 2), (2**30, 6)])
def test_factors_in_flight_are_bounded(cap, most, monkeypatch):
    monkeypatch.setattr("thinwire.capture.layers.COALESCED", 1)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)]).double()
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(comm: CrewComm) -> int:
        lane = Counting()
        attach(models[comm.rank], DAD(), comm, lane=lane, in_flight=cap)
        loss_of(models[comm.rank](batch("mlp", comm.rank, 3))).backward()
        return lane.most

    assert crew(2, work) == [most, most]


# ── company ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Sequential, reentrant: bool):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner[0](x)
        for layer in self.inner[1:]:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_both_kinds_of_checkpointing(reentrant):
    models = [Checkpointed(build("mlp"), reentrant) for _ in range(2)]

    def work(comm: CrewComm) -> dict[str, Tensor | None]:
        attach(models[comm.rank], DAD(), comm)
        loss_of(models[comm.rank](batch("mlp", comm.rank, 3))).backward()
        return {n.removeprefix("inner."): p.grad for n, p in models[comm.rank].named_parameters() if "weight" in n}

    wanted = {key: value for key, value in pooled("mlp", [3, 3]).items() if "weight" in key}
    for found in crew(2, work):
        assert distance(found, wanted) < 1e-12


def test_autocast_sends_half_precision_and_gives_the_gradient_of_half_precision():
    model = build("mlp").float()
    models = [copy.deepcopy(model) for _ in range(2)]

    def loss(model: nn.Module, rank: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model(batch("mlp", rank, 3).float()).float())

    def work(comm: CrewComm) -> tuple[Any, int]:
        layers = attach(models[comm.rank], DAD(), comm)
        loss(models[comm.rank], comm.rank).backward()
        return {s.names[0]: s.weight.grad for s in layers.engine.slots}, sum(r["bytes"] for r in layers.plan())

    for rank in range(2):
        (loss(model, rank) / 2).backward()
    wanted = {key: value for key, value in gradients(model).items() if "weight" in key}
    for found, sent in crew(2, work):
        assert distance(found, wanted) < 0.02
        assert found["0.weight"].dtype is torch.float32
        assert sent == 3 * 2 * (6 + 9 + 9 + 7 + 7 + 3)


def test_half_precision_models_travel_in_half_precision():
    models = [build("mlp").bfloat16() for _ in range(2)]

    def work(comm: CrewComm) -> tuple[Any, int]:
        layers = attach(models[comm.rank], DAD(), comm)
        loss_of(models[comm.rank](batch("mlp", comm.rank, 3).bfloat16())).backward()
        return {s.names[0]: s.weight.grad for s in layers.engine.slots}, sum(r["bytes"] for r in layers.plan())

    for found, sent in crew(2, work):
        assert distance(found, {k: v.bfloat16() for k, v in pooled("mlp", [3, 3]).items() if k in found}) < 0.05
        assert found["0.weight"].dtype is torch.bfloat16
        assert sent == 3 * 2 * (6 + 9 + 9 + 7 + 7 + 3)


def test_copies_pickles_and_state_dicts_know_nothing_of_it():
    for name in ("mlp", "conv2d", "embedding", "lstm cell", "fused gru"):
        plain = build(name)
        model = copy.deepcopy(plain)
        layers = Layers(model, DAD(unroll=True), DryComm(1))
        layers.install(nn.Sequential(model))
        assert any(isinstance(module, Factored) for module in model.modules())
        x = batch(name, 0, 2)
        model.eval(), plain.eval()
        with torch.no_grad():
            assert torch.allclose(model(x), plain(x))
        assert list(model.state_dict()) == list(plain.state_dict())
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        layers_of = lambda m: [type(part) for part in m.modules()]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
            assert layers_of(other) == layers_of(plain)
            other.train()
            loss_of(other(x)).backward()
            assert all(p.grad is not None for n, p in other.named_parameters() if n in layers.ignored)
        layers.unwrap()
        assert layers_of(model) == layers_of(plain)
        loss_of(model.train()(x)).backward()
        assert all(p.grad is not None for p in model.parameters())


def test_copies_of_a_model_do_not_talk():
    model = build("mlp")
    layers = Layers(model, DAD(), DryComm(1))
    layers.install(nn.Sequential(model))
    before = layers.comm.ledger.collectives
    loss_of(copy.deepcopy(model)(batch("mlp", 0, 2))).backward()
    assert layers.comm.ledger.collectives == before


def test_a_model_called_past_the_wrapper_is_refused():
    model = nn.ModuleDict({"inner": build("mlp")})
    outer = nn.Sequential(model["inner"])
    layers = Layers(model["inner"], DAD(), DryComm(1), lane=Inline())
    layers.install(outer)
    out = outer(batch("mlp", 0, 2)).sum() + model["inner"](batch("mlp", 0, 2)).sum()
    with pytest.raises(RuntimeError, match="call the module that wrap"):
        out.backward()
    loss_of(outer(batch("mlp", 0, 2))).backward()  # and the next step is fine


def test_gradients_of_gradients_are_refused():
    model = build("mlp")
    attach(model, DAD(), DryComm(1), lane=Inline())
    x = batch("mlp", 0, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_pause_leaves_gradients_alone():
    model = build("mlp")
    layers = attach(model, DAD(), DryComm(1), lane=Inline())
    x = batch("mlp", 0, 2).requires_grad_()
    before = layers.comm.ledger.collectives
    with layers.paused():
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert gradient.shape == x.shape
    assert layers.comm.ledger.collectives == before
    assert model[0].weight.grad is None


def test_compiled_models_break_their_graph_at_the_layers():
    model = build("mlp")
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    layers = Layers(model, DAD(), DryComm(1), lane=Inline())
    layers.install(compiled)
    x = batch("mlp", 0, 3)
    loss_of(compiled(x)).backward()
    loss_of(plain(x)).backward()
    assert distance(gradients(model), gradients(plain)) < 1e-12


def test_an_error_in_the_backward_pass_reaches_the_caller_and_the_next_step_is_fine():
    models = [build("mlp") for _ in range(2)]

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, delta: Tensor) -> Tensor:
            raise ValueError("out of luck")

    def work(comm: CrewComm) -> dict[str, Tensor | None]:
        model = models[comm.rank]
        attach(model, DAD(), comm)
        hook = model[2].register_forward_pre_hook(lambda module, given: Broken.apply(given[0]))
        with pytest.raises(ValueError, match="out of luck"):
            loss_of(model(batch("mlp", comm.rank, 3))).backward()
        hook.remove()
        model.zero_grad()
        loss_of(model(batch("mlp", comm.rank, 3))).backward()
        return {key: value for key, value in gradients(model).items() if "weight" in key}

    for found in crew(2, work):
        assert distance(found, {k: v for k, v in pooled("mlp", [3, 3]).items() if "weight" in k}) < 1e-12


# ── schemas ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_private_layers_are_nobody_elses_business():
    def work(comm: CrewComm) -> tuple[Any, ...]:
        model = models[comm.rank]
        with torch.no_grad():
            model[0].weight += comm.rank  # a private encoder is this worker's own from the start
        layers = attach(model, DAD(), comm, share=lambda name: not name.startswith("0."))
        loss_of(model(batch("mlp", comm.rank, 3))).backward()
        return layers.ignored, model[0].weight.clone(), model[0].weight.grad, model[2].weight.grad

    models = [build("mlp") for _ in range(2)]
    (ignored, kept, own, shared), (_, other_kept, other_own, other_shared) = crew(2, work)
    assert {"0.weight", "0.bias"} <= set(ignored)
    assert "4.bias" not in ignored
    assert not torch.equal(kept, other_kept)
    assert not torch.equal(own, other_own)
    assert torch.equal(shared, other_shared)


def test_a_boundary_may_average_deltas_on_their_way_down():
    """The aggregated delta goes into the private encoder, as far as rows match."""
    names: list[str] = []
    lock = threading.Lock()

    def work(comm: CrewComm) -> tuple[Tensor, Tensor]:
        model = models[comm.rank]

        def boundary(name: str, delta: Tensor) -> Tensor:
            with lock:
                names.append(name)
            return comm.all_mean(delta.clone()) if name == "2.weight" else delta

        attach(model, DAD(), comm, share=lambda name: not name.startswith("0."), boundary=boundary, lane=Inline())
        x = batch("mlp", comm.rank, 3)
        loss_of(model(x)).backward()
        return model[0].weight.grad, x

    models = [build("mlp") for _ in range(2)]
    results = crew(2, work)
    plain = build("mlp")
    deltas, masks = [], []
    for _, x in results:
        hidden = plain[1](plain[0](x)).detach().requires_grad_()
        loss_of(plain[2:](hidden)).backward()
        deltas.append(hidden.grad)
        masks.append(hidden > 0)
    mean = sum(deltas) / 2
    for (gradient, x), mask in zip(results, masks, strict=True):
        assert torch.allclose(gradient, (mean * mask).T @ x)
    assert set(names) == {"2.weight", "4.weight"}


def test_states_are_saved_and_loaded_and_others_refused():
    model = build("mlp")
    layers = attach(model, RankDAD(2), DryComm(1), lane=Inline())
    loss_of(model(batch("mlp", 0, 5))).backward()
    file = io.BytesIO()
    torch.save(layers.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = attach(build("mlp"), RankDAD(2), DryComm(1), lane=Inline())
    fresh.load_state_dict([saved])
    assert torch.equal(fresh.engine.groups[0].state.start, layers.engine.groups[0].state.start)
    with pytest.raises(ValueError, match="other layers"):
        attach(build("conv2d"), RankDAD(2), DryComm(1), lane=Inline()).load_state_dict([saved])


def test_after_detaching_the_exact_mean_is_exchanged():
    models = [build("mlp") for _ in range(2)]

    def work(comm: CrewComm) -> dict[str, Tensor | None]:
        layers = attach(models[comm.rank], RankDAD(1), comm)
        layers.detach()
        loss_of(models[comm.rank](batch("mlp", comm.rank, 3))).backward()
        return {key: value for key, value in gradients(models[comm.rank]).items() if "weight" in key}

    for found in crew(2, work):
        assert distance(found, {k: v for k, v in pooled("mlp", [3, 3]).items() if "weight" in k}) < 1e-12


def test_images_of_different_sizes_meet():
    """What is smaller is padded with zeros, on both sides of the convolution, which changes no product."""
    start = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 2)).double()
    sizes = [(6, 9), (8, 7)]
    images = [torch.randn(2 + rank, 2, *size, dtype=torch.float64) for rank, size in enumerate(sizes)]

    def work(comm: CrewComm) -> dict[str, Tensor | None]:
        model = copy.deepcopy(start)
        attach(model, DAD(), comm)
        model(images[comm.rank]).square().sum().backward()
        return {"0.weight": model[0].weight.grad, "2.weight": model[2].weight.grad}

    plain = copy.deepcopy(start)
    for x in images:
        (plain(x).square().sum() / 2).backward()
    for found in crew(2, work):
        assert distance(found, {"0.weight": plain[0].weight.grad, "2.weight": plain[2].weight.grad}) < 1e-12


def test_nothing_is_warned_about_without_need():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed("tied transformer", [2, 3], DAD())


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 5), lambda: nn.Conv1d(4, 5, 2), lambda: nn.Embedding(5, 4)])
def test_outputs_may_be_changed_in_place(make):
    layer = make().double()
    model = nn.Sequential(layer, nn.ReLU(inplace=True))
    plain = copy.deepcopy(model)
    attach(model, DAD(), DryComm(1), lane=Inline())
    x = torch.tensor([[1, 4], [0, 0]]) if isinstance(layer, nn.Embedding) else torch.randn(3, 4, 6, dtype=torch.float64)
    loss_of(model(x)).backward()
    loss_of(plain(x)).backward()
    assert distance(gradients(model), gradients(plain)) < 1e-12


def test_states_follow_the_loss_scale():
    """A scale that doubles leaves no trace: the memory is in gradient units, like what is added to it."""

    class Scaler:
        scale = 1.0

        def is_enabled(self) -> bool:
            return True

        def get_scale(self) -> float:
            return self.scale

    def run(factor: float) -> Tensor:
        model, scaler = build("mlp"), Scaler()
        attach(model, RankDAD(1, feedback=True), DryComm(1), lane=Inline(), scaler=scaler)
        for step in range(3):
            scaler.scale = factor if step == 2 else 1.0
            model.zero_grad()
            (scaler.scale * loss_of(model(batch("mlp", 0, 5, step)))).backward()
        return model[0].weight.grad / scaler.scale

    assert torch.allclose(run(1.0), run(64.0), rtol=1e-9)
