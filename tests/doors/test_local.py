"""Local steps: the laws, in threads and processes; outer steps, delays and fragments; checkpoints."""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import local_cases as cases
import thinwire
from examples_of_methods import EXAMPLES, representatives
from local_cases import adamw, batches, flat, net, step, unsent
from processes import launch
from thinwire import CheckpointError, Dense, LocalHandle, Outer
from thinwire.comm import Comm
from thinwire.comm.threads import in_threads

METHODS = [spelling for spelling, reducer in EXAMPLES.items() if reducer.wants is Tensor]
KINDS = representatives(Tensor)
# Of these, whose messages depend on how many workers there are; `--all` takes every kind.
ALL = len(KINDS) > 20
FIRST = {type(EXAMPLES[spelling]): spelling for spelling in reversed(METHODS)}.values()
CHOSEN = METHODS if ALL else {*FIRST, *KINDS}  # each method and each wrapper
PARTED = KINDS if ALL else [one for one in KINDS if re.search("TopK|ExDyna|LowBit|OkTopk", one)]
FEEDBACK = "ErrorFeedback(TopK(0.2))"
FRAGMENT_ENDS = {1: (6,), 4: (1, 2, 4, 6)}  # how many of net()'s parameters lie before each fragment's end


def check_laws(spelling: str, fragments: int, ranks: list[dict[str, Any]], every: int = 4) -> None:
    first = ranks[0]
    sizes = [p.numel() for p in net().parameters()]
    for rank in ranks:
        assert torch.equal(rank["finished"], first["finished"]), "replicas differ after the last exchange"
        assert torch.equal(rank["resumed"], rank["finished"]), "a run that was resumed differs"
        assert torch.equal(*rank["last"]), "a run that was resumed differs in its next step"
        for number, (weights, others) in enumerate(zip(rank["weights"], first["weights"]), start=1):
            position = (number - 1) % every
            exchanged = position * fragments // every if (position + 1) * fragments % every == 0 else None
            ends = (0, *FRAGMENT_ENDS[fragments])
            for fragment, (start, end) in enumerate(pairwise(ends)):
                here = slice(sum(sizes[:start]), sum(sizes[:end]))
                same = torch.equal(weights[here], others[here])
                assert same == (fragment == exchanged or rank is first), f"fragment {fragment} after step {number}"
    if first["conserves"]:
        mean = {key: torch.stack([rank["middle"][key] for rank in ranks]).mean(0) for key in first["middle"]}
        torch.testing.assert_close(
            mean["moved"] + mean["unsent"] + mean["pending"], mean["change"], rtol=0, atol=1e-6, msg=spelling
        )


@pytest.mark.parametrize("fragments", [1, 4])
def test_laws_in_one_process(fragments):
    for number, spelling in enumerate(METHODS if fragments == 1 else KINDS):  # a fragment is a smaller model
        if spelling not in CHOSEN:
            continue
        world = 2 + (number + fragments) % 2
        ranks = in_threads(world, lambda comm, spelling=spelling: cases.laws(comm, spelling, fragments))
        check_laws(spelling, fragments, ranks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_real_processes(world):
    paired = PARTED if ALL else [one for one in PARTED if re.search("GTopK|LowBit", one)]
    spellings, numbers = {2: (KINDS, [1, 4]), 3: (PARTED, [1]), 4: (paired, [4])}[world]
    chosen = [(spelling, fragments) for spelling in spellings for fragments in numbers]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("laws", {"spelling": spelling, "fragments": fragments}) for spelling, fragments in chosen
    ]
    if world == 3 or ALL:
        calls += [
            ("average_twin", {"optimizer": "SGD"}),
            ("average_twin", {"optimizer": "AdamW"}),
            ("equals_ddp", {}),
            ("overlapped", {"delay": 2}),
            ("disagreements", {}),
        ]
    calls += [("two_levels", {})] if world == 4 else []
    by_rank = launch(world, "local_cases:many", calls=calls, timeout=180)
    for results in by_rank:
        for call, result in zip(calls, results, strict=True):
            assert not isinstance(result, str), f"{call}:\n{result}"
    told = [list(ranks) for ranks in zip(*by_rank, strict=True)]

    for (spelling, fragments), ranks in zip(chosen, told):
        check_laws(spelling, fragments, ranks)
    by_name: dict[str, list[Any]] = {}
    for (name, _), ranks in zip(calls[len(chosen) :], told[len(chosen) :], strict=True):
        by_name.setdefault(name, []).extend(ranks)
    if world == 3 or ALL:
        assert len(by_name["average_twin"]) == 2 * world and max(by_name["average_twin"]) < 1e-6
        for plain, ours in by_name["equals_ddp"]:
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)
        assert all(torch.equal(rank, by_name["overlapped"][0]) for rank in by_name["overlapped"])
        threads = in_threads(world, lambda comm: cases.overlapped(comm, delay=2))
        torch.testing.assert_close(by_name["overlapped"][0], threads[0], rtol=0, atol=1e-6)
        for rank in by_name["disagreements"]:
            check_disagreements(rank)

    if world == 4:
        weights = [rank["weights"] for rank in by_name["two_levels"]]
        for number, (a, b, c, d) in enumerate(zip(*weights, strict=True), start=1):
            assert torch.equal(a, b)
            assert torch.equal(c, d)
            assert torch.equal(a, c) == (number % 3 == 0)
        assert all("nothing left to exchange" in rank["refused"] for rank in by_name["two_levels"])


def test_a_worker_killed_between_two_exchanges_goes_on_to_the_same_bits(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    arguments: dict[str, Any] = {"spelling": FEEDBACK, "every": 4, "steps": 12, "save_at": 6}
    expected = launch(2, "local_cases:until_killed", folder=str(straight), die_at=None, **arguments)
    with pytest.raises(AssertionError, match=r"exit code -9"):
        launch(2, "local_cases:until_killed", folder=str(broken), die_at=7, **arguments)
    found = launch(2, "local_cases:until_killed", folder=str(broken), die_at=None, **arguments)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def check_disagreements(heard: dict[str, str]) -> None:
    assert "the ranks disagree about the steps between exchanges: rank 0 has 2, rank 1 has 3" in heard["every"]
    assert "the ranks disagree about the method" in heard["method"]
    assert "the ranks disagree about the method" in heard["outer"]
    assert "the ranks have taken different numbers of steps: {0: 2, 1: 3" in heard["function"]
    assert "somebody other than the optimizer changed parameters between two steps (rank 1)" in heard["edit"]
    assert all(text.startswith("Disagreement: ") for text in heard.values())


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_every_step_with_dense_averages_the_parameters(optimizer):
    assert max(in_threads(3, lambda comm: cases.average_twin(comm, optimizer))) < 1e-6


def test_ranks_that_disagree_hear_of_it_on_every_rank():
    for heard in in_threads(3, cases.disagreements):
        check_disagreements(heard)


# ── the outer optimizer ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("outer", [Outer(0.5), Outer(0.9, momentum=0.8), Outer(0.7, momentum=0.9, nesterov=True)])
def test_the_outer_step_is_that_of_torch_on_the_mean_change(outer):
    world, every, steps = 2, 3, 12

    def ours(comm: Comm) -> Tensor:
        model = net()
        optimizer = adamw(model)
        thinwire.local(model, optimizer, Dense(), every, outer=outer, comm=comm)
        for batch in batches(steps, comm.rank):
            step(model, optimizer, batch)
        return flat(model)

    workers = [net() for _ in range(world)]
    optimizers = [adamw(model) for model in workers]
    anchor = nn.Parameter(flat(workers[0]))
    moved = SGD([anchor], outer.lr, outer.momentum, nesterov=outer.nesterov)
    for number in range(steps):
        for rank, (model, optimizer) in enumerate(zip(workers, optimizers)):
            step(model, optimizer, batches(steps, rank)[number])
        if (number + 1) % every == 0:
            anchor.grad = anchor.detach() - torch.stack([flat(model) for model in workers]).mean(0)
            moved.step()
            for model in workers:
                nn.utils.vector_to_parameters(anchor.detach().clone(), model.parameters())
    for result in in_threads(world, ours):
        torch.testing.assert_close(result, anchor.detach(), rtol=0, atol=2e-6)


def test_an_outer_step_that_makes_no_sense_is_refused():
    for wrong in ({"lr": 0.0}, {"momentum": 1.0}, {"nesterov": True}):
        with pytest.raises(ValueError, match=r"the outer|nesterov"):
            Outer(**wrong)


# ── delay and fragments ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("delay", [1, 3, 9])
def test_a_delayed_result_is_added_to_what_changed_meanwhile(delay):
    world, every, steps = 2, 4, 11
    lag = min(delay, every)

    def ours(comm: Comm) -> list[Tensor]:
        model = net()
        optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
        thinwire.local(model, optimizer, Dense(), every, delay=delay, comm=comm)
        seen = []
        for batch in batches(steps, comm.rank):
            step(model, optimizer, batch)
            seen.append(flat(model))
        return seen

    workers = [net() for _ in range(world)]
    optimizers = [SGD(model.parameters(), 0.05, momentum=0.9) for model in workers]
    anchor, left, twin = flat(workers[0]), [flat(model) for model in workers], []
    for number in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(workers, optimizers)):
            step(model, optimizer, batches(steps, rank)[number - 1])
        if number > every and number % every == lag % every:
            for model, then in zip(workers, left):
                nn.utils.vector_to_parameters(anchor + (flat(model) - then), model.parameters())
        if number % every == 0:
            left = [flat(model) for model in workers]
            anchor = anchor + torch.stack([then - anchor for then in left]).mean(0)
        twin.append([flat(model) for model in workers])
    for rank, seen in enumerate(in_threads(world, ours)):
        for number in range(steps):
            torch.testing.assert_close(seen[number], twin[number][rank], rtol=0, atol=2e-6)


def test_laws_hold_with_a_delay_a_momentum_and_an_exchange_under_way_when_saved():
    for every, steps in ((4, 6), (3, 8)):
        ranks = in_threads(
            3, lambda comm, e=every, s=steps: cases.laws(comm, FEEDBACK, 1, e, s, delay=2, outer=Outer(0.7, 0.9, True))
        )
        for rank in ranks:
            assert torch.equal(rank["finished"], ranks[0]["finished"])
            assert torch.equal(rank["resumed"], rank["finished"])
            assert torch.equal(*rank["last"])


def test_fragments_take_turns_at_even_distances():
    def sent(comm: Comm, every: int, fragments: int) -> list[int]:
        model = net()
        optimizer = SGD(model.parameters(), 0.1)
        handle = thinwire.local(model, optimizer, Dense(), every, fragments=fragments, comm=comm)
        told = []
        for batch in batches(12, comm.rank):
            before = handle.capture.step
            step(model, optimizer, batch)
            told.append(handle.capture.step - before)
        return told

    assert in_threads(2, lambda comm: sent(comm, 6, 1))[0] == [0, 0, 0, 0, 0, 1] * 2
    assert in_threads(2, lambda comm: sent(comm, 6, 3))[0] == [0, 1] * 6
    assert in_threads(2, lambda comm: sent(comm, 6, 4))[0] == [0, 1, 1, 0, 1, 1] * 2
    assert in_threads(2, lambda comm: sent(comm, 2, 4))[0] == [2] * 12
    assert in_threads(2, lambda comm: sent(comm, 1, 4))[0] == [4] * 12


def test_schedules_widen():
    def exchanged_at(comm: Comm, every: Any) -> list[int]:
        model = net()
        optimizer = SGD(model.parameters(), 0.1)
        handle = thinwire.local(model, optimizer, Dense(), every, comm=comm)
        steps = []
        for batch in batches(14, comm.rank):
            step(model, optimizer, batch)
            if handle.metrics()["collectives"]:
                steps.append(int(handle.metrics()["step"]))
        return steps

    assert in_threads(2, lambda comm: exchanged_at(comm, ((0, 1), (3, 2), (7, 5))))[0] == [1, 2, 3, 5, 7, 12]
    assert in_threads(2, lambda comm: exchanged_at(comm, lambda steps: 1 + steps))[0] == [1, 3, 7]
    for wrong in (0, ((1, 2),), ((0, 2), (0, 3)), (), lambda steps: 0):
        with pytest.raises(ValueError, match=r"schedule|1 step or more"):
            in_threads(1, lambda comm, wrong=wrong: exchanged_at(comm, wrong))


# ── checkpoints ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fragments", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_another_number_of_workers_goes_on_from_the_mean_of_all_change(world, fragments, tmp_path):
    arguments = {"folder": str(tmp_path), "spelling": FEEDBACK, "every": 4, "steps": 6, "fragments": fragments}
    before = in_threads(3, lambda comm: cases.save_midway(comm, **arguments))
    after = in_threads(world, lambda comm: cases.load_midway(comm, **arguments))
    total = {key: torch.stack([rank[key] for rank in before]) for key in ("change", "unsent")}
    assert total["change"].any()
    for rank in after:
        torch.testing.assert_close(rank["change"], total["change"].mean(0), rtol=0, atol=1e-6)
        assert torch.equal(rank["end"], after[0]["end"]) == (fragments == 1 or world == 1 or rank is after[0])
    left = torch.stack([rank["unsent"] for rank in after]).sum(0)
    torch.testing.assert_close(left, total["unsent"].sum(0), rtol=0, atol=1e-6)


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    def work(comm: Comm) -> None:
        def start(spelling: str = FEEDBACK, **options: Any) -> tuple[nn.Module, LocalHandle]:
            model = net()
            return model, thinwire.local(model, adamw(model), thinwire.parse(spelling), 2, comm=comm, **options)

        _, handle = start()
        mine = handle.state_dict()
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            (mine, {"outer": Outer(0.5)}, "method"),
            (mine, {"spelling": "ErrorFeedback(TopK(0.5))"}, "method"),
            (mine, {"fragments": 2}, "others, or in another order"),
            ({key: value for key, value in mine.items() if key != "local"}, {}, "no state of local steps"),
            (mine | {"rank": 1 - comm.rank}, {}, "every rank saves and loads its own"),
            (mine | {"world": 3}, {}, "states of all 3 ranks"),
        ]
        for state, options, words in wrong:
            model, other = start(**options)
            before = flat(model)
            with pytest.raises(CheckpointError, match=words):
                other.load_state_dict(state)
            assert torch.equal(flat(model), before)
            assert not unsent(other).any()

    in_threads(2, work)
