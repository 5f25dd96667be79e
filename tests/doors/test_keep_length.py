"""The mean of noisy steps is short: an outer step that gives it its length back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import local_cases as cases
import thinwire
from local_cases import adamw, anchors, batches, flat, net, step, unsent
from processes import launch
from thinwire import Dense, ErrorFeedback, Layout, LocalSteps, MethodWarning, Outer, TopK
from thinwire.comm import Comm
from thinwire.comm.threads import in_threads
from thinwire.testing.atomicity import check_atomicity
from thinwire.testing.cases import Case
from thinwire.wrappers.anchored import Anchored, leads

FULL, PART = Outer(keep_length=1), Outer(keep_length=0.5)
LOW = "ErrorFeedback(LowBit(2, block=16, smallest=8))"
SPARSE = "ErrorFeedback(TopK(0.1))"


def by_entry(values: list[float], handle: thinwire.LocalHandle) -> Tensor:
    (group,) = handle.changes.groups
    return torch.cat([torch.full((n,), v, dtype=torch.float64) for v, n in zip(values, group.layout.sizes)])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("outer", [FULL, PART], ids=str)
@pytest.mark.parametrize("density", [0.2, 1.0])
def test_a_plain_twin(density, outer, ahead):
    """Top-k with error feedback, the lengths of every tensor and what they lead to, written out."""
    world, steps, every = 3, 12, 2

    def ours(comm: Comm) -> list[Tensor]:
        model = net()
        optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
        recipe = LocalSteps(ErrorFeedback(TopK(density)), every, outer, ahead)
        handle = thinwire.local(model, optimizer, recipe, comm=comm)
        seen = []
        for batch in batches(steps, comm.rank):
            step(model, optimizer, batch)
            seen.append(flat(model))
        handle.detach()
        return seen

    workers = [net() for _ in range(world)]
    optimizers = [SGD(model.parameters(), 0.05, momentum=0.9) for model in workers]
    sizes = [p.numel() for p in workers[0].parameters()]
    anchor = flat(workers[0])
    count = int(density * anchor.numel())
    left, residuals = [anchor.clone() for _ in workers], [torch.zeros_like(anchor) for _ in workers]
    shares, twin = [0.0] * len(sizes), []
    for number in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(workers, optimizers)):
            step(model, optimizer, batches(steps, rank)[number - 1])
        if number % every == 0:
            sent = []
            for rank, model in enumerate(workers):
                residuals[rank] += flat(model) - left[rank]
                largest = residuals[rank].abs().topk(count).indices
                sent.append(torch.zeros_like(anchor).index_copy_(0, largest, residuals[rank][largest]))
                residuals[rank] -= sent[rank]
            mean = torch.stack(sent).mean(0)
            gains = []
            for tensor, m in enumerate(mean.split(sizes)):
                own = torch.stack([c.split(sizes)[tensor].norm() for c in sent]).square().mean().sqrt()
                share = float((m.norm() / own).square()) if m.any() else None
                if ahead and share is not None:
                    old = shares[tensor]
                    shares[tensor] = 0.9 * old + 0.1 * share if old else share
                used = shares[tensor] if ahead else share
                gains.append(min(max(used**-0.5, 1.0), world**0.5) ** outer.keep_length if used else 1.0)
            spread = torch.tensor(gains).repeat_interleave(torch.tensor(sizes))
            anchor = anchor + spread * mean
            lead = spread * torch.tensor(shares).repeat_interleave(torch.tensor(sizes))
            for rank, model in enumerate(workers):
                left[rank] = anchor + lead * residuals[rank]
                nn.utils.vector_to_parameters(left[rank].clone(), model.parameters())
        twin.append([flat(model) for model in workers])
    for rank, seen in enumerate(in_threads(world, ours)):
        for number in range(steps):
            torch.testing.assert_close(seen[number], twin[number][rank], rtol=0, atol=2e-5, msg=f"step {number + 1}")


def gains_of(outer: Outer, changes: list[Tensor]) -> list[float]:
    """The gains of tensors of 20 000 and 30 000 entries, with one vector of changes a worker."""
    layout = Layout(("a", "b"), (torch.Size([20_000]), torch.Size([30_000])))

    def work(comm: Comm) -> list[float]:
        method = Anchored(Dense(), outer)
        state = method.init(layout)
        out = layout.zeros()
        method.reduce(changes[comm.rank].clone(), state, comm, out)
        assert method.metrics(state)["gain"] == pytest.approx(0.4 * state.gains[0] + 0.6 * state.gains[1])
        return state.gains

    each = in_threads(len(changes), work)
    assert all(gains == each[0] for gains in each)
    return each[0]


@pytest.mark.parametrize("alike", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_the_gain_is_the_length_that_was_lost(alike, power):
    """n workers with a correlation rho: the mean is shorter by the root of rho + (1 - rho) / n."""
    workers, draw = 4, torch.Generator().manual_seed(1)
    common, *own = torch.randn(workers + 1, 50_000, generator=draw)
    held = [alike**0.5 * common + (1 - alike) ** 0.5 * mine for mine in own]
    lost = (alike + (1 - alike) / workers) ** 0.5
    assert gains_of(Outer(keep_length=power), held) == pytest.approx([lost**-power] * 2, rel=0.02)


def test_a_gain_has_limits():
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(2))
    assert gains_of(FULL, [x] * 4) == pytest.approx([1, 1], abs=1e-6)
    assert gains_of(FULL, [x, -x + 1e-12, x, -x]) == [2, 2]  # nearly nothing in common: no longer than the root of 4
    assert gains_of(FULL, [x, -x]) == [1, 1]  # nothing at all
    assert gains_of(FULL, [torch.zeros(50_000)] * 2) == [1, 1]
    half = torch.cat([x[:20_000], torch.zeros(30_000)])
    assert gains_of(FULL, [half, -half, half, half])[1] == 1  # tensor by tensor
    assert gains_of(FULL, [x]) == [1, 1]
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="keep_length"):
            Outer(keep_length=wrong)
    assert thinwire.parse(repr(PART)) == PART and repr(PART) == "Outer(1.0, keep_length=0.5)"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("spelling", [LOW, SPARSE])
def test_one_worker_is_as_long_as_ever(spelling, ahead):
    def train(outer: Outer) -> Tensor:
        def work(comm: Comm) -> Tensor:
            model = net()
            optimizer = adamw(model)
            recipe = LocalSteps(thinwire.parse(spelling), 2, outer, ahead)
            handle = thinwire.local(model, optimizer, recipe, comm=comm)
            for batch in batches(8, comm.rank):
                step(model, optimizer, batch)
            handle.finish()
            return flat(model)

        return in_threads(1, work)[0]

    if ahead:  # the share is all workers' then, by lengths; alone, what a code left of a mean may bend it
        torch.testing.assert_close(train(FULL), train(Outer()), rtol=0, atol=0.02)
    else:
        assert torch.equal(train(FULL), train(Outer()))


def check_laws(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert torch.equal(rank["finished"], ranks[0]["finished"]), "replicas differ after the last exchange"
        assert torch.equal(rank["resumed"], rank["finished"]), "a run that was resumed differs"
        assert torch.equal(*rank["last"]), "a run that was resumed differs in its next step"


@pytest.mark.parametrize("options", [{}, {"fragments": 4}, {"delay": 1}, {"ahead": True}], ids=str)
@pytest.mark.parametrize("outer", [FULL, Outer(0.9, 0.6, True, 0.5)], ids=str)
@pytest.mark.parametrize("spelling", [LOW, SPARSE, "ErrorFeedback(PowerSGD(1))", "Dense()"])
def test_laws(spelling, outer, options):
    if "ahead" in options and outer != FULL:
        pytest.skip("ahead expects the plain outer step")
    ranks = in_threads(3, lambda comm: cases.laws(comm, spelling, **{"fragments": 1, "outer": outer, **options}))
    check_laws(ranks)
    if not options:  # every 4 steps, replicas are equal
        assert all(torch.equal(rank["weights"][3], ranks[0]["weights"][3]) for rank in ranks)


@pytest.mark.timeout(240)
def test_laws_between_processes():
    calls = [("laws", {"spelling": LOW, "fragments": n, "outer": FULL}) for n in (1, 4)]
    calls += [("laws", {"spelling": SPARSE, "fragments": 1, "outer": PART, "ahead": True})]
    for ranks in zip(*launch(2, "local_cases:many", calls=calls, timeout=200), strict=True):
        assert not any(isinstance(rank, str) for rank in ranks), ranks[0]
        check_laws(list(ranks))


@pytest.mark.parametrize("method", [Anchored(thinwire.parse(LOW), FULL), Anchored(thinwire.parse(SPARSE), PART)])
def test_an_exchange_that_fails_leaves_shares_and_gains_as_they_were(method):
    layout = Layout(("w", "b"), (torch.Size([8, 12]), torch.Size([12])))
    check_atomicity(method, Case(2, layout))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("spelling", [LOW, SPARSE])
def test_conservation_holds_of_what_was_sent_before_it_was_lengthened(spelling, ahead):
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        model = net()
        optimizer = adamw(model)
        changed = cases.watch_steps(model, optimizer)
        recipe = LocalSteps(thinwire.parse(spelling), 2, FULL, ahead)
        handle = thinwire.local(model, optimizer, recipe, comm=comm)
        (group,) = handle.changes.groups
        sent, before = torch.zeros_like(flat(model)).double(), anchors(handle).double()
        for number, batch in enumerate(batches(7, comm.rank)):
            step(model, optimizer, batch)
            if number % 2:
                assert max(group.state.gains) > 1.05
                sent += (anchors(handle).double() - before) / by_entry(group.state.gains, handle)
                before = anchors(handle).double()
        lead = by_entry(leads(group.state.share, group.state.gains, len(group.layout.sizes)), handle)
        held = group.state.inner.residual.double()
        pending = flat(model).double() - before - lead * held
        accounted = sent + unsent(handle) + pending
        handle.detach()
        return torch.stack(changed).sum(0), accounted

    change, accounted = (torch.stack(parts).mean(0) for parts in zip(*in_threads(3, work)))
    torch.testing.assert_close(accounted, change, rtol=0, atol=1e-5)


def test_a_bad_step_leaves_shares_and_gains_as_they_were():
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        model = net()
        optimizer = SGD(model.parameters(), 0.05)
        recipe = LocalSteps(thinwire.parse(SPARSE), 2, FULL, True)
        handle = thinwire.local(model, optimizer, recipe, comm=comm)
        (group,) = handle.changes.groups
        data = batches(8, comm.rank)
        for batch in data[:4]:
            step(model, optimizer, batch)
        left, seen = flat(model), (list(group.state.share), list(group.state.gains))
        for number, (x, y) in enumerate(data[4:6]):
            step(model, optimizer, (x * float("inf") if comm.rank == 1 and number else x, y))
        assert seen == (group.state.share, group.state.gains)
        return left, flat(model)

    with pytest.warns(MethodWarning, match="not finite"):
        ranks = in_threads(2, work)
    assert all(torch.equal(left, back) for left, back in ranks)


def test_a_checkpoint_of_one_share_for_all_is_read():
    """Version 0.1 stored a number."""

    def work(comm: Comm) -> None:
        model = net()
        optimizer = adamw(model)
        recipe = LocalSteps(thinwire.parse(SPARSE), 1, ahead=True)
        handle = thinwire.local(model, optimizer, recipe, comm=comm)
        for batch in batches(4, comm.rank):
            step(model, optimizer, batch)
        (group,) = handle.changes.groups
        group.state.share = 0.5
        handle.load_state_dict(cases.reloaded(handle.state_dict()))
        (group,) = handle.changes.groups
        torch.testing.assert_close(group.state.departure, group.state.anchor + 0.5 * group.state.inner.residual)
        step(model, optimizer, batches(5, comm.rank)[-1])
        assert len(group.state.share) == len(group.layout.sizes)
        handle.finish()

    in_threads(2, work)
