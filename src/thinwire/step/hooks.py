"""Hooks on modules that users copy and pickle."""

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """A hook that goes into a copy or a pickle of its module as one that does nothing."""

    def __init__(self, call: Callable[..., Any] | None = None):
        self._call = call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return None if self._call is None else self._call(*arguments, **named)

    def __reduce__(self) -> Any:
        return ModuleHook, ()
