"""Workers that go on ahead of what they have in common, by the share of their unsent change that all expect to have."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import local_cases as cases
import thinwire
from local_cases import adamw, anchors, batches, flat, net, step, unsent
from processes import launch
from thinwire import Dense, ErrorFeedback, MethodWarning, Outer, TopK
from thinwire.comm import Comm
from thinwire.comm.threads import in_threads
from thinwire.wrappers.anchored import followed, leads

FEEDBACK = "ErrorFeedback(TopK(0.1, agree=True))"


def lead(handle: thinwire.LocalHandle) -> Tensor:
    """By how much this worker is ahead of the anchor."""
    by = [
        torch.full((size,), each)
        for group in handle.changes.groups
        for each, size in zip(leads(group.state.share, group.state.gains, len(group.layout.sizes)), group.layout.sizes)
    ]
    return torch.cat(by).double() * unsent(handle)


@pytest.mark.parametrize("ahead", [True, "all"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_plain_twin(every, ahead):
    """Top-k, error feedback and a share for each tensor, written out."""
    world, steps, density = 3, 12, 0.1

    def ours(comm: Comm) -> list[Tensor]:
        model = net()
        optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
        handle = thinwire.local(model, optimizer, ErrorFeedback(TopK(density)), every, ahead=ahead, comm=comm)
        seen = []
        for batch in batches(steps, comm.rank):
            step(model, optimizer, batch)
            seen.append(flat(model))
        handle.detach()
        return seen

    workers = [net() for _ in range(world)]
    optimizers = [SGD(model.parameters(), 0.05, momentum=0.9) for model in workers]
    anchor = flat(workers[0])
    count = int(density * anchor.numel())
    sizes = torch.tensor([p.numel() for p in workers[0].parameters()])
    residuals, shares = [torch.zeros_like(anchor) for _ in workers], [[0.0] * len(sizes) for _ in workers]

    def departure(rank: int) -> Tensor:
        return anchor + torch.tensor(shares[rank]).repeat_interleave(sizes) * residuals[rank]

    twin = []
    for number in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(workers, optimizers)):
            step(model, optimizer, batches(steps, rank)[number - 1])
        if number % every == 0:
            sent = []
            for rank, model in enumerate(workers):
                residuals[rank] += flat(model) - departure(rank)
                largest = residuals[rank].abs().topk(count).indices
                sent.append(torch.zeros_like(anchor).index_copy_(0, largest, residuals[rank][largest]))
                residuals[rank] -= sent[rank]
            mean = torch.stack(sent).mean(0)
            anchor = anchor + mean
            for rank, model in enumerate(workers):
                for tensor, (c, m) in enumerate(zip(sent[rank].split(sizes.tolist()), mean.split(sizes.tolist()))):
                    if ahead == "all":
                        shares[rank][tensor] = 1.0
                    elif c.any():
                        slope, share = min(max(float(c @ m / (c @ c)), 0), 1), shares[rank][tensor]
                        shares[rank][tensor] = 0.9 * share + 0.1 * slope if share else slope
                nn.utils.vector_to_parameters(departure(rank), model.parameters())
        twin.append([flat(model) for model in workers])
    for rank, seen in enumerate(in_threads(world, ours)):
        for number in range(steps):
            torch.testing.assert_close(seen[number], twin[number][rank], rtol=0, atol=1e-5, msg=f"step {number + 1}")


def check_laws(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert torch.equal(rank["finished"], ranks[0]["finished"]), "replicas differ after the last exchange"
        assert torch.equal(rank["resumed"], rank["finished"]), "a run that was resumed differs"
        assert torch.equal(*rank["last"]), "a run that was resumed differs in its next step"
    assert not torch.equal(ranks[0]["weights"][-1], ranks[1]["weights"][-1])  # or they were not ahead


@pytest.mark.parametrize(
    "options", [{}, {"fragments": 4, "every": 4}, {"delay": 1, "every": 2}, {"ahead": "all"}], ids=str
)
@pytest.mark.parametrize("spelling", [FEEDBACK, "ErrorFeedback(PowerSGD(1))", "ErrorFeedback(ExDyna(0.2))"])
def test_laws(spelling, options):
    given = {"every": 1, "fragments": 1, "steps": 9, "ahead": True, **options}
    check_laws(in_threads(3, lambda comm: cases.laws(comm, spelling, **given)))


@pytest.mark.timeout(120)
def test_laws_between_processes():
    calls = [("laws", {"spelling": FEEDBACK, "fragments": n, "every": 4, "ahead": True}) for n in (1, 4)]
    by_rank = launch(2, "local_cases:many", calls=calls, timeout=100)
    for ranks in zip(*by_rank, strict=True):
        assert not any(isinstance(rank, str) for rank in ranks), ranks[0]
        check_laws(list(ranks))


@pytest.mark.parametrize("ahead", [True, "all"])
def test_no_change_is_lost(ahead):
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        model = net()
        optimizer = adamw(model)
        changed = cases.watch_steps(model, optimizer)
        handle = thinwire.local(model, optimizer, thinwire.parse(FEEDBACK), 2, ahead=ahead, comm=comm)
        start = anchors(handle).double()
        for batch in batches(7, comm.rank):
            step(model, optimizer, batch)
        pending = flat(model).double() - anchors(handle).double() - lead(handle)
        accounted = anchors(handle).double() - start + unsent(handle) + pending
        handle.detach()
        return torch.stack(changed).sum(0), accounted

    ranks = in_threads(3, work)
    change, accounted = (torch.stack(parts).mean(0) for parts in zip(*ranks))
    torch.testing.assert_close(accounted, change, rtol=0, atol=1e-6)


@pytest.mark.parametrize("outer", [Outer(), Outer(keep_length=1)], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_another_number_of_workers_conserves_what_was_not_sent(world, outer, tmp_path):
    def start(comm: Comm) -> tuple[nn.Module, Any, thinwire.LocalHandle]:
        model = net()
        optimizer = adamw(model)
        recipe = thinwire.LocalSteps(thinwire.parse(FEEDBACK), 2, outer, ahead=True)
        return model, optimizer, thinwire.local(model, optimizer, recipe, comm=comm)

    def before(comm: Comm) -> tuple[Tensor, Tensor]:
        model, optimizer, handle = start(comm)
        for batch in batches(7, comm.rank):
            step(model, optimizer, batch)
        handle.save(tmp_path)
        return flat(model).double() - anchors(handle).double() - lead(handle), unsent(handle)

    def after(comm: Comm) -> tuple[Tensor, Tensor]:
        model, optimizer, handle = start(comm)
        handle.load(tmp_path)
        told = flat(model).double() - anchors(handle).double() - lead(handle), unsent(handle)
        step(model, optimizer, batches(1, comm.rank)[0])
        handle.finish()
        return told

    old, new = in_threads(3, before), in_threads(world, after)
    changes, left = zip(*old)
    assert torch.stack(left).any() and torch.stack(changes).any()
    for change, _ in new:
        torch.testing.assert_close(change, torch.stack(changes).mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(sum(rest for _, rest in new), sum(left), rtol=0, atol=1e-6)


def test_a_bad_step_goes_back_to_where_the_worker_left_from():
    def work(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        model = net()
        optimizer = SGD(model.parameters(), 0.05)
        handle = thinwire.local(model, optimizer, thinwire.parse(FEEDBACK), 2, ahead=True, comm=comm)
        data = batches(8, comm.rank)
        for batch in data[:4]:
            step(model, optimizer, batch)
        left, held = flat(model), unsent(handle)
        for number, (x, y) in enumerate(data[4:6]):
            step(model, optimizer, (x * float("inf") if comm.rank == 1 and number else x, y))
        back = flat(model)
        assert torch.equal(held, unsent(handle))
        for batch in data[6:]:
            step(model, optimizer, batch)
        handle.finish()
        return left, back, flat(model)

    with pytest.warns(MethodWarning, match="not finite"):
        ranks = in_threads(2, work)
    for left, back, end in ranks:
        assert torch.equal(left, back) and end.isfinite().all() and torch.equal(end, ranks[0][2])


@pytest.mark.parametrize("alike", [0.0, 0.3, 1.0])
def test_the_share_is_what_the_mean_of_all_is_of_a_workers_own(alike):
    """n workers with a correlation rho: the mean is rho + (1 - rho) / n of one's own, also where that is large."""
    workers, draw = 4, torch.Generator().manual_seed(1)
    common, *own = torch.randn(workers + 1, 200_000, generator=draw)
    held = [alike**0.5 * common + (1 - alike) ** 0.5 * mine for mine in own]
    large = held[0].abs() > 2
    sent, mean = held[0][large], torch.stack(held).mean(0)[large]
    share = followed(0.0, float(sent @ mean), float(sent @ sent))
    assert share == pytest.approx(alike + (1 - alike) / workers, abs=0.01)
    assert followed(share, 0.0, 0.0) == share  # nothing was sent


def test_who_looks_ahead_does_not_swing():
    """Least squares with momentum at a density of a fiftieth: without, steps that long diverge."""

    def work(comm: Comm, ahead: bool) -> float:
        model = nn.Linear(200, 1, bias=False)
        nn.init.zeros_(model.weight)
        truth = torch.randn(200, 1, generator=torch.Generator().manual_seed(3))
        draw = torch.Generator().manual_seed(10 + comm.rank)
        optimizer = SGD(model.parameters(), 0.01, momentum=0.9)
        handle = thinwire.local(model, optimizer, ErrorFeedback(TopK(0.02)), 1, ahead=ahead, comm=comm)
        for _ in range(400):
            x = torch.randn(32, 200, generator=draw)
            step(model, optimizer, (x, x @ truth))
        handle.finish()
        return float((model.weight.detach().T - truth).norm() / truth.norm())

    behind, ahead = (in_threads(2, lambda comm, a=a: work(comm, a))[0] for a in (False, True))
    assert ahead < 0.01 and behind > 1


def test_what_makes_no_sense_is_refused():
    def work(comm: Comm) -> None:
        model = net()
        optimizer = adamw(model)
        with pytest.raises(TypeError, match=r"ErrorFeedback\(TopK"):
            thinwire.local(model, optimizer, TopK(0.1), 1, ahead=True, comm=comm)
        with pytest.raises(ValueError, match="all the way"):
            thinwire.local(model, optimizer, ErrorFeedback(Dense()), 1, ahead=True, outer=Outer(0.7), comm=comm)
        with pytest.raises(ValueError, match="keep_length"):
            thinwire.local(model, optimizer, FEEDBACK, 1, ahead="all", outer=Outer(keep_length=1), comm=comm)
        with pytest.raises(ValueError, match="'all', not 'some'"):
            thinwire.local(model, optimizer, FEEDBACK, 1, ahead="some", comm=comm)  # type: ignore[arg-type]

    in_threads(2, work)
