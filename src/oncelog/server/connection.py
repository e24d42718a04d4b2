"""The server side of one TCP connection: decides when its requests are started and when it is closed.

A request is started as soon as nothing blocks the pipeline. Some requests block it until their response is
ready, such as a fetch that waits for records. An append that waits for the disk does not. The pipeline is
also blocked while the client does not read its responses, too many responses are pending, or a quota
throttles the client.

Bytes after a request that blocks the pipeline stay in the RequestReader's backlog, not yet split into frames.
Reading pauses while the backlog is too large.

Requests are started in rounds. A round ends when the total cost of one connection's requests, mostly 1 each,
reaches MAX_ROUND_REQUESTS, or their responses reach MAX_ROUND_RESPONSE_BYTES. After a round, the event loop
handles the other connections.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol, cast

from oncelog.broker.handlers import join_group, produce, sync_group
from oncelog.broker.state import BrokerState
from oncelog.errors import ConfigError, OncelogError, PeerError
from oncelog.rules.limits.connections import CloseReason, ConnectionActivity, MemoryBudget, Phase
from oncelog.runtime.clock import Clock
from oncelog.runtime.event_log import log_event
from oncelog.server.acceptor import Acceptor
from oncelog.server.connection_auth import ConnectionAuth
from oncelog.server.memory_account import MemoryAccount
from oncelog.server.request_handler import MAX_ROUND_REQUESTS, RequestHandler
from oncelog.server.request_reader import NO_BYTES, RequestReader
from oncelog.server.response_queue import PACED_BYTES, ResponseQueue
from oncelog.server.throttle import Throttle

MAX_ROUND_RESPONSE_BYTES = 65_536
"""Number of response bytes at which a round ends.

The round also ends when its cost reaches MAX_ROUND_REQUESTS.
"""
LARGE_REQUEST_BYTES = 4096
"""Size in bytes above which a request must first get one of the slots of `broker.stepwise`."""
_UNDIVIDED = frozenset({produce.KEY, join_group.KEY, sync_group.KEY})
"""APIs whose requests are large only because they carry data. Such a request needs no slot."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The settings that limit each connection of a server.

    max_unauthenticated_bytes   sasl.server.max.receive.size: the largest request before authentication
    max_request_bytes           socket.request.max.bytes: the largest request after authentication
    max_pending_bytes           oncelog.connection.max.pending.bytes: the limit of the backlog, and the limit
                                of the waiting responses
    max_pending_requests        oncelog.connection.max.pending.requests: requests without a response
    """

    max_unauthenticated_bytes: int
    max_request_bytes: int
    max_pending_bytes: int
    max_pending_requests: int


class ConnectionOwner(Protocol):
    """The methods of the server that its connections call."""

    @property
    def node(self) -> BrokerState: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def connection_limits(self) -> ConnectionLimits: ...

    @property
    def receive_view(self) -> memoryview:
        """The buffer into which asyncio receives the bytes of all connections."""
        ...

    def opened(self, connection: Connection, descriptor: int | None) -> bool:
        """Register a new connection. If the server has too many, close the connection and return False."""
        ...

    def lost(self, connection: Connection) -> None:
        """Remove a connection that has ended. May be called twice for the same connection."""
        ...

    def note_end(self, peer: str, reason: str, bound: CloseReason | None) -> None:
        """Count and log a connection that the broker closes."""
        ...

    def evict(self, budget: MemoryBudget[Any], bound: CloseReason, now_ms: int) -> None:
        """Close the connections that send or receive their bytes slowest, until the rest fits the budget.

        `bound` is the limit that was exceeded; the log and the metrics name it.
        """
        ...

    def after_round(self, now_ms: int) -> None:
        """Finish a round of requests: complete fetches, start flushes and set the timer."""
        ...


class Connection(asyncio.BufferedProtocol):
    """The asyncio protocol of one client connection."""

    def __init__(self, server: ConnectionOwner, acceptor: Acceptor, connection_id: int) -> None:
        node, limits = server.node, server.connection_limits
        self._server, self._node, self._acceptor, self._limits = server, node, acceptor, limits
        self._clock = server.clock
        self._transport: asyncio.Transport | None = None
        self._handshake: asyncio.Task[None] | None = None
        self.peer = self.address = ""
        """The client's address: HOST:PORT in `peer`, the IP address alone in `address`."""
        self.active_ms = self.opened_ms = server.clock.now_ms()
        """Clock times in ms: bytes were last sent or received at `active_ms`, and the connection was accepted
        at `opened_ms`.
        """
        self.is_closing = False
        self.is_gone = False
        """True once the transport has ended. Requests that were received earlier may still be carried out."""
        self.auth = ConnectionAuth(node, acceptor.listener, self._on_authenticated)
        self.reader = RequestReader(server.receive_view, limits.max_unauthenticated_bytes)
        self._responses = ResponseQueue(node.metrics, self._note_large_response)
        self._throttle = Throttle(node.quotas, self.auth, self._on_mute)
        self.memory = MemoryAccount(self, node.request_memory, node.response_memory, server.evict)
        self._requests = RequestHandler(
            node,
            server.clock,
            connection_id,
            self.auth,
            self._throttle,
            self._responses,
            keep_frame=self.reader.keep_frame,
            close=self.close,
            on_late_response=self._on_late_response,
        )
        self._quotas = node.quotas
        self._is_read_paused = False
        self._is_processing_backlog = False
        self._is_turn_scheduled = False
        """True while a call that processes the backlog is scheduled on the event loop."""

    # --- asyncio's callbacks

    def admit(self, peer: Any, descriptor: int | None) -> bool:
        """Register the connection. Return False if the server rejects it.

        `peer`: the socket's address tuple. `descriptor`: the socket's file descriptor, or None if it is not
        known.
        """
        self.peer = f"{peer[0]}:{peer[1]}" if peer else "unknown"
        self.address = peer[0] if peer else ""
        return self._server.opened(self, descriptor)

    def prepare(self, handshake: asyncio.Task[None]) -> None:
        self._handshake = handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.is_closing:
            self._transport.abort()
        elif self._handshake is not None or self.admit(transport.get_extra_info("peername"), None):
            self._start(self._transport)

    def _start(self, transport: asyncio.Transport) -> None:
        self._responses.transport, self._responses.is_paced = transport, self._acceptor.uses_tls
        high_bytes = PACED_BYTES if self._acceptor.uses_tls else self._limits.max_pending_bytes
        transport.set_write_buffer_limits(high=high_bytes)
        if self._throttle.rejects(self.address, self.opened_ms, transport):
            return
        acceptor = self._acceptor
        try:
            principal = acceptor.principal_of(transport)
        except ConfigError as error:
            self.close(str(error), at_once=True)
            return
        self.auth.start(acceptor.listener, self.address, needs_sasl=acceptor.needs_sasl, principal=principal)

    def _on_authenticated(self) -> None:
        self.reader.frames.max_frame_bytes = self._limits.max_request_bytes

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.get_buffer()

    def buffer_updated(self, size_bytes: int) -> None:
        if self.is_closing:
            return
        now_ms = self.active_ms = self._clock.now_ms()
        self._node.metrics.bytes_received += size_bytes
        started = perf_counter()
        data = self.reader.receive(size_bytes)
        requests = self._requests
        requests.has_dispatched = False
        if data is not None:
            rest = self._start_requests(data, now_ms, started)
            if rest:
                self.reader.keep(rest)
        self._end_round(now_ms)
        # After a round of plain Produce requests there is nothing to do: they set no deadline and wait for no
        # flush.
        if requests.has_dispatched or self._node.has_visible_bytes:
            self._server.after_round(now_ms)

    def pause_writing(self) -> None:
        self._responses.is_write_paused = True
        self.note_responses(self._clock.now_ms())
        self._pace_reading()

    def resume_writing(self) -> None:
        self._responses.is_write_paused = False
        self._responses.write_unsent()
        self.note_responses(self._clock.now_ms())
        if self.is_closing:
            self._close_when_written()
        self._resume()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_gone = True
        if self.reader.has_backlog:
            self._responses.abandon()
        if self.is_closing or self._is_finished:
            self._finish()
            return
        # A producer with acks=0 may close the connection as soon as the operating system has accepted its
        # last request. Like Kafka, carry out the requests that were received. See
        # test_requests_without_a_response_are_handled_after_a_disconnect.
        self._responses.discard(but_last=self._responses.outlives_client)
        self._responses.transport = None
        self._responses.is_write_paused = False
        self._schedule_turn()

    @property
    def _is_finished(self) -> bool:
        """True if no further request of a client that is gone will be carried out.

        After the client is gone, its requests are carried out until a response cannot be sent. Otherwise the
        broker would read the data of any number of pipelined fetches for nothing. Kafka, too, closes a
        channel on which it cannot send. See
        test_a_failed_response_drops_the_requests_behind_it_when_the_client_is_gone.

        As on Kafka, the requests of a muted client are carried out when the connection is unmuted, even if
        the client is gone by then. See test_requests_of_a_throttled_client_are_handled_after_it_disconnects.
        """
        if self._responses.outlives_client:
            return False
        return (
            self._responses.blocking_count > 0 or self._responses.has_dropped or not self.reader.has_backlog
        )

    def _finish(self) -> None:
        self._begin_closing()
        self._throttle.cancel()
        self._responses.discard()
        self.reader.clear()
        self._node.slots.remove_waiter(self._schedule_turn)
        self._server.lost(self)
        # The callbacks of these objects refer to the connection. Without the callbacks, the connection is
        # freed now. With them, it would stay until the garbage collector runs, and forever if GcTuner has
        # frozen it. See test_a_closed_connection_is_freed_without_the_garbage_collector.
        self.auth.on_authenticated = self._responses.on_large = self._throttle.on_mute = _ignore
        self._requests.close = self._requests.on_late_response = _ignore

    # --- rounds of requests

    @property
    def _has_too_many_pending(self) -> bool:
        return (
            len(self._responses.slots) >= self._limits.max_pending_requests
            or self._responses.slot_bytes >= self._limits.max_pending_bytes
        )

    def _start_requests(self, data: memoryview, now_ms: int, started: float) -> memoryview:
        """Start the requests in `data`, up to the end of the round.

        Return the bytes that were not processed.
        """
        cost, reader, responses, throttle = 0, self.reader, self._responses, self._throttle
        responses.round_bytes = 0
        while not (
            responses.blocking_count
            or throttle.is_muted
            or responses.is_write_paused
            or self.is_closing
            or responses.has_dropped
            or (responses.slots and self._has_too_many_pending)
        ):
            before = data
            try:
                frame, data = reader.frames.first(data)
            except PeerError as error:
                self.close(f"{error} (see socket.request.max.bytes)")
                return NO_BYTES
            if frame is None:
                return data
            reader.incomplete_since_ms = None
            is_large = len(frame) > LARGE_REQUEST_BYTES and int.from_bytes(frame[:2]) not in _UNDIVIDED
            if not is_large:
                cost += self._start_request(frame, now_ms, started)
            elif self._node.slots.try_acquire(self._schedule_turn):
                cost += self._node.slots.run_with_slot(partial(self._start_request, frame, now_ms, started))
            else:
                # No slot is free, so the request waits as bytes. If its frame was collected in a separate
                # buffer, rebuild the input: the frame's size, the frame, and the bytes after it.
                is_view_of_data = frame.obj is before.obj
                return (
                    before if is_view_of_data else memoryview(b"".join((len(frame).to_bytes(4), frame, data)))
                )
            if not data or self.is_closing:
                return NO_BYTES
            if cost >= MAX_ROUND_REQUESTS or responses.round_bytes >= MAX_ROUND_RESPONSE_BYTES:
                self._schedule_turn()
                break
        return data

    def _start_request(self, frame: memoryview, now_ms: int, started: float) -> int:
        """Carry out a request. Return its cost, 1 for most requests. An error closes the connection.

        The round began at `now_ms` (clock) and `started` (perf_counter, for the latency metrics).
        """
        try:
            if self._quotas.is_any:
                return self._throttle.measure(
                    now_ms, lambda: self._requests.carry_out(frame, now_ms, started)
                )
            return self._requests.carry_out(frame, now_ms, started)
        except PeerError as error:
            self.close(f"a malformed request: {error}")
        except OncelogError as error:
            self.close(f"a request that cannot be answered: {error}")
        except Exception as error:
            # A bug of the broker closes this client's connection. The other connections continue.
            log_event("error", "request failed", peer=self.peer, error=repr(error), exc_info=error)
            self.close(f"an internal error: {error!r}")
        return 1

    def _schedule_turn(self) -> None:
        """Schedule `_run_turn`, which processes the backlog, on the event loop."""
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_turn)

    def _run_turn(self) -> None:
        self._is_turn_scheduled = False
        if not self.is_closing:
            self._resume()
        self._node.slots.decline(self._schedule_turn)

    def _resume(self) -> None:
        self.active_ms = self._clock.now_ms()
        self._process_backlog()
        self._server.after_round(self.active_ms)

    def _process_backlog(self) -> None:
        """Start a round of requests from the backlog.

        A nested call does nothing. Otherwise a request that completes immediately would start the next
        request in its own stack frame, and a long backlog would exhaust the stack.
        """
        if self._is_processing_backlog:
            return
        self._is_processing_backlog = True
        now_ms = self._clock.now_ms()
        try:
            self.reader.backlog = self._start_requests(self.reader.backlog, now_ms, perf_counter())
            if self.reader.next_backlog():
                self._schedule_turn()
        finally:
            self._is_processing_backlog = False
        self._end_round(now_ms)

    def _end_round(self, now_ms: int) -> None:
        """Write the round's responses, and record the memory of the requests that are not carried out yet."""
        reader, responses, memory = self.reader, self._responses, self.memory
        responses.flush()
        if responses.slot_bytes:
            # The responses wait behind one that waits for the disk. The connections of one turn of the event
            # loop must not each fill the same free memory. See
            # test_responses_that_wait_for_the_disk_are_bounded_together.
            self.note_responses(now_ms)
        if self.is_gone and self._is_finished:
            self._finish()
        pending_bytes = reader.frames.pending_bytes
        request_bytes = responses.request_bytes if responses.slots else 0
        holds_bytes = pending_bytes or reader.backlog or request_bytes
        if self.is_closing or not (holds_bytes or memory.is_holding_requests or self._is_read_paused):
            return
        if pending_bytes and reader.incomplete_since_ms is None:
            reader.incomplete_since_ms = now_ms
        memory.set_requests(reader.held_bytes + request_bytes, reader.received_bytes, now_ms)
        self._pace_reading()

    def _on_late_response(self, error: Exception | None) -> None:
        if error is not None:
            log_event("error", "late answer failed", peer=self.peer, error=repr(error), exc_info=error)
            self.close(f"an internal error: {error!r}")
            return
        if self.reader.backlog and not self._is_processing_backlog:
            # Continue in a later turn of the event loop: the caller may be changing state that the next
            # request reads. For example, it may be answering the members of the same group. See
            # test_a_member_may_leave_right_behind_its_sync.
            self._schedule_turn()
        self._end_round(self._clock.now_ms())

    # --- limits and closing

    def _on_mute(self, is_muted: bool) -> None:
        self._pace_reading() if is_muted else self._resume()

    def _note_large_response(self) -> None:
        self.note_responses(self.active_ms)
        # Measure once more in the next turn: by then the operating system may have accepted the complete
        # response.
        asyncio.get_running_loop().call_soon(self._note_responses_now)

    def _note_responses_now(self) -> None:
        self.note_responses(self._clock.now_ms())

    def note_responses(self, now_ms: int) -> None:
        """Record the memory of responses that the client has not accepted."""
        flushed_bytes = self._responses.flushed_bytes()
        if self.memory.note_flushed(flushed_bytes) and not self.is_closing:
            self.active_ms = now_ms
        self.memory.set_responses(self._responses.held_bytes(flushed_bytes), flushed_bytes, now_ms)

    def _pace_reading(self) -> None:
        """Stop reading while the backlog is full, the client reads no responses, or the connection is muted.

        Otherwise resume.
        """
        if self._transport is None or self.is_closing or self.is_gone:
            return
        is_full = self.reader.backlog_bytes >= self._limits.max_pending_bytes
        must_pause = is_full or self._responses.is_write_paused or self._throttle.is_muted
        if must_pause != self._is_read_paused:
            self._is_read_paused = must_pause
            if must_pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def activity(self, now_ms: int) -> ConnectionActivity:
        """Return the values from which the connection's deadlines are computed."""
        if self._is_read_paused and self.reader.incomplete_since_ms is not None:
            # Reading is paused, so the client cannot send the remaining bytes of its request. Restart the
            # read timeout.
            self.reader.incomplete_since_ms = now_ms
        if self.is_closing:
            phase = Phase.CLOSING
        elif self._transport is None:
            phase = Phase.HANDSHAKE
        else:
            phase = Phase.AUTHENTICATED if self.auth.is_authenticated else Phase.UNAUTHENTICATED
        # A connection that waits for a response is not idle while its client is there. If the client is gone,
        # the idle limit applies. Otherwise an abandoned JoinGroup would keep the connection for as long as
        # its group waits. The limit also applies to a muted connection whose responses are sent. The broker
        # does not read from such a connection, so only the idle limit detects that the client is gone
        # (KIP-219).
        is_waiting = bool(self._responses.slots) and not self._responses.is_abandoned
        return ConnectionActivity(
            phase, self.opened_ms, self.active_ms, self.reader.incomplete_since_ms, is_waiting
        )

    def _begin_closing(self) -> None:
        self.is_closing = True
        self._requests.cancel()

    def close(self, reason: str, *, bound: CloseReason | None = None, at_once: bool = False) -> None:
        """Close the connection because of an error or a limit, and log `reason`.

        Responses that are ready are still sent, unless `at_once`.
        """
        if self.is_closing and not at_once:
            return
        self._begin_closing()
        self._server.note_end(self.peer, reason, bound)
        if at_once or self._transport is None or self.is_gone:
            self.abort()
        else:
            self._responses.flush()
            self._close_when_written()

    def _close_when_written(self) -> None:
        """Close the transport once it has all responses. The deadline `linger` bounds the wait."""
        transport = self._transport
        # A TLS transport of asyncio cannot be used any more after a second `close`. See
        # test_the_checks_go_on_after_a_paused_tls_connection_was_closed.
        if transport is not None and not self._responses.unsent_bytes and not transport.is_closing():
            transport.close()

    def abort(self) -> None:
        """End the connection immediately, whatever its state, and drop all responses."""
        self._begin_closing()
        if self.is_gone:
            self._finish()
        elif self._transport is not None:
            self._transport.abort()
        elif self._handshake is not None:
            self._handshake.cancel()


def _ignore(*_: object) -> None:
    """Do nothing. Replaces the callbacks of a connection that has ended."""
