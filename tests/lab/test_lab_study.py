"""Studies: the grid is what it says, the best learning rate is chosen on validation data, and results speak."""

import json
import sys
from pathlib import Path

import pytest

from lab_runs import write_run
from thinwire.cli import main as cli
from thinwire.lab.papers.ranks import by_layer
from thinwire.lab.records.record import Run, rank_file
from thinwire.lab.records.spellings import canonical
from thinwire.lab.studies.grids import sparsifiers
from thinwire.lab.studies.kept import read
from thinwire.lab.studies.studies import STUDIES, exdyna_tell, frontier_tell, sparse_tell, traffic_growth
from thinwire.lab.studies.study import Cell, Result, effect, pareto, results, run_study

BASE = Run("Dense()", "digits", "mlp", lr=0.05, steps=100)


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("quick", [True, False])
def test_every_cell_is_a_run_of_its_own(name: str, quick: bool) -> None:
    cells = STUDIES[name].cells(BASE, quick)
    assert len({cell.name for cell in cells}) == len(cells) == len({cell.run for cell in cells})
    assert all(canonical(cell.run.method) == cell.run.method for cell in cells)
    assert any(cell.run.method == "Dense()" for cell in cells)


def test_the_sparse_grid_crosses_every_factor() -> None:
    cells = [cell for cell in STUDIES["sparse"].cells(BASE, False) if cell.factors["method"] != "Dense"]
    for factor, levels in {
        "memory": {"on", "off"},
        "grain": {"tensor", "model"},
        "coordinates": {"shared", "own"},
        "momentum": {"none", "before", "after"},
    }.items():
        assert {cell.factors[factor] for cell in cells} == levels
    assert len({repr({**cell.factors, "lr": 0}) for cell in cells}) == 2 * 2 * 2 * 2 * 2 * 3 * 3
    before = next(cell for cell in cells if cell.factors["momentum"] == "before" and cell.factors["memory"] == "on")
    assert before.run.method.startswith("Momentum(ErrorFeedback(") and before.run.momentum == 0


def test_every_sparsifier_has_a_memory() -> None:
    spelled = sparsifiers(0.01)
    assert "ErrorFeedback(TopK(0.01))" in spelled and "ErrorFeedback(ExDyna(0.01))" in spelled
    assert "DGC(0.01)" in spelled  # which keeps one itself


def test_momentum_is_masked_for_all_sparsifiers_or_for_none() -> None:
    cells = [cell for cell in STUDIES["exdyna"].cells(BASE, False) if cell.factors["method"] != "Dense()"]
    for momentum, dgc, topk, of_the_optimizer in (
        ("masked", "DGC(0.01)", "Momentum(ErrorFeedback(TopK(0.01)))", 0.0),
        ("after", "DGC(0.01, momentum=0.0)", "ErrorFeedback(TopK(0.01))", 0.9),
    ):
        here = [cell for cell in cells if cell.factors["momentum"] == momentum]
        assert {cell.run.workers for cell in here} == {2, 4, 8, 16} and {cell.run.seed for cell in here} == {0, 1, 2}
        assert {dgc, topk} < {cell.run.method for cell in here}
        assert {cell.run.momentum for cell in here} == {of_the_optimizer}


def result(validation: float | None, wire: float = 1.0, metric: str = "accuracy", **factors: object) -> Result:
    return Result(factors, metric, validation, validation, wire, 0.1, 0.1, "0.1", [validation], {})  # type: ignore[arg-type]


def test_an_effect_is_taken_over_pairs_that_differ_in_nothing_else() -> None:
    found = [
        result(0.9, memory="on", grain="model"),
        result(0.5, memory="off", grain="model"),
        result(0.7, memory="on", grain="tensor"),
        result(None, memory="off", grain="tensor"),
        result(0.1, memory="off", grain="bucket"),
    ]
    assert effect(found, "memory", "on", "off") == (2, 2, pytest.approx(0.4))
    assert effect(found, "grain", "model", "tensor") == (2, 2, pytest.approx(0.2))
    assert effect(found, "method", "a", "b") is None
    losses = [result(2.0, metric="loss", memory="on"), result(2.5, metric="loss", memory="off")]
    assert effect(losses, "memory", "on", "off") == (1, 1, pytest.approx(0.5))


def test_the_front_holds_what_nothing_beats() -> None:
    found = [result(0.9, 100.0), result(0.8, 10.0), result(0.7, 50.0), result(None, 1.0), result(0.5, 5.0)]
    assert [(r.validation, r.wire) for r in pareto(found)] == [(0.5, 5.0), (0.8, 10.0), (0.9, 100.0)]
    losses = [result(2.0, 100.0, "loss"), result(2.5, 10.0, "loss"), result(2.6, 50.0, "loss")]
    assert [r.validation for r in pareto(losses)] == [2.5, 2.0]


def test_traffic_is_measured_against_the_dense_ring() -> None:
    found = [result(0.9, wire, method=method, workers=workers) for method, workers, wire in (
        ("Dense()", 2, 100.0), ("Dense()", 8, 175.0), ("A", 2, 1.0), ("A", 8, 7.0), ("B", 2, 1.0), ("B", 8, 1.75),
    )]  # fmt: skip
    growth = traffic_growth(found)
    assert growth["A"] == (2, 8, pytest.approx(0.01), pytest.approx(0.04))
    assert growth["B"] == (2, 8, pytest.approx(0.01), pytest.approx(0.01))
    said = exdyna_tell(found)
    assert "A: 1 % of dense's bytes with 2 workers, 4 % with 8 (4.00 times the share)." in said


def test_what_is_said_follows_from_the_results() -> None:
    factors = {"density": 0.1, "grain": "model", "coordinates": "own", "momentum": "after"}
    nothing = {"density": 1.0, "grain": "-", "coordinates": "-", "momentum": "after"}
    found = [
        result(0.80, 10.0, method="TopK", memory="on", **factors),
        result(0.90, 10.0, method="TopK", memory="off", **factors),
        result(0.95, 100.0, method="Dense", memory="-", **nothing),
    ]
    said = " ".join(sparse_tell(found))
    assert "with memory than without in 0 of 1 pairs, on average -10.0 points" in said
    assert "-5.0 points of accuracy from dense, at 1/10 of its bytes" in said
    front = [
        result(2.0, 100.0, "loss", method="Dense()", every=1, optimizer="adamw"),
        result(2.1, 1.0, "loss", method="ErrorFeedback(TopK(0.1))", every=10, optimizer="adamw"),
        result(2.4, 50.0, "loss", method="SignSGD()", every=1, optimizer="adamw"),
    ]
    assert frontier_tell(front) == [
        "adamw, ErrorFeedback(TopK(0.1)) every 10: +0.100 of loss at 1/100 of dense's bytes.",
        "adamw, Dense(): -0.000 of loss at 1/1 of dense's bytes.",
    ]


def test_the_best_learning_rate_is_chosen_and_seeds_are_averaged(tmp_path: Path) -> None:
    cells = []
    for lr, speed in ((0.1, 0.4), (0.3, 0.6)):
        for seed in (0, 1):
            cell = Cell({"method": "DDP", "lr": lr, "seed": seed}, Run("DDP", "digits", lr=lr, seed=seed))
            write_run(tmp_path / cell.name, "DDP", speed=speed + 0.1 * seed)
            cells.append(cell)
    (found,) = results(cells, tmp_path, {})
    assert (
        found.lr == 0.3 and len(found.values) == 2 and len(found.unchosen) == 1 and found.factors == {"method": "DDP"}
    )
    assert found.validation == pytest.approx((0.7 + 0.8) / 2)


def test_cells_that_have_ended_are_not_run_again(tmp_path: Path) -> None:
    cell = Cell({"method": "DDP"}, write_run(tmp_path / "made", "DDP"))
    (tmp_path / "made").rename(tmp_path / cell.name)
    before = rank_file(tmp_path / cell.name, 0).read_text()
    assert run_study([cell], tmp_path, None, lambda *_: None) == {}
    assert rank_file(tmp_path / cell.name, 0).read_text() == before


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked")
def test_a_study_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["thinwire", "study", "rank", "--quick", "--steps", "8", "--out", str(tmp_path)]
    words += ["--page", "--page-in", str(tmp_path / "kept")]
    monkeypatch.setattr(sys, "argv", words)
    for _ in range(2):  # the second time everything is there already
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code
        told = capsys.readouterr().out
        assert "effective rank" in told and "report.html" in told
    kept = json.loads((tmp_path / "study.json").read_text())
    assert [one["factors"]["method"] for one in kept["results"]] == ["Dense()", "RankDAD(8)"]
    assert not kept["failed"] and 10_000 < (tmp_path / "report.html").stat().st_size < 500_000
    assert "entropy rank by layer, RankDAD(8)" in (tmp_path / "report.html").read_text()
    page = read(tmp_path / "kept" / "rank-digits.json")
    assert page.command == "thinwire study rank --quick --steps 8" and not page.rehearsed
    layers = by_layer(page.cells[-1], "entropy_rank")
    assert len(layers) == 3 and by_layer(page.cells[-1], "spectrum_1").keys() == layers.keys()
