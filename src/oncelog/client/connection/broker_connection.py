"""One broker address and the connection to it: opened when first used, opened again after it ended.

Requests leave in the order of `submit`, also those that waited for the connection. When a request
times out the connection is closed, since the answers behind it could not be told apart any more.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, NamedTuple

from oncelog.client.connection.broker_protocol import LinkProtocol
from oncelog.client.connection.core import ConnectionCore
from oncelog.client.connection.security import PLAINTEXT, ClientSecurity, tls_failed
from oncelog.errors import (
    AuthenticationError,
    DisconnectedError,
    NotConnectedError,
    OncelogError,
    TimedOut,
)
from oncelog.runtime import system
from oncelog.settings import Settings

GOODBYE_SECONDS = 1.0
"""How long the end of a TLS connection may take."""


_CUT_WHILE_CONNECTED = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""What asyncio and uvloop raise for a connection that stood and ended; a refused one is another error."""


def _address_of(sockaddr: Any) -> str:
    """Return an address as text. One of a link means nothing without the interface, its scope id."""
    scope_id = sockaddr[3] if len(sockaddr) > 3 else 0
    return f"{sockaddr[0]}%{scope_id}" if scope_id else str(sockaddr[0])


class _Outgoing(NamedTuple):
    message: Any
    future: asyncio.Future[Any]
    deadline_ms: float
    timeout_ms: float
    min_version: int | None
    max_version: int | None
    answered: bool
    on_written: Callable[[], object] | None


class BrokerLink:
    """The requests to one address. Not thread safe: use it on its loop."""

    def __init__(
        self, host: str, port: int, settings: Settings, security: ClientSecurity = PLAINTEXT
    ) -> None:
        self.host, self.port = host, port
        self.peer = f"{host}:{port}"
        self.loop = asyncio.get_running_loop()
        self._runtime = system.current()
        self.latencies: deque[float] | None = None
        self._settings = settings
        self._security = security
        self._waiting: deque[_Outgoing] = deque()
        self._undrained: deque[_Outgoing] = deque()
        """Requests without an answer that the socket has not taken whole."""
        self._protocol: LinkProtocol | None = None
        self._features: dict[str, int] = {}
        self._connecting: asyncio.Task[None] | None = None
        self._failure_count = 0
        self._retry_at_ms = 0.0
        self._last_error = "not tried yet"
        self._last_used_ms = self.now_ms()
        self._heard_from_ms = 0.0
        self._timer: asyncio.TimerHandle | None = None
        # What looks at the newest connection later. A timer left open keeps a closed link, and its 64 KB.
        self._idle_timer: asyncio.TimerHandle | None = None
        self._login_timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0.0
        self._closed = False

    def now_ms(self) -> float:
        """Milliseconds of the monotonic clock; uvloop's own time stands still within a turn of the loop."""
        return self._runtime.monotonic_ns() / 1e6

    @property
    def is_connected(self) -> bool:
        return self._protocol is not None

    @property
    def features(self) -> dict[str, int]:
        """The cluster's features as told on the newest connection: a lost one does not turn them off."""
        return self._features

    @property
    def is_backing_off(self) -> bool:
        """Whether the last attempt failed and the next one is not due yet."""
        return self._retry_at_ms > self.now_ms()

    @property
    def in_flight_count(self) -> int:
        in_flight_count = self._protocol.core.in_flight_count if self._protocol else 0
        return len(self._waiting) + len(self._undrained) + in_flight_count

    def submit(
        self,
        message: Any,
        *,
        timeout_ms: float,
        min_version: int | None = None,
        max_version: int | None = None,
        answered: bool = True,
        on_written: Callable[[], object] | None = None,
    ) -> asyncio.Future[Any]:
        """Queue or write a request now; the future gives its answer.

        Of one that is not `answered` it gives None, as soon as the socket has taken it whole.
        `on_written` is called before its first byte leaves.
        """
        future: asyncio.Future[Any] = self.loop.create_future()
        if self._closed:
            future.set_exception(DisconnectedError(f"the client of {self.peer} is closed"))
            return future
        self._last_used_ms = now_ms = self.now_ms()
        # A broker that throttles reads on only then (KIP-219); so it gets up to twice the time.
        silent_ms = min(max(self._heard_from_ms - now_ms, 0), timeout_ms)
        deadline_ms = now_ms + silent_ms + timeout_ms
        out = _Outgoing(
            message, future, deadline_ms, timeout_ms, min_version, max_version, answered, on_written
        )
        if self._protocol is not None and self._protocol.core.is_ready:
            self._write(self._protocol, out)
        else:
            self._waiting.append(out)
            if self._protocol is None and self._connecting is None:
                self._connecting = self.loop.create_task(self._connect())
        self._arm(out.deadline_ms)
        return future

    def _write(self, protocol: LinkProtocol, out: _Outgoing) -> None:
        if out.future.done() or protocol.transport is None:
            return
        now_ms = self.now_ms()
        try:
            pieces = protocol.core.send(
                out.message,
                now_ms,
                token=out.future,
                timeout_ms=max(out.deadline_ms - now_ms, 0),
                min_version=out.min_version,
                max_version=out.max_version,
                answered=out.answered,
            )
        except (OncelogError, ValueError, TypeError, OverflowError) as error:
            out.future.set_exception(error)
            return
        if out.on_written is not None:
            out.on_written()
        if not out.answered:
            protocol.watch_writing()
        if len(pieces) == 1:
            protocol.transport.write(pieces[0])
        else:
            protocol.transport.writelines(pieces)
        if not out.answered:
            # A broker that reads slowly must hold its sender up: what is done leaves buffer.memory.
            self._undrained.append(out)
            if not protocol.is_writing_paused:
                self.on_drained()

    def on_drained(self) -> None:
        """Everything written so far is out."""
        done, self._undrained = self._undrained, deque()
        for out in done:
            if not out.future.done():
                out.future.set_result(None)

    def _fail_undrained(self, error: OncelogError) -> None:
        lost, self._undrained = self._undrained, deque()
        for out in lost:
            if not out.future.done():
                out.future.set_exception(error)

    def on_answer(self, future: asyncio.Future[Any], response: Any, latency_ms: float) -> None:
        if self.latencies is not None:
            self.latencies.append(latency_ms)
        throttle_time_ms = getattr(response, "throttle_time_ms", 0)
        if throttle_time_ms:
            self._heard_from_ms = max(self._heard_from_ms, self.now_ms() + throttle_time_ms)
        if not future.done():
            future.set_result(response)

    def on_lost(self, protocol: LinkProtocol, error: OncelogError) -> None:
        for future in protocol.core.abandon():
            if not future.done():
                future.set_exception(error)
        if self._protocol is protocol:
            self._protocol, self._heard_from_ms = None, 0.0
            self._stop_watching()
            self._note_failure(error)
            self._fail_undrained(error)
            if self._waiting and not self._closed:  # they came while it logged in again
                self._connecting = self.loop.create_task(self._connect())

    def _note_failure(self, error: BaseException) -> None:
        base, top = self._settings["reconnect.backoff.ms"], self._settings["reconnect.backoff.max.ms"]
        pause_ms = min(base * 2 ** min(self._failure_count, 20), max(top, base))
        self._failure_count += 1
        self._retry_at_ms = self.now_ms() + pause_ms * self._runtime.rng.uniform(0.8, 1.2)
        self._last_error = str(error)

    async def _connect(self) -> None:
        try:
            await asyncio.sleep(max(self._retry_at_ms - self.now_ms(), 0) / 1000)
            protocol = await self._open()
        except Exception as error:
            # A host name that cannot be one is a UnicodeError, a port a ValueError or OverflowError. Else the
            # link would never try again. See test_a_host_name_that_cannot_be_one_is_refused_at_once.
            self._connecting = None
            self._note_failure(error)
            self._fail_waiting(self._never_sent(error))
            return
        self._connecting, self._protocol, self._failure_count = None, protocol, 0
        self._features = protocol.core.features
        self.on_ready(protocol)
        self._watch_idle()

    def on_ready(self, protocol: LinkProtocol) -> None:
        """Requests may be written, for the first time or again; also note when to log in next."""
        while self._waiting:
            self._write(protocol, self._waiting.popleft())
        due_ms = protocol.core.login_due_ms
        if due_ms is not None:
            delay_s = max(due_ms - self.now_ms(), 0) / 1000
            self._login_timer = self.loop.call_later(delay_s, self._log_in_again, protocol)

    def _log_in_again(self, protocol: LinkProtocol) -> None:
        if self._protocol is not protocol or protocol.transport is None:
            return
        timeout_ms = self._settings["socket.connection.setup.timeout.ms"]
        try:
            protocol.transport.write(protocol.core.log_in_again(self.now_ms(), timeout_ms))
        except OncelogError as error:
            protocol.fail(DisconnectedError(str(error)))
        else:
            self._arm(self.now_ms() + timeout_ms)

    async def _open(self) -> LinkProtocol:
        """Connect and learn the broker's versions, both within socket.connection.setup.timeout.ms.

        An address that takes the connection and does not answer takes that time once more, as in Java.
        """
        setup_ms = self._settings["socket.connection.setup.timeout.ms"]
        until_s = self.loop.time() + setup_ms / 1000
        try:
            async with asyncio.timeout_at(until_s):
                *others, last = await self._addresses()
            share_s = setup_ms / 1000 / (len(others) + 1)
            for address in others:
                # One that drops packets, ends connections or is silent must not keep the next from being
                # tried, in each attempt. See
                # test_an_address_that_does_not_answer_keeps_no_other_of_its_host_from_being_tried.
                connected_s = None
                try:
                    protocol = await self._connect_to(address, min(self.loop.time() + share_s, until_s))
                    connected_s = self.loop.time()
                    return await self._greet(protocol, connected_s + setup_ms / 1000)
                except OSError as error:
                    # Another address does no better for one who was refused for who he is.
                    if isinstance(error, (ssl.SSLError, AuthenticationError)):
                        raise
                if connected_s is not None:
                    until_s += self.loop.time() - connected_s
            return await self._greet(await self._connect_to(last, until_s), until_s)
        except TimeoutError:
            raise DisconnectedError(
                f"{self.peer} did not finish connecting within socket.connection.setup.timeout.ms="
                f"{setup_ms}; check the address, that a Kafka broker listens there, and that "
                f"security.protocol={self._settings['security.protocol']} is what it speaks"
            ) from None

    async def _addresses(self) -> list[str]:
        """Return the addresses of the host, in the order in which they are to be tried."""
        try:
            ip_address(self.host)
        except ValueError:
            found = await self.loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(_address_of(sockaddr) for *_, sockaddr in found)) or [self.host]
        return [self.host]

    async def _connect_to(self, address: str, until_s: float) -> LinkProtocol:
        """Connect to one address, with TLS if that is configured."""
        core = ConnectionCore(self._settings["client.id"], self.peer, credentials=self._security.credentials)
        protocol = LinkProtocol(self, core)
        context = self._security.context
        name = self.host if context is not None else None
        try:
            async with asyncio.timeout_at(until_s):
                await self.loop.create_connection(
                    lambda: protocol, address, self.port, ssl=context, server_hostname=name
                )
        except BaseException:
            protocol.fail(DisconnectedError("abandoned"))
            raise
        return protocol

    async def _greet(self, protocol: LinkProtocol, until_s: float) -> LinkProtocol:
        """Learn the broker's versions, and log in if that is configured."""
        try:
            assert protocol.transport is not None
            setup_ms = self._settings["socket.connection.setup.timeout.ms"]
            protocol.transport.write(protocol.core.hello(self.now_ms(), setup_ms))
            async with asyncio.timeout_at(until_s):
                await asyncio.shield(protocol.ready)
            if protocol.failure:
                raise protocol.failure
        except BaseException:
            protocol.fail(DisconnectedError("abandoned"))
            raise
        return protocol

    def _never_sent(self, error: Exception) -> OncelogError:
        """What requests are told that waited for a connection which did not come about."""
        if isinstance(error, NotConnectedError):
            return error
        if isinstance(error, ssl.SSLError):
            return tls_failed(self.peer, error)
        if isinstance(error, DisconnectedError):
            return NotConnectedError(str(error))
        if isinstance(error, OncelogError):
            return error
        if self._security.context is not None and isinstance(error, _CUT_WHILE_CONNECTED):
            return NotConnectedError(
                f"{self.peer} ended the connection during the TLS handshake; check that it speaks TLS there: "
                f"security.protocol={self._settings['security.protocol']} needs a listener of that protocol, "
                "a PLAINTEXT one ends the connection so"
            )
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number and number > 0 else str(error)
        reason = reason or type(error).__name__
        return NotConnectedError(
            f"cannot connect to {self.peer}: {reason}; check that the broker runs and bootstrap.servers"
        )

    def _fail_waiting(self, error: OncelogError) -> None:
        waiting, self._waiting = self._waiting, deque()
        for out in waiting:
            if not out.future.done():
                out.future.set_exception(error)

    def _arm(self, deadline_ms: float) -> None:
        if self._timer is not None:
            if self._timer_ms <= deadline_ms:
                return
            self._timer.cancel()
        self._timer_ms = deadline_ms
        delay_ms = max(deadline_ms - self.now_ms(), 0)
        self._timer = self.loop.call_later(delay_ms / 1000, self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._timer = None
        now_ms = self.now_ms()
        deadlines = [out.deadline_ms for out in (*self._waiting, *self._undrained)]
        self._expire_waiting(now_ms)
        if self._protocol is not None:
            self._expire_in_flight(self._protocol, now_ms)
        if self._protocol is not None:  # a late answer has just ended it
            deadlines.append(self._protocol.core.next_deadline_ms() or 0)
        later = [deadline_ms for deadline_ms in deadlines if deadline_ms > now_ms]
        if later:
            self._arm(min(later))

    def _expire_waiting(self, now_ms: float) -> None:
        for out in self._waiting:
            if out.deadline_ms <= now_ms and not out.future.done():
                out.future.set_exception(
                    TimedOut(f"no connection to {self.peer} in {out.timeout_ms:g} ms: {self._last_error}")
                )
        self._waiting = deque(out for out in self._waiting if not out.future.done())

    def _expire_in_flight(self, protocol: LinkProtocol, now_ms: float) -> None:
        late = protocol.core.expired(now_ms)
        for future in late:
            if future is not None and not future.done():
                what = protocol.core.describe(future)
                future.set_exception(
                    TimedOut(
                        f"{self.peer} did not answer {what} in its time (request.timeout.ms); "
                        "whether it was carried out is unknown"
                    )
                )
        if late or any(out.deadline_ms <= now_ms for out in self._undrained):
            protocol.fail(
                DisconnectedError(
                    f"connection to {self.peer} given up after a request in front went unanswered; "
                    "whether this one was carried out is unknown"
                )
            )

    def _watch_idle(self) -> None:
        """Close a connection unused for connections.max.idle.ms (-1: never), looking once per period."""
        limit_ms = self._settings["connections.max.idle.ms"]
        protocol = self._protocol
        if limit_ms < 0 or protocol is None or self._closed:
            return
        idle_ms = self.now_ms() - self._last_used_ms
        if idle_ms >= limit_ms and self.in_flight_count == 0 and protocol.transport:
            self._protocol = None
            self._stop_watching()
            protocol.transport.close()
            return
        delay_s = max(limit_ms - idle_ms, 1000) / 1000
        self._idle_timer = self.loop.call_later(delay_s, self._watch_idle_of, protocol)

    def _stop_watching(self) -> None:
        for timer in (self._idle_timer, self._login_timer):
            if timer is not None:
                timer.cancel()
        self._idle_timer = self._login_timer = None

    def _watch_idle_of(self, protocol: LinkProtocol) -> None:
        if self._protocol is protocol:
            self._watch_idle()

    async def _until_lost(self, protocol: LinkProtocol) -> None:
        """TLS says goodbye and waits for the answer; the loop must not end meanwhile."""
        if self._security.context is None or protocol.transport is None:
            return
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await protocol.is_lost.wait()
        except TimeoutError:
            protocol.transport.abort()
            await asyncio.sleep(0)

    async def close(self) -> None:
        """End the connection; whatever is unanswered fails with DisconnectedError."""
        self._closed = True
        self._stop_watching()
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._connecting:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
            self._connecting = None
        error = DisconnectedError(f"the client of {self.peer} was closed")
        self._fail_waiting(error)
        self._fail_undrained(error)
        protocol, self._protocol = self._protocol, None
        if protocol:
            for future in protocol.core.abandon():
                if not future.done():
                    future.set_exception(error)
            if protocol.transport:
                protocol.transport.close()
                await self._until_lost(protocol)
