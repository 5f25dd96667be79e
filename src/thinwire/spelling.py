"""How reducers are spelled: `parse(repr(reducer)) == reducer`.

The command line takes this spelling, records store it and reports label with it. It is Python's own syntax
for calls, but nothing is evaluated: names come from a table and arguments are literals.
"""

import ast
import difflib
import inspect
from collections import ChainMap
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from thinwire.compose import Cast, Route, Warmup
from thinwire.feedback import Adam, ErrorFeedback, Momentum
from thinwire.methods import METHODS
from thinwire.reducer import Reducer

WRAPPERS: dict[str, type[Reducer[Any, Any]]] = {
    "Adam": Adam,
    "Cast": Cast,
    "ErrorFeedback": ErrorFeedback,
    "Momentum": Momentum,
    "Route": Route,
    "Warmup": Warmup,
}
NAMES: ChainMap[str, type[Reducer[Any, Any]]] = ChainMap(METHODS, WRAPPERS)


class SpellingError(ValueError):
    """A text that spells no reducer."""


def parse(text: str) -> Reducer[Any, Any]:
    """The reducer that `text` spells, such as 'ErrorFeedback(TopK(0.01))'."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpellingError(f"{_excerpt(text)} is not spelled like ErrorFeedback(TopK(0.01))") from error
    return _reducer(tree)


def spell(reducer: Reducer[Any, Any]) -> str:
    """The shortest spelling that `parse` takes: no defaults, and no name for a first argument that needs none."""
    given = []
    for position, f in enumerate(fields(reducer)):  # type: ignore[arg-type]
        value = getattr(reducer, f.name)
        if value != _default(f):
            written = spell(value) if isinstance(value, Reducer) else repr(value)
            plain = position == 0 and not isinstance(value, bool)
            given.append(written if plain else f"{f.name}={written}")
    return f"{type(reducer).__name__}({', '.join(given)})"


def _reducer(node: ast.expr) -> Reducer[Any, Any]:
    match node:
        case ast.Name(id=name):  # Dense, as well as Dense()
            return _made(name, [], {})
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            named = {k.arg: _value(k.value) for k in keywords if k.arg}
            if len(named) < len(keywords):
                _refuse(node)
            return _made(name, [_value(arg) for arg in args], named)
        case _:
            _refuse(node)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {_value(key): _value(value) for key, value in zip(keys, values) if key is not None}
        case ast.Call() | ast.Name():
            return _reducer(node)
        case _:
            _refuse(node)


def _made(name: str, args: list[Any], named: dict[str, Any]) -> Reducer[Any, Any]:
    if name not in NAMES:
        near = difflib.get_close_matches(name.lower(), [known.lower() for known in NAMES], n=1, cutoff=0.5)
        meant = [known for known in NAMES if known.lower() in near]
        hint = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(sorted(NAMES))}"
        raise SpellingError(f"there is no method {name}: {hint}")
    method = NAMES[name]
    try:
        given = inspect.signature(method).bind(*args, **named).arguments
    except TypeError as error:
        raise SpellingError(f"{name}: {error}; it takes {_parameters(method)}") from error
    hints = get_type_hints(method.__init__)
    for parameter, value in given.items():
        if not _fits(value, hints.get(parameter, Any)):
            raise SpellingError(f"{name}: {parameter} cannot be {value!r}; it takes {_parameters(method)}")
    return method(**given)


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


def _parameters(method: type[Reducer[Any, Any]]) -> str:
    return str(inspect.signature(method)).removesuffix(" -> None").replace("thinwire.reducer.", "")


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def _refuse(node: ast.expr) -> NoReturn:
    raise SpellingError(
        f"{_excerpt(ast.unparse(node))} is not a literal: a reducer is spelled with names of methods, "
        "numbers, strings, True, False, None, tuples and dicts"
    )


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
