"""One client's connection to the broker: frames in, answers out in their order, bounds kept.

A request is begun as soon as nothing before it on the connection holds it back (a waiting fetch
does, an append that waits for the disk does not); the rest queue up as bytes. Reading stops while
too many requests or bytes are pending in either direction, and goes on below that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from oncelog.broker.apis.produce_direct import answer as answer_produce
from oncelog.broker.authorizer import Access
from oncelog.broker.door import Door, Farewell
from oncelog.broker.node import Request
from oncelog.broker.waiting import Deferred, Disconnect
from oncelog.edge.event_log import log_event
from oncelog.errors import ConfigError, OncelogError, PeerError
from oncelog.rules.authorization import ANONYMOUS
from oncelog.rules.door import SASL_AUTHENTICATE, SASL_HANDSHAKE
from oncelog.rules.principal import distinguished_name
from oncelog.wire.frames import (
    FrameReader,
    RequestHeader,
    decode_request_header,
    encode_large_response,
    encode_response,
)
from oncelog.wire.messages import FetchResponse
from oncelog.wire.primitives import Buffer

if TYPE_CHECKING:
    from oncelog.edge.acceptor import Acceptor
    from oncelog.edge.server import Server


LARGE_REST_BYTES = 65_536
"""From this on the rest of a frame is received in its own place; less goes through the shared buffer."""


_Payload = bytes | list[Buffer]
"""A response frame, in pieces when it is large."""


class _Slot:
    """The place of one answer in the connection's order."""

    __slots__ = ("deferred", "is_done", "payload")

    def __init__(self, deferred: Deferred | None) -> None:
        self.deferred = deferred
        self.is_done = False
        self.payload: _Payload | None = None

    @property
    def holds_later_requests(self) -> bool:
        return not self.is_done and self.deferred is not None and self.deferred.holds_later_requests


class Connection(asyncio.BufferedProtocol):
    """Server side of one TCP connection. Bytes arrive in the server's one shared buffer."""

    def __init__(self, server: Server, acceptor: Acceptor, connection_id: int) -> None:
        self.server, self.node, self.connection_id = server, server.node, connection_id
        self.acceptor = acceptor
        self.transport: asyncio.Transport | None = None
        self.peer = self.client_host = ""
        self.active_ms = self.opened_ms = server.clock.now_ms()
        self.is_closing = False
        self.door = Door(self.node, acceptor.listener, needs_sasl=True)
        self._is_plain = False
        self._access: Access | None = None
        self._reader = FrameReader(server.max_stranger_bytes)
        self._room: memoryview | None = None
        self._slots: deque[_Slot] = deque()
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._out: list[bytes] = []
        self._holds = 0
        self._is_write_paused = self._is_read_paused = False
        self._is_beginning = False

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if name else "unknown"
        self.client_host = f"/{name[0]}" if name else ""
        self.transport.set_write_buffer_limits(high=self.server.max_pending_bytes)
        self.server.opened(self)
        try:
            principal = self._certified()
        except ConfigError as error:
            self.close(str(error), at_once=True)
            return
        host = self.client_host.removeprefix("/")
        listener, needs_sasl = self.acceptor.listener, self.acceptor.needs_sasl
        self.door = Door(self.node, listener, host, needs_sasl=needs_sasl, principal=principal)
        self._look_at_door()

    def _certified(self) -> str:
        """Whom the client's certificate names, where it has shown one."""
        certificate = self.transport.get_extra_info("peercert") if self.transport is not None else None
        if not certificate:
            return ANONYMOUS
        return f"User:{self.acceptor.name_of(distinguished_name(certificate['subject']))}"

    def _look_at_door(self) -> None:
        """What follows from its state for the next requests."""
        self._is_plain = self.door.is_plain
        if self.door.is_open:
            self._reader.max_frame_bytes = self.server.max_request_bytes
            self._access = None if self.node.authorizer is None else self.door.access

    def get_buffer(self, sizehint: int) -> memoryview:
        self._room = self._reader.room(LARGE_REST_BYTES)
        return self.server.receive_view if self._room is None else self._room

    def buffer_updated(self, size_bytes: int) -> None:
        if self.is_closing:
            return
        now_ms = self.active_ms = self.server.clock.now_ms()
        self.node.metrics.bytes_received += size_bytes
        started = perf_counter()
        try:
            frames = self._frames(size_bytes)
        except PeerError as error:
            self.close(f"{error} (see socket.request.max.bytes)")
            return
        for frame in frames:
            if self._holds or self._queue or self._is_write_paused:
                # The shared buffer is overwritten by the next read, so what waits is copied.
                self._queue.append(memoryview(bytearray(frame)))
                self._queued_bytes += len(frame)
            else:
                self._begin(frame, now_ms, started)
        self._write_out()
        self._pace_reading()
        self.server.after_round(now_ms)

    def _frames(self, size_bytes: int) -> Sequence[memoryview]:
        if self._room is None:
            return self._reader.feed(self.server.receive_view[:size_bytes])
        self._room = None
        frame = self._reader.filled(size_bytes)
        return () if frame is None else (frame,)

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self.active_ms = self.server.clock.now_ms()
        self._begin_queued()
        self.server.after_round(self.active_ms)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closing = True
        for slot in self._slots:
            if slot.deferred is not None:
                slot.deferred.cancel()
        self._slots.clear()
        self._queue.clear()
        self._queued_bytes = 0
        self.server.lost(self)

    # --- requests

    def _begin(self, frame: memoryview, now_ms: int, started: float) -> None:
        """Carry a request out, received at `now_ms` and `started` (perf_counter)."""
        if self.is_closing:
            return
        try:
            if not self._is_plain:
                reason = self.door.pass_through(int.from_bytes(frame[:2]), now_ms)
                if reason is not None:
                    self.close(reason)
                    return
            payload = None if self._slots else answer_produce(self.node, frame, now_ms, self._access)
            if payload is None:
                self._begin_any(frame, now_ms, started)
            else:
                self._out.append(payload)
                self.node.metrics.observe("Produce", perf_counter() - started)
        except PeerError as error:
            self.close(f"a request that cannot be read: {error}")
        except OncelogError as error:
            self.close(f"a request that cannot be answered: {error}")
        except Exception as error:
            # A bug of ours costs this client its connection, never the others their broker.
            log_event("error", "request failed", peer=self.peer, error=repr(error), exc_info=error)
            self.close(f"an internal error: {error!r}")

    def _begin_any(self, frame: memoryview, now_ms: int, started: float) -> None:
        header = decode_request_header(frame)
        answer: Any = self.node.refuse(header)
        if answer is not None:
            self._take_answer(header._replace(api_version=0), answer, started)
            return
        api = self.node.offered[header.api_key]
        message = api.request.decode(header.api_version, frame, header.body_position)
        request = Request(self.connection_id, header, message, self.client_host, self.door)
        answer = self.node.handle(request, now_ms)
        if header.api_key in (SASL_HANDSHAKE, SASL_AUTHENTICATE):
            self._look_at_door()
        self._take_answer(header, answer, started)

    def _take_answer(self, header: RequestHeader, answer: Any, started: float) -> None:
        if isinstance(answer, Farewell):
            self._holds += 1  # nothing after it is begun
            delay_s = answer.delay_ms / 1000
            asyncio.get_running_loop().call_later(delay_s, self._part, header, answer, started)
        elif isinstance(answer, Deferred):
            slot = _Slot(answer)
            self._slots.append(slot)
            self._holds += answer.holds_later_requests
            answer.listen(lambda late: self._late(slot, header, late, started))
        elif self._slots:
            slot = _Slot(None)
            self._slots.append(slot)
            self._fill(slot, header, answer, started)
        else:
            self._put(self._encode(header, answer, started))

    def _part(self, header: RequestHeader, farewell: Farewell, started: float) -> None:
        if not self.is_closing:
            if not self._slots:
                self._put(self._encode(header, farewell.answer, started))
            self.close(farewell.reason)

    def _late(self, slot: _Slot, header: RequestHeader, answer: Any, started: float) -> None:
        self._holds -= slot.holds_later_requests
        try:
            self._fill(slot, header, answer, started)
        except Exception as error:
            log_event("error", "late answer failed", peer=self.peer, error=repr(error), exc_info=error)
            self.close(f"an internal error: {error!r}")
            return
        self._begin_queued()

    def _fill(self, slot: _Slot, header: RequestHeader, answer: Any, started: float) -> None:
        slot.payload = self._encode(header, answer, started)
        slot.is_done = True
        while self._slots and self._slots[0].is_done:
            self._put(self._slots.popleft().payload)

    def _put(self, payload: _Payload | None) -> None:
        """Small answers of a round leave in one write; a large one at once, so that its weight is felt."""
        if isinstance(payload, bytes):
            self._out.append(payload)
        elif payload is not None and self.transport is not None:
            self._write_out()
            self.node.metrics.bytes_sent += sum(map(len, payload))
            self.transport.writelines(payload)

    def _encode(self, header: RequestHeader, answer: Any, started: float) -> _Payload | None:
        if isinstance(answer, Disconnect):
            self.close(answer.reason)
            return None
        payload: _Payload | None = None
        if isinstance(answer, FetchResponse):
            pieces = encode_large_response(answer, header.api_version, header.correlation_id)
            payload = pieces if len(pieces) > 1 else bytes(pieces[0])
        elif answer is not None:
            payload = encode_response(answer, header.api_version, header.correlation_id)
        self.node.metrics.observe(self.node.offered[header.api_key].name, perf_counter() - started)
        return payload

    def _begin_queued(self) -> None:
        """Go on with requests that waited. Not re-entered, so that many of them need no deep stack."""
        if self._is_beginning:
            return
        self._is_beginning = True
        try:
            while self._queue and not (self._holds or self._is_write_paused or self.is_closing):
                frame = self._queue.popleft()
                self._queued_bytes -= len(frame)
                self._begin(frame, self.server.clock.now_ms(), perf_counter())
                self._write_out()
            self._write_out()
        finally:
            self._is_beginning = False
        self._pace_reading()

    # --- bytes out, bounds, the end

    def _write_out(self) -> None:
        if not self._out or self.transport is None:
            return
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        self.node.metrics.bytes_sent += len(data)
        self.transport.write(data)

    def _pace_reading(self) -> None:
        if self.transport is None or self.is_closing:
            return
        is_full = (
            self._is_write_paused
            or len(self._queue) + len(self._slots) >= self.server.max_pending_requests
            or self._queued_bytes >= self.server.max_pending_bytes
        )
        if is_full != self._is_read_paused:
            self._is_read_paused = is_full
            if is_full:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is owed that is not the client's fault."""
        return bool(self._slots)

    def close(self, reason: str, *, at_once: bool = False) -> None:
        """End the connection for cause; what was answered before still leaves unless `at_once`."""
        if self.is_closing and not at_once:
            return
        self.is_closing = True
        self.node.metrics.connections_closed_for_cause += 1
        log_event("warning", "connection closed", peer=self.peer, reason=reason)
        if self.transport is not None:
            self._write_out()
            self.transport.abort() if at_once else self.transport.close()
