"""One attempt of a link to be connected: bytes between asyncio's transport and the connection's core."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, cast

from oncelog.client.connection.core import ConnectionCore
from oncelog.client.connection.security import tls_failed
from oncelog.errors import AuthenticationError, DisconnectedError, OncelogError

if TYPE_CHECKING:
    from oncelog.client.connection.broker_connection import BrokerLink

_RECEIVE_BYTES = 65_536
"""Taken at a time; what an answer lacks beyond that is received where it stays."""


class LinkProtocol(asyncio.BufferedProtocol):
    """Carries what the transport tells to the link."""

    def __init__(self, link: BrokerLink, core: ConnectionCore) -> None:
        self.link, self.core = link, core
        self.ready: asyncio.Future[None] = link.loop.create_future()
        self.transport: asyncio.Transport | None = None
        self.failure: OncelogError | None = None
        self._received = memoryview(bytearray(_RECEIVE_BYTES))
        self._is_in_room = self._is_watching = False
        self.is_lost = asyncio.Event()
        self.is_writing_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def watch_writing(self) -> None:
        """Be told from now on of every byte that the socket does not take at once."""
        if self.transport is not None and not self._is_watching:
            self._is_watching = True
            self.transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        self.is_writing_paused = True

    def resume_writing(self) -> None:
        self.is_writing_paused = False
        self.link.on_drained()

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self.core.room(_RECEIVE_BYTES)
        self._is_in_room = room is not None
        return self._received if room is None else room

    def buffer_updated(self, size_bytes: int) -> None:
        if self.failure is not None:
            return
        now_ms, was_logging_in = self.link.now_ms(), not self.core.is_ready
        try:
            if self._is_in_room:
                completed, to_write = self.core.filled(size_bytes, now_ms)
            else:  # a copy, since answers are views of what they came in
                completed, to_write = self.core.receive(bytes(self._received[:size_bytes]), now_ms)
        except AuthenticationError as error:
            # What is in flight while logging in again may have been carried out.
            self.fail(DisconnectedError(str(error)) if self.ready.done() else error)
            return
        except OncelogError as error:
            self.fail(error)
            return
        if to_write and self.transport:
            self.transport.write(to_write)
        for token, response, latency_ms in completed:
            self.link.on_answer(token, response, latency_ms)
        if self.core.is_ready:
            if not self.ready.done():
                self.ready.set_result(None)
            elif was_logging_in:
                self.link.on_ready(self)

    def fail(self, error: OncelogError) -> None:
        """Close at once; everything in flight ends with `error`."""
        self.failure = self.failure or error
        if self.transport:
            self.transport.abort()
        self.link.on_lost(self, self.failure)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost.set()
        error = self.failure or self._lost_text(exc)
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # seen even if the connecting task is gone
        self.link.on_lost(self, error)

    def _lost_text(self, exc: Exception | None) -> OncelogError:
        why = f"lost ({exc})" if exc else "closed by the broker"
        # Later the peer is believed already, and requests are in flight whose outcome is unknown. See
        # test_a_damaged_tls_record_leaves_the_outcome_unknown.
        if isinstance(exc, ssl.SSLError) and not self.ready.done():
            return tls_failed(self.core.peer, exc)
        if not self.core.is_ready:
            return DisconnectedError(
                f"connection to {self.core.peer} {why} before it said which versions it serves; check that a "
                "Kafka broker listens there, that security.protocol is what it speaks, and whether it asks "
                "for a certificate (ssl.keystore.location)"
            )
        return DisconnectedError(
            f"connection to {self.core.peer} {why} with {self.core.in_flight_count} requests unanswered; "
            "whether they were carried out is unknown"
        )
