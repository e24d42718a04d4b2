"""Listening sockets that check the connection limits first, before a client costs memory or a TLS handshake.

If no file descriptor is free, accepting pauses and is retried. Until then, clients wait in the operating
system's queue.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

from oncelog.runtime.event_log import log_event

BACKLOG = 1_024
MAX_ACCEPTS_PER_TURN = 64
"""Maximum number of connections accepted in one turn of the event loop, so that existing connections are not
delayed.
"""
RETRY_SECONDS = 1.0
HANDSHAKE_SECONDS = 60.0
"""asyncio's timeout for a TLS handshake. The server's own timeout, `server.HANDSHAKE_MS`, is shorter."""
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""TCP keep-alive: idle seconds, seconds between probes, number of probes.

With these values, the operating system detects a lost peer within two minutes.
"""


class AcceptedConnection(Protocol):
    """The protocol object of an accepted connection. Implementations are also asyncio.BufferedProtocol."""

    def admit(self, peer: Any, descriptor: int | None) -> bool:
        """Register the connection until `connection_lost`. Return False to reject the connection."""
        ...

    def prepare(self, handshake: asyncio.Task[None]) -> None:
        """Store the task that performs the TLS handshake and then connects the transport."""
        ...

    def connection_lost(self, error: Exception | None) -> None: ...


class ListeningSockets:
    """The listening sockets of one listener: one per address of its host name.

    `factory` returns the protocol object of a new connection. `context` returns the TLS context, and is
    called for each connection. `context` is None for a listener without TLS.
    """

    def __init__(
        self, factory: Callable[[], AcceptedConnection], context: Callable[[], ssl.SSLContext] | None
    ) -> None:
        self._factory, self._context = factory, context
        self._loop = asyncio.get_running_loop()
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self.sockets: list[socket.socket] = []

    async def open(self, host: str, port: int) -> None:
        """Bind and listen. Raises OSError."""
        self.sockets = await bind_sockets(host, port)
        for listening in self.sockets:
            self._listen(listening)

    def _listen(self, listening: socket.socket) -> None:
        self._paused.pop(listening, None)
        self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(MAX_ACCEPTS_PER_TURN):
            try:
                accepted, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log_event("error", "cannot accept connections", error=error, retry_seconds=RETRY_SECONDS)
                self._loop.remove_reader(listening)
                self._paused[listening] = self._loop.call_later(RETRY_SECONDS, self._listen, listening)
                return
            accepted.setblocking(False)
            connection = self._factory()
            if connection.admit(peer, accepted.fileno()):
                connection.prepare(self._loop.create_task(self._connect(accepted, connection)))
            else:
                accepted.close()

    async def _connect(self, accepted: socket.socket, connection: AcceptedConnection) -> None:
        context = None if self._context is None else self._context()
        seconds = None if context is None else HANDSHAKE_SECONDS
        try:
            await self._loop.connect_accepted_socket(
                lambda: cast(asyncio.BaseProtocol, connection),
                accepted,
                ssl=context,
                ssl_handshake_timeout=seconds,
            )
        except (OSError, asyncio.CancelledError) as error:
            log_event("debug", "no TLS handshake", error=repr(error))
            connection.connection_lost(None)

    def close(self) -> None:
        """Accept no more connections. Existing connections stay open."""
        for timer in self._paused.values():
            timer.cancel()
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            listening.close()


async def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on all addresses of `host`; on all interfaces if `host` is empty.

    An IPv6 address that this computer lacks is skipped if another address can be bound. Raises OSError.
    """
    infos = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(infos):
        try:
            sockets.append(_bind(family, kind, protocol, address))
        except OSError as error:
            if family != socket.AF_INET6 or error.errno not in _NO_IPV6:
                for listening in sockets:
                    listening.close()
                raise
            # Continue without an IPv6 address that this computer lacks. For localhost, /etc/hosts often
            # contains ::1 although IPv6 is disabled, for example in containers.
            missing = error
    if missing is not None:
        if not sockets:
            raise missing
        log_event("warning", "this machine lacks an IPv6 address of the listener", host=host)
    return sockets


def _bind(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        _keep_alive(listening)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _keep_alive(listening: socket.socket) -> None:
    """Enable TCP keep-alive. The accepted sockets inherit this option."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        # Some systems lack an option: macOS has no TCP_KEEPIDLE.
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


Listen = Callable[..., Awaitable[Any]]
"""The signature of `listen`. The simulator passes its own function."""


async def listen(
    factory: Callable[[], AcceptedConnection],
    host: str,
    port: int,
    *,
    ssl: Callable[[], ssl.SSLContext] | None = None,
) -> ListeningSockets:
    """Open the listening sockets and return them. Raises OSError."""
    listener = ListeningSockets(factory, ssl)
    await listener.open(host, port)
    return listener
