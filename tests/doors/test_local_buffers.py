"""Buffers that steps change, such as a batch norm's statistics: each worker's own until they are asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import thinwire
from local_cases import batches, flat, net, step
from thinwire import Dense, MethodWarning
from thinwire.comm import Comm
from thinwire.comm.threads import in_threads


class Masked(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*net(norm=True))
        self.register_buffer("mask", torch.full((5000,), -torch.inf))


def with_buffers(comm: Comm, average_buffers: Any) -> dict[str, Any]:
    """What becomes of a batch norm's statistics after an exchange and after the last one, and what was sent."""
    model = Masked()
    optimizer = SGD(model.parameters(), 0.1)
    handle = thinwire.local(model, optimizer, Dense(), 2, average_buffers=average_buffers, comm=comm)
    seen = []
    before = handle.ledger.payload
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[1].running_var.clone()))
    for batch in batches(2, comm.rank):
        step(model, optimizer, batch)
    told = {"own": seen[-1], "now": model[1].running_var.clone(), "sent": handle.ledger.payload - before}
    handle.finish()
    assert bool((model.mask == -torch.inf).all())
    return told | {"end": model[1].running_var, "all": handle.ledger.payload - before}


def test_buffers_are_averaged_when_they_change_and_not_sent_when_they_do_not():
    ranks = in_threads(3, lambda comm: with_buffers(comm, True))
    for rank in ranks:
        assert torch.equal(rank["now"], ranks[0]["now"])
        assert rank["sent"] < 4 * (flat(net(norm=True)).numel() + 100)
        torch.testing.assert_close(rank["now"], torch.stack([other["own"] for other in ranks]).mean(0))
    for rank in in_threads(3, lambda comm: with_buffers(comm, False)):
        assert torch.equal(rank["now"], rank["own"]) and torch.equal(rank["end"], rank["own"])


def test_buffers_stay_a_workers_own_until_all_have_finished():
    ranks = in_threads(3, lambda comm: with_buffers(comm, "finish"))
    never = in_threads(3, lambda comm: with_buffers(comm, False))
    for rank, other in zip(ranks, never, strict=True):
        assert torch.equal(rank["now"], rank["own"]) and rank["sent"] == other["sent"]
        assert torch.equal(rank["end"], ranks[0]["end"])
        assert rank["all"] < other["all"] + 4 * 100
        torch.testing.assert_close(rank["end"], torch.stack([one["own"] for one in ranks]).mean(0))
    with pytest.raises(ValueError, match="'finish', True or False"):
        in_threads(1, lambda comm: with_buffers(comm, "always"))


def test_buffers_are_averaged_when_asked_for_and_go_back_with_a_bad_step():
    def work(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        model = net(norm=True)
        optimizer = SGD(model.parameters(), 0.1)
        handle = thinwire.local(model, optimizer, Dense(), 2, comm=comm)
        data = batches(4, comm.rank)
        for batch in data[:2]:
            step(model, optimizer, batch)
        own = model[1].running_mean.clone()
        handle.average_buffers()
        mean = model[1].running_mean.clone()
        for number, (x, y) in enumerate(data[2:]):
            step(model, optimizer, (x * float("inf") if comm.rank == 1 and number else x, y))
        return own, mean, model[1].running_mean

    with pytest.warns(MethodWarning, match="not finite"):
        ranks = in_threads(2, work)
    for _, mean, back in ranks:
        assert torch.equal(mean, ranks[0][1]) and torch.equal(mean, back)
        torch.testing.assert_close(mean, torch.stack([own for own, _, _ in ranks]).mean(0))


@pytest.mark.parametrize("world", [1, 3])
def test_buffers_of_another_number_of_workers_are_their_mean(world, tmp_path):
    def start(comm: Comm) -> tuple[nn.Module, thinwire.LocalHandle]:
        model = net(norm=True)
        optimizer = SGD(model.parameters(), 0.1)
        handle = thinwire.local(model, optimizer, Dense(), 2, comm=comm)
        for batch in batches(3 if comm.world == 2 else 0, comm.rank):
            step(model, optimizer, batch)
        return model, handle

    def before(comm: Comm) -> tuple[Tensor, Tensor]:
        model, handle = start(comm)
        handle.save(tmp_path)
        return model[1].running_mean, handle.changes.kept["1.running_mean"]

    def after(comm: Comm) -> tuple[Tensor, Tensor]:
        model, handle = start(comm)
        handle.load(tmp_path)
        return model[1].running_mean, handle.changes.kept["1.running_mean"]

    own, kept = (torch.stack(parts).mean(0) for parts in zip(*in_threads(2, before)))
    for now, then in in_threads(world, after):
        torch.testing.assert_close(now, own)
        torch.testing.assert_close(then, kept)
