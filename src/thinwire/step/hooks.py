"""Hooks on modules that users copy, pickle and compile."""

from collections.abc import Callable
from typing import Any

import torch


class ModuleHook:
    """A hook that goes into a copy or a pickle of its module as one that does nothing.

    It keeps count on the side, which a compiled graph would leave out: it is never compiled.
    """

    def __init__(self, call: Callable[..., Any] | None = None):
        self._call: Callable[..., Any] | None = None if call is None else torch.compiler.disable(call)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return None if self._call is None else self._call(*arguments, **named)

    def __reduce__(self) -> Any:
        return ModuleHook, ()
