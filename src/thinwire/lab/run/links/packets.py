"""Packets as a TUN device hands them over: ten bytes that say how to go on, then IP.

The kernel hands over up to 64 KiB of a TCP stream as one piece and leaves it to the device to cut it up ("GSO"),
which is what makes a forwarder in Python fast enough. On a real link there would be a packet for every `gso_size`
bytes, each with headers of its own: that is what is counted, and what can be lost.
"""

import struct
from collections.abc import Collection

ABOUT = 10  # bytes of the kernel's own header, virtio_net_hdr
_ABOUT = struct.Struct("=BBHHHH")  # flags, kind, length of headers, size of a segment, where a checksum goes (2)
_CHECKSUM_MISSING, _SINGLE, _TCP4 = 1, 0, 1
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80
_TCP, _TCP_CHECKSUM = 6, 16


def destination(packet: bytes) -> int | None:
    """The last byte of the IPv4 address a packet goes to; None for anything that is not passed on."""
    return packet[ABOUT + 19] if len(packet) >= ABOUT + 20 and packet[ABOUT] >> 4 == 4 else None


def segments(packet: bytes) -> int:
    """How many packets there would be on a link."""
    size = int.from_bytes(packet[4:6], "little")
    return -(-(len(packet) - ABOUT - _headers(packet)) // size) if packet[1] and size else 1


def size(packet: bytes, count: int) -> int:
    """Bytes on a link, when it goes as `count` packets: each has headers."""
    return len(packet) - ABOUT + ((count - 1) * _headers(packet) if count > 1 else 0)


def without(packet: bytes, lost: Collection[int]) -> list[bytes]:
    """What is left of a piece when some of its segments are lost: every unbroken run of the others is one piece."""
    count = segments(packet)
    if count == 1:
        return [] if lost else [packet]
    left, start = [], 0
    for place in [*sorted(lost), count]:
        if place > start:
            left.append(_run(packet, start, place, count))
        start = place + 1
    return left


def _headers(packet: bytes) -> int:
    ip = 4 * (packet[ABOUT] & 15)
    return ip + 4 * (packet[ABOUT + ip + 12] >> 4)


def _run(packet: bytes, start: int, end: int, count: int) -> bytes:
    """Segments `start` to `end` as a piece of their own, with headers that fit."""
    segment = int.from_bytes(packet[4:6], "little")
    length = _headers(packet)
    data = packet[ABOUT + length :][start * segment : end * segment]
    head = bytearray(packet[ABOUT : ABOUT + length])
    ip = 4 * (head[0] & 15)
    struct.pack_into("!H", head, 2, length + len(data))
    struct.pack_into("!H", head, 4, (int.from_bytes(head[4:6], "big") + start) & 0xFFFF)
    struct.pack_into("!H", head, 10, 0)
    struct.pack_into("!H", head, 10, 0xFFFF ^ _sum(bytes(head[:ip])))
    struct.pack_into("!I", head, ip + 4, (int.from_bytes(head[ip + 4 : ip + 8], "big") + start * segment) & 0xFFFFFFFF)
    if end < count:
        head[ip + 13] &= ~(_FIN | _PSH) & 0xFF  # they belong to the last one
    if start > 0:
        head[ip + 13] &= ~_CWR & 0xFF  # and this to the first
    pseudo = bytes(head[12:20]) + struct.pack("!HH", _TCP, length - ip + len(data))
    struct.pack_into("!H", head, ip + _TCP_CHECKSUM, _sum(pseudo))  # the kernel sums up the rest
    kind, of = (_TCP4, segment) if len(data) > segment else (_SINGLE, 0)
    return _ABOUT.pack(_CHECKSUM_MISSING, kind, length, of, ip, _TCP_CHECKSUM) + bytes(head) + data


def _sum(words: bytes) -> int:
    """The internet's sum of 16-bit words."""
    total = sum(struct.unpack(f"!{len(words) // 2}H", words))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
