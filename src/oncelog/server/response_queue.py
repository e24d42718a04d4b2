"""A connection's answers: in the order of their requests, and how much of them the client has not taken."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from oncelog.broker.metrics import Metrics
from oncelog.broker.purgatory import Deferred
from oncelog.wire.frames import LARGE_BYTES
from oncelog.wire.primitives import Buffer

Payload = bytes | list[Buffer]
"""A response frame, in pieces when it is large."""


class Slot:
    """The place of one answer in the connection's order."""

    __slots__ = ("deferred", "is_done", "is_passed_over", "payload")

    def __init__(self, deferred: Deferred | None) -> None:
        self.deferred = deferred
        self.is_done = False
        self.payload: Payload | None = None
        self.is_passed_over = False
        """True once the client is gone, and requests behind this one are carried out all the same."""

    @property
    def holds_later_requests(self) -> bool:
        return not self.is_done and self.deferred is not None and self.deferred.holds_later_requests


class Outbox:
    """`on_large` is called after a large answer was written: its weight is to be felt at once."""

    def __init__(self, metrics: Metrics, on_large: Callable[[], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.slots: deque[Slot] = deque()
        """Answers that are not there yet, and those behind them."""
        self.slotted_bytes = 0
        self.gathered_bytes = 0
        """Small answers of this round, which leave in one write."""
        self.has_dropped = False
        """True once an answer had no transport to leave by: its client is gone."""
        self.written_bytes = 0
        self._metrics, self._on_large = metrics, on_large
        self._gathered: list[bytes] = []
        self._large: deque[tuple[int, int]] = deque()
        """Where large answers begin and end, counted in `written_bytes`."""

    def reserve(self, deferred: Deferred | None) -> Slot:
        """A place behind all answers so far."""
        slot = Slot(deferred)
        self.slots.append(slot)
        return slot

    def fill(self, slot: Slot, payload: Payload | None) -> None:
        """The answer (None: there is none) of a reserved place; what is then in order leaves."""
        payload = None if slot.is_passed_over else payload
        slot.payload, slot.is_done = payload, True
        self.slotted_bytes += _size_of(payload)
        while self.slots and self.slots[0].is_done:
            first = self.slots.popleft().payload
            self.slotted_bytes -= _size_of(first)
            self.put(first)

    def put(self, payload: Payload | None) -> None:
        """An answer that is next in order."""
        if payload is None:
            return
        if self.transport is None:
            self.has_dropped = True
            return
        if isinstance(payload, bytes) and len(payload) < LARGE_BYTES:
            self._gathered.append(payload)
            self.gathered_bytes += len(payload)
            return
        self.flush()
        size_bytes = _size_of(payload)
        self._large.append((self.written_bytes, self.written_bytes + size_bytes))
        self.written_bytes += size_bytes
        self._metrics.bytes_sent += size_bytes
        self.transport.writelines([payload] if isinstance(payload, bytes) else payload)
        self._on_large()

    def flush(self) -> None:
        """Write what was gathered."""
        if not self._gathered or self.transport is None:
            return
        data = self._gathered[0] if len(self._gathered) == 1 else b"".join(self._gathered)
        self._gathered.clear()
        self.written_bytes += self.gathered_bytes
        self._metrics.bytes_sent += self.gathered_bytes
        self.gathered_bytes = 0
        self.transport.write(data)

    def taken_bytes(self) -> int:
        """Of what was written, so much has left."""
        return self.written_bytes - (self.transport.get_write_buffer_size() if self.transport else 0)

    def held_bytes(self, taken_bytes: int) -> int:
        """What answers take of memory: of a large one all is there until its last byte has left."""
        while self._large and self._large[0][1] <= taken_bytes:
            self._large.popleft()
        first_bytes = min(self._large[0][0], taken_bytes) if self._large else taken_bytes
        return self.written_bytes - first_bytes + self.slotted_bytes

    @property
    def request_bytes(self) -> int:
        """What the request that holds later ones keeps until it is carried out. It is the last one begun."""
        last = self.slots[-1] if self.slots else None
        return last.deferred.request_bytes if last and last.deferred and not last.is_done else 0

    @property
    def outlives_client(self) -> bool:
        """True while a request that expects no answer is carried out, or one that is passed over."""
        last = self.slots[-1] if self.slots else None
        if last is None or last.deferred is None or last.is_done:
            return False
        return last.deferred.outlives_client or last.is_passed_over

    @property
    def is_passed_over(self) -> bool:
        """True while requests of a client that is gone wait for the answer of the one before them."""
        return bool(self.slots and self.slots[-1].is_passed_over)

    def pass_over(self) -> None:
        """Let requests that stand behind a JoinGroup or SyncGroup outlive their client."""
        last = self.slots[-1] if self.slots else None
        if last is not None and last.deferred is not None and not last.is_done:
            last.is_passed_over = last.deferred.keeps_later_requests

    def discard(self, *, but_last: bool = False) -> None:
        """Drop what is not written, for which nobody waits: the connection is over."""
        last = self.slots.pop() if but_last else None
        for slot in self.slots:
            if slot.deferred is not None:
                slot.deferred.cancel()
        self.slots.clear()
        if last is not None:
            self.slots.append(last)
        self._gathered.clear()
        self.gathered_bytes = self.slotted_bytes = 0


def _size_of(payload: Payload | None) -> int:
    if payload is None or isinstance(payload, bytes):
        return len(payload or b"")
    return sum(map(len, payload))
