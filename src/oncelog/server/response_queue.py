"""The responses of one connection, in the order of their requests, until the client has accepted them.

Kafka's clients match responses to requests by their order. Therefore no response may overtake an earlier one,
not even the response of a long poll. See test_deferred_fetch_and_produce_of_one_connection_answer_in_order.

A response that is not ready has a slot. Later responses wait in slots, too. The small responses of one round
(requests that are handled together) are joined into one write.

A large response to a TLS client is written in parts of PACED_BYTES, each as soon as the transport has room. A
TLS transport hands all encrypted bytes to the socket's transport below it, and does not count them as
buffered. If a large response were written in one call, its unsent bytes would count against no memory limit,
and the next response would not wait for them. See
test_unread_responses_over_tls_are_bounded_together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from oncelog.broker.metrics import Metrics
from oncelog.broker.purgatory import PendingResponse
from oncelog.wire.frames import LARGE_BYTES
from oncelog.wire.primitives import Buffer

PACED_BYTES = 65_536
"""Largest write of a paced connection in bytes.

Its transport pauses the writer when this many bytes are unsent.
"""

Payload = bytes | list[Buffer]
"""A response frame; if it is large, the list of its parts."""


class ResponseSlot:
    """The place of one response in the order of its connection.

    `pending`: the response, if it was not ready when the slot was reserved; otherwise None.
    """

    __slots__ = ("is_abandoned", "is_done", "payload", "pending")

    def __init__(self, pending: PendingResponse | None) -> None:
        self.pending = pending
        self.is_done = False
        self.payload: Payload | None = None
        self.is_abandoned = False
        """True if the client is gone, but its request still runs.

        The response will be discarded. The requests after this one are carried out, too.
        """

    @property
    def blocks_pipeline(self) -> bool:
        """True while the requests after this one must not be started."""
        return not self.is_done and self.pending is not None and self.pending.blocks_pipeline


class ResponseQueue:
    """The responses of one connection. `on_large` is called after each write of a large response."""

    def __init__(self, metrics: Metrics, on_large: Callable[[], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_paced = False
        """True if large responses are written in parts, because the connection uses TLS."""
        self.is_write_paused = False
        """True from the transport's `pause_writing` to its `resume_writing`."""
        self.slots: deque[ResponseSlot] = deque()
        """Slots of the responses that are not ready, and of all responses after the first of them."""
        self.blocking_count = 0
        """Number of reasons not to start another request, such as a fetch that waits for records."""
        self.slot_bytes = 0
        """Bytes of responses that are ready, but wait behind a response that is not ready."""
        self.batched_bytes = 0
        """Bytes of this round's small responses. `flush` writes them."""
        self.round_bytes = 0
        """Bytes of responses since the connection set this to 0, at the start of a round."""
        self.unsent_bytes = 0
        """Bytes of paced responses that are not given to the transport yet."""
        self.has_dropped = False
        """True once a response could not be sent, because the transport had ended or was closing."""
        self.written_bytes = 0
        """Bytes given to the transport since the connection was opened, plus `unsent_bytes`."""
        self._metrics, self.on_large = metrics, on_large
        self._unsent: deque[memoryview] = deque()
        self._batched: list[bytes] = []
        self._large: deque[tuple[int, int]] = deque()
        """(start, end) of each large response that is not fully flushed, as values of `written_bytes`."""

    def block(self) -> None:
        """Start no further request, because the connection will close after the next response."""
        self.blocking_count += 1

    def reserve(self, pending: PendingResponse | None) -> ResponseSlot:
        """Append a slot after all earlier responses, and return it."""
        slot = ResponseSlot(pending)
        self.slots.append(slot)
        self.blocking_count += slot.blocks_pipeline
        return slot

    def complete(self, slot: ResponseSlot, payload: Payload | None) -> None:
        """Fill a slot, and send each response that is now first in order.

        If `payload` is None, the request gets no response.
        """
        self.blocking_count -= slot.blocks_pipeline
        payload = None if slot.is_abandoned else payload
        slot.payload, slot.is_done = payload, True
        self.slot_bytes += _size_of(payload)
        while self.slots and self.slots[0].is_done:
            first = self.slots.popleft().payload
            self.slot_bytes -= _size_of(first)
            self.send(first)

    def send(self, payload: Payload | None) -> None:
        """Send the response that is first in order. If `payload` is None, there is none to send.

        A small response is only added to the batch that the next `flush` sends.
        """
        if payload is None:
            return
        if self.transport is None:
            self.has_dropped = True
            return
        self.round_bytes += _size_of(payload)
        if isinstance(payload, bytes) and len(payload) < LARGE_BYTES:
            self._batched.append(payload)
            self.batched_bytes += len(payload)
            return
        self.flush()
        size_bytes = _size_of(payload)
        self._large.append((self.written_bytes, self.written_bytes + size_bytes))
        self.written_bytes += size_bytes
        self._metrics.bytes_sent += size_bytes
        parts: list[Buffer] = [payload] if isinstance(payload, bytes) else payload
        if self.is_paced:
            self._append_unsent(parts)
            self.write_unsent()
        else:
            self.transport.writelines(parts)
        # After a failed write, the transport discards further responses without pausing the writer until it
        # calls connection_lost. Without this check, the broker would read the data of the round's remaining
        # fetches for nothing. See
        # test_a_failed_response_drops_the_requests_behind_it_when_the_client_is_gone.
        self.has_dropped = self.transport.is_closing()
        self.on_large()

    def flush(self) -> None:
        """Give this round's small responses to the transport, in one write."""
        if not self._batched or self.transport is None:
            return
        data = self._batched[0] if len(self._batched) == 1 else b"".join(self._batched)
        self._batched.clear()
        self.written_bytes += self.batched_bytes
        self._metrics.bytes_sent += self.batched_bytes
        self.batched_bytes = 0
        if self.unsent_bytes:
            self._append_unsent([data])
        else:
            self.transport.write(data)

    def _append_unsent(self, parts: list[Buffer]) -> None:
        self._unsent.extend(map(memoryview, parts))
        self.unsent_bytes += _size_of(parts)

    def write_unsent(self) -> None:
        """Give the transport unsent bytes until it pauses the writer."""
        transport = self.transport
        while self._unsent and transport is not None and not (self.is_write_paused or transport.is_closing()):
            first = self._unsent.popleft()
            part, rest = first[:PACED_BYTES], first[PACED_BYTES:]
            if rest:
                self._unsent.appendleft(rest)
            self.unsent_bytes -= len(part)
            transport.write(part)

    def flushed_bytes(self) -> int:
        """Return how many of the written bytes the operating system has accepted.

        Over TLS, up to about 2 * PACED_BYTES of them may still be in the socket's transport.
        """
        buffered_bytes = self.transport.get_write_buffer_size() if self.transport else 0
        return self.written_bytes - self.unsent_bytes - buffered_bytes

    def held_bytes(self, flushed_bytes: int) -> int:
        """Return the memory of the responses in bytes. `flushed_bytes`: the result of `self.flushed_bytes()`.

        A large response counts with all of its bytes until its last byte is flushed.
        """
        while self._large and self._large[0][1] <= flushed_bytes:
            self._large.popleft()
        first_bytes = min(self._large[0][0], flushed_bytes) if self._large else flushed_bytes
        return self.written_bytes - first_bytes + self.slot_bytes

    @property
    def request_bytes(self) -> int:
        """Memory in bytes of the request in the last slot until it is carried out; otherwise 0."""
        last = self.slots[-1] if self.slots else None
        return last.pending.request_bytes if last and last.pending and not last.is_done else 0

    @property
    def outlives_client(self) -> bool:
        """True while the last request must be carried out even if the client is gone.

        The request then expects no response (acks=0), or its slot is abandoned.
        """
        last = self.slots[-1] if self.slots else None
        if last is None or last.pending is None or last.is_done:
            return False
        return last.pending.outlives_client or last.is_abandoned

    @property
    def is_abandoned(self) -> bool:
        """True while the client is gone and its last request is still being carried out."""
        return bool(self.slots and self.slots[-1].is_abandoned)

    def abandon(self) -> None:
        """Keep the last request of a client that is gone, if it is a JoinGroup or SyncGroup.

        As in Kafka, the requests after it are then carried out, too.
        """
        last = self.slots[-1] if self.slots else None
        if last is not None and last.pending is not None and not last.is_done:
            last.is_abandoned = last.pending.runs_next_request

    def discard(self, *, but_last: bool = False) -> None:
        """Drop every response that is not written, and cancel the pending ones, because the connection has
        ended.

        `but_last`: keep the last response.
        """
        last = self.slots.pop() if but_last else None
        for slot in self.slots:
            if slot.pending is not None:
                slot.pending.cancel()
        self.slots.clear()
        if last is not None:
            self.slots.append(last)
        self._batched.clear()
        self._unsent.clear()
        self.batched_bytes = self.slot_bytes = self.unsent_bytes = 0


def _size_of(payload: Payload | None) -> int:
    if payload is None or isinstance(payload, bytes):
        return len(payload or b"")
    return sum(map(len, payload))
