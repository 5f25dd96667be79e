"""Kept results: small, without dates and places, and all that tables and pictures need."""

import json
from pathlib import Path

import pytest

from lab_runs import write_run
from thinwire.cli.talk import typed
from thinwire.lab import LabError
from thinwire.lab.papers import documents
from thinwire.lab.papers.claims import Row
from thinwire.lab.papers.claims_page import rows
from thinwire.lab.papers.pictures import PICTURES
from thinwire.lab.records.record import Run
from thinwire.lab.studies import kept
from thinwire.lab.studies.grids import cut
from thinwire.lab.studies.studies import STUDIES
from thinwire.lab.studies.study import Cell, results

TOLD = {
    "union": 0.015,
    "busiest": 1.1,
    "build_up": 1.5,
    "imbalance": 1.25,
    "fc/entropy_rank": 2.5,
    "fc/overlap": 0.5,
    "fc/captured": 0.9,
}
TOLD |= {"fc/rank": 4.0, **{f"fc/spectrum_{i}": 8.0 / (i + 1) for i in range(16)}}


def a_study(name: str, folder: Path, levels: list[dict]) -> dict:
    """A study of made-up runs: two seeds and two learning rates of each setting, the larger rate learns faster."""
    cells = []
    for place, (factors, seed, lr) in enumerate((f, s, r) for f in levels for s in (0, 1) for r in (0.1, 0.3)):
        method, workers = str(factors["method"]), int(factors.get("workers", 2))
        spelled = f"{method}(0.1)" if method in ("TopK", "RandomBlock") else "Dense()" if method == "Dense" else method
        run = Run(spelled, "digits", "mlp", lr=lr, seed=seed, workers=workers)
        cells.append(Cell({**factors, "lr": lr, "seed": seed}, run))
        wire = 1000.0 if "Dense" in method else 10.0 + place
        write_run(folder / cells[-1].name, run.method, workers=workers, wire=wire, speed=lr + 0.1 * seed, **TOLD)
    found = results(cells, folder, {})
    return kept.keep(name, "a test", f"thinwire study {name}", found, ["It was made up."], {folder / "x": "Oh\nno\n"})


LEVELS = {
    "sparse": [
        {"method": "TopK", "density": 0.1, "memory": m, "grain": "model", "coordinates": "own", "momentum": "after"}
        for m in ("on", "off")
    ]
    + [{"method": "Dense", "density": 1.0, "memory": "-", "grain": "-", "coordinates": "-", "momentum": "after"}],
    "exdyna": [
        {"method": m, "workers": w, "density": d, "momentum": "after"}
        for w in (2, 4)
        for m, d in (("Dense()", 1.0), ("ErrorFeedback(ExDyna(0.01))", 0.01), ("ErrorFeedback(TopK(0.01))", 0.01))
    ],
    "variance": [{"method": m, "optimizer": "adamw"} for m in ("Dense()", "Variance(1.0)", "Variance(2.0)")],
    "rank": [{"method": m} for m in ("Dense()", "RankDAD(4)")],
    "frontier": [
        {"method": m, "every": 1, "optimizer": "adamw"}
        for m in ("Dense()", "ErrorFeedback(TopK(0.1))", "ErrorFeedback(TopK(0.01))", "LowBit(2)")
    ],
}


def test_what_is_kept_is_small_and_whole(tmp_path: Path) -> None:
    told = a_study("exdyna", tmp_path / "runs", LEVELS["exdyna"])
    path = kept.write(told, tmp_path / "studies")
    assert path.name == "exdyna-digits.json" and path.stat().st_size < 20_000
    assert str(tmp_path) not in path.read_text()
    again = kept.read(path)
    assert json.loads(path.read_text()) == told and len(again.cells) == 6
    cell = again.cells[1]
    assert cell.result.rate == "0.3" and list(cell.result.unchosen) == ["0.1"]
    assert cell.result.values == [pytest.approx(0.4), pytest.approx(0.5)] and len(cell.tests) == 2
    assert cell.means["imbalance"] == 1.25 and cell.means["density_error"] == pytest.approx(0.5)
    assert again.failed == {"x": "no"} and not again.rehearsed and "torch" in again.versions
    assert again.settings["steps"] == 40 and "workers" not in again.settings  # it differs between settings


def test_a_name_for_the_file_and_a_damaged_one(tmp_path: Path) -> None:
    told = a_study("variance", tmp_path / "runs", LEVELS["variance"])
    path = kept.write(told, tmp_path / "variance-digits-two.json")
    assert kept.read(path).name == "variance-digits-two"
    path.write_text(path.read_text().replace('"metric"', '"meter"'))
    with pytest.raises(LabError, match=r"variance-digits-two.json cannot be read .* --page"):
        kept.read(path)


def test_the_command_tells_no_places() -> None:
    words = ["study", "rank", "--out", "/home/me/x", "--page", "--data=/data", "--only", "seed=0,1", "--page-in", "p"]
    assert typed(words) == "thinwire study rank --only seed=0,1"


def test_a_grid_is_cut_by_the_levels_of_a_factor() -> None:
    cells = STUDIES["exdyna"].cells(Run("Dense()", "digits", "mlp"), False)
    method = "ErrorFeedback(Threshold(density=0.01))"
    left = cut(cells, ["workers=2,16", "seed=0", f"method=Dense(),{method}", "momentum=after"])
    assert {(cell.run.method, cell.run.workers) for cell in left} == {
        (m, w) for m in ("Dense()", "ErrorFeedback(Threshold(density=0.01))") for w in (2, 16)
    }
    with pytest.raises(LabError, match="no level 3: there are 2, 4, 8, 16"):
        cut(cells, ["workers=3"])
    with pytest.raises(LabError, match="method, workers, density, momentum"):
        cut(cells, ["colour=red"])


@pytest.mark.parametrize("name", PICTURES)
def test_every_study_has_a_page_with_a_picture_that_follows_from_its_file(name: str, tmp_path: Path) -> None:
    kept.write(a_study(name, tmp_path / "runs", LEVELS[name]), tmp_path / "studies")
    page = tmp_path / "page.md"
    page.write_text(
        f"Before.\n\n<!-- made of {name}-digits: command settings figure says table -->\nold\n{documents.END}After.\n"
    )
    assert documents.make(tmp_path) == [page, tmp_path / "images" / f"{name}-digits.svg"]
    text = page.read_text()
    assert text.startswith("Before.\n") and text.endswith(f"{documents.END}After.\n") and "\nold\n" not in text
    assert f"thinwire study {name}" in text and f"images/{name}-digits.svg" in text and "| 0.3 |" in text
    assert documents.make(tmp_path) == []  # making it again changes nothing
    drawn = (tmp_path / "images" / f"{name}-digits.svg").read_text()
    assert "prefers-color-scheme:dark" in drawn and 3_000 < len(drawn) < 100_000


def test_what_was_not_measured_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"<!-- made of rank-cifar10: figure table -->\n{documents.END}")
    documents.make(tmp_path)
    assert "Not measured yet: `thinwire study rank --task cifar10 --page`" in (tmp_path / "page.md").read_text()


def test_several_files_of_one_name_are_one_picture(tmp_path: Path) -> None:
    for part in ("a", "b"):
        told = a_study("frontier", tmp_path / part, LEVELS["frontier"])
        kept.write(told, tmp_path / "studies" / f"frontier-digits-{part}.json")
    files = kept.read_all(tmp_path / "studies")
    assert len(documents.named("frontier-digits", files)) == 2 and not documents.named("frontier-dig", files)
    assert documents.block("frontier-digits", ["command"], files).count("thinwire study frontier") == 2


def test_a_claim_about_quality_needs_learning_rates_to_choose_from(tmp_path: Path) -> None:
    """And a method that is worse than dense is said to be."""
    told = a_study("rank", tmp_path / "runs", LEVELS["rank"])
    path = kept.write(told, tmp_path / "rank-digits.json")
    verdicts = {row.claim: row.verdict for row in _rows(path) if row.setting.startswith("digits")}
    iterations = "Structured power iterations compress further without significant loss."
    assert verdicts[iterations] == "holds" and verdicts["They show the dynamics of training."] == "does not hold here"
    told["cells"][1]["validation"] = told["cells"][0]["validation"] - 0.05
    assert {r.claim: r.verdict for r in _rows(kept.write(told, path)) if r.measured != "-"}[
        iterations
    ] == "does not hold here"
    for cell in told["cells"]:
        cell["others"] = {}
    alone = {r.claim: r.verdict for r in _rows(kept.write(told, path)) if r.measured != "-"}
    assert alone[iterations] == "not measured yet: at one learning rate alone"


def _rows(path: Path) -> list[Row]:
    return list(rows({"rank-digits": kept.read(path)})["Distributed auto-differentiation"])


def test_claims_without_a_study_are_not_measured_yet() -> None:
    told = [row for some in rows({}).values() for row in some if row.measured == "-"]
    assert len(told) >= 10 and {row.verdict for row in told} == {"not measured yet"}
    assert all("--page`" in row.command for row in told)
