"""A reducer's repr is its spelling, and a spelling is data: nothing in it is evaluated."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples_of_methods import EXAMPLES
from thinwire import Dense, ErrorFeedback, TopK
from thinwire.spelling import NAMES, SpellingError, parse, spell


@pytest.mark.parametrize("reducer", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_repr_and_short_spelling_round_trip(reducer):
    assert parse(repr(reducer)) == reducer
    assert parse(spell(reducer)) == reducer


@pytest.mark.parametrize("spelling", EXAMPLES.keys())
def test_examples_are_spelled_by_their_keys(spelling):
    assert parse(spelling) == EXAMPLES[spelling]
    assert spell(EXAMPLES[spelling]) == spelling


def test_short_spelling_leaves_defaults_out():
    assert spell(ErrorFeedback(TopK(0.01))) == "ErrorFeedback(TopK(0.01))"
    assert spell(ErrorFeedback(TopK(0.01, agree=True), decay=0.9)) == (
        "ErrorFeedback(TopK(0.01, agree=True), decay=0.9)"
    )


def test_a_bare_name_is_a_call_without_arguments():
    assert parse("Dense") == parse(" Dense( ) ") == Dense()


def test_every_method_and_wrapper_has_a_name():
    assert {"Dense", "TopK", "ErrorFeedback"} <= set(NAMES)
    for name, reducer in NAMES.items():
        assert reducer.__name__ == name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Topk(0.1)", "did you mean TopK"),
        ("ErrorFedback(TopK(0.1))", "did you mean ErrorFeedback"),
        ("Zzzz()", "there are"),
        ("TopK()", "missing a required argument: 'density'"),
        ("TopK(0.1, True, 3)", "too many positional"),
        ("TopK(0.1, densty=3)", "densty"),
        ("TopK('a lot')", "density cannot be 'a lot'"),
        ("TopK(True)", "density cannot be True"),
        ("TopK(0.1, agree=1)", "agree cannot be 1"),
        ("ErrorFeedback(0.1)", "inner cannot be 0.1"),
        ("ErrorFeedback(TopK)", "missing a required argument"),
        ("TopK(density=0)", "density must lie above 0"),
        ("TopK(density=1.5)", "density must lie above 0"),
        ("TopK(1 / 100)", "is not a literal"),
        ("TopK(b'1')", "is not a literal"),
        ("TopK(1j)", "is not a literal"),
        ("TopK(*(0.1,))", "is not a literal"),
        ("TopK(**{'density': 0.1})", "is not a literal"),
        ("TopK(density=[0.1 for _ in '1'][0])", "is not a literal"),
        ("TopK(__import__('os').getpid())", "is not a literal"),
        ("(lambda: TopK(0.1))()", "is not a literal"),
        ("TopK.__init__(0.1)", "is not a literal"),
        ("thinwire.TopK(0.1)", "is not a literal"),
        ("__import__('os')", "there is no method __import__"),
        ("0.1", "is not a literal"),
        ("TopK(0.1", "is not spelled like"),
        ("TopK(0.1) TopK(0.1)", "is not spelled like"),
        ("", "is not spelled like"),
        ("TopK(0.1)\0", "is not spelled like"),
        ("ErrorFeedback(" * 5000, "is not spelled like"),
        ("TopK(density={1: 2, **{}})", "is not a literal"),
    ],
)
def test_what_spells_nothing_gets_one_clear_error(text, says):
    with pytest.raises(ValueError) as error:
        parse(text)
    assert says in str(error.value)
    assert len(str(error.value)) < 500


@given(st.text(max_size=40))
def test_no_text_does_anything_but_spell_or_be_refused(text):
    with contextlib.suppress(SpellingError):
        parse(text)
