"""Tests that hold a clock to a bound: whatever else the machine does for a moment can spoil one measurement.

`python tests/support/quiet.py` goes well where they need nobody to be quiet: see `needs_quiet`.
"""

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest


@contextmanager
def at_once() -> Iterator[None]:
    """This process and those it starts run as soon as they can, before all others, if they may."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    yield
    with suppress(OSError):
        os.sched_setscheduler(0, *before)


def _may_be_at_once() -> bool:
    with at_once():
        return os.sched_getscheduler(0) == os.SCHED_RR


def needs_quiet() -> bool:
    """Whether nothing else should run beside a test that measures time: where `at_once` is not allowed."""
    return sys.platform != "linux" or not _may_be_at_once()


timed = pytest.mark.alone if needs_quiet() else pytest.mark.timed  # marks what measures time


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


if __name__ == "__main__":
    sys.exit(needs_quiet())
