"""The study of links between sites: its figures, its table, its picture, and the page that shows them."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from thinwire.core.reducer import Layout
from thinwire.lab import LabError
from thinwire.lab.studies import sites

DOCS = Path(__file__).parents[2] / "docs"
LAYOUT = Layout(("a", "b"), (torch.Size([120, 100]), torch.Size([120])))


@pytest.fixture(scope="module")
def found() -> dict:
    return sites.predicted(LAYOUT, "two tensors", [2])


def test_every_cell_has_every_method(found: dict) -> None:
    assert len(found["cells"]) == len(sites.RATES) * len(sites.TRIPS)
    for cell in found["cells"]:
        took = {name: row["seconds"] for name, row in cell["methods"].items()}
        assert set(took) == {*sites.BASELINES, *sites.EVERY_STEP, *sites.NOW_AND_THEN}
        assert took["DDP"] >= took["DDP('fp16')"] and min(took.values()) > 0
        if cell["rtt"] >= 0.01:
            assert took["ErrorFeedback(TopK(0.01))"] < took["DDP('fp16')"]
            assert cell["methods"]["ErrorFeedback(TopK(0.01))"]["trips"] == 1


def test_it_can_be_read_again_and_shown(found: dict, tmp_path: Path) -> None:
    (tmp_path / "sites.json").write_text(json.dumps(found))
    again = sites.read(tmp_path / "sites.json")
    assert sites.table(again) == sites.table(found)
    assert sites.table(found).count("\n") == 2 + len(found["cells"])
    drawn = sites.picture(found).standalone()
    assert "prefers-color-scheme" in drawn and "RankDAD(4)" in drawn and "10mbit" in drawn


@pytest.mark.parametrize(
    "text", ["{}", "[]", "no json", '{"study": "sites", "cells": []}', '{"study": "rank", "cells": [1]}']
)
def test_another_file_is_refused_with_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "sites.json").write_text(text)
    with pytest.raises(LabError, match=r"sites\.json"):
        sites.read(tmp_path / "sites.json")


def test_the_page_shows_what_the_study_found() -> None:
    page = runpy.run_path(str(DOCS / "make_sites.py"))["page"]()
    assert (DOCS / "between-sites.md").read_text() == page, "run python docs/make_sites.py"
    drawn = sites.picture(sites.read(DOCS / "studies" / "sites.json")).standalone()
    assert (DOCS / "images" / "sites.svg").read_text() == drawn, "run python docs/make_sites.py"
