"""Recipes by name: a method, when it exchanges, and the optimizer's settings that it was measured with.

A recipe stands here only with the command that measured it, so that whoever doubts it can measure again. The command
line takes a recipe's name wherever it takes a method.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.spelling import Recipe as Method
from thinwire.spelling import recipe_of


@dataclass(frozen=True)
class Recipe:
    """What to use and when, with its evidence."""

    spelling: str  # of a reducer, or of LocalSteps
    optimizer: str  # sgd, adamw or muon, with which it was measured
    use: str  # for which link, model and number of workers, in one line
    measured: str  # the command that measured it
    told: str  # what that command said: quality and bytes beside those of dense
    settings: Mapping[str, float] = field(default_factory=dict)  # of the optimizer: lr, muon_lr, beta2, clip, ...

    def method(self) -> Method:
        return recipe_of(self.spelling)


RECIPES: dict[str, Recipe] = {}  # name: recipe; names are words with dashes, which no spelling can be


def recipe(name: str) -> Recipe:
    """The recipe called `name`."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=1)
    known = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(RECIPES)) or 'none yet'}"
    raise KeyError(f"there is no recipe {name}: {known}")
