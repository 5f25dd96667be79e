"""The process between the workers: it takes packets from their TUN devices and hands them on when it is time.

    worker i [eth0] -> uplink of i -> on its way -> queue and downlink of j -> [eth0] worker j

A packet leaves when the uplink has carried it, is on its way for half a round trip, waits at the other end until the
downlink is free, and arrives when that has carried it. What finds the queue there full is dropped, as a router does;
a sender is held back by its own device, as a network card does. Packets between two workers stay in order.

It reads what to do from its standard input, one line of JSON, and ends when that is closed: it cannot outlive its
launcher. Nothing here may load torch.
"""

import contextlib
import ctypes
import heapq
import json
import os
import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from thinwire.lab.run.links.packets import destination, segments, size, without

AHEAD = 0.005  # seconds of packets that an uplink takes from its device at most; the others wait inside the device
QUEUE, QUEUE_BYTES = 0.05, 128 * 1024  # what waits at a downlink: seconds (or a round trip, if longer), and bytes
WINDOW = 0.02  # seconds for which jitter stays as it was drawn
BATCH = 32  # packets taken from one device before the others have their turn
LARGEST = 65_536 + 64
TRIAL = 0.3  # seconds in which the forwarder finds out how fast it is
CLONE_NEWNET = 0x40000000

Phase = dict[str, Any]  # the fields of spelling.Change, none of them open


class Site:
    """One worker's end: its device, its link as it is now, and what waits for it."""

    def __init__(self, device: int, timeline: Sequence[Phase]) -> None:
        self.device = device
        self.timeline = list(timeline)
        self.sending = self.receiving = 0.0  # until when the two ways are taken
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.sway, self.sway_until = 0.0, 0.0
        self.sent = self.received = 0
        self.become(self.timeline.pop(0))

    def become(self, phase: Phase) -> None:
        self.up, self.down = phase["up"] / 8, phase["down"] / 8  # bytes a second
        self.delay, self.jitter = phase["rtt"] / 2, phase["jitter"] / 2
        self.loss, self.works = phase["loss"], phase["works"]

    def swaying(self, now: float) -> float:
        """From -1 to 1: where in its jitter the link is."""
        if now >= self.sway_until:
            self.sway, self.sway_until = random.uniform(-1, 1), now + WINDOW
        return self.sway


class Forwarder:
    """Joins sites. Time begins with the first packet that is passed on."""

    def __init__(self, devices: Sequence[int], timelines: Sequence[Sequence[Phase]]) -> None:
        self.sites = [Site(device, timeline) for device, timeline in zip(devices, timelines)]
        self.by_device = {site.device: site for site in self.sites}
        self.on_the_way: list[tuple[float, int, float, Site, bytes]] = []  # a heap by time of arrival
        self.arrivals: dict[tuple[int, int], float] = {}
        self.began: float | None = None
        self.serial = self.passed = self.lost = self.overflowed = self.late = 0
        self.latest = 0.0

    def turn(self, patience: float, also: Sequence[int] = ()) -> list[int]:
        """Wait for something to do, but not for longer than `patience`; do it; those of `also` that can be read."""
        now = time.monotonic()
        self._change(now)
        self._deliver(now)
        free = [site.device for site in self.sites if site.sending - now < AHEAD]
        busy = [site.sending - AHEAD for site in self.sites if site.sending - now >= AHEAD]
        due = [*self.on_the_way[0][:1], *busy] if self.on_the_way else busy
        due += [site.waiting[0][0] for site in self.sites if site.waiting]
        wait = max(0.0, min([patience, *(at - now for at in due)]))
        ready, _, _ = select.select([*free, *also], [], [], wait)
        now = time.monotonic()
        for device in ready:
            if device in self.by_device:
                self._take(self.by_device[device], now)
        self._deliver(time.monotonic())
        return [one for one in ready if one not in self.by_device]

    def _take(self, site: Site, now: float) -> None:
        for _ in range(BATCH):
            try:
                packet = os.read(site.device, LARGEST)
            except BlockingIOError:
                return
            to = destination(packet)
            if to is None or not 1 <= to <= len(self.sites):
                continue  # no route leads out
            self._send(site, self.sites[to - 1], packet, now)
            if site.sending - now >= AHEAD:
                return

    def _send(self, site: Site, to: Site, packet: bytes, now: float) -> None:
        if self.began is None:
            self.began = now
        count = segments(packet)
        length = size(packet, count)
        start = max(site.sending, now)
        site.sending = start + length / site.up
        site.sent += length
        self.passed += count
        if not (site.works and to.works):
            self.lost += count
            return
        loss = max(site.loss, to.loss)
        pieces = [packet]
        if loss:
            lost = [place for place in range(count) if random.random() < loss]
            self.lost += len(lost)
            pieces = without(packet, lost) if lost else pieces
        delay = max(site.delay, to.delay) + max(site.jitter, to.jitter) * site.swaying(now)
        pair = (site.device, to.device)
        arrival = max(start + delay, self.arrivals.get(pair, 0.0))
        self.arrivals[pair] = arrival
        whole = arrival + length / site.up
        for piece in pieces:
            self.serial += 1
            heapq.heappush(self.on_the_way, (arrival, self.serial, whole, to, piece))

    def _deliver(self, now: float) -> None:
        while self.on_the_way and self.on_the_way[0][0] <= now:
            arrival, _, whole, site, packet = heapq.heappop(self.on_the_way)
            count = segments(packet)
            length = size(packet, count)
            if not site.works:
                self.lost += count
            elif site.receiving - arrival > QUEUE_BYTES / site.down + max(QUEUE, 2 * site.delay):
                self.overflowed += count
            else:
                site.receiving = max(site.receiving, arrival) + length / site.down
                due = max(site.receiving, whole)
                if site.waiting:
                    due = max(due, site.waiting[-1][0])
                site.waiting.append((due, packet))
                site.received += length
        for site in self.sites:
            while site.waiting and site.waiting[0][0] <= now:
                due, packet = site.waiting.popleft()
                self.latest = max(self.latest, now - due)
                self.late += now - due > 0.001
                with contextlib.suppress(OSError):  # a device that has gone down
                    os.write(site.device, packet)

    def _change(self, now: float) -> None:
        for site in self.sites:
            while self.began is not None and site.timeline and now - self.began >= site.timeline[0]["after"]:
                site.become(site.timeline.pop(0))

    def tell(self) -> dict[str, Any]:
        return {
            "sent": [site.sent for site in self.sites],
            "received": [site.received for site in self.sites],
            "packets": self.passed,
            "lost": self.lost,
            "overflowed": self.overflowed,
            "late": self.late,
            "latest": self.latest,
        }


def trial(devices: Sequence[int], hosts: Sequence[str], addresses: Sequence[str]) -> dict[str, float]:
    """How many bits and packets a second pass at full speed, between two workers, the work of both ends included."""
    free: Phase = {"up": 1e15, "down": 1e15, "rtt": 0.0, "jitter": 0.0, "loss": 0.0, "works": True}
    forwarder = Forwarder(devices, [[free]] * len(devices))
    listener, sender = (socket_in(host, socket.SOCK_STREAM) for host in hosts)
    listener.bind((addresses[0], 0))
    listener.listen(1)
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        sender.connect(listener.getsockname())
    while not forwarder.turn(1.0, [listener.fileno()]):
        pass
    receiver, _ = listener.accept()
    receiver.setblocking(False)
    began, before, data = time.monotonic(), forwarder.passed, memoryview(bytes(1 << 18))
    count = 0
    while time.monotonic() - began < TRIAL:
        with contextlib.suppress(BlockingIOError):
            sender.send(data)
        forwarder.turn(0.0)
        with contextlib.suppress(BlockingIOError):
            count += len(receiver.recv(1 << 18))
    took = time.monotonic() - began
    packets = (forwarder.passed - before) / took
    for end in (sender, receiver, listener):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # gone at once, without goodbyes
        end.close()
    quiet = time.monotonic() + 0.02
    while time.monotonic() < quiet:
        forwarder.turn(0.005)
    return {"rate": 8 * count / took, "packets": packets}


def socket_in(namespace: str, kind: int) -> socket.socket:
    """A socket that lives in another network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as here, open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"namespace {namespace} cannot be entered")
        try:
            return socket.socket(socket.AF_INET, kind)
        finally:
            libc.setns(here.fileno(), CLONE_NEWNET)


def come_first() -> None:
    """A packet that waits for a busy machine is late: ask to run before all others."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        return
    with contextlib.suppress(OSError):
        os.nice(-20)


def main() -> None:
    come_first()
    order = json.loads(sys.stdin.readline())
    devices = order["devices"]
    two = slice(0, 2)
    able = trial(devices[two], order["hosts"][two], order["addresses"][two]) if len(devices) > 1 else None
    forwarder = Forwarder(devices, order["timelines"])
    print(json.dumps(able), flush=True)
    commands = sys.stdin.fileno()
    while True:
        if forwarder.turn(1.0, [commands]):
            if not os.read(commands, 100):
                return
            print(json.dumps(forwarder.tell()), flush=True)


if __name__ == "__main__":
    main()
