"""How workers talk: every collective once, above the transports."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import overload

import torch
from torch import Tensor

from thinwire.comm.codec import Codec, Floats, as_bytes
from thinwire.comm.ledger import Ledger
from thinwire.comm.link import Link
from thinwire.comm.rider import Rider
from thinwire.comm.transport import Transport

PIECE, PIECES = 1 << 18, 8  # a long mean goes in at most so many pieces of at least so many bytes


class PeerFailed(RuntimeError):
    """Another worker could not go on, or is gone; this one's step was taken back too."""


class Comm:
    """The collectives under the verbs of `exchange`.

    Here, and nowhere else, what is sent is put into fewer bits, entered on the ledger and timed.
    """

    def __init__(self, transport: Transport, carries: Codec | None = None, same_as: "Comm | None" = None):
        self.transport = transport
        self.rank, self.world = transport.rank, transport.world
        self.carries = carries  # what floating-point values are stored as while they travel; None: as they are
        self.ledger: Ledger = same_as.ledger if same_as else Ledger(self.world)
        self.rider: Rider = same_as.rider if same_as else Rider()

    @property
    def far(self) -> bool:
        """Whether trips cost so much that means are made directly, in the order of ranks: settled when workers join.

        The last bits of a mean depend on it, so a run that is to go on as it began sets it to what it was.
        """
        return self.transport.far

    @far.setter
    def far(self, far: bool) -> None:
        self.transport.far = far

    @property
    def link(self) -> Link | None:
        """What joins the workers, as they have measured and agreed; None where nothing was measured."""
        return self.transport.link

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What values of `dtype` are stored as while they travel."""
        return self.carries.dtype if self.carries is not None and dtype.is_floating_point else dtype

    def value_bytes(self, n: int, dtype: torch.dtype) -> int:
        """How many bytes `n` values of `dtype` are while they travel."""
        if self.carries is not None and dtype.is_floating_point:
            return self.carries.nbytes(n)
        return n * dtype.itemsize

    # ── a few bytes that go with the next message ──────────────────────────────────────────────────────────────

    def ride(self, head: Tensor, judge: Callable[[Tensor], None]) -> None:
        """Let `head` go with the next collective; `judge` hears the bytes of all workers' heads, [world, n].

        What it raises comes out of that collective, on every worker alike and before any result does. Where workers
        are near, or the collective does not bring everybody's message to everybody, the head goes before it.
        """
        self.rider.take(as_bytes(head), judge)

    def all_gather_later(self, x: Tensor) -> Callable[[], Tensor]:
        """`all_gather`, whose result is asked for later: far away `x` goes with the next message, near at once."""
        codec, heard = self._codec(x), list[Tensor]()
        if not self.far:
            heard.append(self._gathered("all_gather", _stored(x.reshape(-1), codec)))
        else:
            self.rider.take(_stored(x.reshape(-1), codec), heard.append)

        def result() -> Tensor:
            if not heard:
                self.settle()
            return _values(heard[0], x.numel(), x.dtype, codec).view(self.world, *x.shape)

        return result

    def all_mean_later(self, x: Tensor) -> Callable[[], Tensor]:
        """`all_mean`, with the same bits, whose result is asked for later: it may go with the next message."""
        size, link = self.value_bytes(x.numel(), x.dtype), self.link
        if not self.far or link is None or not link.rides(size, self.world):
            mean = self.all_mean(x)
            return lambda: mean
        codec, rows = self._codec(x), self.all_gather_later(x)
        return lambda: x.copy_(self._mean_of_rows(rows(), codec))

    def settle(self) -> None:
        """Send the head that still waits for a message, if there is one."""
        head = self.rider.head
        if head is not None:
            with self._entered("all_gather", head.numel()):
                heads = self.transport.all_gather(head) if head.numel() else head.new_empty(self.world, 0)
            self.rider.heard(heads)

    # ── when an exchange fails ─────────────────────────────────────────────────────────────────────────────────

    def abandon(self, reason: str) -> None:
        """This worker's exchange has failed: the others must not wait for it, and will hear the reason."""
        self.rider.waiting.clear()
        self.transport.abandon(reason)

    def renew(self) -> None:
        """Before the next exchange: meet again, if the last one was abandoned."""
        self.transport.renew()

    def explain(self, error: BaseException) -> BaseException:
        """The error of another worker, if that is what broke the exchange here; else `error` itself."""
        told = self.transport.blame(error)
        return error if told is None else PeerFailed(told)

    def close(self) -> None:
        """Talk no more."""
        self.transport.close()

    def _takes_head(self) -> Tensor | None:
        """The head that the next message has to take along."""
        if not self.far:
            self.settle()
        return self.rider.head

    @contextmanager
    def _entered(self, op: str, size: int, way: str | None = None, head: Tensor | None = None) -> Iterator[None]:
        riding = 0 if head is None else head.numel()
        if riding:
            self.ledger.enter_bytes("riding", riding)
        self.ledger.enter_bytes(op, size, way or self.transport.way(op, size))
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.ledger.seconds += seconds
        self.transport.took(op, size, riding, seconds)

    # ── the collectives ────────────────────────────────────────────────────────────────────────────────────────

    def all_mean(self, x: Tensor) -> Tensor:
        """Average `x` over the workers, in place; the same bits everywhere."""
        codec = self._codec(x)
        size = self.value_bytes(x.numel(), x.dtype)
        way = self.transport.way("all_mean", size)
        if isinstance(codec, Codec) and not isinstance(codec, Floats):
            way = "two phases"  # no network can add these up
        if way == "gather":
            return x.copy_(self._mean_of_all(x.reshape(-1), codec).view_as(x))
        if way == "two phases":
            return x.copy_(self._mean_by_owners(x.reshape(-1), codec).view_as(x))
        self.settle()
        raw = (codec.cast(x, self.world) if isinstance(codec, Floats) else x).contiguous()
        with self._entered("all_mean", size):
            self.transport.all_mean(raw)
        return x if raw is x else x.copy_(raw)

    def _mean_of_all(self, flat: Tensor, codec: Codec | None) -> Tensor:
        """Everything to everybody, and all add up alike: one trip."""
        rows = self._gathered("all_mean", _stored(flat, codec), "gather")
        return self._mean_of_rows(_values(rows, flat.numel(), flat.dtype, codec), codec)

    def _mean_of_rows(self, rows: Tensor, codec: Codec | None) -> Tensor:
        mean = in_turn(rows, self.world)
        return mean if codec is None else codec.rounded(mean)  # as owners would have sent it

    def _mean_by_owners(self, flat: Tensor, codec: Codec | None) -> Tensor:
        """Each part to its owner, and the owners' means to all: two trips, and the bytes of a ring.

        What is long goes in pieces. Numbers have the same bits however many: all are added up in the order of ranks.
        """
        numel, size = flat.numel(), self.value_bytes(flat.numel(), flat.dtype)
        count = self.world * max(1, min(PIECES, size // PIECE))
        part = -(-numel // count)
        if part * count > numel:
            flat = torch.cat([flat, flat.new_zeros(part * count - numel)])
        head = self._takes_head()
        cut = flat.view(count // self.world, self.world, part)
        pieces = [torch.stack([_stored(row, codec) for row in rows]) for rows in cut]
        if head is not None:
            pieces[0] = torch.cat([head.expand(self.world, -1), pieces[0]], 1)

        def owned(rows: Tensor) -> Tensor:
            if self.rider.head is not None:
                rows = self._without_heads(rows, self.rider.head.numel())
            return _stored(in_turn(_values(rows, part, flat.dtype, codec), self.world), codec)

        with self._entered("all_mean", size, "two phases", head):
            means = self.transport.two_phases(pieces, owned)
        return _values(torch.cat(means), part, flat.dtype, codec).reshape(-1)[:numel]

    def scatter_mean(self, x: Tensor) -> Tensor:
        """This worker's part, of `world` equal ones, of the mean of the flat vector `x`; each worker has another."""
        if x.numel() % self.world:
            raise ValueError(f"{x.numel()} entries cannot be cut into {self.world} equal parts: pad them with zeros")
        parts, codec = x.reshape(self.world, -1), self._codec(x)
        sent = torch.stack([_stored(part, codec) for part in parts])
        received = self._swapped("scatter_mean", sent)
        return in_turn(_values(received, parts.shape[1], x.dtype, codec), self.world)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every worker's `x`, all of one shape: [world, *x.shape]."""
        codec = self._codec(x)
        rows = self._gathered("all_gather", _stored(x.reshape(-1), codec))
        return _values(rows, x.numel(), x.dtype, codec).view(self.world, *x.shape)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite `x` with that of the worker `source`."""
        codec = self._codec(x)
        raw = _stored(x.reshape(-1), codec)
        if self.transport.way("broadcast", raw.numel()) != "direct":
            self.settle()  # in a tree not everybody hears everybody
        head = self._takes_head()
        with self._entered("broadcast", raw.numel(), head=head):
            if head is None:
                self.transport.broadcast(raw, source)
            else:
                heads = self.transport.broadcast_with(head, raw, source)
        if head is not None:
            self.rider.heard(heads)
        if raw.data_ptr() == x.data_ptr():
            return x
        return x.copy_(_values(raw, x.numel(), x.dtype, codec).view_as(x))

    @overload
    def all_to_all(self, parts: Tensor) -> Tensor: ...
    @overload
    def all_to_all(self, parts: list[Tensor]) -> list[Tensor]: ...
    def all_to_all(self, parts: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        """Send row i of [world, n] to worker i; what each worker sent here, [world, n].

        Or a list of flat parts of any lengths and one dtype; their sizes go before them, at the price of a trip.
        """
        if isinstance(parts, list):
            return self._uneven(parts)
        codec = self._codec(parts)
        sent = torch.stack([_stored(part, codec) for part in parts])
        received = self._swapped("all_to_all", sent)
        return _values(received, parts.shape[1], parts.dtype, codec)

    def _uneven(self, parts: list[Tensor]) -> list[Tensor]:
        codec, dtype = self._codec(parts[0]), parts[0].dtype
        counts = torch.tensor([[part.numel()] for part in parts], device=parts[0].device)
        coming = self.all_to_all(counts).flatten().tolist()
        sent = [_stored(part, codec) for part in parts]
        lengths = [self.value_bytes(n, dtype) for n in coming]
        with self._entered("all_to_all", sum(part.numel() for part in sent)):
            flat = self.transport.all_to_all_uneven(torch.cat(sent), [part.numel() for part in sent], lengths)
        return [_values(raw, n, dtype, codec) for raw, n in zip(flat.split(lengths), coming, strict=True)]

    def shift(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """Send `x` to one worker and receive a tensor like it from another; None stays silent."""
        self.settle()
        codec = self._codec(x)
        raw = _stored(x.reshape(-1), codec)
        if to is not None:
            self.ledger.enter("shift", raw)
        elif source is not None:  # who only receives sends nothing, and waits for the trip
            self.ledger.trips += 1
            self.ledger.entries.append(("shift", 0))
        start = time.perf_counter()
        received = self.transport.shift(raw, to, source)
        self.ledger.seconds += time.perf_counter() - start
        return None if received is None else _values(received, x.numel(), x.dtype, codec).view(x.shape)

    def _codec(self, x: Tensor) -> Codec | None:
        return self.carries if x.is_floating_point() else None

    def _gathered(self, op: str, sent: Tensor, way: str | None = None) -> Tensor:
        """[world, n] of everybody's n bytes, the head taken along."""
        head = self._takes_head()
        if head is not None:
            with self._entered(op, sent.numel(), way, head):
                rows = self.transport.all_gather(torch.cat([head, sent]))
            return self._without_heads(rows, head.numel())
        with self._entered(op, sent.numel(), way):
            return self.transport.all_gather(sent) if sent.numel() else sent.new_empty(self.world, 0)

    def _swapped(self, op: str, sent: Tensor) -> Tensor:
        """What came from each when row i of the bytes [world, n] went to worker i, the head taken along."""
        head = self._takes_head()
        with self._entered(op, sent.numel(), head=head):
            if head is None:
                return self.transport.all_to_all(sent)
            rows = self.transport.all_to_all(torch.cat([head.expand(self.world, -1), sent], 1))
        return self._without_heads(rows, head.numel())

    def _without_heads(self, rows: Tensor, size: int) -> Tensor:
        self.rider.heard(rows[:, :size].contiguous())
        return rows[:, size:].contiguous()


def _stored(flat: Tensor, codec: Codec | None) -> Tensor:
    return as_bytes(flat) if codec is None else codec.encode(flat)


def _values(raw: Tensor, n: int, dtype: torch.dtype, codec: Codec | None) -> Tensor:
    """Bytes [..., nbytes(n)] as values [..., n]."""
    if not n:
        return raw.new_empty(*raw.shape[:-1], 0, dtype=dtype)
    if codec is not None:
        return codec.decode(raw, n, dtype)
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()  # bytes may begin at any address
    return raw.view(dtype)


def in_turn(rows: Tensor, world: int) -> Tensor:
    """The mean over the workers of [world, n], added up in the order of ranks: the same bits wherever it is done."""
    total = rows[0] * (1 / world)  # before the sum, as DDP does, so that nothing overflows
    for row in rows[1:]:
        total.add_(row * (1 / world))
    return total


class CastComm(Comm):
    """The same workers, with floating-point values sent in fewer bits, or by any codec."""

    def __init__(self, comm: Comm, carries: torch.dtype | Codec):
        super().__init__(comm.transport, carries if isinstance(carries, Codec) else Floats(carries), same_as=comm)
