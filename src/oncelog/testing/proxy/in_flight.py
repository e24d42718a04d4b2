"""Messages on their way through the proxy: frames on streams, requests in flight, and held messages."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from oncelog.errors import PeerError
from oncelog.testing.proxy.events import EventLog, WireEvent
from oncelog.testing.proxy.rules import RuleBook
from oncelog.wire.frames import RequestHeader

MAX_FRAME_BYTES = 256 * 1024 * 1024
_SIZE = struct.Struct(">i")

Address = tuple[str, int]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ProxyContext(Protocol):
    """The parts of a proxy that its relays share."""

    book: RuleBook
    log: EventLog
    held: list[HeldMessage]
    """The held messages of all connections."""

    async def address_for(self, host: str, port: int) -> Address:
        """Return the proxy's address for the broker `host:port`."""
        ...

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task that may continue after the relay has ended."""
        ...


@dataclass(slots=True, eq=False)
class HeldMessage:
    """A message that a rule holds. `on_release(lose)` is called once, when the message is released."""

    api: str
    remaining: int | None
    """Number of requests of `api` that must still pass before the release; None if requests do not release
    the message.
    """
    on_release: Callable[[bool], None]
    timer: asyncio.TimerHandle | None = None
    is_done: bool = False

    def release(self, lose: bool = False) -> None:
        """Release the message: forward it, or drop it if `lose` is True. Further calls do nothing."""
        if not self.is_done:
            self.is_done = True
            if self.timer:
                self.timer.cancel()
            self.on_release(lose)

    def count_down(self, api: str) -> None:
        """Count a later request of `api` that has passed. Release the message if enough requests of its own
        API have passed.
        """
        if self.remaining is not None and api == self.api:
            self.remaining -= 1
            if self.remaining <= 0:
                self.release()


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request that the proxy has read, and its response."""

    header: RequestHeader
    frame: bytes
    event: WireEvent
    response: asyncio.Future[bytes | None]
    """The response's frame; None if the broker closed the connection."""
    send_number: int = 0
    """Number of this request, from 1, among the requests of its API that the proxy sent on this connection.
    0: not sent.
    """
    is_copy: bool = False
    is_dropped: bool = False
    is_forged: bool = False
    is_queued: bool = False

    @property
    def expects_response(self) -> bool:
        """False for a Produce request with acks=0. Every other request has a response."""
        return self.event.acks != 0


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next frame without its size prefix; None at the end of the stream.

    Raises PeerError for an invalid size.
    """
    try:
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        if not 0 <= size <= MAX_FRAME_BYTES:
            raise PeerError(f"a frame of {size} bytes; the proxy carries 0 to {MAX_FRAME_BYTES}")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_frame(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Write a frame with its size prefix, unless the connection is closing."""
    if not writer.is_closing():
        writer.write(_SIZE.pack(len(frame)) + frame)


async def drain(writer: asyncio.StreamWriter) -> None:
    """Wait until the writer accepts more data. A lost connection is ignored."""
    try:
        await writer.drain()
    except ConnectionError:
        # The task that reads from this connection notices the loss.
        pass
