"""Links with latency, loss and moods do what their spelling says.

Both ends of every link are sockets of this process that live in the workers' namespaces.
"""

import hashlib
import random
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiet import at_once, measured_again, timed
from thinwire.lab import LabError
from thinwire.lab.run.links import packets, tun
from thinwire.lab.run.links.forwarder import socket_in
from thinwire.lab.run.links.spelling import Link
from thinwire.lab.run.links.tun import Routed

refusal = tun.missing()
needs_rights = pytest.mark.skipif(refusal is not None, reason=str(refusal))
pytestmark = [pytest.mark.timeout(120), timed]


@contextmanager
def linked(text: str, workers: int = 2) -> Iterator[Routed]:
    with Routed(Link.parse(text), workers) as hosts:
        yield hosts


def datagrams(hosts: Routed, worker: int) -> socket.socket:
    end = socket_in(hosts.hosts[worker], socket.SOCK_DGRAM)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    end.bind((hosts.address(worker), 0))
    end.settimeout(2)
    return end


@contextmanager
def stream(hosts: Routed, source: int, sink: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket_in(hosts.hosts[sink], socket.SOCK_STREAM))
        listener.bind((hosts.address(sink), 0))
        listener.listen(1)
        sender = stack.enter_context(socket_in(hosts.hosts[source], socket.SOCK_STREAM))
        sender.settimeout(20)
        sender.connect(listener.getsockname())
        receiver = stack.enter_context(listener.accept()[0])
        receiver.settimeout(20)
        yield sender, receiver


class Flow:
    """A stream that is kept full until it is closed."""

    def __init__(self, hosts: Routed, source: int, sink: int) -> None:
        self.stack = ExitStack()
        self.sender, self.receiver = self.stack.enter_context(stream(hosts, source, sink))
        self.ends = False
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]
        for thread in self.threads:
            thread.start()

    def _send(self) -> None:
        while not self.ends:
            self.sender.sendall(bytes(1 << 14))
        self.sender.shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        while self.receiver.recv(1 << 18):
            pass

    def __enter__(self) -> "Flow":
        return self

    def __exit__(self, *_: object) -> None:
        self.ends = True
        for thread in self.threads:
            thread.join(30)
        self.stack.close()


def rates(hosts: Routed, seconds: float, what: str = "received") -> list[float]:
    """Bits a second on every worker's link, by what the forwarder counts."""
    before, began = hosts.told()[what], time.monotonic()
    time.sleep(seconds)
    after, took = hosts.told()[what], time.monotonic() - began
    return [8 * (b - a) / took for a, b in zip(before, after)]


def round_trips(hosts: Routed, source: int, sink: int, times: int) -> list[float]:
    with datagrams(hosts, source) as here, datagrams(hosts, sink) as there:
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            here.sendto(b"x" * 60, there.getsockname())
            there.sendto(*there.recvfrom(100))
            here.recv(100)
            taken.append(time.perf_counter() - began)
        return taken


@pytest.fixture(autouse=True)
def _at_once() -> Iterator[None]:
    """Whoever measures is not kept waiting by other processes of a busy machine."""
    with at_once():
        yield


@needs_rights
@measured_again
def test_a_round_trip_takes_as_long_as_the_link_says() -> None:
    with linked("100mbit, 40ms; worker 2: 90ms", 3) as hosts:
        near = round_trips(hosts, 0, 1, 15)
        far = round_trips(hosts, 0, 2, 9)
    assert min(near) >= 0.04 and statistics.median(near) == pytest.approx(0.04, abs=0.002)
    assert min(far) >= 0.09 and statistics.median(far) == pytest.approx(0.09, abs=0.002)


@needs_rights
@measured_again
def test_the_rate_is_kept_and_the_counters_agree() -> None:
    with linked("50mbit, 10ms") as hosts, Flow(hosts, 0, 1):
        time.sleep(0.7)  # the stream finds its rate
        before = hosts.sent()[0]
        found = rates(hosts, 2.0)
        counted = hosts.sent()[0] - before
    assert found[1] == pytest.approx(50e6, rel=0.05)
    assert 8 * counted / 2.0 == pytest.approx(50e6, rel=0.12)  # an interface counts headers once a piece, and longer


@needs_rights
@measured_again
def test_ways_up_and_down_are_apart_and_senders_share_a_way_down() -> None:
    with linked("10mbit up 30mbit down, 4ms; worker 2: 20mbit up 12mbit down", 3) as hosts:
        with Flow(hosts, 2, 0):
            time.sleep(2.0)
            assert rates(hosts, 3.0)[0] == pytest.approx(20e6, rel=0.05)  # the sender's way up
        with Flow(hosts, 0, 2), Flow(hosts, 1, 2):
            time.sleep(3.0)  # two streams take longer to share a way than one to find its rate
            assert rates(hosts, 4.0)[2] == pytest.approx(12e6, rel=0.05)  # the receiver's way down


@needs_rights
def test_as_many_packets_are_lost_as_the_link_says_and_the_others_stay_in_order() -> None:
    count, loss = 6000, 0.02
    with linked("400mbit, 8ms +- 8ms, 2% loss") as hosts:
        with datagrams(hosts, 0) as here, datagrams(hosts, 1) as there:
            arrived = []

            def listen() -> None:
                with suppress(TimeoutError):
                    while True:
                        arrived.append(int.from_bytes(there.recv(200), "little"))

            thread = threading.Thread(target=listen)
            thread.start()
            for number in range(count):
                here.sendto(number.to_bytes(100, "little"), there.getsockname())
                if number % 20 == 19:
                    time.sleep(0.003)
            thread.join()
        told = hosts.told()
    lost, spread = count - len(arrived), (count * loss * (1 - loss)) ** 0.5
    assert abs(lost - count * loss) < 4 * spread
    assert told["lost"] == lost and told["overflowed"] == 0
    assert arrived == sorted(arrived)


@needs_rights
def test_a_stream_comes_through_loss_whole_and_each_packet_of_a_piece_may_be_lost() -> None:
    data = random.Random(1).randbytes(4_000_000)
    got = hashlib.sha256()
    with linked("200mbit, 4ms, 1% loss") as hosts:
        with stream(hosts, 0, 1) as (sender, receiver):
            thread = threading.Thread(target=lambda: (sender.sendall(data), sender.shutdown(socket.SHUT_WR)))
            thread.start()
            while piece := receiver.recv(1 << 18):
                got.update(piece)
            thread.join()
        told = hosts.told()
    assert got.digest() == hashlib.sha256(data).digest()
    expected = 0.01 * told["packets"]
    assert told["packets"] > 2500 and abs(told["lost"] - expected) < 4 * expected**0.5


@needs_rights
@measured_again
def test_a_link_changes_when_it_should() -> None:
    with linked("40mbit, 4ms, then 10mbit after 2s, then 44ms after 4s") as hosts:
        with Flow(hosts, 0, 1):
            began = time.monotonic()
            time.sleep(0.6)
            first = rates(hosts, 1.2)[1]
            time.sleep(max(0.0, began + 2.4 - time.monotonic()))
            second = rates(hosts, 1.2)[1]
        time.sleep(max(0.0, began + 4.3 - time.monotonic()))
        after = round_trips(hosts, 0, 1, 7)
    assert first == pytest.approx(40e6, rel=0.05)
    assert second == pytest.approx(10e6, rel=0.05)
    assert statistics.median(after) == pytest.approx(0.044, abs=0.002)


@needs_rights
def test_a_link_that_is_down_for_three_seconds_comes_back() -> None:
    with linked("20mbit, 4ms, then down after 1s, then up after 4s") as hosts, Flow(hosts, 0, 1):
        began = time.monotonic()
        time.sleep(1.3)
        assert rates(hosts, 2.0) == [0.0, 0.0]
        time.sleep(max(0.0, began + 4.0 - time.monotonic()))
        until = time.monotonic() + 8  # TCP waits for longer and longer before it tries again
        while (found := rates(hosts, 0.5)[1]) < 19e6:
            assert time.monotonic() < until, f"{found} bit/s"


@needs_rights
def test_no_route_leads_out() -> None:
    with linked("100mbit, 2ms") as hosts:
        with socket_in(hosts.hosts[0], socket.SOCK_DGRAM) as here:
            with pytest.raises(OSError, match="unreachable"):
                here.connect(("192.0.2.1", 53))
            here.sendto(b"x", ("198.18.0.77", 9))  # nobody of ours
            time.sleep(0.2)
        assert hosts.told()["packets"] == 0


@needs_rights
def test_a_full_queue_drops_as_a_router_does() -> None:
    with linked("100mbit up 1mbit down, 2ms") as hosts:
        with datagrams(hosts, 0) as here, datagrams(hosts, 1) as there:
            for _ in range(400):
                here.sendto(bytes(1400), there.getsockname())
            time.sleep(0.3)
        told = hosts.told()
    # 128 KiB and 50 ms of the rate find room; at 1 Mbit/s the way down takes 0.1 s for nine packets
    assert 400 - (128 * 1024 + 1e6 / 8 * 0.5) // 1428 < told["overflowed"] < 400 - 128 * 1024 // 1428


@needs_rights
@measured_again
def test_it_says_up_to_where_it_can_be_trusted() -> None:
    with linked("100mbit, 2ms") as hosts:
        assert hosts.able and hosts.able["rate"] > 1e8 and hosts.able["packets"] > 1e4
        assert "200mbit are asked for" in hosts.trust() and "too long" not in hosts.trust()
        hosts.able["rate"] = 1.5e8
        assert "too long" in hosts.trust()


@needs_rights
def test_a_forwarder_that_ends_is_noticed() -> None:
    with linked("100mbit, 2ms") as hosts:
        hosts.check()
        assert hosts.forwarder
        hosts.forwarder.kill()
        hosts.forwarder.wait()
        with pytest.raises(LabError, match="has failed"):
            hosts.check()
        with pytest.raises(LabError, match="has failed"):
            hosts.told()


def piece(data: bytes, segment: int) -> bytes:
    """A part of a TCP stream as the kernel hands it over: 12 bytes of options, PSH, FIN and CWR set."""
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 52 + len(data), 7, 0x4000, 64, 6, 0) + bytes([198, 18, 0, 1, 198, 18, 0, 2])
    tcp = struct.pack("!HHIIBBHHH", 5000, 80, 2**32 - 1000, 9, 8 << 4, 0x80 | 0x10 | 0x08 | 0x01, 500, 0, 0) + bytes(12)
    return struct.pack("=BBHHHH", 1, 1, 52, segment, 20, 16) + ip + tcp + data


@given(st.binary(min_size=1, max_size=400), st.integers(1, 50), st.data())
def test_what_is_left_of_a_piece_is_what_was_not_lost(data: bytes, segment: int, draw: st.DataObject) -> None:
    whole = piece(data, segment)
    count = packets.segments(whole)
    assert count == -(-len(data) // segment) and packets.size(whole, count) == len(data) + 52 * count
    assert packets.destination(whole) == 2
    lost = draw.draw(st.sets(st.integers(0, count - 1)))
    kept = {n: data[n * segment : (n + 1) * segment] for n in range(count) if n not in lost}
    found = {}
    for one in packets.without(whole, lost):
        ip, tcp, rest = one[10:30], one[30:62], one[62:]
        assert int.from_bytes(ip[2:4], "big") == len(one) - 10
        assert count == 1 or packets._sum(ip) == 0xFFFF
        start = ((int.from_bytes(tcp[4:8], "big") + 1000) % 2**32) // segment
        number = packets.segments(one)
        for n in range(number):
            found[start + n] = rest[n * segment : (n + 1) * segment]
        assert bool(tcp[13] & 0x09) == (start + number == count)
        assert bool(tcp[13] & 0x80) == (start == 0)
    assert found == kept
