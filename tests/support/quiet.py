"""Tests that hold a clock to a bound: whatever else the machine does for a moment can spoil one measurement."""

import functools
import time
from collections.abc import Callable
from typing import Any


def measured_again(test: Callable[..., None]) -> Callable[..., None]:
    """Measure up to three times, at the same bounds: what is wrong fails each time, what met a busy moment does not."""

    @functools.wraps(test)
    def tried(*arguments: Any, **named: Any) -> None:
        for _ in range(2):
            try:
                return test(*arguments, **named)
            except AssertionError:
                time.sleep(1.0)
        return test(*arguments, **named)

    return tried
