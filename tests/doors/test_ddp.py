"""Real DDP, real gloo processes."""

import os
import re
from functools import cache
from typing import Any

import pytest
import torch

from ddp_cases import Failed, reductions
from examples_of_methods import EXAMPLES, representatives
from processes import launch
from thinwire import parse
from thinwire.comm.threads import in_threads
from thinwire.core.reducer import Moments

METHODS = representatives(torch.Tensor, Moments)
ALL = bool(os.environ.get("THINWIRE_TEST_ALL"))
PARTED = "TopK|ExDyna|LowBit|CLTK|Variance"  # whose messages depend on how many workers there are
FEEDBACK = "ErrorFeedback(TopK(0.1))"


def run(world: int, calls: list[tuple[str, dict[str, Any]]], timeout: float = 240) -> list[list[Any]]:
    """Per case, what each rank returned."""
    by_rank = launch(world, "ddp_cases:many", calls=calls, timeout=timeout)
    for results in by_rank:
        for (name, arguments), result in zip(calls, results, strict=True):
            assert not isinstance(result, Failed), f"{name}({arguments}):\n{result.error}"
    return [list(case) for case in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("world", [2, 4])
def test_the_laws_hold_with_1_2_and_6_buckets(world):
    shapes = ((2, "bucket", True), (1, "model", False), (6, "model", False))
    methods = METHODS if world == 2 or ALL else [one for one in METHODS if re.search(PARTED, one)]
    calls = [
        ("laws", {"spelling": spelling, "cuts": cuts, "grain": grain, "overlap": overlap})
        for spelling in methods
        for cuts, grain, overlap in (shapes if world == 2 or ALL else shapes[:1])  # how cut, and among how many
    ]
    for (_, case), ranks in zip(calls, run(world, calls), strict=True):
        assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks), case
        handed = torch.stack([rank["handed"] for rank in ranks]).mean(0)
        unsent = torch.stack([rank["unsent"] for rank in ranks]).mean(0)
        method = EXAMPLES[case["spelling"]]
        if method.conserves and (unsent.any() or case["spelling"] == "Dense()"):  # else nobody keeps the rest
            apart = (ranks[0]["applied"] + unsent - handed).abs().max()
            assert apart < 1e-5 + 1e-4 * handed.abs().max(), case
        assert ranks[0]["metrics"]["payload_bytes"] > 0


@pytest.mark.parametrize("world", [2, 4])
def test_threads_and_processes_give_the_same_bits(world):
    gradients = [spelling for spelling, method in EXAMPLES.items() if method.wants is torch.Tensor]
    if world == 4 and not ALL:  # each way to exchange once more, where a ring adds up in its own order
        gradients = representatives(torch.Tensor)
    found = run(world, [("reduced", {"spelling": spelling}) for spelling in gradients])
    for spelling, ranks in zip(gradients, found, strict=True):
        threads = in_threads(world, lambda comm, s=spelling: reductions(parse(s), comm))
        for one, other in zip(ranks[0], threads[0], strict=True):
            if world == 2:
                assert torch.equal(one, other), spelling
            else:  # a ring adds up in another order than threads do; some wires carry half precision
                torch.testing.assert_close(one, other, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_dense_is_ddp_to_the_bit(world):
    calls = [
        ("dense_equals_ddp", {"steps": 20, "cuts": cuts, "grain": grain}) for cuts, grain in ((1, None), (6, None))
    ]
    if world < 3:  # with more workers a ring sums in an order that follows from the message's length
        calls += [
            ("dense_equals_ddp", {"steps": 20, "cuts": cuts, "grain": g}) for cuts, g in ((6, "model"), (2, "tensor"))
        ]
    for case, ranks in zip(calls, run(world, calls), strict=True):
        assert all(ranks), case


def test_powersgd_runs_on_gloo_with_six_buckets():
    calls = [("long_run", {"spelling": "ErrorFeedback(PowerSGD(2))", "steps": 200, "cuts": 6})]
    for first, last in run(2, calls)[0]:
        assert last < 0.2 * first


@pytest.mark.parametrize("grain", ["tensor", "bucket", "model"])
def test_a_resumed_run_goes_on_to_the_same_bits(grain, tmp_path):
    turns = {"model": METHODS, "tensor": METHODS[::2], "bucket": METHODS[1::2]}  # each at two grains, or at all
    methods = METHODS if ALL else turns[grain]
    calls = [("resumed", {"spelling": spelling, "grain": grain, "folder": str(tmp_path)}) for spelling in methods]
    calls += [("resumed", {"spelling": FEEDBACK, "grain": grain, "folder": str(tmp_path), "overlap": True})]
    for case, ranks in zip(calls, run(2, calls), strict=True):
        assert all(ranks), case


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    straight.mkdir()
    broken.mkdir()
    arguments = {"spelling": FEEDBACK, "grain": "model", "steps": 9}
    expected = launch(2, "ddp_cases:until_killed", folder=str(straight), die_at=None, **arguments)
    with pytest.raises(AssertionError, match=r"exit code -9"):
        launch(2, "ddp_cases:until_killed", folder=str(broken), die_at=7, **arguments)
    found = launch(2, "ddp_cases:until_killed", folder=str(broken), die_at=None, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("world", [2, 3, 6])
def test_another_number_of_workers_conserves_the_sum_of_residuals(world, four_workers):
    folder, before = four_workers
    ranks = run(world, [("load_from", {"spelling": FEEDBACK, "folder": folder})])[0]
    after = sum(unsent for unsent, _ in ranks)
    assert torch.linalg.vector_norm(after - before) <= 1e-6 * torch.linalg.vector_norm(before)
    assert all(torch.equal(w, ranks[0][1]) for _, w in ranks)


@pytest.fixture(scope="module")
def four_workers(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("four"))
    return folder, sum(run(4, [("save_after", {"spelling": FEEDBACK, "folder": folder})])[0])


@pytest.mark.parametrize("options", [{"grain": "model"}, {"grain": "tensor", "overlap": True, "cuts": 2}], ids=str)
def test_a_bad_step_is_as_if_it_had_not_been(options):
    both = (float("inf"), float("nan"))
    calls = [
        ("bad_step", {"spelling": spelling, "value": value, **options})
        for number, spelling in enumerate(METHODS)
        for value in (both if ALL else [both[(number + (options["grain"] == "model")) % 2]])  # each meets both
    ]
    calls += [("bad_step", {"spelling": FEEDBACK, "value": float("inf"), "layer": 2, **options})]
    for (_, case), ranks in zip(calls, run(2, calls), strict=True):
        for rank in ranks:
            assert rank["non-finite"] and rank["weights kept"] and rank["state kept"] and rank["finite"], (case, rank)
            assert rank["scale"] == 4.0  # the scaler saw the overflow on every rank and backed off once
        assert torch.equal(ranks[0]["weights"], ranks[1]["weights"]), case


def test_residuals_follow_the_loss_scale():
    plain, scaled = run(
        2, [("laws", {"spelling": FEEDBACK, "steps": 8}), ("follows_the_scale", {"spelling": FEEDBACK})]
    )
    for rank in range(2):
        torch.testing.assert_close(plain[rank]["unsent"], scaled[rank], rtol=1e-4, atol=1e-6)


def test_ranks_that_disagree_are_told_on_every_rank():
    topk, denser, dense = "ErrorFeedback(TopK(0.1))", "ErrorFeedback(TopK(0.2))", "Dense()"
    calls = [
        ("disagree", {"spellings": (topk, dense)}),
        ("disagree", {"spellings": (topk, denser)}),
        ("disagree", {"spellings": (topk, topk), "widths": (4, 5)}),
        ("disagree", {"spellings": ("DAD()", topk)}),
        ("disagree", {"spellings": (topk, topk), "overlap": (True, False)}),
        ("disagree", {"spellings": (dense, dense), "check_every": (2, 0)}),
        ("diverged", {"spelling": topk}),
        ("lost_step", {"spelling": topk}),
    ]
    method, density, model, factors, overlap, looks, diverged, lost = run(2, calls)
    for told, what in ((factors, "the method"), (overlap, "the overlap"), (looks, "the check_every")):
        assert all(what in one for one in told), told
    for told in method:
        assert "the method" in told and "TopK(0.1" in told and "Dense()" in told
    for told in density:
        assert "TopK(0.1" in told and "TopK(0.2" in told
    for told in model:
        assert "the model" in told and "(4, 4)" in told and "(5, 4)" in told
    for told in diverged:
        assert "replicas have diverged" in told
    for told in lost:
        assert "different steps" in told


@cache
def odd_cases() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("odd_model", {"spelling": spelling, "unused": unused, "half": half, **extra})
        for spelling in ("Dense()", FEEDBACK, "TopK(0.1, agree=True)")
        for unused in (False, True)
        for half in (False, True)
        for extra in (
            {},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"grain": "tensor", "overlap": True},
        )
        if not (unused and "static_graph" in extra)
        if ALL or spelling != "TopK(0.1, agree=True)" or not extra  # what is extra is DDP's, not the method's
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_models_of_all_kinds_train(world):
    cases = [case for case in odd_cases() if ALL or world > 1 or case[1]["spelling"] != FEEDBACK]
    for (_, case), ranks in zip(cases, run(world, cases), strict=True):
        for start, ours, plain in ranks:
            assert torch.equal(ours, ranks[0][1]), case
            assert ours.isfinite().all() and not torch.equal(ours, start), case
            if case["spelling"] == "Dense()":
                assert torch.equal(ours, plain), case


def test_accumulation_with_and_without_no_sync():
    calls = [
        ("accumulated", {"spelling": "Dense()", "no_sync": no_sync, "view": view})
        for no_sync in (False, True)
        for view in (False, True)
    ]
    calls += [
        ("conserved_when_accumulating", {"spelling": spelling})
        for spelling in (FEEDBACK, "ErrorFeedback(TopK(0.05, agree=True))")
    ]
    calls += [("cleared_after_forward", {"spelling": FEEDBACK}), ("let_go", {"spelling": FEEDBACK})]
    *dense, own, union, cleared, gone = run(2, calls)
    assert all(torch.equal(before, after) for before, after in cleared)
    assert all(gone)
    for ranks in dense[1:]:
        torch.testing.assert_close(ranks[0], dense[0][0], rtol=1e-5, atol=1e-7)
    for ranks in (own, union):
        handed, kept = (torch.stack(parts).mean(0) for parts in zip(*ranks, strict=True))
        torch.testing.assert_close(kept, handed, rtol=1e-4, atol=1e-5)


def test_what_goes_wrong_quietly_is_said(tmp_path):
    silent, checkpoints = run(2, [("silent_hook", {}), ("bad_checkpoints", {"folder": str(tmp_path)})])
    for told in silent:
        assert len(told) == 1 and "without a gradient exchange" in told[0]
    for told in checkpoints:
        assert told["unchanged"] == "True"
        assert "truncated or damaged" in told["truncated"]
        assert "every rank saves and loads its own" in told["another rank"]
        assert "TopK(0.2" in told["another method"]
        assert "holds no thinwire state" in told["empty folder"]
        assert "not a state" in told["not a state"]
        assert "all 7 ranks" in told["other world, one file"]
