"""Forwards one client connection through the proxy, and applies the rules to its messages.

    client --requests---> [rules] --> broker          _read_from_client
    broker --responses--> by order of sending         _read_from_broker
    client <--responses-- [rules] in request order    _deliver

Clients match responses to requests by order. If a response has an unexpected correlation id, clients close
the connection (Java's client and librdkafka alike). Therefore a response that is held or dropped also blocks
all later responses.

After the client's connection has ended, the broker gets DRAIN_SECONDS to finish the requests that it was
sent. Therefore a lost response means that the broker has handled the request, but the client does not know
the result.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from oncelog.errors import PeerError
from oncelog.testing.proxy.decode import (
    addresses_of,
    clip_versions,
    correlation_of,
    decode_known_response,
    encode_response_frame,
    forged_error,
    request_event,
    response_event,
)
from oncelog.testing.proxy.events import Fate, WireEvent
from oncelog.testing.proxy.in_flight import (
    Address,
    HeldMessage,
    InFlightRequest,
    ProxyContext,
    Streams,
    drain,
    read_frame,
    write_frame,
)
from oncelog.testing.proxy.rules import Action, Rule, error_code_of

DRAIN_SECONDS = 1.0
"""Seconds that a broker gets to respond to the last requests before its connection is closed."""

LATE_SECONDS = 10.0
"""Seconds that a broker gets to respond to a request that was released after its connection ended."""


class Relay:
    """A client's connection, and the proxy's connection to one broker."""

    def __init__(
        self, context: ProxyContext, number: int, upstream: Address, client: Streams, broker: Streams
    ) -> None:
        self.context = context
        self.number = number
        self.upstream = upstream
        self._reader, self._writer = client
        self._from_broker, self._to_broker = broker
        self._loop = asyncio.get_running_loop()
        self._open: deque[InFlightRequest] = deque()
        """Requests whose response is not yet delivered, in the order in which the client sent them."""
        self._order: asyncio.Queue[InFlightRequest | None] = asyncio.Queue()
        self._sent: deque[InFlightRequest] = deque()
        """Requests to which the broker has not yet responded, in the order in which the proxy sent them."""
        self._held: list[HeldMessage] = []
        self._cut = asyncio.Event()
        self._sent_counts: dict[str, int] = {}
        """Number of requests that the proxy has sent to the broker, by API."""
        self._is_over = False
        self._has_broker_closed = False
        self._is_blocked = False
        """True while a held response blocks all later ones."""

    async def run(self) -> None:
        """Forward messages until one side or a rule ends the connection. Then close both connections."""
        try:
            await self._run_tasks()
        finally:
            self._writer.close()
            self._to_broker.close()
        await self._wait_closed()

    async def _run_tasks(self) -> None:
        responses = asyncio.create_task(self._read_from_broker())
        coroutines = (self._read_from_client(), self._deliver(), self._wait_for_cut())
        ending_tasks: list[asyncio.Task[None]] = [asyncio.create_task(coroutine) for coroutine in coroutines]
        try:
            await asyncio.wait(ending_tasks, return_when=asyncio.FIRST_COMPLETED)
            self._end(ending_tasks)
            if self._sent and not self._has_broker_closed:
                await drain(self._to_broker)
                await asyncio.wait([responses], timeout=DRAIN_SECONDS)
        finally:
            for task in (responses, *ending_tasks):
                task.cancel()
            await asyncio.gather(responses, *ending_tasks, return_exceptions=True)

    async def abort(self) -> None:
        """Close both connections immediately. Data that are not yet written are lost."""
        self._writer.transport.abort()
        self._to_broker.transport.abort()
        await self._wait_closed()

    async def _wait_closed(self) -> None:
        closing = (self._writer.wait_closed(), self._to_broker.wait_closed())
        await asyncio.gather(*closing, return_exceptions=True)

    def cut(self) -> None:
        """Close the client's connection now."""
        self._cut.set()

    @property
    def _node(self) -> str:
        return f"{self.upstream[0]}:{self.upstream[1]}"

    async def _wait_for_cut(self) -> None:
        await self._cut.wait()

    def _end(self, ending_tasks: list[asyncio.Task[None]]) -> None:
        """End the exchange with the client: cancel its tasks, and record undelivered responses as lost."""
        self._is_over = True
        if self._reader.at_eof():
            self._writer.close()
        for request in self._open:
            frame = request.response.result() if request.response.done() else None
            if frame is not None:
                self._record_lost(request, frame)
        for task in ending_tasks:
            task.cancel()

    # --- requests: client to broker

    async def _read_from_client(self) -> None:
        try:
            await self._read_requests()
        except PeerError as error:
            self.context.log.note(f"connection {self.number}: not a Kafka client: {error}")

    async def _read_requests(self) -> None:
        while (frame := await read_frame(self._reader)) is not None:
            header, event = request_event(frame, self.number, self._node)
            request = InFlightRequest(header, frame, event, self._loop.create_future())
            decision = self.context.book.decide(event)
            if decision.delay_ms:
                await asyncio.sleep(decision.delay_ms / 1000)
            if not self._apply_rule(request, decision.rule):
                return
            await drain(self._to_broker)

    def _apply_rule(self, request: InFlightRequest, rule: Rule | None) -> bool:
        """Apply a rule to a request. Return False if the connection must end."""
        action = rule.action if rule else None
        if action is Action.CUT:
            self.context.log.record(request.event, Fate.CUT)
            return False
        request.is_dropped = action is Action.DROP
        if request.expects_response:
            self._open.append(request)
            self._order.put_nowait(request)
        if action is Action.DROP:
            self.context.log.record(request.event, Fate.DROPPED)
        elif action is Action.HOLD and rule:
            self.context.log.record(request.event, Fate.HELD)
            self._hold_request(request, rule)
        elif action is Action.FAIL and rule:
            self._forge_response(request, rule)
        else:
            self._send(request, Fate.PASSED)
            if action is Action.DUPLICATE and rule:
                self._send_copy(request, rule)
        return True

    def _forge_response(self, request: InFlightRequest, rule: Rule) -> None:
        code = error_code_of(rule.error or "")
        self.context.log.record(request.event, Fate.FORGED, f"answered {rule.error} by the proxy")
        frame, _ = forged_error(request.header, request.event, code)
        request.is_forged = True
        request.response.set_result(frame)

    def _send_copy(self, request: InFlightRequest, rule: Rule) -> None:
        copy = InFlightRequest(
            request.header, request.frame, request.event, self._loop.create_future(), is_copy=True
        )
        if rule.delay_ms or rule.release_after:
            self.context.log.record(copy.event, Fate.HELD, "a copy")
            self._hold_request(copy, rule)
        else:
            self._send(copy, Fate.COPY)

    def _send(self, request: InFlightRequest, fate: Fate) -> None:
        """Send a request to the broker. Then release the held messages that waited for this request."""
        self.context.log.record(request.event, fate, "a copy" if request.is_copy else "")
        if self._has_broker_closed:
            request.response.set_result(None)
            return
        if request.expects_response:
            self._sent.append(request)
        write_frame(self._to_broker, request.frame)
        api = request.event.api
        self._sent_counts[api] = request.send_number = self._sent_counts.get(api, 0) + 1
        for held in tuple(self._held):
            held.count_down(api)
        self._held = [held for held in self._held if not held.is_done]

    def _hold(self, event: WireEvent, rule: Rule, on_release: Callable[[bool], None]) -> HeldMessage:
        held = HeldMessage(event.api, rule.release_after, on_release)
        if rule.delay_ms:
            held.timer = self._loop.call_later(rule.delay_ms / 1000, held.release)
        self._held.append(held)
        self.context.held[:] = [*(message for message in self.context.held if not message.is_done), held]
        return held

    def _hold_request(self, request: InFlightRequest, rule: Rule) -> None:
        def on_release(lose: bool) -> None:
            if lose:
                self.context.log.record(request.event, Fate.LOST, "lost while held")
            elif self._is_over or self._has_broker_closed:
                self.context.spawn(self._send_late(request))
            else:
                self._send(request, Fate.RELEASED)

        self._hold(request.event, rule, on_release)

    async def _send_late(self, request: InFlightRequest) -> None:
        """Send a held request after its connection has ended, on a new connection to the broker.

        The response is recorded, but no client gets it.
        """
        self.context.log.record(request.event, Fate.RELEASED, "after its connection ended")
        try:
            reader, writer = await asyncio.open_connection(*self.upstream)
        except OSError as error:
            self.context.log.note(
                f"no broker at {self._node} for the late request: {error.strerror or error}"
            )
            return
        try:
            write_frame(writer, request.frame)
            await drain(writer)
            if request.expects_response:
                async with asyncio.timeout(LATE_SECONDS):
                    frame = await read_frame(reader)
                if frame is not None:
                    self._record_response(request, frame, Fate.UNEXPECTED)
        except TimeoutError:
            self.context.log.note("the late request had no answer")
        finally:
            writer.close()

    # --- responses: broker to proxy

    async def _read_from_broker(self) -> None:
        try:
            await self._read_responses()
        except PeerError as error:
            self.context.log.note(f"connection {self.number}: not a Kafka broker: {error}")
        self._has_broker_closed = True
        for request in self._open:
            if not request.response.done():
                request.response.set_result(None)
        self._order.put_nowait(None)

    async def _read_responses(self) -> None:
        while (frame := await read_frame(self._from_broker)) is not None:
            if not self._sent or correlation_of(frame) != self._sent[0].event.correlation_id:
                raise PeerError(f"correlation id {correlation_of(frame)} out of turn")
            self._on_response(self._sent.popleft(), frame)
            if self._is_over and not self._sent:
                return

    def _on_response(self, request: InFlightRequest, frame: bytes) -> None:
        if request.is_copy:
            self._record_response(request, frame, Fate.UNEXPECTED)
        elif self._is_over:
            self._record_lost(request, frame)
        else:
            self._mark_if_queued(request, frame)
            request.response.set_result(frame)

    def _mark_if_queued(self, request: InFlightRequest, frame: bytes) -> None:
        earlier = []
        for other in self._open:
            if other is request:
                break
            earlier.append(other)
        if any(other.is_dropped for other in earlier):
            # Do not queue the response: it cannot be delivered after a dropped one, and `_lose_responses`
            # records it as lost.
            return
        if earlier and (self._is_blocked or any(not other.response.done() for other in earlier)):
            self._queue(request, frame)

    def _queue(self, request: InFlightRequest, frame: bytes) -> None:
        request.is_queued = True
        self._record_response(request, frame, Fate.QUEUED)

    def _queue_responses_behind(self, head: InFlightRequest) -> None:
        """Record that the responses after `head` wait, because `head` is now held."""
        for request in self._open:
            frame = request.response.result() if request.response.done() else None
            if request is not head and frame is not None and not request.is_queued:
                self._queue(request, frame)

    def _record_response(self, request: InFlightRequest, frame: bytes, fate: Fate, detail: str = "") -> None:
        message = decode_known_response(request.header, frame)
        self.context.log.record(response_event(request.event, frame, message), fate, detail)

    def _record_lost(self, request: InFlightRequest, frame: bytes) -> None:
        self._record_response(request, frame, Fate.LOST, "waited for its turn" if request.is_queued else "")

    # --- responses: proxy to client

    async def _deliver(self) -> None:
        while (request := await self._order.get()) is not None:
            if request.is_dropped:
                return await self._lose_responses()
            frame = await request.response
            if frame is None or not await self._deliver_one(request, frame):
                return
            self._open.popleft()
            await drain(self._writer)

    async def _lose_responses(self) -> None:
        """Record all further responses as lost: after a dropped message, none can be delivered in order."""
        if self._open:
            self._open.popleft()
        while (request := await self._order.get()) is not None:
            if not request.is_dropped:
                frame = await request.response
                if frame is None:
                    return
                self._record_lost(request, frame)
            self._open.popleft()

    async def _deliver_one(self, request: InFlightRequest, frame: bytes) -> bool:
        """Apply the rules to a response. Return False if the connection must end."""
        frame, event = await self._rewrite(request, frame)
        fate = Fate.RELEASED if request.is_queued else Fate.PASSED
        if request.is_forged:
            return self._write(event, frame, Fate.FORGED)
        decision = self.context.book.decide(event)
        if decision.delay_ms:
            await asyncio.sleep(decision.delay_ms / 1000)
        rule = decision.rule
        if rule is None:
            return self._write(event, frame, fate)
        if rule.action is Action.FAIL:
            self.context.log.record(event, Fate.LOST, f"overwritten with {rule.error}")
            frame, event = forged_error(request.header, request.event, error_code_of(rule.error or ""))
            return self._write(event, frame, Fate.FORGED)
        if rule.action is Action.HOLD:
            return await self._hold_response(request, event, frame, rule)
        if rule.action is Action.CUT:
            self._open.popleft()
            self.context.log.record(event, Fate.CUT)
            return False
        self.context.log.record(event, Fate.DROPPED)
        await self._lose_responses()
        return False

    async def _hold_response(
        self, request: InFlightRequest, event: WireEvent, frame: bytes, rule: Rule
    ) -> bool:
        released: asyncio.Future[bool] = self._loop.create_future()

        def on_release(lose: bool) -> None:
            if not released.done():
                released.set_result(not lose)

        self.context.log.record(event, Fate.HELD)
        self._is_blocked = True
        self._queue_responses_behind(request)
        held = self._hold(event, rule, on_release)
        for _ in range(self._sent_counts[event.api] - request.send_number):
            # Requests that the proxy sent after this one have passed already.
            held.count_down(event.api)
        if await released:
            self._is_blocked = False
            return self._write(event, frame, Fate.RELEASED)
        self._open.popleft()
        self.context.log.record(event, Fate.CUT, "lost while held")
        return False

    def _write(self, event: WireEvent, frame: bytes, fate: Fate) -> bool:
        self.context.log.record(event, fate)
        write_frame(self._writer, frame)
        return True

    async def _rewrite(self, request: InFlightRequest, frame: bytes) -> tuple[bytes, WireEvent]:
        """Replace the brokers' addresses in a response with the proxy's, and lower versions in ApiVersions.

        Return the new frame and the response's event.
        """
        message = decode_known_response(request.header, frame)
        event = response_event(request.event, frame, message)
        if message is None:
            return frame, event
        parts = addresses_of(message)
        for part in parts:
            part.host, part.port = await self.context.address_for(part.host, part.port)
        is_clipped = event.api == "ApiVersions" and clip_versions(message)
        return (encode_response_frame(request.header, message) if parts or is_clipped else frame), event
