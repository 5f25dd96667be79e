"""How recipes are spelled: `parse(repr(recipe)) == recipe`.

The command line takes this spelling, records and checkpoints store it and reports label with it. It is Python's own
syntax for calls, but nothing is evaluated: names come from a table and arguments are literals.
"""

import ast
import difflib
import inspect
import threading
from collections import ChainMap
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from thinwire.core.reducer import Reducer
from thinwire.core.spelled import Spelled
from thinwire.methods import METHODS
from thinwire.wrappers.adam import Adam
from thinwire.wrappers.anchored import Anchored, Outer
from thinwire.wrappers.cast import Cast
from thinwire.wrappers.feedback import ErrorFeedback
from thinwire.wrappers.local_steps import LocalSteps
from thinwire.wrappers.momentum import Momentum
from thinwire.wrappers.route import Route
from thinwire.wrappers.warmup import Warmup

WRAPPERS: dict[str, type[Reducer[Any, Any]]] = {
    "Adam": Adam,
    "Cast": Cast,
    "ErrorFeedback": ErrorFeedback,
    "Momentum": Momentum,
    "Route": Route,
    "Warmup": Warmup,
}
NAMES: ChainMap[str, type[Reducer[Any, Any]]] = ChainMap(METHODS, WRAPPERS)
Recipe = Reducer[Any, Any] | LocalSteps
Table = Mapping[str, type[Spelled]]
TABLE: Table = {**NAMES, "LocalSteps": LocalSteps, "Outer": Outer, "Anchored": Anchored}
# CPython up to 3.12 counts the depth of a tree for all threads together, and now and then raises SystemError for it.
_ONE_AT_A_TIME = threading.Lock()


class SpellingError(ValueError):
    """A text that spells no recipe."""


def parse(text: str, table: Table = TABLE) -> Any:
    """What `text` spells: a reducer such as 'ErrorFeedback(TopK(0.01))', or 'LocalSteps(Dense(), every=10)'."""
    try:
        with _ONE_AT_A_TIME:
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpellingError(f"{_excerpt(text)} is not spelled like ErrorFeedback(TopK(0.01))") from error
    return _spelled(tree, table)


def spell(recipe: Spelled) -> str:
    """The shortest spelling that `parse` takes: the recipe's `repr`."""
    return repr(recipe)


def same(one: str, other: str) -> bool:
    """Whether two texts spell the same recipe; also in the longer spelling that version 0.1 wrote into checkpoints."""
    if one == other:
        return True
    try:
        return bool(parse(one) == parse(other))
    except (TypeError, ValueError):
        return False


def recipe_of(thing: Any) -> Recipe:
    """The recipe that a user hands in: an object, or its spelling. Anything else is refused with what to write."""
    recipe = parse(thing) if isinstance(thing, str) else thing
    if isinstance(recipe, type) and issubclass(recipe, (Reducer, LocalSteps)):
        name = recipe.__name__
        raise TypeError(f"{name} is a class, and what trains is an object: write {name}{_parameters(recipe)}")
    if not isinstance(recipe, (Reducer, LocalSteps)):
        raise TypeError(f"this is no method: {_excerpt(repr(recipe))}; write ErrorFeedback(TopK(0.01)) or the like")
    return recipe


def reducer_of(thing: Any) -> Reducer[Any, Any]:
    """The same where gradients are exchanged at every step, and local steps have no place."""
    recipe = recipe_of(thing)
    if isinstance(recipe, LocalSteps):
        raise TypeError(f"local steps hook onto the optimizer: write thinwire.local(model, optimizer, {recipe!r})")
    return recipe


def _spelled(node: ast.expr, table: Table) -> Spelled:
    match node:
        case ast.Name(id=name):  # Dense, as well as Dense()
            return _made(name, [], {}, table)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            named = {k.arg: _value(k.value, table) for k in keywords if k.arg}
            if len(named) < len(keywords):
                _refuse(node)
            return _made(name, [_value(arg, table) for arg in args], named, table)
        case _:
            _refuse(node)


def _value(node: ast.expr, table: Table) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Tuple(elts=items):
            return tuple(_value(item, table) for item in items)
        case ast.List(elts=items):
            return [_value(item, table) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {_value(key, table): _value(value, table) for key, value in zip(keys, values) if key is not None}
        case ast.Call() | ast.Name():
            return _spelled(node, table)
        case _:
            _refuse(node)


def _made(name: str, args: list[Any], named: dict[str, Any], table: Table) -> Spelled:
    if name not in table:
        near = difflib.get_close_matches(name.lower(), [known.lower() for known in table], n=1, cutoff=0.5)
        meant = [known for known in table if known.lower() in near]
        hint = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(sorted(table))}"
        raise SpellingError(f"there is no method {name}: {hint}")
    kind = table[name]
    try:
        given = inspect.signature(kind).bind(*args, **named).arguments
    except TypeError as error:
        raise SpellingError(f"{name}: {error}; it takes {_parameters(kind)}") from error
    hints = get_type_hints(kind.__init__)
    for parameter, value in given.items():
        if not _fits(value, hints.get(parameter, Any)):
            raise SpellingError(f"{name}: {parameter} cannot be {value!r}; it takes {_parameters(kind)}")
    return kind(**given)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a literal may stand where `wanted` is annotated; what is not understood passes."""
    kind = get_origin(wanted) or wanted
    if kind in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(wanted))
    if kind is Literal:
        return value in get_args(wanted)
    if kind is tuple and isinstance(value, tuple) and len(get_args(wanted)) == 2:
        first, second = get_args(wanted)
        if second is Ellipsis:
            return all(_fits(item, first) for item in value)
        return len(value) == 2 and _fits(value[0], first) and _fits(value[1], second)
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, (int, float))
    return not isinstance(kind, type) or isinstance(value, kind)


def _parameters(kind: type[Spelled]) -> str:
    """What a class takes, as one writes it: (density, agree=False)."""
    taken = inspect.signature(kind).parameters.values()
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in taken)})"


def _refuse(node: ast.expr) -> NoReturn:
    raise SpellingError(
        f"{_excerpt(ast.unparse(node))} is not a literal: a recipe is spelled with names of methods, "
        "numbers, strings, True, False, None, tuples and dicts"
    )


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
