"""Executes the requests of one connection and sends their responses.

A plain Produce request is answered directly from its bytes (`broker.handlers.produce_direct`). Any other
request is decoded and passed to the handler of its API. The handler returns a response, a PendingResponse
that is completed later, or CloseAfterResponse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from oncelog.broker.dispatch import handle, refuse
from oncelog.broker.encoded_response import encoding_of
from oncelog.broker.handlers.produce import KEY as PRODUCE
from oncelog.broker.handlers.produce import records_bytes
from oncelog.broker.handlers.produce_direct import answer as answer_produce
from oncelog.broker.purgatory import Disconnect, PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.request_limits import max_elements
from oncelog.broker.security.authenticator import CloseAfterResponse
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Continuation, Work, joined_steps, respond_in_steps
from oncelog.errors import OncelogError, PeerError
from oncelog.rules.limits.quotas import counted_client_id
from oncelog.rules.security.auth_state import SASL_AUTHENTICATE, SASL_HANDSHAKE
from oncelog.runtime.clock import Clock
from oncelog.server.connection_auth import ConnectionAuth
from oncelog.server.response_queue import Payload, ResponseQueue, ResponseSlot
from oncelog.server.throttle import Throttle
from oncelog.wire.frames import RequestHeader, decode_request_header, encode_large_response, encode_response
from oncelog.wire.message import Api, Message
from oncelog.wire.messages import FetchResponse, ProduceRequest
from oncelog.wire.primitives import TooManyElements

T = TypeVar("T")

MAX_ROUND_REQUESTS = 64
"""The cost at which a round ends. Most requests cost 1; large and expensive requests cost more.

The limit is a cost instead of a time, so that the simulator stays deterministic. See
test_a_seed_gives_the_same_bytes_in_every_process.
"""
REQUEST_BYTES = 256
"""A request costs 1 more for each 256 bytes, because its work grows with its size. The records of a Produce
request do not count: storing 256 bytes takes much less time than decoding them.
"""
METERED_RECORDS = 256
"""A request costs 1 more for each 256 records that it adds to `BrokerState.round_meter`.

For a Produce request, these are records that the broker had to decompress. Each 64 bytes of compressed or
decompressed data count as one more record: see `prepare_batch`.
"""

DECODED_AT_ONCE = 2_000
"""Maximum number of elements that are decoded at once. Further elements are decoded in steps: 100,000
partitions take 0.1 s.
"""
DECODED_PER_STEP = 1_000
_SASL = (SASL_HANDSHAKE, SASL_AUTHENTICATE)


class RequestHandler:
    """Executes the requests of one connection.

    `keep_frame(frame)` returns a frame that later reads do not overwrite. `close(reason)` ends the
    connection. `on_late_response(None)` is called after a pending response was
    completed; after a failure, it is called with the error.
    """

    def __init__(
        self,
        node: BrokerState,
        clock: Clock,
        connection_id: int,
        auth: ConnectionAuth,
        throttle: Throttle,
        responses: ResponseQueue,
        *,
        keep_frame: Callable[[memoryview], memoryview],
        close: Callable[[str], None],
        on_late_response: Callable[[Exception | None], None],
    ) -> None:
        self._node, self._clock, self._connection_id = node, clock, connection_id
        self._auth, self._throttle, self._responses = auth, throttle, responses
        self._keep_frame = keep_frame
        self.close, self.on_late_response = close, on_late_response
        self._quotas = node.quotas
        self.has_dispatched = False
        """True if a request other than a plain Produce request was executed since the connection last set
        this attribute to False.
        """
        self._close_timer: asyncio.TimerHandle | None = None

    def carry_out(self, frame: memoryview, now_ms: int, started: float) -> int:
        """Execute a request and send its response. Return the request's cost in its round.

        The round began at `now_ms` (clock) and `started` (perf_counter). Raises PeerError if the request
        cannot be decoded.
        """
        # `frame` is a view of the receive buffer, and so are the records that are decoded from it. A handler
        # must copy everything that it keeps after this call. See
        # test_batches_left_for_later_steps_do_not_refer_to_the_receive_buffer.
        if not self._auth.allows_any_request:
            reason = self._auth.check(int.from_bytes(frame[:2]), now_ms)
            if reason is not None:
                self.close(reason)
                return 1
        node, responses = self._node, self._responses
        payload = None if responses.slots else answer_produce(node, frame, now_ms, self._auth.access)
        if payload is None:
            before = node.round_meter.records
            self._dispatch(frame, now_ms, started)
            api_key = int.from_bytes(frame[:2])
            if api_key == SASL_AUTHENTICATE:
                # Checking a PLAIN password takes milliseconds, so one such request fills the round.
                return MAX_ROUND_REQUESTS
            cost = 1 + (node.round_meter.records - before) // METERED_RECORDS
            return cost if api_key == PRODUCE else cost + len(frame) // REQUEST_BYTES
        if self._quotas.is_any:
            payload = self._throttle.charge_direct_produce(frame, payload, now_ms)
        responses.send(payload)
        node.metrics.observe("Produce", perf_counter() - started)
        return 1

    def _dispatch(self, frame: memoryview, now_ms: int, started: float) -> None:
        """Decode a request and pass it to its API's handler.

        Send the response. If the response is pending, reserve its place in the queue.
        """
        self.has_dispatched = True
        header = decode_request_header(frame)
        self._throttle.set_client_id(header)
        response: Any = refuse(self._node, header)
        if response is not None:
            self._respond(header._replace(api_version=0), response, started)
            return
        api = self._node.offered[header.api_key]
        limit = max_elements(api.name, len(frame))
        try:
            message = api.request.decode(
                header.api_version, frame, header.body_position, max_elements=min(limit, DECODED_AT_ONCE)
            )
        except TooManyElements:
            if limit <= DECODED_AT_ONCE or header.api_key in _SASL:
                raise
            self._respond(header, self._decode_in_steps(api, header, frame, limit), started)
            return
        response = self._handle(header, message, len(frame), now_ms)
        if header.api_key in _SASL:
            self._auth.update()
        self._respond(header, response, started)

    def _handle(self, header: RequestHeader, message: Message, frame_bytes: int, now_ms: int) -> Any:
        auth = self._auth
        if isinstance(message, ProduceRequest):
            # The request may have thousands of topics without partitions, or tagged fields. See
            # test_a_produce_request_of_many_topics_costs_more_of_its_round.
            other_bytes = frame_bytes - records_bytes(message)
            self._node.round_meter.add(other_bytes * METERED_RECORDS // REQUEST_BYTES)
        request = Request(self._connection_id, header, message, f"/{auth.host}", auth.authenticator)
        response = handle(self._node, request, now_ms)
        if header.api_key == PRODUCE and self._quotas.is_any:
            self._throttle.charge_produce(header, frame_bytes, now_ms)
        return response

    def _decode_in_steps(self, api: Api, header: RequestHeader, frame: memoryview, limit: int) -> Any:
        """Decode a request of many elements in steps, and then handle it. Return the pending response.

        Until it has a slot, the request waits as bytes. See
        test_a_request_of_many_elements_is_decoded_in_steps.
        """
        frame_bytes, kept = len(frame), self._keep_frame(frame)
        response = respond_in_steps(self._node.slots, self._decoding(api, header, kept, limit), free_steps=0)
        if isinstance(response, PendingResponse):
            response.request_bytes = frame_bytes
            # The acknowledgements that a producer waits for are not decoded yet. With acks=0, it may close
            # its connection now.
            response.outlives_client = header.api_key == PRODUCE
        return response

    def _decoding(self, api: Api, header: RequestHeader, frame: memoryview, limit: int) -> Work[Any]:
        yield None
        decoding = api.request.decode_in_steps(
            header.api_version, frame, header.body_position, max_elements=limit
        )
        try:
            message = yield from joined_steps(decoding, DECODED_PER_STEP)
        except PeerError as error:
            return Disconnect(f"a malformed request: {error}")
        frame_bytes = len(frame)

        def start() -> Any:
            try:
                return self._handle(header, message, frame_bytes, self._clock.now_ms())
            except OncelogError as error:
                return Disconnect(f"a request that cannot be answered: {error}")

        return Continuation(start)

    def _respond(self, header: RequestHeader, response: Any, started: float) -> None:
        if isinstance(response, CloseAfterResponse):
            self._responses.block()
            later = asyncio.get_running_loop().call_later
            self._close_timer = later(
                response.delay_ms / 1000, self._send_and_close, header, response, started
            )
        elif isinstance(response, PendingResponse):
            # Keep no long client id while the response is pending: a fetch may wait for ten minutes. See
            # test_connections_keep_no_long_client_ids.
            header = header._replace(client_id=counted_client_id(header.client_id))
            slot = self._responses.reserve(response)
            response.encode = partial(encoding_of, version=header.api_version)
            if self._quotas.is_any:
                response.measure = lambda work: self._measure_later(header, work)
            response.add_done_callback(lambda late: self._complete(slot, header, late, started))
        elif self._responses.slots:
            slot = self._responses.reserve(None)
            self._responses.complete(slot, self._encode(header, response, started))
        else:
            self._responses.send(self._encode(header, response, started))

    def _send_and_close(self, header: RequestHeader, closing: CloseAfterResponse, started: float) -> None:
        if not self._responses.slots:
            self._responses.send(self._encode(header, closing.response, started))
        self.close(closing.reason)

    def _measure_later(self, header: RequestHeader, work: Callable[[], T]) -> T:
        """Call `work`, which makes part of a pending response, and charge its time to the client's quota."""
        if not self._quotas.is_any:
            return work()
        self._throttle.set_client_id(header)
        return self._throttle.measure(self._clock.now_ms(), work)

    def _complete(self, slot: ResponseSlot, header: RequestHeader, response: Any, started: float) -> None:
        try:
            payload = self._measure_later(header, lambda: self._encode(header, response, started))
            self._responses.complete(slot, payload)
        except Exception as error:
            self.on_late_response(error)
        else:
            self.on_late_response(None)

    def _encode(self, header: RequestHeader, response: Any, started: float) -> Payload | None:
        """Return the response frame; None if no response is sent."""
        if isinstance(response, Disconnect):
            self.close(response.reason)
            return None
        if self._quotas.is_any:
            self._throttle.charge_response(header, response, self._clock.now_ms())
        payload: Payload | None = None
        if isinstance(response, FetchResponse):
            pieces = encode_large_response(response, header.api_version, header.correlation_id)
            payload = pieces if len(pieces) > 1 else bytes(pieces[0])
        elif response is not None:
            payload = encode_response(response, header.api_version, header.correlation_id)
        self._node.metrics.observe(self._node.offered[header.api_key].name, perf_counter() - started)
        return payload

    def cancel(self) -> None:
        """Stop the timer of `_send_and_close`, because the connection has ended or is already closing."""
        if self._close_timer is not None:
            self._close_timer.cancel()
