"""Recipes have evidence, can be used, and are found by name."""

import re
import shlex

import pytest

from thinwire import LocalSteps, recipes
from thinwire.lab.records.run import Run
from thinwire.lab.records.spellings import canonical
from thinwire.recipes import RECIPES, Recipe, recipe

MADE_UP = Recipe("LocalSteps(Dense(), every=2)", "adamw", "a test", "thinwire compare", "nothing", {"lr": 1e-3})


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


def test_an_unknown_recipe_says_what_there_is():
    with pytest.raises(KeyError, match="there is no recipe none-such"):
        recipe("none-such")
