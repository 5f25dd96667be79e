"""Before any test: one thread, and kernels compiled once, so that worker processes find them in the cache."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

# What is heavy is imported where it is used: the process that hands out the tests runs none of them.

LAB = Path(__file__).parent / "lab"
# Files that take long, longest first.
LONG = (
    "tests/lab/test_lab_train.py",
    "tests/doors/test_loops.py",
    "tests/doors/test_ddp.py",
    "tests/lab/test_links.py",
    "tests/doors/test_local.py",
    "tests/methods/test_exdyna_density.py",
    "tests/house/test_resume_example.py",
    "tests/doors/test_atomicity.py",
    "tests/lab/",
    "tests/methods/test_dad.py",
    "tests/comm/",
    "tests/doors/",
    "tests/house/test_docs.py",
)
APART = ("tests/house/test_docs.py", "tests/methods/test_laws.py")  # long ones whose tests share nothing
LAST = "tests/methods/test_laws.py"  # a hundred short ones, which fill what the others leave free


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every method with every capture, in place of representatives")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
        os.environ["THINWIRE_TEST_ALL"] = "1"  # before the examples are read


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest is handed out first, and short ones last, so that nobody waits for it in the end."""
    for item in items:
        if item.get_closest_marker("alone") and item.path.parent != LAB:
            raise pytest.UsageError(
                f"{item.nodeid} is to run alone: `make test` looks for such tests in tests/lab only"
            )
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    place = next((n for n, long in enumerate(LONG) if item.nodeid.startswith(long)), len(LONG))
    return place + item.nodeid.startswith(LAST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup` a file goes to whichever process is free: its tests share what is made once for it.

    xdist's own groups are not used: it writes them into the names of tests, which pytest 9.2 does not let it
    (pytest-dev/pytest-xdist#1386), and then hands out each test by itself without a word.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Rooms(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return nodeid if path in APART else path

    config.option.loadscopereorder = False  # the order of the tests, and not the file with most of them first
    return Rooms(config, log)


@pytest.fixture(scope="session", autouse=True)
def _settled_machine() -> None:
    import torch
    from filelock import FileLock  # which torch brings

    from thinwire import kernels

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it
    dtypes = [torch.float32, torch.float64]
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":  # on a fresh clone two processes compile one dtype each
        dtypes.reverse()
    for dtype in dtypes:
        with FileLock(Path(tempfile.gettempdir()) / f"thinwire-tests-{os.getuid()}-{dtype}.lock"):
            kernels.warm(dtype)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab's launcher forks its workers, for tests in which how an interpreter starts does not matter."""
    import forked as forked_workers
    from thinwire.lab.run import processes, rehearsal

    for starts in (processes, rehearsal):
        monkeypatch.setattr(starts, "subprocess", forked_workers)
