"""The asyncio protocol of one TCP connection to a broker.

It passes bytes between the transport and a ConnectionCore.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Protocol, cast

from oncelog.client.connection.core import ConnectionCore
from oncelog.client.connection.security import tls_failed
from oncelog.errors import AuthenticationError, DisconnectedError, OncelogError

_RECEIVE_BYTES = 65_536
"""Size of the receive buffer.

If at least this many bytes of a response are still missing, they are received directly into that response's
own buffer.
"""


class ProtocolEvents(Protocol):
    """The events that a BrokerProtocol reports, and the loop and clock that it uses."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def now_ms(self) -> float: ...

    def on_response(self, future: asyncio.Future[Any], response: Any, latency_ms: float) -> None:
        """Complete a request's future with its response. `latency_ms` is the time since the request was
        sent.
        """
        ...

    def on_drained(self) -> None:
        """React to the fact that the socket has accepted all written bytes."""
        ...

    def on_ready(self, protocol: BrokerProtocol) -> None:
        """Write the requests that waited for the end of re-authentication."""
        ...

    def on_lost(self, protocol: BrokerProtocol, error: OncelogError) -> None:
        """Fail the requests in flight. May be called twice for one connection."""
        ...


class BrokerProtocol(asyncio.BufferedProtocol):
    """One TCP connection to a broker, while it is opened, used and closed."""

    def __init__(self, events: ProtocolEvents, core: ConnectionCore) -> None:
        self.core = core
        self.ready: asyncio.Future[None] = events.loop.create_future()
        """Completes when requests may be sent for the first time.

        Fails with the error if the connection is not established.
        """
        self.transport: asyncio.Transport | None = None
        self.failure: OncelogError | None = None
        """The error that made this client close the connection; None if the client has not closed it."""
        self.is_lost = asyncio.Event()
        self.is_writing_paused = False
        self._events = events
        self._received = memoryview(bytearray(_RECEIVE_BYTES))
        self._is_receiving_large = self._watches_writing = False
        self._has_response = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def watch_writing(self) -> None:
        """Make asyncio call `pause_writing` as soon as a write leaves bytes that the socket has not
        accepted.
        """
        if self.transport is not None and not self._watches_writing:
            self._watches_writing = True
            self.transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        self.is_writing_paused = True

    def resume_writing(self) -> None:
        self.is_writing_paused = False
        self._events.on_drained()

    def get_buffer(self, sizehint: int) -> memoryview:
        space = self.core.room(_RECEIVE_BYTES)
        self._is_receiving_large = space is not None
        return self._received if space is None else space

    def buffer_updated(self, size_bytes: int) -> None:
        if self.failure is not None:
            return
        now_ms, was_authenticating = self._events.now_ms(), not self.core.is_ready
        try:
            if self._is_receiving_large:
                completed, to_write = self.core.filled(size_bytes, now_ms)
            else:
                # Copy the bytes: decoded responses are views of them, and the buffer is reused.
                completed, to_write = self.core.receive(bytes(self._received[:size_bytes]), now_ms)
        except AuthenticationError as error:
            # During re-authentication requests may be in flight, and the broker may have carried them out. So
            # they must fail with DisconnectedError (outcome unknown) and not with AuthenticationError (never
            # sent). See test_a_refused_re_authentication_leaves_the_outcome_unknown.
            self.fail(DisconnectedError(str(error)) if self.ready.done() else error)
            return
        except OncelogError as error:
            self.fail(error)
            return
        if to_write and self.transport:
            self.transport.write(to_write)
        self._has_response = self._has_response or bool(completed)
        for token, response, latency_ms in completed:
            self._events.on_response(token, response, latency_ms)
        if self.core.is_ready:
            if not self.ready.done():
                self.ready.set_result(None)
            elif was_authenticating:
                self._events.on_ready(self)

    def fail(self, error: OncelogError) -> None:
        """Abort the connection. All requests in flight fail with `error`, or with the error of an earlier
        call.
        """
        self.failure = self.failure or error
        if self.transport:
            self.transport.abort()
        self._events.on_lost(self, self.failure)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost.set()
        error = self.failure or self._lost_error(exc)
        if not self.ready.done():
            self.ready.set_exception(error)
            # Mark the exception as retrieved: the connecting task may have ended, and asyncio would log the
            # exception.
            self.ready.exception()
        self._events.on_lost(self, error)

    def _lost_error(self, exc: Exception | None) -> OncelogError:
        cause = f"lost ({exc})" if exc else "closed by the broker"
        # A TLS error after the handshake is not a failed authentication: the outcome of requests in flight is
        # unknown. See test_a_damaged_tls_record_leaves_the_outcome_unknown.
        if isinstance(exc, ssl.SSLError) and not self.ready.done():
            return tls_failed(self.core.peer, exc)
        if not self.core.is_ready:
            return DisconnectedError(
                f"connection to {self.core.peer} {cause} before the broker answered "
                "ApiVersions; check that a Kafka broker listens there, that "
                "security.protocol matches the listener, and whether the broker requires a "
                "client certificate (ssl.keystore.location)"
            )
        count = self.core.in_flight_count
        unknown = f" while {count} requests had no response; the broker may have carried them out"
        if exc is None and not self._has_response and not self.core.has_credentials:
            unknown += "; if its listener requires SASL, set security.protocol and sasl.mechanism"
        return DisconnectedError(f"connection to {self.core.peer} {cause}{unknown if count else ''}")
