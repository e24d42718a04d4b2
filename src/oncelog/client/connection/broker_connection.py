"""The connection to one broker address.

The first request opens the connection, and the next request after a loss opens it again. Requests are written
in the order of `submit`, including requests that waited for the connection. A request that times out closes
the connection, because its late response would be matched with the next request: responses come in the order
of requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from oncelog.client.connection.broker_protocol import BrokerProtocol
from oncelog.client.connection.connector import Connector, ReconnectBackoff
from oncelog.client.connection.security import PLAINTEXT, ClientSecurity
from oncelog.errors import DisconnectedError, OncelogError, TimedOut
from oncelog.runtime import system
from oncelog.settings import Settings

TLS_SHUTDOWN_SECONDS = 1.0
"""Longest wait for the broker's TLS close_notify after this client has closed a connection."""


class _Outgoing(NamedTuple):
    """A request that is not written yet, or whose last byte the socket has not accepted yet."""

    message: Any
    future: asyncio.Future[Any]
    deadline_ms: float
    timeout_ms: float
    min_version: int | None
    max_version: int | None
    expects_response: bool
    on_written: Callable[[], object] | None


class BrokerConnection:
    """A connection to one broker address. Not thread safe: use it only on the event loop that created it."""

    def __init__(
        self, host: str, port: int, settings: Settings, security: ClientSecurity = PLAINTEXT
    ) -> None:
        self.peer = f"{host}:{port}"
        self.loop = asyncio.get_running_loop()
        self.latencies: deque[float] | None = None
        """If a caller sets this deque, the latency of each response in milliseconds is appended to it."""
        self._runtime = system.current()
        self._settings, self._security = settings, security
        self._connector = Connector(host, port, settings, security)
        self._backoff = ReconnectBackoff(settings, self._runtime)
        self._waiting: deque[_Outgoing] = deque()
        """Requests that are not written yet because the connection is not ready, oldest first."""
        self._undrained: deque[_Outgoing] = deque()
        """Written requests that expect no response (acks=0) and whose last byte the socket has not accepted
        yet.
        """
        self._protocol: BrokerProtocol | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._features: dict[str, int] = {}
        self._last_used_ms = self.now_ms()
        self._muted_until_ms = 0.0
        """The broker throttles this client until this monotonic time in milliseconds."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer for the earliest deadline of all requests (`_timer_ms`); None if there are no requests."""
        self._timer_ms = 0.0
        # Timers of the current connection. They are cancelled when the connection is lost, because a timer
        # would keep the connection and its receive buffer of 64 KB in memory.
        self._idle_timer: asyncio.TimerHandle | None = None
        self._reauthentication_timer: asyncio.TimerHandle | None = None
        self._closed = False

    def now_ms(self) -> float:
        """Return the monotonic time in milliseconds.

        This is not the event loop's time, because uvloop does not advance its time within one iteration of
        the loop.
        """
        return self._runtime.monotonic_ns() / 1e6

    @property
    def is_connected(self) -> bool:
        return self._protocol is not None

    @property
    def features(self) -> dict[str, int]:
        """The cluster's feature levels, as the broker reported them to the newest connection.

        The levels stay available after the connection is lost.
        """
        return self._features

    @property
    def is_backing_off(self) -> bool:
        """True if the latest attempt failed or the connection was lost, and the next attempt is not due."""
        return self._backoff.retry_at_ms > self.now_ms()

    @property
    def in_flight_count(self) -> int:
        in_flight_count = self._protocol.core.in_flight_count if self._protocol else 0
        return len(self._waiting) + len(self._undrained) + in_flight_count

    # --- requests

    def submit(
        self,
        message: Any,
        *,
        timeout_ms: float,
        min_version: int | None = None,
        max_version: int | None = None,
        expects_response: bool = True,
        on_written: Callable[[], object] | None = None,
    ) -> asyncio.Future[Any]:
        """Write a request, or queue it until the connection is ready. The future completes with the response.

        If no response is expected, the future completes with None when the socket has accepted the last byte.
        `on_written` is called just before the first byte is written. The future fails with DisconnectedError,
        NotConnectedError (not sent), TimedOut, UnsupportedVersion or AuthenticationError.
        """
        future: asyncio.Future[Any] = self.loop.create_future()
        if self._closed:
            future.set_exception(DisconnectedError(f"the client of {self.peer} is closed"))
            return future
        self._last_used_ms = now_ms = self.now_ms()
        # A broker does not read from a throttled client until the throttle time is over (KIP-219). So the
        # request's deadline is extended by the remaining throttle time, by at most `timeout_ms`.
        muted_ms = min(max(self._muted_until_ms - now_ms, 0), timeout_ms)
        deadline_ms = now_ms + muted_ms + timeout_ms
        request = _Outgoing(
            message, future, deadline_ms, timeout_ms, min_version, max_version, expects_response, on_written
        )
        if self._protocol is not None and self._protocol.core.is_ready:
            self._write(self._protocol, request)
        else:
            self._waiting.append(request)
            if self._protocol is None and self._connecting is None:
                self._connecting = self.loop.create_task(self._connect())
        self._set_timer(request.deadline_ms)
        return future

    def _write(self, protocol: BrokerProtocol, request: _Outgoing) -> None:
        if request.future.done() or protocol.transport is None:
            return
        now_ms = self.now_ms()
        try:
            pieces = protocol.core.send(
                request.message,
                now_ms,
                token=request.future,
                timeout_ms=max(request.deadline_ms - now_ms, 0),
                min_version=request.min_version,
                max_version=request.max_version,
                expects_response=request.expects_response,
            )
        except (OncelogError, ValueError, TypeError, OverflowError) as error:
            request.future.set_exception(error)
            return
        if request.on_written is not None:
            request.on_written()
        if not request.expects_response:
            protocol.watch_writing()
        if len(pieces) == 1:
            protocol.transport.write(pieces[0])
        else:
            protocol.transport.writelines(pieces)
        if not request.expects_response:
            # A completed request frees its part of buffer.memory. So a request without a response completes
            # only when the socket has accepted it: a broker that reads slowly must slow its producer down.
            self._undrained.append(request)
            if not protocol.is_writing_paused:
                self.on_drained()

    # --- events of the protocol

    def on_drained(self) -> None:
        """Complete the written requests that expect no response, now that the socket has accepted every
        byte.
        """
        drained, self._undrained = self._undrained, deque()
        for request in drained:
            if not request.future.done():
                request.future.set_result(None)

    def on_response(self, future: asyncio.Future[Any], response: Any, latency_ms: float) -> None:
        """Complete a request's future with its response. Also record the latency and the broker's throttle
        time.
        """
        if self.latencies is not None:
            self.latencies.append(latency_ms)
        throttle_time_ms = getattr(response, "throttle_time_ms", 0)
        if throttle_time_ms:
            self._muted_until_ms = max(self._muted_until_ms, self.now_ms() + throttle_time_ms)
        if not future.done():
            future.set_result(response)

    def on_lost(self, protocol: BrokerProtocol, error: OncelogError) -> None:
        """Fail the requests in flight. Connect again if other requests wait to be written."""
        for future in protocol.core.abandon():
            if not future.done():
                future.set_exception(error)
        if self._protocol is protocol:
            self._protocol, self._muted_until_ms = None, 0.0
            self._cancel_connection_timers()
            self._backoff.note_failure(error, self.now_ms())
            _fail_all(self._undrained, error)
            # Connect again for the requests that were submitted during re-authentication.
            if self._waiting and not self._closed:
                self._connecting = self.loop.create_task(self._connect())

    def on_ready(self, protocol: BrokerProtocol) -> None:
        """Write the requests that waited for authentication, and schedule the next re-authentication."""
        while self._waiting:
            self._write(protocol, self._waiting.popleft())
        due_ms = protocol.core.reauthentication_due_ms
        if due_ms is not None:
            delay_s = max(due_ms - self.now_ms(), 0) / 1000
            self._reauthentication_timer = self.loop.call_later(delay_s, self._reauthenticate, protocol)

    # --- opening

    async def _connect(self) -> None:
        try:
            await asyncio.sleep(max(self._backoff.retry_at_ms - self.now_ms(), 0) / 1000)
            protocol = await self._connector.connect(self)
        except Exception as error:
            # Catch every Exception: an invalid host name is a UnicodeError, an invalid port a ValueError or
            # OverflowError. If an exception escaped, `_connecting` would stay set, and no further attempt
            # would be made. See test_an_invalid_host_name_is_refused_at_once.
            self._connecting = None
            self._backoff.note_failure(error, self.now_ms())
            _fail_all(self._waiting, self._connector.explain(error))
            return
        self._connecting, self._protocol = None, protocol
        self._backoff.note_success()
        self._features = protocol.core.features
        self.on_ready(protocol)
        self._check_idle(protocol)

    def _reauthenticate(self, protocol: BrokerProtocol) -> None:
        """Authenticate again before the session expires (KIP-368)."""
        if self._protocol is not protocol or protocol.transport is None:
            return
        timeout_ms = self._settings["socket.connection.setup.timeout.ms"]
        try:
            protocol.transport.write(protocol.core.reauthenticate(self.now_ms(), timeout_ms))
        except OncelogError as error:
            protocol.fail(DisconnectedError(str(error)))
        else:
            self._set_timer(self.now_ms() + timeout_ms)

    # --- timeouts

    def _set_timer(self, deadline_ms: float) -> None:
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
        deadlines = [request.deadline_ms for request in (*self._waiting, *self._undrained)]
        self._expire_waiting(now_ms)
        if self._protocol is not None:
            self._expire_in_flight(self._protocol, now_ms)
        if self._protocol is not None:  # `_expire_in_flight` may have closed the connection
            deadlines.append(self._protocol.core.next_deadline_ms() or 0)
        later = [deadline_ms for deadline_ms in deadlines if deadline_ms > now_ms]
        if later:
            self._set_timer(min(later))

    def _expire_waiting(self, now_ms: float) -> None:
        for request in self._waiting:
            if request.deadline_ms <= now_ms and not request.future.done():
                request.future.set_exception(
                    TimedOut(
                        f"no connection to {self.peer} within {request.timeout_ms} ms: "
                        f"{self._backoff.last_error}"
                    )
                )
        self._waiting = deque(request for request in self._waiting if not request.future.done())

    def _expire_in_flight(self, protocol: BrokerProtocol, now_ms: float) -> None:
        expired = protocol.core.expired(now_ms)
        for future in expired:
            if future is not None and not future.done():
                api_name = protocol.core.describe(future)
                future.set_exception(
                    TimedOut(
                        f"{self.peer} did not respond to {api_name} within "
                        "request.timeout.ms; the broker may have carried out the request"
                    )
                )
        if expired or any(request.deadline_ms <= now_ms for request in self._undrained):
            protocol.fail(
                DisconnectedError(
                    f"connection to {self.peer} closed because an earlier request timed out; "
                    "the broker may have carried out this request too"
                )
            )

    def _check_idle(self, protocol: BrokerProtocol) -> None:
        """Close the connection if it was unused for connections.max.idle.ms (-1: never).

        Otherwise check again later.
        """
        limit_ms = self._settings["connections.max.idle.ms"]
        if limit_ms < 0 or self._protocol is not protocol or self._closed:
            return
        idle_ms = self.now_ms() - self._last_used_ms
        if idle_ms >= limit_ms and self.in_flight_count == 0 and protocol.transport:
            self._protocol = None
            self._cancel_connection_timers()
            protocol.transport.close()
            return
        delay_s = max(limit_ms - idle_ms, 1000) / 1000
        self._idle_timer = self.loop.call_later(delay_s, self._check_idle, protocol)

    def _cancel_connection_timers(self) -> None:
        for timer in (self._idle_timer, self._reauthentication_timer):
            if timer is not None:
                timer.cancel()
        self._idle_timer = self._reauthentication_timer = None

    # --- closing

    async def close(self) -> None:
        """Close the connection. With TLS, wait for the broker's close_notify. Unfinished requests fail with
        DisconnectedError.
        """
        self._closed = True
        self._cancel_connection_timers()
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._connecting:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
            self._connecting = None
        error = DisconnectedError(f"the client of {self.peer} was closed")
        _fail_all(self._waiting, error)
        _fail_all(self._undrained, error)
        protocol, self._protocol = self._protocol, None
        if protocol:
            for future in protocol.core.abandon():
                if not future.done():
                    future.set_exception(error)
            if protocol.transport:
                protocol.transport.close()
                await self._shut_down_tls(protocol)

    async def _shut_down_tls(self, protocol: BrokerProtocol) -> None:
        """Wait for the broker's close_notify, so that the event loop does not end before the TLS shutdown is
        complete.
        """
        if self._security.context is None or protocol.transport is None:
            return
        try:
            async with asyncio.timeout(TLS_SHUTDOWN_SECONDS):
                await protocol.is_lost.wait()
        except TimeoutError:
            protocol.transport.abort()
            await asyncio.sleep(0)


def _fail_all(requests: deque[_Outgoing], error: OncelogError) -> None:
    """Empty a queue and fail its requests with `error`."""
    while requests:
        request = requests.popleft()
        if not request.future.done():
            request.future.set_exception(error)
