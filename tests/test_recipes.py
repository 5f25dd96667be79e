"""Recipes have evidence, can be used, and are found by name."""

import re
import shlex
from dataclasses import replace

import pytest

from thinwire import LocalSteps, recipes
from thinwire.lab.papers import documents
from thinwire.lab.records.run import Run
from thinwire.lab.records.spellings import canonical
from thinwire.recipes import RECIPES, Recipe, recipe

MADE_UP = Recipe(
    "LocalSteps(Dense(), every=2)", "adamw", "a test", "thinwire compare", "nothing", {"lr": 1e-3}, "Less for wide ones"
)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_can_be_used_and_measured_again(name):
    kept = RECIPES[name]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name)
    assert repr(kept.method()) == kept.spelling
    assert shlex.split(kept.measured)[0] == "thinwire" and kept.told and kept.use
    assert set(kept.settings) <= set(vars(Run()))


def test_a_recipe_is_found_by_its_name(monkeypatch):
    monkeypatch.setitem(recipes.RECIPES, "made-up", MADE_UP)
    assert isinstance(recipe("made-up").method(), LocalSteps)
    assert canonical("made-up") == MADE_UP.spelling  # as the command line reads it
    with pytest.raises(KeyError, match="did you mean made-up"):
        recipe("made-ip")


def test_an_entry_of_the_table_is_all_it_takes(monkeypatch, tmp_path):
    """Imported, spelled on the command line, and in the documents with the command that measured it."""
    monkeypatch.setitem(recipes.RECIPES, "made-up", MADE_UP)
    from thinwire.recipes import MADE_UP as imported

    assert imported is MADE_UP and imported.local and "MADE_UP" in dir(recipes)
    assert canonical("MADE_UP") == canonical("made-up") == MADE_UP.spelling
    page = tmp_path / "recipes.md"
    page.write_text(f"<!-- made of recipes: table -->\n{documents.END}")
    documents.make(tmp_path)
    assert (
        "| `made-up`, `MADE_UP` | `LocalSteps(Dense(), every=2)` | adamw, lr 0.001. Less for wide ones |"
        in page.read_text()
    )
    assert "thinwire compare  # made-up" in page.read_text()


def test_what_is_no_recipe_is_no_attribute(monkeypatch):
    with pytest.raises(AttributeError, match="no attribute 'NONE_SUCH'"):
        recipes.NONE_SUCH  # noqa: B018
    monkeypatch.setitem(recipes.RECIPES, "on-the-wire", replace(MADE_UP, spelling="ErrorFeedback(TopK(0.01))"))
    assert not recipes.ON_THE_WIRE.local and not hasattr(recipes, "on_the_wire")


def test_an_unknown_recipe_says_what_there_is():
    with pytest.raises(KeyError, match="there is no recipe none-such"):
        recipe("none-such")
