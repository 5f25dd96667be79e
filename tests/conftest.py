"""Before any test: one thread, and kernels compiled once, so that worker processes find them in the cache."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock  # which torch brings

import forked as forked_workers
from thinwire import kernels
from thinwire.lab.run import processes

LAB = Path(__file__).parent / "lab"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every method with every capture, in place of representatives")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
        os.environ["THINWIRE_TEST_ALL"] = "1"  # before the examples are read


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` every test goes to whichever process is free, the largest group first.

    Tests of the lab start launchers and workers of their own: they stay in one process, so that no two of them run side
    by side, and begin at once, since they are the longest. Other groups share what is made once for a file.
    """
    for item in items:
        if item.path.parent == LAB:
            item.add_marker(pytest.mark.xdist_group("lab"))
        elif item.get_closest_marker("alone"):
            raise pytest.UsageError(
                f"{item.nodeid} is to run alone: `make test` looks for such tests in tests/lab only"
            )


@pytest.fixture(scope="session", autouse=True)
def _settled_machine() -> None:
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
    monkeypatch.setattr(processes, "subprocess", forked_workers)
