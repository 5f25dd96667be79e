"""Factors are taken from the backward pass of any model, whatever it does, and every gradient is the pooled one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

from dad_worker import ARCHITECTURES, attach, batch, build, distance, distributed, gradients, loss_of, pooled
from thinwire import DAD, MethodWarning
from thinwire.capture.layers.factors.capture import Layers
from thinwire.comm.dry import DryComm
from thinwire.comm.threads import ThreadComm, in_threads
from thinwire.step.lanes import Beside, Inline
from transformers_like import Conv1D

torch.set_num_threads(1)
CPU = torch.device("cpu")
ROWS = ([4], [3, 3], [2, 5, 1], [3, 0, 2, 4])


@pytest.mark.filterwarnings("ignore::thinwire.core.reducer.MethodWarning")
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
    by_factors = [slot.weight for slot in layers.exchange.slots]
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


def test_layers_are_known_by_what_their_forward_does():
    class Renamed(nn.Linear):
        """Only its name is another."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Renamed(3, 3), Doubled(3, 3), Conv1D(3, 3), nn.Linear(0, 3))
    assert Layers(model, DAD(), DryComm(2)).ignored == ["0.weight", "2.weight"]
    assert [type(layer).__name__ for layer in model] == ["Renamed", "Doubled", "Conv1D", "Linear"]


def test_weights_with_hooks_of_the_user_stay_with_ddp():
    model = build("mlp")
    model[0].weight.register_hook(lambda gradient: gradient)
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert Layers(model, DAD(), DryComm(2)).ignored == ["4.weight"]


def test_a_weight_used_outside_its_layer_is_exact_and_said_to_be_dense():
    with pytest.warns(MethodWarning, match=r"embedding\.weight is used outside its layer"):
        distributed("tied by a function", [3, 2], DAD())


@pytest.mark.filterwarnings("ignore::thinwire.core.reducer.MethodWarning")
def test_a_use_outside_the_layer_is_exact_in_every_step_and_averaged_once_known():
    models = [build("tied by a function") for _ in range(2)]
    wanted = [pooled("tied by a function", [3, 3], step)["embedding.weight"] for step in range(3)]

    def work(comm: ThreadComm) -> tuple[list[float], list[str]]:
        model, off = models[comm.rank], []
        layers = attach(model, DAD(), comm)
        for step in range(3):
            model.zero_grad()
            loss_of(model(batch("tied by a function", comm.rank, 3, step))).backward()
            off.append(float((model.embedding.weight.grad - wanted[step]).abs().max()))
        return off, [row["mode"] for row in layers.plan() if row["layer"] == "embedding.weight"]

    for off, modes in in_threads(2, work):
        assert max(off) < 1e-12
        assert modes == ["dense"]


# ── accumulation ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["mlp", "mlp on grids", "conv2d", "gru cell"])
@pytest.mark.parametrize("silently", [True, False])
def test_micro_batches_add_up_to_one_batch(name, silently):
    """In no_sync nothing is sent until the last; without it every micro-batch is exchanged, to the same effect."""
    sent: list[int] = []

    def work(comm: ThreadComm) -> dict[str, Tensor | None]:
        model = models[comm.rank]
        layers = attach(model, DAD(), comm)
        start = comm.ledger.payload
        for step in range(3):
            model.require_backward_grad_sync = step == 2 or not silently
            loss_of(model(batch(name, comm.rank, 2, step))).backward()
            sent.append(comm.ledger.payload - start)
            if silently and step < 2:
                assert all(slot.weight.grad is None for slot in layers.exchange.slots)
        return {slot.names[0]: slot.weight.grad for slot in layers.exchange.slots}

    models = [build(name) for _ in range(2)]
    wanted = [pooled(name, [2, 2], step) for step in range(3)]
    for found in in_threads(2, work):
        total = {key: sum(part[key] for part in wanted) for key in found}
        assert distance(found, total) < 1e-12
    assert sorted(sent)[:4] == [0] * 4 if silently else min(sent) > 0


def test_several_forward_passes_before_one_backward_pass_and_the_other_way_round():
    def work(comm: ThreadComm) -> tuple[Any, Any]:
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
    for together, again in in_threads(2, work):
        assert distance(together, both) < 1e-12
        assert distance(again, twice) < 1e-12


def test_forward_passes_that_nobody_differentiates_cost_nothing():
    def work(comm: ThreadComm) -> list[int]:
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
    in_threads(2, work)


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
    monkeypatch.setattr("thinwire.capture.layers.factors.capture.COALESCED", 1)  # a message for each layer
    torch.manual_seed(3)
    start = Branches().double()

    def work(comm: ThreadComm) -> list[dict[str, Tensor | None]]:
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
    for steps in in_threads(2, work, timeout=20):
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
    monkeypatch.setattr("thinwire.capture.layers.factors.capture.COALESCED", 1)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)]).double()
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(comm: ThreadComm) -> int:
        lane = Counting()
        attach(models[comm.rank], DAD(), comm, lane=lane, in_flight=cap)
        loss_of(models[comm.rank](batch("mlp", comm.rank, 3))).backward()
        return lane.most

    assert in_threads(2, work) == [most, most]
