"""What a relay handles: frames on streams, an exchange of request and answer, a message that is held."""

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


class Hub(Protocol):
    """What a relay needs of its proxy."""

    book: RuleBook
    log: EventLog
    held: list[Held]

    async def address_for(self, host: str, port: int) -> Address:
        """Where clients reach the broker `host:port` through the proxy."""
        ...

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task that outlives the relay."""
        ...


@dataclass(slots=True, eq=False)
class Held:
    """A message kept in the network. `on_release(lose)` is called once."""

    api: str
    remaining: int | None
    on_release: Callable[[bool], None]
    timer: asyncio.TimerHandle | None = None
    is_done: bool = False

    def release(self, lose: bool = False) -> None:
        """Let it go on, or lose it."""
        if not self.is_done:
            self.is_done = True
            if self.timer:
                self.timer.cancel()
            self.on_release(lose)

    def count_down(self, api: str) -> None:
        """A later request of `api` went by."""
        if self.remaining is not None and api == self.api:
            self.remaining -= 1
            if self.remaining <= 0:
                self.release()


@dataclass(slots=True, eq=False)
class Exchange:
    """A request and the way to its answer.

    `answer` becomes None when the broker is gone; `turn` counts the requests of its API that the
    broker was given on this connection, from 1.
    """

    header: RequestHeader
    frame: bytes
    event: WireEvent
    answer: asyncio.Future[bytes | None]
    turn: int = 0
    is_copy: bool = False
    is_dropped: bool = False
    is_forged: bool = False
    is_queued: bool = False

    @property
    def expects_answer(self) -> bool:
        """acks=0 is the one request that has none."""
        return self.event.acks != 0


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame without its size prefix; None at the end. Raises PeerError on a senseless size."""
    try:
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        if not 0 <= size <= MAX_FRAME_BYTES:
            raise PeerError(f"a frame of {size} bytes; the proxy carries 0 to {MAX_FRAME_BYTES}")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_frame(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Write a frame with its size prefix; nothing when the connection is closing."""
    if not writer.is_closing():
        writer.write(_SIZE.pack(len(frame)) + frame)


async def drain(writer: asyncio.StreamWriter) -> None:
    try:
        await writer.drain()
    except ConnectionError:
        pass  # the reading pump of that side sees the end
