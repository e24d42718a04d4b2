"""One client connection through the proxy: three pumps and what the rules make of the messages.

    client --requests--> [rules] --> broker          _take_requests
    broker --answers--> by order of sending          _take_answers
    client <--answers-- [rules] in request order     _deliver

Clients match answers to requests by order and close the connection on any other correlation id
(the Java client and librdkafka alike), so an answer that may not be delivered yet, or never, holds
back all later ones. A connection that ends lets the broker finish what was already sent to it, so
that "acknowledgement lost" always means: stored, and not told.
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
    encode_answer,
    forged_error,
    read_answer,
    request_event,
    response_event,
)
from oncelog.testing.proxy.events import Fate, WireEvent
from oncelog.testing.proxy.in_flight import (
    Address,
    Exchange,
    Held,
    Hub,
    Streams,
    drain,
    read_frame,
    write_frame,
)
from oncelog.testing.proxy.rules import Action, Rule, error_code_of

DRAIN_SECONDS = 1.0
"""How long a broker may take to answer what it was sent before its connection is closed."""

LATE_SECONDS = 10.0


class Relay:
    """A client connection and its connection to one broker."""

    def __init__(self, hub: Hub, number: int, upstream: Address, client: Streams, broker: Streams) -> None:
        self.hub = hub
        self.number = number
        self.upstream = upstream
        self._reader, self._writer = client
        self._from_broker, self._to_broker = broker
        self._loop = asyncio.get_running_loop()
        self._open: deque[Exchange] = deque()  # in the client's order, not yet delivered
        self._order: asyncio.Queue[Exchange | None] = asyncio.Queue()
        self._sent: deque[Exchange] = deque()  # in the broker's order, not yet answered
        self._held: list[Held] = []
        self._cut = asyncio.Event()
        self._sent_count: dict[str, int] = {}  # requests given to the broker, by API
        self._is_over = False
        self._is_broker_gone = False
        self._is_blocked = False  # the answer whose turn it is, is held

    async def run(self) -> None:
        """Carry messages until either side ends or a rule cuts, then close both connections."""
        try:
            await self._pump()
        finally:
            self._writer.close()
            self._to_broker.close()
        await self._wait_closed()

    async def _pump(self) -> None:
        answers = asyncio.create_task(self._take_answers())
        pumps = (self._take_requests(), self._deliver(), self._wait_for_cut())
        enders: list[asyncio.Task[None]] = [asyncio.create_task(pump) for pump in pumps]
        try:
            await asyncio.wait(enders, return_when=asyncio.FIRST_COMPLETED)
            self._end(enders)
            if self._sent and not self._is_broker_gone:
                await drain(self._to_broker)
                await asyncio.wait([answers], timeout=DRAIN_SECONDS)
        finally:
            for task in (answers, *enders):
                task.cancel()
            await asyncio.gather(answers, *enders, return_exceptions=True)

    async def abort(self) -> None:
        """Throw both connections away, with what is not written yet."""
        self._writer.transport.abort()
        self._to_broker.transport.abort()
        await self._wait_closed()

    async def _wait_closed(self) -> None:
        closing = (self._writer.wait_closed(), self._to_broker.wait_closed())
        await asyncio.gather(*closing, return_exceptions=True)

    def cut(self) -> None:
        """End the client's connection now."""
        self._cut.set()

    @property
    def _node(self) -> str:
        return f"{self.upstream[0]}:{self.upstream[1]}"

    async def _wait_for_cut(self) -> None:
        await self._cut.wait()

    def _end(self, enders: list[asyncio.Task[None]]) -> None:
        """From here on nothing goes to the client, and nothing more comes from it."""
        self._is_over = True
        if self._reader.at_eof():
            self._writer.close()
        for exchange in self._open:
            frame = exchange.answer.result() if exchange.answer.done() else None
            if frame is not None:
                self._record_lost(exchange, frame)
        for task in enders:
            task.cancel()

    # Requests: client to broker.

    async def _take_requests(self) -> None:
        try:
            await self._read_requests()
        except PeerError as error:
            self.hub.log.note(f"connection {self.number}: not a Kafka client: {error}")

    async def _read_requests(self) -> None:
        while (frame := await read_frame(self._reader)) is not None:
            header, event = request_event(frame, self.number, self._node)
            exchange = Exchange(header, frame, event, self._loop.create_future())
            decision = self.hub.book.decide(event)
            if decision.delay_ms:
                await asyncio.sleep(decision.delay_ms / 1000)
            if not self._carry(exchange, decision.rule):
                return
            await drain(self._to_broker)

    def _carry(self, exchange: Exchange, rule: Rule | None) -> bool:
        """Do with a request what the rule says; False ends the connection."""
        action = rule.action if rule else None
        if action is Action.CUT:
            self.hub.log.record(exchange.event, Fate.CUT)
            return False
        exchange.is_dropped = action is Action.DROP
        if exchange.expects_answer:
            self._open.append(exchange)
            self._order.put_nowait(exchange)
        if action is Action.DROP:
            self.hub.log.record(exchange.event, Fate.DROPPED)
        elif action is Action.HOLD and rule:
            self.hub.log.record(exchange.event, Fate.HELD)
            self._hold_request(exchange, rule)
        elif action is Action.FAIL and rule:
            self._refuse(exchange, rule)
        else:
            self._send(exchange, Fate.PASSED)
            if action is Action.DUPLICATE and rule:
                self._send_copy(exchange, rule)
        return True

    def _refuse(self, exchange: Exchange, rule: Rule) -> None:
        code = error_code_of(rule.error or "")
        self.hub.log.record(exchange.event, Fate.FORGED, f"answered {rule.error} by the proxy")
        frame, _ = forged_error(exchange.header, exchange.event, code)
        exchange.is_forged = True
        exchange.answer.set_result(frame)

    def _send_copy(self, exchange: Exchange, rule: Rule) -> None:
        copy = Exchange(
            exchange.header, exchange.frame, exchange.event, self._loop.create_future(), is_copy=True
        )
        if rule.delay_ms or rule.release_after:
            self.hub.log.record(copy.event, Fate.HELD, "a copy")
            self._hold_request(copy, rule)
        else:
            self._send(copy, Fate.COPY)

    def _send(self, exchange: Exchange, fate: Fate) -> None:
        """Give a request to the broker; held ones that waited for this follow at once."""
        self.hub.log.record(exchange.event, fate, "a copy" if exchange.is_copy else "")
        if self._is_broker_gone:
            exchange.answer.set_result(None)
            return
        if exchange.expects_answer:
            self._sent.append(exchange)
        write_frame(self._to_broker, exchange.frame)
        api = exchange.event.api
        self._sent_count[api] = exchange.turn = self._sent_count.get(api, 0) + 1
        for held in tuple(self._held):
            held.count_down(api)
        self._held = [held for held in self._held if not held.is_done]

    def _hold(self, event: WireEvent, rule: Rule, on_release: Callable[[bool], None]) -> Held:
        held = Held(event.api, rule.release_after, on_release)
        if rule.delay_ms:
            held.timer = self._loop.call_later(rule.delay_ms / 1000, held.release)
        self._held.append(held)
        self.hub.held[:] = [*(each for each in self.hub.held if not each.is_done), held]
        return held

    def _hold_request(self, exchange: Exchange, rule: Rule) -> None:
        def let_go(lose: bool) -> None:
            if lose:
                self.hub.log.record(exchange.event, Fate.LOST, "lost while held")
            elif self._is_over or self._is_broker_gone:
                self.hub.spawn(self._arrive_late(exchange))
            else:
                self._send(exchange, Fate.RELEASED)

        self._hold(exchange.event, rule, let_go)

    async def _arrive_late(self, exchange: Exchange) -> None:
        """Bring a request to the broker that its client has long given up: nobody reads the answer."""
        self.hub.log.record(exchange.event, Fate.RELEASED, "after its connection ended")
        try:
            reader, writer = await asyncio.open_connection(*self.upstream)
        except OSError as error:
            self.hub.log.note(f"no broker at {self._node} for the late request: {error.strerror or error}")
            return
        try:
            write_frame(writer, exchange.frame)
            await drain(writer)
            if exchange.expects_answer:
                async with asyncio.timeout(LATE_SECONDS):
                    frame = await read_frame(reader)
                if frame is not None:
                    self._record_answer(exchange, frame, Fate.SWALLOWED)
        except TimeoutError:
            self.hub.log.note("the late request had no answer")
        finally:
            writer.close()

    # Answers: broker to proxy.

    async def _take_answers(self) -> None:
        try:
            await self._read_answers()
        except PeerError as error:
            self.hub.log.note(f"connection {self.number}: not a Kafka broker: {error}")
        self._is_broker_gone = True
        for exchange in self._open:
            if not exchange.answer.done():
                exchange.answer.set_result(None)
        self._order.put_nowait(None)

    async def _read_answers(self) -> None:
        while (frame := await read_frame(self._from_broker)) is not None:
            if not self._sent or correlation_of(frame) != self._sent[0].event.correlation_id:
                raise PeerError(f"correlation id {correlation_of(frame)} out of turn")
            self._on_answer(self._sent.popleft(), frame)
            if self._is_over and not self._sent:
                return

    def _on_answer(self, exchange: Exchange, frame: bytes) -> None:
        if exchange.is_copy:
            self._record_answer(exchange, frame, Fate.SWALLOWED)
        elif self._is_over:
            self._record_lost(exchange, frame)
        else:
            self._mark_if_queued(exchange, frame)
            exchange.answer.set_result(frame)

    def _mark_if_queued(self, exchange: Exchange, frame: bytes) -> None:
        earlier = []
        for other in self._open:
            if other is exchange:
                break
            earlier.append(other)
        if any(other.is_dropped for other in earlier):
            return  # it will be lost, which is told when it is
        if earlier and (self._is_blocked or any(not other.answer.done() for other in earlier)):
            self._queue(exchange, frame)

    def _queue(self, exchange: Exchange, frame: bytes) -> None:
        exchange.is_queued = True
        self._record_answer(exchange, frame, Fate.QUEUED)

    def _queue_answers_behind(self, head: Exchange) -> None:
        """Answers that came together with one that is now held wait from now on."""
        for exchange in self._open:
            frame = exchange.answer.result() if exchange.answer.done() else None
            if exchange is not head and frame is not None and not exchange.is_queued:
                self._queue(exchange, frame)

    def _record_answer(self, exchange: Exchange, frame: bytes, fate: Fate, detail: str = "") -> None:
        message = read_answer(exchange.header, frame)
        self.hub.log.record(response_event(exchange.event, frame, message), fate, detail)

    def _record_lost(self, exchange: Exchange, frame: bytes) -> None:
        self._record_answer(exchange, frame, Fate.LOST, "waited for its turn" if exchange.is_queued else "")

    # Answers: proxy to client.

    async def _deliver(self) -> None:
        while (exchange := await self._order.get()) is not None:
            if exchange.is_dropped:
                return await self._stay_silent()
            frame = await exchange.answer
            if frame is None or not await self._hand_over(exchange, frame):
                return
            self._open.popleft()
            await drain(self._writer)

    async def _stay_silent(self) -> None:
        """Behind a dropped message nothing can be delivered: take the answers and lose them."""
        if self._open:
            self._open.popleft()
        while (exchange := await self._order.get()) is not None:
            if not exchange.is_dropped:
                frame = await exchange.answer
                if frame is None:
                    return
                self._record_lost(exchange, frame)
            self._open.popleft()

    async def _hand_over(self, exchange: Exchange, frame: bytes) -> bool:
        """Do with an answer what the rules say; False ends the connection."""
        frame, event = await self._rewrite(exchange, frame)
        fate = Fate.RELEASED if exchange.is_queued else Fate.PASSED
        if exchange.is_forged:
            return self._write(event, frame, Fate.FORGED)
        decision = self.hub.book.decide(event)
        if decision.delay_ms:
            await asyncio.sleep(decision.delay_ms / 1000)
        rule = decision.rule
        if rule is None:
            return self._write(event, frame, fate)
        if rule.action is Action.FAIL:
            self.hub.log.record(event, Fate.LOST, f"overwritten with {rule.error}")
            frame, event = forged_error(exchange.header, exchange.event, error_code_of(rule.error or ""))
            return self._write(event, frame, Fate.FORGED)
        if rule.action is Action.HOLD:
            return await self._hold_answer(exchange, event, frame, rule)
        if rule.action is Action.CUT:
            self._open.popleft()
            self.hub.log.record(event, Fate.CUT)
            return False
        self.hub.log.record(event, Fate.DROPPED)
        await self._stay_silent()
        return False

    async def _hold_answer(self, exchange: Exchange, event: WireEvent, frame: bytes, rule: Rule) -> bool:
        released: asyncio.Future[bool] = self._loop.create_future()

        def let_go(lose: bool) -> None:
            if not released.done():
                released.set_result(not lose)

        self.hub.log.record(event, Fate.HELD)
        self._is_blocked = True
        self._queue_answers_behind(exchange)
        held = self._hold(event, rule, let_go)
        for _ in range(self._sent_count[event.api] - exchange.turn):
            held.count_down(event.api)  # later requests that went by before this answer came
        if await released:
            self._is_blocked = False
            return self._write(event, frame, Fate.RELEASED)
        self._open.popleft()
        self.hub.log.record(event, Fate.CUT, "lost while held")
        return False

    def _write(self, event: WireEvent, frame: bytes, fate: Fate) -> bool:
        self.hub.log.record(event, fate)
        write_frame(self._writer, frame)
        return True

    async def _rewrite(self, exchange: Exchange, frame: bytes) -> tuple[bytes, WireEvent]:
        """The answer with the brokers' addresses turned into the proxy's, and its event."""
        message = read_answer(exchange.header, frame)
        event = response_event(exchange.event, frame, message)
        if message is None:
            return frame, event
        parts = addresses_of(message)
        for part in parts:
            part.host, part.port = await self.hub.address_for(part.host, part.port)
        is_clipped = event.api == "ApiVersions" and clip_versions(message)
        return (encode_answer(exchange.header, message) if parts or is_clipped else frame), event
