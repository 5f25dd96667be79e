"""Emulated links: the rate is kept, the counters tell, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import forked
from quiet import measured_again, timed
from thinwire.lab.run.links import namespaces, tun, veth
from thinwire.lab.run.links.emulated import emulate, missing_rights
from thinwire.lab.run.links.spelling import Link
from thinwire.plan import Network, parse_rate, parse_seconds, spell_rate

KINDS = ["100mbit", "100mbit, 10ms"]  # shaped by the kernel, and by the forwarder
refusal = veth.missing() or tun.missing()
needs_rights = pytest.mark.skipif(refusal is not None, reason=str(refusal))

ALL_REDUCE = textwrap.dedent("""
    import sys, time, torch, torch.distributed as dist
    from quiet import at_once
    rank, world, host, size, rounds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), 4
    torch.set_num_threads(1)
    with at_once():  # and the threads that gloo starts in here
        dist.init_process_group("gloo", init_method=f"tcp://{host}:29500", rank=rank, world_size=world)
        x = torch.ones(size // 4)
        dist.all_reduce(x)  # connects, and empties the shaper's bucket
        start = time.perf_counter()
        for _ in range(rounds):
            dist.all_reduce(x)
        print((time.perf_counter() - start) / rounds, flush=True)
        dist.barrier()
""")


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 1e8), ("1gbit", 1e9), ("2.5 Gbit/s", 2.5e9), ("64kbit", 64e3), ("9600bit", 9600.0)],
)
def test_rates_are_read_and_spelled(text: str, rate: float) -> None:
    assert parse_rate(text) == rate
    assert parse_rate(spell_rate(rate)) == rate


@pytest.mark.parametrize("text", ["", "fast", "100", "100MB", "-1mbit", "0mbit", "1e3mbit", "100 mbit per second"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="100mbit"):
        parse_rate(text)


def test_times_are_read() -> None:
    assert parse_seconds("40ms") == pytest.approx(0.04)
    assert parse_seconds("200us") == pytest.approx(2e-4)
    assert parse_seconds("1.5s") == 1.5
    with pytest.raises(ValueError, match="1ms"):
        parse_seconds("soon")


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"workers": 0}, {"rtt": -1.0}, {"rate": float("nan")}])
def test_an_impossible_network_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Network(**{"rate": 1e8, "workers": 2, "rtt": 0.0, **wrong})


def mine() -> list[str]:
    return [name for name in namespaces.namespaces() if name.startswith(f"thinwire-{os.getpid()}-")]


@needs_rights
@timed
@measured_again
def test_an_all_reduce_takes_the_time_the_rate_says() -> None:
    rate, size, workers = 20e6, 1_000_000, 3
    on_the_wire = 2 * (workers - 1) / workers * size
    with emulate(Link.parse(spell_rate(rate)), workers) as links:
        before = links.sent()
        runs = [
            subprocess.Popen(
                links.command(i, [sys.executable, "-c", ALL_REDUCE, str(i), str(workers), links.address(0), str(size)]),
                env={**os.environ, **links.environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(workers)
        ]
        took = [float(run.communicate(timeout=120)[0]) for run in runs]
        sent = [after - at for after, at in zip(links.sent(), before)]
    assert min(took) == pytest.approx(8 * on_the_wire / rate, rel=0.15)
    assert max(took) == pytest.approx(8 * on_the_wire / rate, rel=0.15)
    assert max(sent) == pytest.approx(5 * on_the_wire, rel=0.05)
    assert mine() == []


@needs_rights
@pytest.mark.parametrize(("link", "count"), [("100mbit", 3), ("100mbit, 10ms", 2)])
def test_links_are_removed_when_the_block_fails(link: str, count: int) -> None:
    def fail() -> None:
        with emulate(Link.parse(link), 2):
            assert len(mine()) == count
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert mine() == []


def hold(link: str, guarded: bool = True) -> tuple[forked.Popen, int]:
    """A run with links, and a process that it has started on one of them."""
    words = [sys.executable, "-m", "held_links", link, "guarded" if guarded else "unguarded"]
    run = forked.Popen(words, env=dict(os.environ), stderr=forked.PIPE)
    said: list[str] = []
    until(lambda: bool(said.append(Path(run.said.name).read_text()) or "inside" in said[-1]))
    return run, int(said[-1].split("inside ")[1])


def until(met: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not met():
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.05)


def forwarders(run: int) -> list[int]:
    """The processes that forward packets for a run, by their ids."""
    forwarding = [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if b"links.forwarder" in _read(path)]
    return [
        int(one.name) for one in forwarding if _read(one / "stat").rpartition(b")")[2].split()[1:2] == [b"%d" % run]
    ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_rights
@pytest.mark.parametrize("link", KINDS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_links_are_removed_when_the_run_is_asked_to_end(number: int, link: str) -> None:
    run, inside = hold(link)
    forwarding = forwarders(run.pid)
    assert len(forwarding) == ("ms" in link)
    run.send_signal(number)
    run.wait(timeout=20)
    assert not [name for name in namespaces.namespaces() if f"-{run.pid}-" in name]
    assert not any(map(alive, [inside, *forwarding]))


@needs_rights
@pytest.mark.parametrize("link", KINDS)
def test_a_killed_run_is_cleared_away_at_once(link: str) -> None:
    run, inside = hold(link)
    forwarding = forwarders(run.pid)
    run.kill()
    run.wait(timeout=20)
    until(lambda: not [name for name in namespaces.namespaces() if f"-{run.pid}-" in name])
    until(lambda: not any(map(alive, [inside, *forwarding])))


@needs_rights
def test_the_next_run_clears_away_what_nobody_else_did() -> None:
    run, inside = hold("100mbit", guarded=False)
    left = [name for name in namespaces.namespaces() if f"-{run.pid}-" in name]
    assert len(left) == 3
    run.kill()
    run.wait(timeout=20)  # another process that begins a run may sweep these away before this one does
    with emulate(Link.parse("100mbit"), 1):
        assert not set(left) & set(namespaces.namespaces())
        until(lambda: not alive(inside))
    assert mine() == []


def test_without_the_tools_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for link in KINDS:
        reason = missing_rights(Link.parse(link))
        assert reason and "iproute2" in reason and "\n" not in reason
    assert namespaces.namespaces() == []


def test_a_process_without_an_emulated_link_has_no_counter() -> None:
    assert namespaces.sent_bytes() is None
