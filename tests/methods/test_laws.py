"""Every method keeps the laws, on one to five workers, for every kind of layout, in float32 and float64.

`--all` takes both dtypes for every layout and number of workers; else they take turns.
"""

import os

import pytest

from examples_of_methods import EXAMPLES
from thinwire import METHODS
from thinwire.core.reducer import inner_reducers
from thinwire.spelling import WRAPPERS
from thinwire.testing import WORLDS, check, check_by_turns

ALL = bool(os.environ.get("THINWIRE_TEST_ALL"))

# Workers own parts or meet in pairs, so an odd number beyond three may matter.
PARTED = ("ExDyna", "OkTopk", "GTopK", "LowBit", "DEFT", "CLTK", "SparseLoCo")
# The first example of each method.
FIRST = {type(EXAMPLES[spelling]): spelling for spelling in reversed(EXAMPLES)}.values()


@pytest.mark.parametrize("spelling", EXAMPLES)
def test_every_method_keeps_the_laws(spelling):
    reducer = EXAMPLES[spelling]
    name = type(reducer).__name__
    if ALL or (spelling in FIRST and name in PARTED):
        worlds: tuple[int, ...] = WORLDS
    elif spelling in FIRST and name in METHODS:
        worlds = WORLDS[:3]  # one, a pair, an odd number
    else:
        worlds = (1, 3)  # what is composed talks through what it is made of; other options of a method met above
    (check if ALL else check_by_turns)(reducer, worlds=worlds)


def test_every_method_and_wrapper_is_among_the_examples():
    seen = {type(part).__name__ for example in EXAMPLES.values() for part in inner_reducers(example)}
    assert seen >= METHODS.keys() | WRAPPERS.keys()
