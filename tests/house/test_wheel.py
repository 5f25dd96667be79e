"""What `pip install thinwire` would bring: a wheel is built, installed beside torch alone, and used."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import thinwire

ROOT = Path(__file__).parents[2]
USED = """
import importlib, pathlib, sys
import thinwire

assert pathlib.Path(thinwire.__file__).is_relative_to(sys.prefix), thinwire.__file__
for name in thinwire.__all__:
    getattr(thinwire, name)
print(thinwire.parse("ErrorFeedback(TopK(0.01))"), thinwire.__version__)
"""


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed: it builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (found,) = folder.iterdir()
    return found


def test_a_wheel_holds_the_sources_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in (source / "thinwire").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == wanted
    assert wheel.name == f"thinwire-{thinwire.__version__}-py3-none-any.whl"


def test_a_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    # What it depends on is borrowed: a folder named in a .pth file lends its packages, and not its own .pth files,
    # through which the sources of this repository would be found.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    spelled, version = run(python, "-I", "-c", USED).split()
    assert thinwire.parse(spelled) == thinwire.parse("ErrorFeedback(TopK(0.01))")
    assert version == thinwire.__version__
    assert version in run(python, "-I", tmp_path / "bin" / "thinwire", "--version")
