"""Things whose `repr` is the shortest spelling that `thinwire.parse` takes."""

import math
from dataclasses import MISSING, Field, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, get_args


class Spelled:
    """A base of frozen dataclasses: `parse(repr(x)) == x`, and what is equal has one `repr`.

    Defaults are left out, with one exception: a leading number (a rank, a density) makes a method what it is, so it is
    always written. A record then means the same after a default has changed.
    """

    unnamed: ClassVar[int] = 1  # so many leading arguments are written without their names

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Spelled.__repr__  # type: ignore[method-assign]  # the dataclass decorator leaves it alone

    def __repr__(self) -> str:
        if not is_dataclass(self):
            return object.__repr__(self)
        given, named = [], False
        for position, f in enumerate(f for f in fields(self) if f.init):
            value = getattr(self, f.name)
            if value == _default(f) and not (position == 0 and _is_number(value)):
                named = True  # whatever follows a gap needs its name
                continue
            named = named or position >= self.unnamed or isinstance(value, bool)
            written = written_as(value, f.type)
            given.append(f"{f.name}={written}" if named else written)
        return f"{type(self).__name__}({', '.join(given)})"


def written_as(value: Any, kind: Any = None) -> str:
    """A literal for `value`; where a float is annotated, 1 is written as 1.0."""
    if isinstance(value, tuple):
        inside = [written_as(item, (get_args(kind) or (None,))[0]) for item in value]
        return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
    if not _is_number(value):
        return repr(value)
    kinds = get_args(kind) or (kind,)
    if isinstance(value, Integral) and not (float in kinds and int not in kinds):
        return repr(int(value))
    number = float(value)
    return repr(number) if not math.isinf(number) else ("1e999" if number > 0 else "-1e999")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()
