"""Opens the TCP connection of a BrokerConnection: name resolution, TLS, version negotiation and SASL.

A host name may have several addresses. The connector tries them in turn within
socket.connection.setup.timeout.ms, as Java's client does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from ipaddress import ip_address
from typing import Any

from oncelog.client.connection.broker_protocol import BrokerProtocol, ProtocolEvents
from oncelog.client.connection.core import ConnectionCore
from oncelog.client.connection.security import ClientSecurity, tls_failed
from oncelog.errors import AuthenticationError, DisconnectedError, NotConnectedError, OncelogError
from oncelog.runtime.system import Runtime
from oncelog.settings import Settings

_CLOSED_BY_PEER = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""Errors of asyncio and uvloop for a connection that was established and then closed by the peer."""


def address_text(sockaddr: Any) -> str:
    """Return the IP address of a socket address.

    A link-local IPv6 address includes its interface (scope id).
    """
    scope_id = sockaddr[3] if len(sockaddr) > 3 else 0
    return f"{sockaddr[0]}%{scope_id}" if scope_id else str(sockaddr[0])


class ReconnectBackoff:
    """The pause before the next attempt to connect. It is reconnect.backoff.ms, doubled with each failure.

    The pause grows up to reconnect.backoff.max.ms and varies at random by 20 %.
    """

    def __init__(self, settings: Settings, runtime: Runtime) -> None:
        self._settings, self._runtime = settings, runtime
        self.failure_count = 0
        self.retry_at_ms = 0.0
        """Earliest monotonic time of the next attempt, in milliseconds."""
        self.last_error = "not tried yet"

    def note_failure(self, error: BaseException, now_ms: float) -> None:
        """Record that an attempt failed, or that the connection was lost."""
        base, top = self._settings["reconnect.backoff.ms"], self._settings["reconnect.backoff.max.ms"]
        pause_ms = min(base * 2 ** min(self.failure_count, 20), max(top, base))
        self.failure_count += 1
        self.retry_at_ms = now_ms + pause_ms * self._runtime.rng.uniform(0.8, 1.2)
        self.last_error = str(error)

    def note_success(self) -> None:
        self.failure_count = 0


class Connector:
    """Opens connections to one HOST:PORT."""

    def __init__(self, host: str, port: int, settings: Settings, security: ClientSecurity) -> None:
        self._host, self._port, self._peer = host, port, f"{host}:{port}"
        self._settings, self._security = settings, security
        self._loop = asyncio.get_running_loop()

    async def connect(self, events: ProtocolEvents) -> BrokerProtocol:
        """Return a connection that is ready for requests. The connection reports its events to `events`.

        Ready means that the broker has reported its versions and, with SASL, authenticated this client. The
        time limit is socket.connection.setup.timeout.ms. If an address accepts the connection and then fails,
        the limit grows by the time since that address accepted, as in Java's client. Raises
        DisconnectedError, AuthenticationError, OSError, and ValueError for an invalid host or port.
        """
        setup_ms = self._settings["socket.connection.setup.timeout.ms"]
        until_s = self._loop.time() + setup_ms / 1000
        try:
            async with asyncio.timeout_at(until_s):
                *others, last = await self._addresses()
            share_s = setup_ms / 1000 / (len(others) + 1)
            for address in others:
                # An address that drops packets, closes connections or is silent must not use up the time of
                # the next address. See
                # test_an_unresponsive_address_does_not_prevent_attempts_at_others_of_its_host.
                connected_s = None
                try:
                    protocol = await self._open(events, address, min(self._loop.time() + share_s, until_s))
                    connected_s = self._loop.time()
                    return await self._negotiate(events, protocol, connected_s + setup_ms / 1000)
                except OSError as error:
                    # After a TLS or SASL error, do not try another address: it would refuse the same
                    # certificate or password.
                    if isinstance(error, (ssl.SSLError, AuthenticationError)):
                        raise
                if connected_s is not None:
                    until_s += self._loop.time() - connected_s
            return await self._negotiate(events, await self._open(events, last, until_s), until_s)
        except TimeoutError:
            raise DisconnectedError(
                f"{self._peer} did not finish connecting within "
                f"socket.connection.setup.timeout.ms={setup_ms}; check the address, that a "
                "Kafka broker listens there, and that "
                f"security.protocol={self._settings['security.protocol']} matches the listener"
            ) from None

    async def _addresses(self) -> list[str]:
        """Return the IP addresses of the host, in the order of the attempts to connect."""
        try:
            ip_address(self._host)
        except ValueError:
            infos = await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(address_text(sockaddr) for *_, sockaddr in infos)) or [self._host]
        return [self._host]

    async def _open(self, events: ProtocolEvents, address: str, until_s: float) -> BrokerProtocol:
        """Open a TCP connection to one address, with TLS if it is configured."""
        core = ConnectionCore(self._settings["client.id"], self._peer, credentials=self._security.credentials)
        protocol = BrokerProtocol(events, core)
        context = self._security.context
        server_name = self._host if context is not None else None
        try:
            async with asyncio.timeout_at(until_s):
                await self._loop.create_connection(
                    lambda: protocol, address, self._port, ssl=context, server_hostname=server_name
                )
        except BaseException:
            protocol.fail(DisconnectedError("abandoned"))
            raise
        return protocol

    async def _negotiate(
        self, events: ProtocolEvents, protocol: BrokerProtocol, until_s: float
    ) -> BrokerProtocol:
        """Request the broker's versions, and authenticate if SASL is configured."""
        try:
            assert protocol.transport is not None
            setup_ms = self._settings["socket.connection.setup.timeout.ms"]
            protocol.transport.write(protocol.core.negotiate(events.now_ms(), setup_ms))
            async with asyncio.timeout_at(until_s):
                await asyncio.shield(protocol.ready)
            if protocol.failure:
                raise protocol.failure
        except BaseException:
            protocol.fail(DisconnectedError("abandoned"))
            raise
        return protocol

    def explain(self, error: Exception) -> OncelogError:
        """Return the error for requests that were never sent because `connect` raised `error`. A failed TLS
        handshake gives AuthenticationError. A refused or lost connection gives NotConnectedError, whose text
        says what to check.
        """
        if isinstance(error, NotConnectedError):
            return error
        if isinstance(error, ssl.SSLError):
            return tls_failed(self._peer, error)
        if isinstance(error, DisconnectedError):
            return NotConnectedError(str(error))
        if isinstance(error, OncelogError):
            return error
        if self._security.context is not None and isinstance(error, _CLOSED_BY_PEER):
            return NotConnectedError(
                f"{self._peer} closed the connection during the TLS handshake; "
                f"security.protocol={self._settings['security.protocol']} needs a listener "
                "with TLS, and a PLAINTEXT listener closes the connection like this"
            )
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number and number > 0 else str(error)
        reason = reason or type(error).__name__
        return NotConnectedError(
            f"cannot connect to {self._peer}: {reason}; check bootstrap.servers and that the broker runs"
        )
