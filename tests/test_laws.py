"""Every method keeps the laws, on one to five workers, for every kind of layout, in float32 and float64."""

import pytest

from examples_of_methods import EXAMPLES
from thinwire import METHODS
from thinwire.reducer import inner_reducers
from thinwire.spelling import WRAPPERS
from thinwire.testing import WORLDS, check


@pytest.mark.parametrize("spelling", EXAMPLES)
def test_every_method_keeps_the_laws(spelling):
    reducer = EXAMPLES[spelling]
    # What is composed talks through what it is made of: fewer numbers of workers tell all there is to tell.
    check(reducer, worlds=WORLDS if type(reducer).__name__ in METHODS else (1, 3))


def test_every_method_and_wrapper_is_among_the_examples():
    seen = {type(part).__name__ for example in EXAMPLES.values() for part in inner_reducers(example)}
    assert seen >= METHODS.keys() | WRAPPERS.keys()
