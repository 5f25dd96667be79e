"""Word of a compilation when it begins: it takes seconds, on a busy machine minutes, and nothing else moves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core.event import Event, Listener, install_listener


class _Begins(Listener):
    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell, self.begun = tell, False

    def on_start(self, event: Event) -> None:
        if not self.begun:
            self.begun = True
            self.tell()

    def on_end(self, event: Event) -> None:
        pass


@contextmanager
def watched(tell: Callable[[], None]) -> Iterator[_Begins]:
    """Inside, `tell` is called once, when numba begins to compile; what comes from its cache is no compilation."""
    watching = _Begins(tell)
    with install_listener("numba:compile", watching):
        yield watching
