"""Factors between sites: all layers in one message, with their sizes, also when batches change."""

from typing import Any

import pytest
import torch

from dad_worker import attach, average_the_rest, batch, build, distance, gradients, loss_of, pooled
from thinwire import parse
from thinwire.comm.link import Link
from thinwire.comm.threads import ThreadComm, in_threads

SITES = Link(1e8, 0.04)
ROWS = [[4, 4, 4], [4, 4, 4], [4, 2, 4], [4, 4, 4], [6, 4, 1], [4, 4, 4], [3, 3, 3]]


def trained(name: str, method: str, plan: list[list[int]]) -> list[tuple[list[Any], list[int]]]:
    """On every worker: its gradients after each step, and the trips that their factors took."""
    models = [build(name) for _ in plan[0]]

    def work(comm: ThreadComm) -> tuple[list[Any], list[int]]:
        model, found, trips = models[comm.rank], [], []
        layers = attach(model, parse(method), comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # gradients that no step follows are taken back
        for step, rows in enumerate(plan):
            model.zero_grad()
            before = comm.ledger.trips
            loss_of(model(batch(name, comm.rank, rows[comm.rank], step))).backward()
            trips.append(comm.ledger.trips - before)
            average_the_rest(model, layers, comm)
            found.append(gradients(model))
            optimizer.step()
        layers.unwrap()
        return found, trips

    return in_threads(len(plan[0]), work, timeout=60, link=SITES)


@pytest.mark.parametrize("method", ["DAD()", "EDAD(strict=False)", "AutoDAD()"])
def test_exact_whatever_the_batches_are(method: str) -> None:
    told = trained("mlp", method, ROWS)
    for found, trips in told:
        assert all(distance(found[step], pooled("mlp", rows, step)) < 1e-9 for step, rows in enumerate(ROWS))
        # The first step also agrees on sizes and looks for stray uses. Fewer rows fit; more are sent again.
        assert trips[1:] == [1, 1, 1, 2, 1, 1] if method == "DAD()" else max(trips[1:]) <= 2
    for found, _ in told[1:]:
        for mine, theirs in zip(found, told[0][0], strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_rank_dad_sends_one_message_and_all_agree() -> None:
    told = trained("mlp", "RankDAD(2)", ROWS)
    assert [trips[1:] for _, trips in told] == [[1, 1, 1, 2, 1, 1]] * 3
    for found, _ in told[1:]:
        for mine, theirs in zip(found, told[0][0], strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
