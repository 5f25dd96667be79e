"""Local steps in bad company: steps that are not finite, edits, odd models; and what is told and refused."""

import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import forked
import local_cases as cases
import thinwire
from local_cases import adamw, anchors, batches, flat, net, step, unsent
from processes import launch
from thinwire import Dense, Disagreement, ErrorFeedback, MethodWarning, TopK, plan
from thinwire.comm import Comm
from thinwire.comm.threads import in_threads

FEEDBACK = "ErrorFeedback(TopK(0.2))"


# ── bad steps, odd models ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_change_that_is_not_finite_takes_everybody_back(fragments):
    every = 3

    def work(comm: Comm) -> dict[str, Any]:
        model = net(norm=True)
        optimizer = adamw(model)
        handle = thinwire.local(model, optimizer, thinwire.parse(FEEDBACK), every, fragments=fragments, comm=comm)
        data = batches(12, comm.rank)
        for batch in data[:every]:
            step(model, optimizer, batch)
        before, left = anchors(handle), unsent(handle)
        for number, (x, y) in enumerate(data[every:], start=every + 1):
            if comm.rank == 1 and number == every + 1:
                x = x * torch.inf
            step(model, optimizer, (x, y))
            if handle.metrics()["skipped"] == 1:
                break
        after = flat(model), anchors(handle), unsent(handle)
        for batch in data[-4:]:
            step(model, optimizer, batch)
        handle.finish()
        return {"before": (before, left), "after": after, "end": flat(model), "told": handle.metrics()}

    with pytest.warns(MethodWarning, match="not finite on every rank"):
        ranks = in_threads(3, work)
    for rank in ranks:
        weights, anchor, left = rank["after"]
        assert torch.equal(weights, ranks[0]["before"][0])
        assert torch.equal(anchor, ranks[0]["before"][0])
        assert torch.equal(left, rank["before"][1])
        assert rank["told"]["skipped"] == 1
        assert rank["end"].isfinite().all()
        assert torch.equal(rank["end"], ranks[0]["end"])


def test_edits_by_others_are_refused_or_count_as_change():
    with pytest.raises(Disagreement, match=r"changed parameters between two steps \(rank 0, 1\)"):
        in_threads(2, lambda comm: cases.edited(comm, odd=True))
    one, two = in_threads(2, lambda comm: cases.edited(comm, comm.rank == 1, check_edits=False))
    assert torch.equal(one, two)
    plain, _ = in_threads(2, lambda comm: cases.edited(comm, odd=False))
    assert not torch.equal(one, plain)
    with pytest.raises(Disagreement, match="changed parameters"):  # heard when the exchange beside the steps lands
        in_threads(2, lambda comm: cases.edited(comm, comm.rank == 1, delay=1, steps=6))


def test_looking_at_the_common_model_is_no_edit_and_restart_leaves_from_what_was_loaded():
    def work(comm: Comm) -> dict[str, Any]:
        model = net(norm=True, seed=comm.rank)  # everybody leaves from rank 0's all the same
        optimizer = SGD(model.parameters(), 0.1)
        handle = thinwire.local(model, optimizer, Dense(), 4, comm=comm)
        data = batches(8, comm.rank)
        for batch in data[:2]:
            step(model, optimizer, batch)
        own = flat(model), model[1].running_mean.clone()
        with handle.anchored():
            common = flat(model), model[1].running_mean.clone()
        back = flat(model), model[1].running_mean.clone()
        model.load_state_dict(net(norm=True, seed=7).state_dict())
        handle.restart()
        for batch in data[2:5]:
            step(model, optimizer, batch)
        early = handle.capture.step
        step(model, optimizer, data[5])
        return {"own": own, "common": common, "back": back, "early": early, "end": flat(model), "steps": handle.steps}

    ranks = in_threads(2, work)
    for rank in ranks:
        assert torch.equal(rank["common"][0], flat(net(norm=True)))
        assert not rank["common"][1].any()
        assert all(map(torch.equal, rank["own"], rank["back"]))
        assert not torch.equal(rank["own"][0], rank["common"][0])
        assert rank["early"] == 0
        assert rank["steps"] == 6
        assert torch.equal(rank["end"], ranks[0]["end"])
    assert float((ranks[0]["end"] - flat(net(norm=True, seed=7))).abs().max()) < 1


def test_the_optimizers_state_is_left_alone_or_averaged():
    def work(comm: Comm, kept: Any) -> tuple[list[Tensor], list[Tensor]]:
        model = net()
        optimizer = adamw(model)
        own: list[Tensor] = []

        def squares() -> list[Tensor]:
            return [optimizer.state[p]["exp_avg_sq"].clone() for p in model.parameters()]

        optimizer.register_step_post_hook(lambda *_: own.__setitem__(slice(None), squares()))
        thinwire.local(model, optimizer, Dense(), 2, fragments=2, optimizer_state=kept, comm=comm)
        for batch in batches(4, comm.rank):
            step(model, optimizer, batch)
        return own, squares()

    for own, now in in_threads(2, lambda comm: work(comm, "local")):
        assert all(map(torch.equal, own, now))
    ranks = in_threads(2, lambda comm: work(comm, "average"))
    for own, now in ranks:
        assert torch.equal(own[0], now[0])  # the first fragment was exchanged a step ago
        for number in range(1, 6):
            torch.testing.assert_close(now[number], (ranks[0][0][number] + ranks[1][0][number]) / 2)
            assert not torch.equal(own[number], now[number])


def test_groups_frozen_and_tied_parameters_and_accumulated_gradients():
    def work(comm: Comm) -> tuple[Tensor, Tensor, list[str]]:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(3, 3))
        donor = net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(flat(donor)[: parameter.numel()].view(parameter.shape))
        model[1].weight = model[0].weight
        model[3].requires_grad_(False)
        groups = [
            {"params": [model[0].weight, model[0].bias, model[1].bias]},
            {"params": model[2].parameters(), "lr": 0.5},
        ]
        optimizer = SGD(groups, lr=0.1)
        handle = thinwire.local(model, optimizer, Dense(), 2, comm=comm)
        for first, second in zip(batches(4, comm.rank), batches(4, comm.rank + 10)):
            optimizer.zero_grad()
            for x, y in (first, second):
                (model(x) - y).square().mean().backward()
            optimizer.step()
        frozen = torch.cat([p.flatten() for p in model[3].parameters()])
        return flat(model), frozen, list(handle.changes.parameters)

    ranks = in_threads(2, work)
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert ranks[0][2] == ["0.weight", "0.bias", "1.bias", "2.weight", "2.bias"]
    assert torch.equal(ranks[0][1], torch.cat([flat(net())[:9], flat(net())[:3]]))


def test_half_precision_keeps_an_anchor_in_full():
    def work(comm: Comm) -> tuple[Tensor, Tensor, int]:
        model = net().bfloat16()
        optimizer = SGD(model.parameters(), 0.05)
        handle = thinwire.local(model, optimizer, ErrorFeedback(TopK(0.3)), 2, comm=comm)
        for x, y in batches(6, comm.rank):
            step(model, optimizer, (x.bfloat16(), y.bfloat16()))
        return flat(model), handle.changes.groups[0].state.anchor, handle.ledger.payload

    ranks = in_threads(2, work)
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert ranks[0][1].dtype is torch.float32
    assert torch.equal(ranks[0][1].bfloat16(), ranks[0][0])
    assert not torch.equal(ranks[0][1], ranks[0][0].float())


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_do_not_count(fused):
    def work(comm: Comm) -> tuple[int, Tensor]:
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.02, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        handle = thinwire.local(model, optimizer, Dense(), 3, comm=comm)
        skipped = 0
        for number, (x, y) in enumerate(batches(7, comm.rank)):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            overflow = comm.rank == 1 and number == 1
            scaler.scale(loss * torch.inf if overflow else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            skipped += overflow
        counted = handle.steps
        handle.finish()
        return counted + skipped, flat(model)

    ranks = in_threads(2, work)
    assert [rank[0] for rank in ranks] == [7, 7]
    assert torch.equal(ranks[0][1], ranks[1][1])


def test_ranks_with_fewer_steps_take_part_until_all_are_done_and_may_go_on():
    def work(comm: Comm, fragments: int) -> tuple[list[int], Tensor]:
        model = net()
        optimizer = SGD(model.parameters(), 0.1)
        handle = thinwire.local(model, optimizer, Dense(), 4, fragments=fragments, comm=comm)
        counts = []
        for epoch in range(2):
            for batch in batches(10 if comm.rank else 3 + epoch, comm.rank):
                step(model, optimizer, batch)
            handle.finish()
            counts.append(handle.steps)
        return counts, flat(model)

    for fragments in (1, 4):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            ranks = in_threads(3, lambda comm, fragments=fragments: work(comm, fragments))
        assert [rank[0] for rank in ranks] == [[10, 20]] * 3
        assert all(torch.equal(rank[1], ranks[0][1]) for rank in ranks)
        assert any("without a change of its own" in str(one.message) for one in heard)


# ── at the front door ──────────────────────────────────────────────────────────────────────────────────────────────


def test_metrics_speak_of_the_last_step():
    def work(comm: Comm) -> list[dict[str, float]]:
        model = net()
        optimizer = adamw(model)
        handle = thinwire.local(model, optimizer, ErrorFeedback(TopK(0.1)), 2, comm=comm)
        told = []
        for batch in batches(4, comm.rank):
            step(model, optimizer, batch)
            told.append(handle.metrics())
        total = sum(one["payload_bytes"] for one in told)
        assert 0 < total <= handle.ledger.payload
        return told

    quiet, loud, *_ = in_threads(2, work)[0]
    assert quiet["payload_bytes"] == quiet["density"] == quiet["residual_norm"] == 0
    assert loud["payload_bytes"] > 0
    assert loud["residual_norm"] > 0
    assert 0.09 < loud["density"] < 0.11
    assert (loud["step"], loud["exchanges"], loud["skipped"]) == (2, 1, 0)
    assert quiet.keys() == loud.keys()


def test_the_plan_of_local_steps_is_what_they_send():
    world, every = 3, 5
    for reducer in (Dense(), thinwire.parse("ErrorFeedback(RandomBlock(0.1))")):

        def work(comm: Comm, reducer: Any = reducer) -> float:
            model = net()
            optimizer = adamw(model)
            handle = thinwire.local(model, optimizer, reducer, every, comm=comm)
            for batch in batches(every, comm.rank):
                step(model, optimizer, batch)
            return handle.metrics()["wire_bytes"]

        planned = plan.local_steps(reducer, plan.layout_of(net()), world, every)
        assert planned.wire(world) * every == pytest.approx(in_threads(world, work)[0])
        once = plan.local_steps(reducer, plan.layout_of(net()), world, 1)
        network = plan.Network(1e6, world, 1e-3)
        assert planned.exchange(network) == pytest.approx(once.exchange(network) / every)


def test_what_makes_no_sense_is_refused():
    def refused(error: type[Exception], words: str, reducer: Any = None, every: Any = 2, **options: Any) -> None:
        model = options.pop("model", net())
        optimizer = options.pop("optimizer", None) or adamw(model)
        with pytest.raises(error, match=words):
            in_threads(
                1, lambda comm: thinwire.local(model, optimizer, reducer or Dense(), every, comm=comm, **options)
            )

    refused(TypeError, "backward pass", thinwire.parse("DAD()"))
    refused(ValueError, "delay", delay=-1)
    refused(ValueError, "optimizer_state", optimizer_state="both")
    refused(ValueError, "with a delay", optimizer_state="average", delay=1)
    refused(ValueError, "fragments", fragments=7)
    refused(ValueError, "not the model's", optimizer=adamw(net()))
    refused(ValueError, "nothing to exchange", model=net().requires_grad_(False))
    refused(ValueError, "no shape yet", model=nn.LazyLinear(3))
    with pytest.raises(RuntimeError, match="init_process_group"):
        thinwire.local(net(), adamw(net()), Dense(), 2)
    with pytest.warns(MethodWarning, match="never sends what it leaves out"):
        in_threads(1, lambda comm: thinwire.local(model := net(), adamw(model), TopK(0.1), 2, comm=comm))


def test_one_handle_an_optimizer_and_none_after_detach():
    def work(comm: Comm) -> None:
        model = net()
        optimizer = SGD(model.parameters(), 0.1)
        handle = thinwire.local(model, optimizer, Dense(), 1, comm=comm)
        with pytest.raises(RuntimeError, match="local steps already"):
            thinwire.local(model, optimizer, Dense(), 1, comm=comm)
        handle.detach()
        sent = handle.ledger.payload
        step(model, optimizer, batches(1, comm.rank)[0])
        assert handle.ledger.payload == sent
        again = thinwire.local(model, optimizer, Dense(), 1, comm=comm)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with pytest.raises(RuntimeError, match="did not when local"):
            step(model, optimizer, batches(1, comm.rank)[0])
        again.detach()

    in_threads(2, work)


def test_the_example_runs():
    example = Path(__file__).parents[2] / "examples" / "local_steps.py"
    kernels = {"THINWIRE_KERNELS": "reference", "OMP_NUM_THREADS": "1"}
    code, said = forked.workers(2, [str(example), "60"], os.environ | kernels)
    assert code == 0, said
    assert "2 workers" in said
    assert float(said.split("accuracy ")[1].split("%")[0]) > 60


def test_one_thread_begins_local_steps_while_an_optimizer_of_another_takes_a_step():
    """The look at an optimizer's first step goes through the handles of all threads."""

    def begin(comm: Comm) -> None:
        for _ in range(150):
            model = net()
            kept.append(thinwire.local(model, SGD(model.parameters(), 0.1), Dense(), 2, comm=comm))

    kept: list[thinwire.LocalHandle] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as other:
            beginning = other.submit(in_threads, 1, begin)
            alone = SGD(net().parameters(), 0.1)
            while not beginning.done():
                alone.step()
            beginning.result()
    finally:
        sys.setswitchinterval(interval)


def test_a_model_that_is_sharded_is_refused_in_words():
    for told in launch(2, "local_cases:sharded"):
        assert all("TypeError: 0.weight is a DTensor (6 such parameters), as FSDP2" in said for said in told), told
