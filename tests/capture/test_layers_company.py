"""Factors are taken in company: beside checkpointing, autocast, copies and compilation, and in methods' own schemas."""

import copy
import io
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dad_worker import attach, batch, build, distance, distributed, gradients, loss_of, pooled
from thinwire import DAD, RankDAD
from thinwire.capture.layers.factors.capture import Layers
from thinwire.capture.layers.operations import Captured
from thinwire.comm.dry import DryComm
from thinwire.comm.threads import ThreadComm, in_threads
from thinwire.step.lanes import Inline

torch.set_num_threads(1)


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

    def work(comm: ThreadComm) -> dict[str, Tensor | None]:
        attach(models[comm.rank], DAD(), comm)
        loss_of(models[comm.rank](batch("mlp", comm.rank, 3))).backward()
        return {n.removeprefix("inner."): p.grad for n, p in models[comm.rank].named_parameters() if "weight" in n}

    wanted = {key: value for key, value in pooled("mlp", [3, 3]).items() if "weight" in key}
    for found in in_threads(2, work):
        assert distance(found, wanted) < 1e-12


def test_autocast_sends_half_precision_and_gives_the_gradient_of_half_precision():
    model = build("mlp").float()
    models = [copy.deepcopy(model) for _ in range(2)]

    def loss(model: nn.Module, rank: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model(batch("mlp", rank, 3).float()).float())

    def work(comm: ThreadComm) -> tuple[Any, int]:
        layers = attach(models[comm.rank], DAD(), comm)
        loss(models[comm.rank], comm.rank).backward()
        return {s.names[0]: s.weight.grad for s in layers.exchange.slots}, sum(r["bytes"] for r in layers.plan())

    for rank in range(2):
        (loss(model, rank) / 2).backward()
    wanted = {key: value for key, value in gradients(model).items() if "weight" in key}
    for found, sent in in_threads(2, work):
        assert distance(found, wanted) < 0.02
        assert found["0.weight"].dtype is torch.float32
        assert sent == 3 * 2 * (6 + 9 + 9 + 7 + 7 + 3)


def test_half_precision_models_travel_in_half_precision():
    models = [build("mlp").bfloat16() for _ in range(2)]

    def work(comm: ThreadComm) -> tuple[Any, int]:
        layers = attach(models[comm.rank], DAD(), comm)
        loss_of(models[comm.rank](batch("mlp", comm.rank, 3).bfloat16())).backward()
        return {s.names[0]: s.weight.grad for s in layers.exchange.slots}, sum(r["bytes"] for r in layers.plan())

    for found, sent in in_threads(2, work):
        assert distance(found, {k: v.bfloat16() for k, v in pooled("mlp", [3, 3]).items() if k in found}) < 0.05
        assert found["0.weight"].dtype is torch.bfloat16
        assert sent == 3 * 2 * (6 + 9 + 9 + 7 + 7 + 3)


def test_copies_pickles_and_state_dicts_know_nothing_of_it():
    for name in ("mlp", "conv2d", "embedding", "lstm cell", "fused gru"):
        plain = build(name)
        model = copy.deepcopy(plain)
        layers = Layers(model, DAD(unroll=True), DryComm(1))
        layers.install(nn.Sequential(model))
        assert any(isinstance(module, Captured) for module in model.modules())
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
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


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

    def work(comm: ThreadComm) -> dict[str, Tensor | None]:
        model = models[comm.rank]
        attach(model, DAD(), comm)
        hook = model[2].register_forward_pre_hook(lambda module, given: Broken.apply(given[0]))
        with pytest.raises(ValueError, match="out of luck"):
            loss_of(model(batch("mlp", comm.rank, 3))).backward()
        hook.remove()
        model.zero_grad()
        loss_of(model(batch("mlp", comm.rank, 3))).backward()
        return {key: value for key, value in gradients(model).items() if "weight" in key}

    for found in in_threads(2, work):
        assert distance(found, {k: v for k, v in pooled("mlp", [3, 3]).items() if "weight" in k}) < 1e-12


# ── schemas ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_private_layers_are_nobody_elses_business():
    def work(comm: ThreadComm) -> tuple[Any, ...]:
        model = models[comm.rank]
        with torch.no_grad():
            model[0].weight += comm.rank  # a private encoder is this worker's own from the start
        layers = attach(model, DAD(), comm, share=lambda name: not name.startswith("0."))
        loss_of(model(batch("mlp", comm.rank, 3))).backward()
        return layers.ignored, model[0].weight.clone(), model[0].weight.grad, model[2].weight.grad

    models = [build("mlp") for _ in range(2)]
    (ignored, kept, own, shared), (_, other_kept, other_own, other_shared) = in_threads(2, work)
    assert {"0.weight", "0.bias"} <= set(ignored)
    assert "4.bias" not in ignored
    assert not torch.equal(kept, other_kept)
    assert not torch.equal(own, other_own)
    assert torch.equal(shared, other_shared)


def test_a_boundary_may_average_deltas_on_their_way_down():
    """The aggregated delta goes into the private encoder, as far as rows match."""
    names: list[str] = []
    lock = threading.Lock()

    def work(comm: ThreadComm) -> tuple[Tensor, Tensor]:
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
    results = in_threads(2, work)
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
    torch.optim.SGD(model.parameters(), 0.1).step()  # what nobody has used is not saved
    file = io.BytesIO()
    torch.save(layers.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = attach(build("mlp"), RankDAD(2), DryComm(1), lane=Inline())
    fresh.load_state_dict([saved])
    assert torch.equal(fresh.exchange.groups[0].state.start, layers.exchange.groups[0].state.start)
    with pytest.raises(ValueError, match="other layers"):
        attach(build("conv2d"), RankDAD(2), DryComm(1), lane=Inline()).load_state_dict([saved])


def test_after_detaching_the_exact_mean_is_exchanged():
    models = [build("mlp") for _ in range(2)]

    def work(comm: ThreadComm) -> dict[str, Tensor | None]:
        layers = attach(models[comm.rank], RankDAD(1), comm)
        layers.detach(DAD())
        loss_of(models[comm.rank](batch("mlp", comm.rank, 3))).backward()
        return {key: value for key, value in gradients(models[comm.rank]).items() if "weight" in key}

    for found in in_threads(2, work):
        assert distance(found, {k: v for k, v in pooled("mlp", [3, 3]).items() if "weight" in k}) < 1e-12


def test_images_of_different_sizes_meet():
    """What is smaller is padded with zeros, on both sides of the convolution, which changes no product."""
    start = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 2)).double()
    sizes = [(6, 9), (8, 7)]
    images = [torch.randn(2 + rank, 2, *size, dtype=torch.float64) for rank, size in enumerate(sizes)]

    def work(comm: ThreadComm) -> dict[str, Tensor | None]:
        model = copy.deepcopy(start)
        attach(model, DAD(), comm)
        model(images[comm.rank]).square().sum().backward()
        return {"0.weight": model[0].weight.grad, "2.weight": model[2].weight.grad}

    plain = copy.deepcopy(start)
    for x in images:
        (plain(x).square().sum() / 2).backward()
    for found in in_threads(2, work):
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
