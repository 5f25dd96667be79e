"""The command line starts light: what is heavy is loaded once the arguments are known to be good."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from thinwire import lab
from thinwire.cli.main import main
from thinwire.lab.run.checkup import look

HEAVY = ("torch", "numpy", "numba", "sklearn", "PIL")
LOADED = """
import json, sys
sys.argv = ["thinwire", *{words}]
from thinwire.cli.main import main
try:
    main()
except SystemExit as left:
    print(json.dumps([left.code, [name for name in {heavy} if name in sys.modules], len(sys.modules)]), file=sys.stderr)
"""


def loaded(*words: str, folder: Path) -> tuple[int, list[str], int]:
    """A command's exit code, which of the heavy packages it has loaded, and how many modules in all."""
    program = LOADED.format(words=list(words), heavy=HEAVY)
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=folder, env=where
    )
    code, heavy, modules = json.loads(done.stderr.strip().splitlines()[-1])
    return code, heavy, modules


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["compare", "--help"], 0),
        (["data"], 0),
        (["train", "--steps", "0"], 2),
        (["train", "--task", "digitss"], 2),
        (["compare", "--target", "abc"], 2),
        (["plan", "digits", "--workers", "1"], 2),
        (["plan", "digits", "--compute-ms", "-4"], 2),
        (["study", "frontier", "--screen", "many"], 2),
        (["study", "everything"], 2),
        (["study", "sites", "--link", "1gbit"], 2),
        (["data", "iris"], 2),
        (["report", "nowhere"], 2),
    ],
    ids=str,
)
def test_nothing_heavy_is_loaded_for_help_or_a_bad_argument(words, code, tmp_path):
    left, heavy, modules = loaded(*words, folder=tmp_path)
    assert left == code and heavy == []
    assert modules < 600
    assert list(tmp_path.iterdir()) == []


def test_importing_thinwire_loads_nothing_else():
    program = f"import sys, thinwire; print([name for name in {HEAVY} if name in sys.modules], thinwire.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[]", thinwire.__version__]


def test_the_first_word_comes_before_torch_is_loaded(tmp_path):
    """A torch that cannot be imported: the word has been said by then."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is being loaded now')")
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for words in (["methods"], ["train"], ["compare"], ["plan", "digits"], ["probe"], ["doctor"]):
        command = [sys.executable, "-m", "thinwire", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=where, cwd=tmp_path)
        first, *rest = done.stderr.strip().splitlines()
        assert first == "thinwire: loading torch ..." and "torch is being loaded now" in rest[-1], done.stderr


@pytest.mark.parametrize(
    ("hidden", "words", "package"),
    [
        ("sklearn", ["train"], "scikit-learn"),
        ("sklearn", ["compare"], "scikit-learn"),
        ("sklearn", ["study", "sparse", "--quick"], "scikit-learn"),
    ],
)
def test_what_the_light_install_lacks_is_said_with_what_to_type(hidden, words, package, tmp_path, monkeypatch, capsys):
    find = lab.find_spec
    monkeypatch.setattr(lab, "find_spec", lambda name, *more: None if name == hidden else find(name, *more))
    monkeypatch.setattr(sys, "argv", ["thinwire", *words])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert f"{package} must be installed for this: pip install 'thinwire[lab]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_doctor_tells_what_is_here_and_what_is_missing(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/nowhere")
    found = {one.what: one for one in look()}
    assert thinwire.__version__ in found["thinwire"].told and "torch" in found["thinwire"].told
    assert found["interface"].verdict == "missing" and "none0" in found["interface"].told
    assert found["kernels' cache"].verdict == "missing" and "NUMBA_CACHE_DIR" in found["kernels' cache"].told
    assert found["loopback"].verdict == "fine" and "us" in found["loopback"].told
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in found["restarts"].told
    assert found["scikit-learn"].verdict == "fine"
