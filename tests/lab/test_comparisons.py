"""A comparison that is kept for the documents: its table and its picture say what the runs did, in README too."""

from pathlib import Path

import pytest

from lab_runs import write_run
from thinwire.lab import LabError
from thinwire.lab.papers import comparisons, documents
from thinwire.lab.studies.compare import conclude

METHODS = {"DDP": (0.4, 4000.0), "ErrorFeedback(TopK(0.01))": (0.1, 80.0), "TopK(0.01)": (0.1, 80.0)}


def a_comparison(folder: Path) -> comparisons.Comparison:
    for place, (method, (step_s, wire)) in enumerate(METHODS.items()):
        write_run(folder / str(place), method, step_s=step_s, wire=wire, speed=0.2 if place == 2 else 1.0)
    runs = [folder / str(place) for place in range(len(METHODS))]
    summary = conclude(folder, runs, {}, link=None, emulated=False, target=0.9)
    return comparisons.keep("thinwire compare --target 0.9", summary, runs)


def test_readme_shows_what_the_kept_runs_did(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    told = a_comparison(tmp_path / "runs")
    comparisons.write(told, docs / "comparisons" / "demo.json")
    assert comparisons.read_all(docs / "comparisons") == {"demo": told}
    (tmp_path / "README.md").write_text(
        f"<!-- made of compare-demo: command figure table says -->\nold\n{documents.END}"
    )
    assert documents.make(docs) == [tmp_path / "README.md", docs / "images" / "compare-demo.svg"]
    assert documents.make(docs) == []  # making it again changes nothing
    text = (tmp_path / "README.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(METHODS)
    assert "| 400 |" in rows[0] and "| 100 |" in rows[1] and rows[2].endswith("| never |")
    assert "(docs/images/compare-demo.svg)" in text and "--target 0.9" in text and "reached 90.0 %" in text
    drawn = comparisons.draw([told])
    assert [one.x[-1] for one in drawn.series] == [pytest.approx(16.0), pytest.approx(4.0), pytest.approx(4.0)]


def test_two_commands_are_one_picture(tmp_path: Path) -> None:
    told = a_comparison(tmp_path / "runs")
    for name in ("thin", "thin-muon", "thinner"):
        comparisons.write(told, tmp_path / f"{name}.json")
    files = comparisons.read_all(tmp_path)
    assert len(comparisons.named("compare-thin", files)) == 2


def test_a_page_that_asks_for_what_was_never_kept_hears_so(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"<!-- made of compare-gone: table -->\n{documents.END}")
    with pytest.raises(LabError, match=r"docs/comparisons/gone\.json"):
        documents.make(tmp_path)
    (tmp_path / "comparisons").mkdir()
    (tmp_path / "comparisons" / "gone.json").write_text('{"command": 1}')
    with pytest.raises(LabError, match="make it again"):
        documents.make(tmp_path)
