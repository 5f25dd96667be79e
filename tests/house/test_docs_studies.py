"""What the pages show of the studies is what their kept results give."""

from pathlib import Path

from thinwire.lab.papers.documents import made

DOCS = Path(__file__).parents[2] / "docs"


def test_tables_and_figures_are_up_to_date():
    texts = made(DOCS)
    for path, text in texts.items():
        assert path.exists() and path.read_text() == text, f"{path.name}: run python docs/make_studies.py"


def test_kept_results_stay_small():
    for path in (DOCS / "studies").glob("*.json"):
        assert path.stat().st_size < 100_000, f"{path.name} is too large for a repository: keep fewer curves"
