"""One client's connection to the broker: frames in, answers out in their order, bounds kept.

A request is begun as soon as nothing before it on the connection holds it back (a waiting fetch
does, an append that waits for the disk does not, answers that the client does not take do); what is behind it
stays as bytes, uncut. Reading stops while too many of them are there or answers are not taken. A connection
with many requests gets a round of them at a time, between which others have theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from oncelog.broker.handlers import join_group, sync_group
from oncelog.broker.handlers.produce import KEY as PRODUCE
from oncelog.broker.handlers.produce_direct import answer as answer_produce
from oncelog.broker.node import Request
from oncelog.broker.purgatory import Deferred, Disconnect
from oncelog.broker.request_limits import max_elements
from oncelog.broker.security.authenticator import Door, Farewell
from oncelog.broker.security.authorizer import Access
from oncelog.errors import ConfigError, OncelogError, PeerError
from oncelog.rules.limits.connections import Bound, Phase, Standing
from oncelog.rules.security.auth_state import SASL_AUTHENTICATE, SASL_HANDSHAKE
from oncelog.runtime.event_log import log_event
from oncelog.server.listener import Accepted
from oncelog.server.response_queue import Outbox, Payload, Slot
from oncelog.server.throttle import Throttle
from oncelog.wire.frames import (
    FrameReader,
    RequestHeader,
    decode_request_header,
    encode_large_response,
    encode_response,
)
from oncelog.wire.messages import FetchResponse

if TYPE_CHECKING:
    from oncelog.server.acceptor import Acceptor
    from oncelog.server.server import Server

LARGE_REST_BYTES = 65_536
"""From this on the rest of a frame is received in its own place; less goes through the shared buffer."""
ROUND_REQUESTS = 64
ROUND_ANSWER_BYTES = 65_536
"""After so many requests or bytes of answers a connection waits until others had their turn."""
REQUEST_BYTES = 256
"""A request other than Produce counts once more in its round for so many bytes: its work grows with them."""
OPENED_RECORDS = 256
"""A Produce request counts once more in its round for so many records that were opened to look at them."""
LARGE_REQUEST_BYTES = 4096
"""A longer request may have to wait until fewer answers are being made in steps."""
_UNDIVIDED = frozenset({PRODUCE, join_group.KEY, sync_group.KEY})
"""Requests with data, which are answered in one step however long they are."""
_NOTHING = memoryview(b"")


class Connection(Accepted):
    """Server side of one TCP connection. Bytes arrive in the server's one shared buffer."""

    def __init__(self, server: Server, acceptor: Acceptor, connection_id: int) -> None:
        self.server, self.node, self.connection_id = server, server.node, connection_id
        self.acceptor = acceptor
        self.transport: asyncio.Transport | None = None
        self.peer = self.address = ""
        self.active_ms = self.opened_ms = server.clock.now_ms()
        self.is_closing = False
        self._is_gone = False
        """True once the transport has ended; requests that came before may still be carried out."""
        self.door = Door(self.node, acceptor.listener, needs_sasl=True)
        self._handshake: asyncio.Task[None] | None = None
        self._is_plain = False
        self._access: Access | None = None
        self._reader = FrameReader(server.max_stranger_bytes)
        self._room: memoryview | None = None
        self._request_ms: int | None = None
        self._backlog, self._arrived = _NOTHING, bytearray()
        """Bytes that wait for their turn: those being cut, and what came after them."""
        self._outbox = Outbox(self.node.metrics, self._note_large_answer)
        self._received_bytes = self._taken_bytes = 0
        self._holds = 0
        self._is_write_paused = self._is_read_paused = False
        self._is_going_on = self._is_turn_asked = self._is_holding = False
        self._quotas = self.node.quotas
        self._throttle = Throttle(self._quotas, self._hold)

    # --- what asyncio calls

    def admit(self, peer: Any, descriptor: int | None) -> bool:
        """`peer`: its address as sockets have it. Whether the server lets it stay."""
        self.peer = f"{peer[0]}:{peer[1]}" if peer else "unknown"
        self.address = peer[0] if peer else ""
        return self.server.opened(self, descriptor)

    def prepare(self, handshake: asyncio.Task[None]) -> None:
        self._handshake = handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.is_closing:
            self.transport.abort()
        elif self._handshake is not None or self.admit(transport.get_extra_info("peername"), None):
            self._enter(self.transport)

    def _enter(self, transport: asyncio.Transport) -> None:
        self._outbox.transport = transport
        transport.set_write_buffer_limits(high=self.server.max_pending_bytes)
        if self._throttle.turns_away(self.address, self.opened_ms, transport):
            return
        listener, needs_sasl = self.acceptor.listener, self.acceptor.needs_sasl
        try:
            principal = self.acceptor.principal_of(transport)
        except ConfigError as error:
            self.close(str(error), at_once=True)
            return
        self.door = Door(self.node, listener, self.address, needs_sasl=needs_sasl, principal=principal)
        self._look_at_door()

    def _look_at_door(self) -> None:
        """What follows from its state for the next requests."""
        self._is_plain = self.door.is_plain
        if self.door.is_open:
            self._reader.max_frame_bytes = self.server.max_request_bytes
            self._access = None if self.node.authorizer is None else self.door.access

    def get_buffer(self, sizehint: int) -> memoryview:
        # What is behind a backlog may not overtake it.
        self._room = None if self._backlog else self._reader.room(LARGE_REST_BYTES)
        return self.server.receive_view if self._room is None else self._room

    def buffer_updated(self, size_bytes: int) -> None:
        if self.is_closing:
            return
        now_ms = self.active_ms = self.server.clock.now_ms()
        self.node.metrics.bytes_received += size_bytes
        self._received_bytes += size_bytes
        started = perf_counter()
        data = _NOTHING
        if self._room is None:
            data = self.server.receive_view[:size_bytes]
        else:
            self._room = None
            self._reader.fill(size_bytes)
        if self._backlog:
            self._arrived += data
        else:
            rest = self._go_through(data, now_ms, started)
            if rest:
                # The shared buffer is overwritten by the next read.
                self._backlog = memoryview(bytes(rest))
        self._end_round(now_ms)
        self.server.after_round(now_ms)

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self.note_answers(self.server.clock.now_ms())
        self._pace_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self.note_answers(self.server.clock.now_ms())
        self._go_on_now()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._is_gone = True
        if self._backlog or self._arrived:
            self._outbox.pass_over()
        if self.is_closing or self._has_no_more:
            self._finish()
            return
        # A producer with acks=0 closes as soon as the system has taken its last request. Kafka, too, carries
        # out what it has received. Guard: test_requests_without_an_answer_are_carried_out_after_the_end.
        self._outbox.discard(but_last=self._outbox.outlives_client)
        self._outbox.transport = None
        self._is_write_paused = False
        self._ask_for_turn()

    @property
    def _has_no_more(self) -> bool:
        """True if nothing is left to carry out of a client that is gone, or something holds it back.

        The first answer that nobody takes is the last. Pipelined fetches would all be read, for nobody and
        without a bound. Kafka, too, closes such a channel when it has an answer to send.
        See test_an_answer_ends_what_a_client_that_is_gone_has_left.
        A client over its quota is heard again in time, as on Kafka, however long it has been gone.
        See test_what_a_client_over_its_quota_sent_before_its_end_is_carried_out.
        """
        if self._outbox.outlives_client:
            return False
        waits_for_answer = self._holds > self._throttle.is_silent
        return waits_for_answer or self._outbox.has_dropped or not (self._backlog or self._arrived)

    def _finish(self) -> None:
        self.is_closing = True
        self._throttle.cancel()
        self._outbox.discard()
        self._backlog, self._arrived = _NOTHING, bytearray()
        self.node.steps.forget(self._ask_for_turn)
        self.server.lost(self)

    # --- requests

    @property
    def _has_too_many(self) -> bool:
        """Whether so many answers are owed that no more requests are begun."""
        return (
            len(self._outbox.slots) >= self.server.max_pending_requests
            or self._outbox.slotted_bytes >= self.server.max_pending_bytes
        )

    def _go_through(self, data: memoryview, now_ms: int, started: float) -> memoryview:
        """Begin the requests in `data`, a round of them at most; returns what was not looked at."""
        begun, outbox = 0, self._outbox
        while not (
            self._holds
            or self._is_write_paused
            or outbox.has_dropped
            or (outbox.slots and self._has_too_many)
        ):
            before = data
            try:
                frame, data = self._reader.first(data)
            except PeerError as error:
                self.close(f"{error} (see socket.request.max.bytes)")
                return _NOTHING
            if frame is None:
                return data
            self._request_ms = None
            is_large = len(frame) > LARGE_REQUEST_BYTES and int.from_bytes(frame[:2]) not in _UNDIVIDED
            if not is_large:
                begun += self._begin(frame, now_ms, started)
            elif self.node.steps.take(self._ask_for_turn):
                begun += self.node.steps.lend(partial(self._begin, frame, now_ms, started))
            else:
                # One that was gathered is put together again, with its size.
                is_cut_here = frame.obj is before.obj
                return before if is_cut_here else memoryview(b"".join((len(frame).to_bytes(4), frame, data)))
            if not data or self.is_closing:
                return _NOTHING
            if begun >= ROUND_REQUESTS or outbox.gathered_bytes >= ROUND_ANSWER_BYTES:
                self._ask_for_turn()
                break
        return data

    def _ask_for_turn(self) -> None:
        if not self._is_turn_asked:
            self._is_turn_asked = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._is_turn_asked = False
        if not self.is_closing:
            self._go_on_now()
        self.node.steps.decline(self._ask_for_turn)

    def _go_on_now(self) -> None:
        self.active_ms = self.server.clock.now_ms()
        self._go_on()
        self.server.after_round(self.active_ms)

    def _go_on(self) -> None:
        """Requests that waited. Not re-entered, so that many of them need no deep stack."""
        if self._is_going_on:
            return
        self._is_going_on = True
        now_ms = self.server.clock.now_ms()
        try:
            self._backlog = self._go_through(self._backlog, now_ms, perf_counter())
            if not self._backlog and self._arrived:
                arrived, self._arrived = self._arrived, bytearray()
                self._backlog = memoryview(arrived)
                self._ask_for_turn()
        finally:
            self._is_going_on = False
        self._end_round(now_ms)

    def _end_round(self, now_ms: int) -> None:
        self._outbox.flush()
        if self._is_gone and self._has_no_more:
            self._finish()
        has_bytes = self._reader.pending_bytes or self._backlog or self._outbox.request_bytes
        if self.is_closing or not (has_bytes or self._is_holding or self._is_read_paused):
            return
        if self._request_ms is None and self._reader.pending_bytes:
            self._request_ms = now_ms
        # Of a backlog that is partly cut all is still there.
        backlog_bytes = len(cast(bytes, self._backlog.obj)) if self._backlog else 0
        held_bytes = self._reader.held_bytes + backlog_bytes + len(self._arrived) + self._outbox.request_bytes
        self._is_holding = held_bytes > 0
        self.server.hold_requests(self, held_bytes, self._received_bytes, now_ms)
        self._pace_reading()

    def _begin(self, frame: memoryview, now_ms: int, started: float) -> int:
        """Carry a request out, received at `now_ms` and `started`; returns how much of a round it takes."""
        if self.is_closing:
            return 1
        try:
            if self._quotas.is_any:
                return cast(
                    int,
                    self._throttle.measured(
                        self.door, now_ms, lambda: self._carry_out(frame, now_ms, started)
                    ),
                )
            return self._carry_out(frame, now_ms, started)
        except PeerError as error:
            self.close(f"a request that cannot be read: {error}")
        except OncelogError as error:
            self.close(f"a request that cannot be answered: {error}")
        except Exception as error:
            # A bug of ours costs this client its connection, never the others their broker.
            log_event("error", "request failed", peer=self.peer, error=repr(error), exc_info=error)
            self.close(f"an internal error: {error!r}")
        return 1

    def _carry_out(self, frame: memoryview, now_ms: int, started: float) -> int:
        if not self._is_plain:
            reason = self.door.pass_through(int.from_bytes(frame[:2]), now_ms)
            if reason is not None:
                self.close(reason)
                return 1
        payload = None if self._outbox.slots else answer_produce(self.node, frame, now_ms, self._access)
        if payload is None:
            opened_before = self.node.opened_cost
            self._begin_any(frame, now_ms, started)
            key = int.from_bytes(frame[:2])
            if key == SASL_AUTHENTICATE:
                return ROUND_REQUESTS  # PLAIN takes milliseconds, however small the request is
            if key == PRODUCE:
                return 1 + (self.node.opened_cost - opened_before) // OPENED_RECORDS
            return 1 + len(frame) // REQUEST_BYTES
        if self._quotas.is_any:
            payload = self._throttle.produced_directly(self.door, frame, payload, now_ms)
        self._outbox.put(payload)
        self.node.metrics.observe("Produce", perf_counter() - started)
        return 1

    def _begin_any(self, frame: memoryview, now_ms: int, started: float) -> None:
        header = decode_request_header(frame)
        self._throttle.identified(header)
        answer: Any = self.node.refuse(header)
        if answer is not None:
            self._take_answer(header._replace(api_version=0), answer, started)
            return
        api = self.node.offered[header.api_key]
        message = api.request.decode(
            header.api_version, frame, header.body_position, max_elements=max_elements(api.name, len(frame))
        )
        request = Request(self.connection_id, header, message, f"/{self.address}", self.door)
        answer = self.node.handle(request, now_ms)
        if header.api_key == PRODUCE and self._quotas.is_any:
            self._throttle.produced(self.door, header, len(frame), now_ms)
        if header.api_key in (SASL_HANDSHAKE, SASL_AUTHENTICATE):
            self._look_at_door()
        self._take_answer(header, answer, started)

    def _take_answer(self, header: RequestHeader, answer: Any, started: float) -> None:
        if isinstance(answer, Farewell):
            self._holds += 1  # nothing after it is begun
            later = asyncio.get_running_loop().call_later
            later(answer.delay_ms / 1000, self._part, header, answer, started)
        elif isinstance(answer, Deferred):
            slot = self._outbox.reserve(answer)
            self._holds += answer.holds_later_requests
            if self._quotas.is_any:
                answer.measure = lambda work: self._measured_later(header, work)
            answer.listen(lambda late: self._late(slot, header, late, started))
        elif self._outbox.slots:
            slot = self._outbox.reserve(None)
            self._outbox.fill(slot, self._encode(header, answer, started))
        else:
            self._outbox.put(self._encode(header, answer, started))

    def _part(self, header: RequestHeader, farewell: Farewell, started: float) -> None:
        if not self.is_closing:
            if not self._outbox.slots:
                self._outbox.put(self._encode(header, farewell.answer, started))
            self.close(farewell.reason)

    def _measured_later(self, header: RequestHeader, work: Callable[[], Any]) -> Any:
        """Charge the client for work on an answer that comes later."""
        if not self._quotas.is_any:
            return work()
        self._throttle.identified(header)
        return self._throttle.measured(self.door, self.server.clock.now_ms(), work)

    def _late(self, slot: Slot, header: RequestHeader, answer: Any, started: float) -> None:
        self._holds -= slot.holds_later_requests
        try:
            payload = self._measured_later(header, lambda: self._encode(header, answer, started))
            self._outbox.fill(slot, payload)
        except Exception as error:
            log_event("error", "late answer failed", peer=self.peer, error=repr(error), exc_info=error)
            self.close(f"an internal error: {error!r}")
            return
        if self._backlog and not self._is_going_on:
            self._ask_for_turn()  # whoever answers may be amid its own work, and is not to be asked more now
        self._end_round(self.server.clock.now_ms())

    def _encode(self, header: RequestHeader, answer: Any, started: float) -> Payload | None:
        if isinstance(answer, Disconnect):
            self.close(answer.reason)
            return None
        if self._quotas.is_any:
            self._throttle.answered(self.door, header, answer, self.server.clock.now_ms())
        payload: Payload | None = None
        if isinstance(answer, FetchResponse):
            pieces = encode_large_response(answer, header.api_version, header.correlation_id)
            payload = pieces if len(pieces) > 1 else bytes(pieces[0])
        elif answer is not None:
            payload = encode_response(answer, header.api_version, header.correlation_id)
        self.node.metrics.observe(self.node.offered[header.api_key].name, perf_counter() - started)
        return payload

    # --- bounds, the end

    def _hold(self, is_held: bool) -> None:
        """Whether to read and begin nothing more; what is under way is answered."""
        self._holds += 1 if is_held else -1
        self._pace_reading() if is_held else self._go_on_now()

    def _note_large_answer(self) -> None:
        self.note_answers(self.active_ms)
        # What the system takes at once is not waited for.
        asyncio.get_running_loop().call_soon(self._note_answers_again)

    def _note_answers_again(self) -> None:
        self.note_answers(self.server.clock.now_ms())

    def note_answers(self, now_ms: int) -> None:
        """Tell the server how much of its answers the client has not taken."""
        if self not in self.server.connections:
            return
        taken_bytes = self._outbox.taken_bytes()
        if taken_bytes > self._taken_bytes:
            self._taken_bytes = taken_bytes
            self.active_ms = self.active_ms if self.is_closing else now_ms
        held_bytes = self._outbox.held_bytes(taken_bytes)
        if held_bytes or self in self.node.answers_held:
            self.server.hold_answers(self, held_bytes, taken_bytes, now_ms)

    def _pace_reading(self) -> None:
        if self.transport is None or self.is_closing or self._is_gone:
            return
        is_full = len(self._backlog) + len(self._arrived) >= self.server.max_pending_bytes
        is_full = is_full or self._is_write_paused or self._throttle.is_silent
        if is_full != self._is_read_paused:
            self._is_read_paused = is_full
            if is_full:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def standing(self, now_ms: int) -> Standing:
        """What its deadlines depend on."""
        if self._is_read_paused and self._request_ms is not None:
            self._request_ms = now_ms  # it cannot go on with its request
        if self.is_closing:
            phase = Phase.CLOSING
        elif self.transport is None:
            phase = Phase.HANDSHAKE
        else:
            phase = Phase.KNOWN if self.door.is_open else Phase.STRANGER
        # A throttled connection is not read, so only the idle limit tells that its client is gone (KIP-219).
        # Nor may a client that is gone wait longer for its group.
        is_waiting = bool(self._outbox.slots) and not self._outbox.is_passed_over
        return Standing(phase, self.opened_ms, self.active_ms, self._request_ms, is_waiting)

    def close(self, reason: str, *, bound: Bound | None = None, at_once: bool = False) -> None:
        """End the connection for cause; what was answered before still leaves unless `at_once`."""
        if self.is_closing and not at_once:
            return
        self.is_closing = True
        self.server.note_end(self.peer, reason, bound)
        if at_once or self.transport is None or self._is_gone:
            self.abort()
        else:
            self._outbox.flush()
            self.transport.close()

    def abort(self) -> None:
        """End the connection, whatever it is at."""
        self.is_closing = True
        if self._is_gone:
            self._finish()
        elif self.transport is not None:
            self.transport.abort()
        elif self._handshake is not None:
            self._handshake.cancel()
