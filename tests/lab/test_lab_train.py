"""Training in real processes: records, resuming, and every way in which a run can end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import forked
from thinwire import parse
from thinwire.cli import main as cli
from thinwire.lab import LabError
from thinwire.lab.records.record import has_ended, read_lines, read_steps
from thinwire.lab.run import meeting
from thinwire.lab.run.links import namespaces, tun, veth
from thinwire.lab.run.meeting import already_launched, leads
from thinwire.methods import METHODS

THINWIRE = [sys.executable, "-m", "thinwire"]
LOOPBACK = {"0100007F"}
LINKED = {"010012C6", "020012C6"}  # 198.18.0.1 and 198.18.0.2, in namespaces from which no route leads out
LINK = [] if veth.missing() else ["--link", "1gbit"]
TRAIN = [
    "train",
    "--task",
    "digits",
    "--method",
    "ErrorFeedback(TopK(0.01))",
    "--checkpoint-every",
    "10",
    "--workers",
    "2",
]


# Methods by which every collective is met, and every message that is coded in its own way.
COUNTED = (
    "TopK",
    "PowerSGD",
    "QSGD",
    "LowBit",
    "ExDyna",
    "CLTK",
    "OkTopk",
    "GTopK",
    "Variance",
    "RankDAD",
    "SparseLoCo",
)

pytestmark = pytest.mark.timeout(400)  # some of these start processes three times


@pytest.fixture
def start() -> Iterator["Start"]:
    """Starts a launcher, with its workers, in interpreters as people do, or forked: that takes a tenth of the time."""
    started: list[Any] = []

    def begin(*words: str, typed: bool = False) -> Any:
        pipe = subprocess.PIPE
        if typed:
            started.append(subprocess.Popen([*THINWIRE, *words], stdout=pipe, stderr=pipe, text=True))
        else:
            command = [sys.executable, "-m", "thinwire.cli.main", *words]
            started.append(forked.Popen(command, env=dict(os.environ), stderr=forked.PIPE, launcher=True))
        return started[-1]

    yield begin
    for one in started:
        one.kill()  # its workers notice, if a test has failed in the middle
        one.wait()


Start = Callable[..., Any]


@pytest.fixture
def run(forked: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A command that must go well, for what it does rather than how its processes start: what it says."""

    def begin(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["thinwire", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        assert not left.value.code, said.err
        return said.out

    return begin


Command = Callable[..., str]


def last_line(said: str, typed: bool) -> str:
    """What it ended with. Before that there is the start, and a line of progress at times: nothing else."""
    *loading, starting, line = (
        one for one in said.strip().splitlines() if "ErrorFeedback(TopK(0.01)): step" not in one
    )
    assert loading == ["thinwire: loading torch ..."] * typed  # what is forked has loaded it
    assert starting.startswith("starting 2 workers")
    return line


def pids(folder: Path) -> list[int]:
    return [line["pid"] for path in sorted(folder.glob("rank*.jsonl")) for line in read_lines(path) if "pid" in line]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(met: object, seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not met():  # type: ignore[operator]
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.05)


def in_the_middle(folder: Path) -> bool:
    """A checkpoint is written and more steps have been made since."""
    path = folder / "rank0.jsonl"
    return (folder / "checkpoints" / "latest").exists() and len(read_steps(path)) > 14


def left_behind(launcher: int, folder: Path) -> Iterator[str]:
    yield from (name for name in namespaces.namespaces() if f"-{launcher}-" in name)
    yield from (str(pid) for pid in pids(folder) if alive(pid))


def losses(folder: Path) -> list[list[float]]:
    return [[line["loss"] for line in read_steps(folder / f"rank{r}.jsonl") if line["step"]] for r in range(2)]


def test_a_killed_worker_ends_the_run_with_one_line_and_it_resumes_to_the_same_bits(
    start: Start, run: Command, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    told = run(*TRAIN, "--steps", "120", "--out", str(whole))
    assert "after 120 steps" in told and str(whole) in told

    words = [*TRAIN, *LINK, "--steps", "120", "--out", str(broken)]
    launched = start(*words)
    until(lambda: in_the_middle(broken))
    os.kill(pids(broken)[1], signal.SIGKILL)
    killed = time.monotonic()
    _, said = launched.communicate(timeout=60)
    assert time.monotonic() - killed < 15
    assert launched.returncode == 1
    line = last_line(said, typed=False)
    assert "worker 1 was killed (signal 9)" in line and "--resume" in line
    assert not list(left_behind(launched.pid, broken))
    assert not has_ended(broken)

    run(*words, "--resume")
    assert has_ended(broken)
    assert losses(broken) == losses(whole)


def descendants(pid: int) -> Iterator[int]:
    """All processes that a process has started, and those that these have started."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        if parent == pid:
            yield int(path.parent.name)
            yield from descendants(int(path.parent.name))


def listeners(pid: int) -> Iterator[str]:
    """The addresses at which a process can be reached, as the kernel writes them: 0100007F is 127.0.0.1."""
    inodes = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    for kind, listens in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == listens and f"socket:[{words[9]}]" in inodes:
                yield words[1].split(":")[0]


def listens_to_nobody_else(launched: Any, folder: Path, reachable: set[str]) -> None:
    everyone = [launched.pid, *descendants(launched.pid)]
    assert set(pids(folder)) <= set(everyone)
    found = {pid: set(listeners(pid)) for pid in everyone}
    assert set().union(*found.values()) == reachable
    assert not found[launched.pid]
    for pid in everyone:
        assert b"torch.distributed.run" not in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_listens_beyond_the_workers_and_however_the_launcher_ends_they_end_too(
    start: Start, number: int, tmp_path: Path
) -> None:
    typed = number == signal.SIGINT
    launched = start(*TRAIN, *LINK, "--steps", "100000", "--out", str(tmp_path), typed=typed)
    until(lambda: in_the_middle(tmp_path))
    listens_to_nobody_else(launched, tmp_path, LINKED if LINK else LOOPBACK)
    launched.send_signal(number)
    _, said = launched.communicate(timeout=30)
    if number == signal.SIGINT:
        assert launched.returncode == 130
        line = last_line(said, typed)
        assert "records are kept" in line and "--resume goes on" in line
        assert not list(left_behind(launched.pid, tmp_path))
    else:
        until(lambda: not any(alive(pid) for pid in pids(tmp_path)), 10)
        namespaces.sweep()  # as the next run does
        assert not list(left_behind(launched.pid, tmp_path))
    assert read_steps(tmp_path / "rank0.jsonl")[-1]["step"] > 10


def test_a_worker_that_stands_still_ends_the_run_in_bounded_time(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_TIMEOUT", "6")
    launched = start(*TRAIN, "--steps", "100000", "--out", str(tmp_path))
    until(lambda: in_the_middle(tmp_path))
    listens_to_nobody_else(launched, tmp_path, LOOPBACK)  # without links too
    os.kill(pids(tmp_path)[1], signal.SIGSTOP)
    _, said = launched.communicate(timeout=60)
    assert launched.returncode == 1
    assert "nothing has moved for 6 s" in said and "worker 1 has been stopped" in said
    assert not list(left_behind(launched.pid, tmp_path))


def test_who_has_not_joined_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with meeting.listen("127.0.0.1") as listener:
        here = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", meeting.LAUNCHER: "1", meeting.LIMIT: "1"}
        here |= {"MASTER_PORT": str(listener.getsockname()[1]), meeting.LISTENER: str(listener.detach())}
        for name, value in here.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LabError, match="worker 1, 2 has not joined the others within 1 s"):
            meeting.meet()
    monkeypatch.setenv(meeting.LIMIT, "soon")
    with pytest.raises(LabError, match="number of seconds"):
        meeting.limit()


@pytest.mark.skipif(not LINK, reason="links cannot be emulated here")
def test_the_ledger_agrees_with_what_interfaces_count(run: Command, tmp_path: Path) -> None:
    methods = ["DDP", "DDP-fp16", "Cast(Dense())", "ErrorFeedback(TopK(0.1)) every 5", "RandomK(0.1, agree=False)"]
    methods += ["ErrorFeedback(TopK(0.05, agree=True))"]
    for name in METHODS if os.environ.get("THINWIRE_TEST_ALL") else COUNTED:  # as usually meant, more than frames
        sparse = "density" in {f.name for f in fields(METHODS[name])}
        given = {"Strom": "0.01", "VarianceStrom": "1.0, tau=0.01"}.get(name, "density=0.05" if sparse else "")
        plain = f"{name}({given})"
        methods.append(f"ErrorFeedback({plain})" if parse(plain).needs_memory else plain)
    chosen = [word for method in methods for word in ("--method", method)]
    run("compare", *chosen, "--steps", "40", "--link", "200mbit", "--out", str(tmp_path))
    told = json.loads((tmp_path / "summary.json").read_text())["methods"]
    assert len(told) == len(methods)
    for method in told:
        assert method["measured_bytes_a_step"] == pytest.approx(method["wire_bytes_a_step"], rel=0.05), method["method"]


@pytest.mark.skipif(not LINK, reason="links cannot be emulated here")
def test_a_probe_finds_the_rate_of_the_link(run: Command) -> None:
    told = run("probe", "--workers", "2", "--link", "50mbit", "--task", "digits")
    found = re.search(r"thinwire plan digits --link ([\d.]+)mbit --rtt \d+us --workers 2 --compute-ms \d+", told)
    assert found, told
    assert 30 < float(found[1]) < 55  # a busy machine may fall short of the link; nothing goes beyond it


def test_torchs_own_hooks_are_baselines_too(run: Command, tmp_path: Path) -> None:
    spelled = ["DDP", "DDP('fp16')", "DDP('bf16')", "DDP('powersgd', rank=2)", "DDP('none')"]
    words = [word for method in spelled for word in ("--method", method)]
    told = json.loads(run("compare", *words, "--steps", "12", "--json", "--out", str(tmp_path)))
    wire = {m["method"]: m["wire_bytes_a_step"] for m in told["methods"]}
    assert list(wire) == spelled and wire["DDP('none')"] == 0
    assert wire["DDP('fp16')"] == wire["DDP('bf16')"] == pytest.approx(wire["DDP"] / 2, rel=0.02)
    assert wire["DDP('powersgd', rank=2)"] < wire["DDP"] / 10
    assert not told["failed"] and not any(m["diverged"] for m in told["methods"][:4])


@pytest.mark.skipif(bool(tun.missing()), reason=str(tun.missing()))
def test_a_probe_tells_latency_ways_and_what_exchanges_take(run: Command) -> None:
    told = run("probe", "--workers", "3", "--link", "20mbit up 60mbit down, 40ms; worker 2: 10mbit up", "--json")
    found = json.loads(told)
    assert 0.04 <= found["rtt"] < 0.06
    assert found["direct"] < found["ring"]  # one trip against two
    for measured, asked in zip(found["up"] + found["down"], [20e6, 20e6, 10e6, 20e6, 20e6, 40e6]):
        assert 0.5 * asked < measured < 1.2 * asked  # all wait for the slowest sender; a busy machine is slower


def test_sruns_names_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not already_launched() and leads()
    here = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    for name, value in {**here, "MASTER_ADDR": "node0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what is translated stays in here
    assert already_launched() and not leads()
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["3", "8", "1"]


def test_under_torchrun_the_command_is_a_worker(tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "thinwire",
    ]
    words = ["compare", "--method", "DDP", "--method", "Dense()", "--steps", "20", "--out", str(tmp_path)]
    launched = forked.Popen([*torchrun, *words], env=dict(os.environ), stderr=forked.PIPE)
    _, said = launched.communicate(timeout=300)
    assert launched.poll() == 0, said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [m["method"] for m in summary["methods"]] == ["DDP", "Dense()"]
    first, second = (losses(tmp_path / m["folder"]) for m in summary["methods"])
    assert first == second and len(first[0]) == 20  # Dense is plain DDP, to the bit
    assert (tmp_path / "report.html").exists() and said.count("Report:") == 1


def test_a_method_that_fails_does_not_take_the_others_with_it(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lonely.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from thinwire.lab.tasks.base import Arrays, Task\n"
        "calls = 0\n"
        "def loss(out, y):\n"
        "    global calls\n"
        "    calls += out.requires_grad\n"
        "    if dist.get_rank() == 1 and calls == 5:\n"
        "        raise RuntimeError('the fifth batch is bad')\n"
        "    return torch.nn.functional.cross_entropy(out, y)\n"
        "def make_task():\n"
        "    x = torch.randn(400, 3)\n"
        "    return Task('own', lambda: torch.nn.Linear(3, 2), Arrays.split(x, (x.sum(1) > 0).long()), loss)\n"
    )
    words = ["compare", "--task", "lonely:make_task", "--method", "DDP", "--method", "Dense()", "--steps", "3"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run(*words, "--batch", "8", "--out", str(tmp_path / "runs"))
    summary = json.loads((tmp_path / "runs" / "summary.json").read_text())
    assert [m["method"] for m in summary["methods"]] == ["DDP"]
    (said,) = summary["failed"].values()
    assert "worker 1 failed" in said and "the fifth batch is bad" in said
