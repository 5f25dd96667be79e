"""Screening: short runs first, and longer ones only for those that may still win."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lab_runs import write_run
from thinwire.lab.records.record import Run, rank_file
from thinwire.lab.studies.grids import asked_cells
from thinwire.lab.studies.screen import ranked, screened
from thinwire.lab.studies.study import Cell, Result, results


def result(validation: float | None, wire: float) -> Result:
    return Result({}, "accuracy", validation, None, wire, 0.1, 0.1, "0.1", [], {})


def test_the_cheap_and_the_good_come_before_those_that_are_beaten_in_both():
    found = {"good": result(0.9, 100), "cheap": result(0.8, 10), "beaten": result(0.7, 100), "lost": result(None, 1)}
    assert ranked(found) == ["good", "cheap", "beaten"]


def made_up(speeds: dict[str, float], made: list[str]):
    """Runs that come to what their method's speed says; those that are there already are not made again."""

    def make(cells: Sequence[Cell], out: Path) -> dict[Path, str]:
        for cell in cells:
            if not rank_file(out / cell.name, 0).exists():
                made.append(f"{cell.run.method} {cell.run.lr:g} {cell.run.steps} {cell.run.seed}")
                wire = 1000.0 if cell.run.method == "Dense()" else 10.0
                speed = speeds[cell.run.method] * cell.run.lr
                write_run(out / cell.name, cell.run.method, steps=cell.run.steps, speed=speed, wire=wire)
        return {}

    return make


def test_losers_leave_early_and_winners_get_all_their_seeds(tmp_path):
    base = Run(steps=80, lr=1.0, evaluate_every=20)
    methods = ["Dense()", "ErrorFeedback(TopK(0.01))"]
    cells = asked_cells(base, methods, [1, 0.3], range(2))
    made: list[str] = []
    speeds = {"Dense()": 0.6, "ErrorFeedback(TopK(0.01))": 0.5}
    make = made_up(speeds, made)
    kept = screened(cells, tmp_path, [20, 40], 0.5, make)
    assert {(cell.run.method, cell.run.lr) for cell in kept} == {("Dense()", 1.0)} or len(kept) == 2
    assert [cell.run.seed for cell in kept] == [0, 1] and {cell.run.steps for cell in kept} == {80}
    assert len([one for one in made if " 20 " in one]) == 4 and len([one for one in made if " 40 " in one]) == 2
    assert all("0.3" not in one for one in made if " 40 " in one)  # the worse learning rate is gone
    stages = json.loads((tmp_path / "screen.json").read_text())
    assert [stage["steps"] for stage in stages] == [20, 40] and len(stages[0]["left out"]) == 2
    made.clear()
    assert screened(cells, tmp_path, [20, 40], 0.5, make) == kept and made == []  # it goes on with what is there


def test_the_optimizer_and_its_rates_are_an_axis(tmp_path):
    base = Run(steps=20, optimizer="adamw", lr=1e-3)
    cells = asked_cells(base, ["Dense()"], [1, 2], [0], [0.5, 1], ["adamw", "muon"])
    assert len(cells) == 2 + 4 and len({cell.name for cell in cells}) == 6
    assert {cell.run.muon_lr for cell in cells if cell.run.optimizer == "muon"} == {0.01, 0.02}
    for cell in cells:
        run = write_run(tmp_path / cell.name, "Dense()", steps=20, speed=0.5 + 100 * cell.run.lr)
        replace(run, optimizer=cell.run.optimizer).write(tmp_path / cell.name)
    adamw, muon = results(cells, tmp_path, {})
    assert adamw.rate == "0.002" and len(adamw.unchosen) == 1
    assert len(muon.rate.split()) == 2 and len(muon.unchosen) == 3


def test_methods_that_no_factor_tells_apart_are_settings_of_their_own():
    methods = [f"LocalSteps(Dense(), every=8, outer=Outer(keep_length={share}))" for share in (0.5, 1.0)]
    cells = asked_cells(Run(steps=20), [*methods, "Dense()"], [1], [0])
    assert len({cell.name for cell in cells}) == 3
    assert ["spelled" in cell.factors for cell in cells] == [True, True, False]  # others keep the names they had
