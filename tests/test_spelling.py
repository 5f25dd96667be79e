"""A reducer's repr is its spelling, and a spelling is data: nothing in it is evaluated."""

import contextlib
import gc
import math
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import thinwire
from examples_of_methods import EXAMPLES
from thinwire import Dense, ErrorFeedback, LocalSteps, Outer, PowerSGD, RandomBlock, RankDAD, Reducer, TopK
from thinwire.comm.threads import in_threads
from thinwire.core.spelled import Spelled
from thinwire.spelling import NAMES, TABLE, SpellingError, parse, recipe_of, reducer_of, same, spell
from thinwire.wrappers.anchored import Anchored


@pytest.mark.parametrize("reducer", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_repr_and_short_spelling_round_trip(reducer):
    assert parse(repr(reducer)) == reducer
    assert parse(spell(reducer)) == reducer
    assert spell(reducer) == repr(reducer)


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


# ── one repr for everything that has a spelling ────────────────────────────────────────────────────────────────────

SIMPLE = {"LocalSteps": LocalSteps(Dense(), 2), "Outer": Outer(), "Anchored": Anchored(Dense())}
NUMBERS = st.one_of(st.integers(-3, 40), st.floats(0, 1), st.floats(allow_nan=False))


def of_kind(kind: Any, depth: int) -> st.SearchStrategy[Any]:
    """Values that might stand where `kind` is annotated."""
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return st.one_of(*(of_kind(option, depth) for option in get_args(kind)))
    if origin is Literal:
        return st.sampled_from(get_args(kind))
    if origin is tuple:
        first, second = get_args(kind)
        many = st.lists(of_kind(first, depth), max_size=3).map(tuple)
        return many if second is Ellipsis else st.tuples(of_kind(first, depth), of_kind(second, depth))
    if isinstance(origin, type) and issubclass(origin, Reducer):
        return recipes(depth - 1) if depth else st.sampled_from(list(EXAMPLES.values()))
    if origin is Outer:
        return built("Outer", 0)
    simple = {int: st.integers(-3, 40), float: NUMBERS, bool: st.booleans(), str: st.text(), type(None): st.none()}
    return simple[origin]


@st.composite
def built(draw: st.DrawFn, name: str, depth: int) -> Spelled:
    """An instance in which arguments are replaced by drawn ones, wherever the class accepts them."""
    kind = TABLE[name]
    made = SIMPLE.get(name) or next(one for one in EXAMPLES.values() if type(one) is kind)
    hints = get_type_hints(kind)
    for f in fields(kind):
        if draw(st.booleans()):
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                made = replace(made, **{f.name: draw(of_kind(hints[f.name], depth))})  # type: ignore[type-var]
    return made


def recipes(depth: int) -> st.SearchStrategy[Spelled]:
    return st.sampled_from(sorted(NAMES)).flatmap(lambda name: built(name, depth))


@given(st.data())
@settings(max_examples=40)
@pytest.mark.parametrize("name", sorted(TABLE))
def test_whatever_can_be_built_is_spelled_by_its_repr(name, data):
    made = data.draw(built(name, 1))
    assert parse(repr(made)) == made
    assert repr(parse(repr(made))) == repr(made)


@pytest.mark.parametrize(
    "text",
    [
        "LocalSteps(ErrorFeedback(PowerSGD(4)), every=5, outer=Outer(0.9, 0.6))",
        "LocalSteps(ErrorFeedback(RandomBlock(0.01)), every=1, ahead=True)",
        "LocalSteps(Dense(), every=((0, 1), (500, 10)), fragments=4, delay=2)",
        "LocalSteps(Dense(), every=50, outer=Outer(0.7, 0.9, nesterov=True))",
        "Outer(1.0)",
        "LocalSteps(ErrorFeedback(LowBit(2)), every=8, outer=Outer(1.0, keep_length=0.5))",
        "Outer(0.7, nesterov=True, momentum=0.9)",
    ],
)
def test_when_to_exchange_is_spelled_too(text):
    made = parse(text)
    assert parse(repr(made)) == made
    assert repr(made) == text or "momentum=" in text
    assert hash(made) == hash(parse(repr(made)))


def test_local_steps_are_what_is_written():
    made = parse("LocalSteps(ErrorFeedback(PowerSGD(4)), every=5, outer=Outer(0.9, 0.6))")
    assert made == LocalSteps(ErrorFeedback(PowerSGD(4)), every=5, outer=Outer(0.9, momentum=0.6))
    assert LocalSteps(Dense(), [[0, 1], [500, 10]]) == LocalSteps(Dense(), ((0, 1), (500, 10)))  # type: ignore


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("LocalSteps(Dense())", "missing a required argument: 'every'"),
        ("LocalSteps(Dense(), every=0)", "1 step or more"),
        ("LocalSteps(Dense(), every=((0, 5), (10, 0)))", "1 step or more"),
        ("LocalSteps(Dense(), every=((5, 1),))", "growing starts"),
        ("LocalSteps(Dense(), every=2.5)", "every cannot be 2.5"),
        ("LocalSteps(Dense(), every=2, delay=-1)", "delay must be"),
        ("LocalSteps(Dense(), every=2, fragments=0)", "fragments must be"),
        ("LocalSteps(TopK(0.1), every=2, ahead=True)", "ahead needs to know"),
        ("LocalSteps(RankDAD(4), every=2)", "needs to see the backward pass"),
        ("LocalSteps(LocalSteps(Dense(), every=2), every=2)", "inner cannot be LocalSteps"),
        ("ErrorFeedback(LocalSteps(Dense(), every=2))", "inner cannot be LocalSteps"),
        ("LocalSteps(Dense(), every=2, outer=0.7)", "outer cannot be 0.7"),
    ],
)
def test_local_steps_that_cannot_be(text, says):
    with pytest.raises((TypeError, ValueError), match=says):
        parse(text)


def test_a_function_has_no_spelling():
    with pytest.raises(TypeError, match="has no spelling"):
        LocalSteps(Dense(), lambda step: 3)  # type: ignore[arg-type]


def test_a_leading_number_is_always_written():
    assert repr(RankDAD()) == repr(RankDAD(4)) == "RankDAD(4)"
    assert repr(PowerSGD()) == "PowerSGD(4)"


def test_what_is_equal_has_one_spelling():
    assert repr(TopK(1)) == repr(TopK(1.0)) == "TopK(1.0)"
    assert repr(Outer(1, 0)) == "Outer(1.0)"
    assert parse("DGC(0.1, clip=1e999)").clip == math.inf
    assert repr(parse("DGC(0.1, clip=1e999)")) == "DGC(0.1, clip=1e999)"


def test_methods_of_others_are_spelled_as_well():
    @dataclass(frozen=True)
    class Mine(Dense):
        share: float = 0.5
        loud: bool = False

    class Plain(Dense):
        pass

    assert repr(Mine(loud=True)) == "Mine(0.5, loud=True)"
    assert parse("ErrorFeedback(Mine(0.25))", {**TABLE, "Mine": Mine}) == ErrorFeedback(Mine(0.25))
    assert repr(Plain()) == "Plain()"


def test_version_0_1_wrote_all_arguments_and_means_the_same():
    long = "ErrorFeedback(inner=TopK(density=0.01, agree=False), decay=1.0)"
    assert same(long, repr(ErrorFeedback(TopK(0.01))))
    assert not same(long, repr(ErrorFeedback(TopK(0.02))))
    anchored = "Anchored(inner=Dense(), outer=Outer(lr=1.0, momentum=0.0, nesterov=False), ahead=False)"
    assert same(anchored, "Anchored(Dense())")
    assert same("a method of somebody else(3)", "a method of somebody else(3)")
    assert not same("a method of somebody else(3)", "Dense()")
    assert not same("TopK(7.0)", "Dense()")


def test_users_hand_in_an_object_or_its_spelling():
    assert reducer_of("ErrorFeedback(TopK(0.01))") == reducer_of(ErrorFeedback(TopK(0.01))) == ErrorFeedback(TopK(0.01))
    steps = LocalSteps(ErrorFeedback(RandomBlock(0.01)), every=1, ahead=True)
    assert recipe_of(repr(steps)) == recipe_of(steps) == steps


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (TopK, r"TopK is a class.*write TopK\(density, agree=False\)"),
        (LocalSteps, r"LocalSteps is a class.*write LocalSteps\(inner, every"),
        (0.01, "write ErrorFeedback"),
        (None, "write ErrorFeedback"),
        (int, "write ErrorFeedback"),
        (Outer(0.7), "write ErrorFeedback"),
        ("Outer(0.7)", "write ErrorFeedback"),
        (LocalSteps(Dense(), every=3), r"thinwire.local\(model, optimizer, LocalSteps\(Dense\(\), every=3\)\)"),
        ("LocalSteps(Dense(), every=3)", r"thinwire.local\(model, optimizer"),
    ],
    ids=repr,
)
def test_what_is_no_method_is_refused_with_what_to_write(thing, says):
    with pytest.raises(TypeError, match=says):
        reducer_of(thing)


def test_wrap_refuses_before_it_joins_anybody():
    for thing in (TopK, "LocalSteps(Dense(), every=3)", "TopK(7)", "Tpk(0.1)", 0.1):
        with pytest.raises((TypeError, ValueError), match=r"write|must lie|did you mean"):
            thinwire.wrap(nn.Linear(2, 2), thing)  # type: ignore[arg-type]


def test_a_checkpoint_that_was_spelled_by_version_0_1_loads():
    def work(comm):
        model = nn.Linear(2, 2)
        handle = thinwire.local(model, torch.optim.SGD(model.parameters(), 0.1), TopK(0.5), every=2, comm=comm)
        state = handle.state_dict()
        written = "Anchored(inner=TopK(density={}, agree=False), outer=Outer(lr=1.0, momentum=0.0), ahead=False)"
        handle.load_state_dict(state | {"method": written.format(0.5)})
        with pytest.raises(thinwire.CheckpointError, match="was made with method"):
            handle.load_state_dict(state | {"method": written.format(0.25)})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", thinwire.MethodWarning)
        in_threads(1, work)


def test_threads_may_read_spellings_at_the_same_time():
    """CPython's parser may be interrupted by the garbage collector, and mixes up two threads then."""

    def read(_: int) -> None:
        for _ in range(20):
            parse("LocalSteps(ErrorFeedback(Cast(TopK(0.01), bits=4)), every=5, outer=Outer(0.9, 0.6))")

    def let_others_run(*_: Any) -> None:
        time.sleep(1e-4)

    thresholds = gc.get_threshold()
    gc.callbacks.append(let_others_run)
    gc.set_threshold(5, 1_000_000, 1_000_000)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(4)))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(let_others_run)
