"""The listening socket: each connection is looked at before anything is done for it.

That is before memory and TLS' handshake are spent on it. When descriptors run out, accepting rests and is
tried again; clients wait in the system's queue meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from oncelog.runtime.event_log import log_event

BACKLOG = 1_024
ACCEPTS_A_TURN = 64
"""So many connections are taken before those that are there have their turn."""
RETRY_SECONDS = 1.0
HANDSHAKE_SECONDS = 60.0
"""The server's own deadline is shorter."""
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds, seconds, times: a peer that is gone without a word is noticed in two minutes."""


class Accepted(asyncio.BufferedProtocol, ABC):
    """What the listener needs of a connection."""

    @abstractmethod
    def admit(self, peer: Any, descriptor: int | None) -> bool:
        """Whether it may stay; from then on it counts until `connection_lost`."""

    @abstractmethod
    def prepare(self, handshake: asyncio.Task[None]) -> None:
        """Its transport comes by this."""


class ListeningSockets:
    """Listens with one or several sockets (a name may have more than one address).

    `context`: asked for each connection that is accepted; None without TLS.
    """

    def __init__(self, factory: Callable[[], Accepted], context: Callable[[], ssl.SSLContext] | None) -> None:
        self._factory, self._context = factory, context
        self._loop = asyncio.get_running_loop()
        self._resting: dict[socket.socket, asyncio.TimerHandle] = {}
        self.sockets: list[socket.socket] = []

    async def open(self, host: str, port: int) -> None:
        """Raises OSError."""
        self.sockets = await bind_sockets(host, port)
        for listening in self.sockets:
            self._listen(listening)

    def _listen(self, listening: socket.socket) -> None:
        self._resting.pop(listening, None)
        self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                accepted, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log_event("error", "cannot accept connections", error=error, retry_seconds=RETRY_SECONDS)
                self._loop.remove_reader(listening)
                self._resting[listening] = self._loop.call_later(RETRY_SECONDS, self._listen, listening)
                return
            accepted.setblocking(False)
            connection = self._factory()
            if connection.admit(peer, accepted.fileno()):
                connection.prepare(self._loop.create_task(self._hand_over(accepted, connection)))
            else:
                accepted.close()

    async def _hand_over(self, accepted: socket.socket, connection: Accepted) -> None:
        context = None if self._context is None else self._context()
        seconds = None if context is None else HANDSHAKE_SECONDS
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=context, ssl_handshake_timeout=seconds
            )
        except (OSError, asyncio.CancelledError) as error:
            log_event("debug", "no TLS handshake", error=repr(error))
            connection.connection_lost(None)

    def close(self) -> None:
        """No more connections; those that are there stay."""
        for timer in self._resting.values():
            timer.cancel()
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            listening.close()


async def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on all addresses of a host, or of the machine if it is empty.

    Raises OSError.
    """
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            sockets.append(_bind(family, kind, protocol, address))
        except OSError as error:
            if family != socket.AF_INET6 or error.errno not in _NO_IPV6:
                for listening in sockets:
                    listening.close()
                raise
            # /etc/hosts names ::1 for localhost also where IPv6 is off, as in many containers.
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
    """What is accepted inherits it."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):  # macOS has another name for the first one
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


Listen = Callable[..., Awaitable[Any]]
"""(protocol factory, host, port, ssl=the context of the next connection) -> what has `sockets`, `close()`."""


async def listen(
    factory: Callable[[], Accepted],
    host: str,
    port: int,
    *,
    ssl: Callable[[], ssl.SSLContext] | None = None,
) -> ListeningSockets:
    """Listen as asyncio's `create_server` does, which the simulator gives instead. Raises OSError."""
    listener = ListeningSockets(factory, ssl)
    await listener.open(host, port)
    return listener
