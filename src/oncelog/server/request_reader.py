"""The bytes that the broker has received from one client and has not processed yet."""

from __future__ import annotations

from collections.abc import Sized
from typing import cast

from oncelog.wire.frames import SIZE_BYTES, FrameReader

LARGE_REST_BYTES = 65_536
"""If a frame lacks at least this number of bytes, they are received directly into the frame's buffer."""
NO_BYTES = memoryview(b"")


class RequestReader:
    """The input of one connection: an incomplete frame, and a backlog of bytes that are not yet split into
    frames.

    All connections of a server receive into one shared buffer, and the next read overwrites it. Bytes that
    cannot be processed immediately are therefore copied into the backlog.
    """

    __slots__ = (
        "_arrived",
        "_frame_space",
        "_shared",
        "backlog",
        "frames",
        "incomplete_since_ms",
        "received_bytes",
    )

    def __init__(self, shared: memoryview, max_frame_bytes: int) -> None:
        self.frames = FrameReader(max_frame_bytes)
        self.backlog = NO_BYTES
        """Bytes that the connection processes next.

        While the backlog is not empty, new bytes are collected in `_arrived`.
        """
        self.received_bytes = 0
        """Bytes received since the connection was opened."""
        self.incomplete_since_ms: int | None = None
        """Clock time at which the read timeout of an incomplete request starts; None without such a request.
        """
        self._shared = shared
        self._arrived = bytearray()
        """Bytes received while the backlog was not empty."""
        self._frame_space: memoryview | None = None
        """The free part of a large frame's buffer, if asyncio receives the next bytes there; otherwise None.
        """

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next read."""
        # Bytes that follow a backlog must not be added to a frame before the backlog was processed.
        self._frame_space = None if self.backlog else self.frames.room(LARGE_REST_BYTES)
        return self._shared if self._frame_space is None else self._frame_space

    def receive(self, size_bytes: int) -> memoryview | None:
        """Accept the bytes that asyncio has read into the buffer. Return the bytes to process now.

        The result is a view of the shared buffer: call `keep` with the part that was not processed. Return
        None if the bytes must wait behind the backlog.
        """
        self.received_bytes += size_bytes
        data = NO_BYTES
        if self._frame_space is None:
            data = self._shared[:size_bytes]
        else:
            self._frame_space = None
            self.frames.fill(size_bytes)
        if self.backlog:
            self._arrived += data
            return None
        return data

    def keep(self, rest: memoryview) -> None:
        """Copy the unprocessed part of the shared buffer into the backlog."""
        if rest:
            self.backlog = memoryview(bytes(rest))

    def keep_frame(self, frame: memoryview) -> memoryview:
        """Return a frame that the next read does not overwrite, and whose memory is about its size.

        It is a copy only if that is needed. A view of the backlog is copied, because it keeps the whole
        backlog alive. See test_a_frame_that_is_kept_does_not_keep_the_backlog.
        """
        is_view_of_more = len(cast(Sized, frame.obj)) > len(frame) + SIZE_BYTES
        return memoryview(bytearray(frame)) if is_view_of_more or frame.obj is self._shared.obj else frame

    def next_backlog(self) -> bool:
        """If the backlog was processed, move the bytes of `_arrived` into it.

        Return True if any bytes were moved.
        """
        if self.backlog or not self._arrived:
            return False
        arrived, self._arrived = self._arrived, bytearray()
        self.backlog = memoryview(arrived)
        return True

    @property
    def has_backlog(self) -> bool:
        return bool(self.backlog or self._arrived)

    @property
    def backlog_bytes(self) -> int:
        """Number of bytes that were received and are not yet split into frames."""
        return len(self.backlog) + len(self._arrived)

    @property
    def held_bytes(self) -> int:
        """Memory of the incomplete frame and of the backlog, in bytes."""
        # The backlog is a view. A view keeps its whole object alive, so count all bytes of that object.
        backlog_bytes = len(cast(Sized, self.backlog.obj)) if self.backlog else 0
        return self.frames.held_bytes + backlog_bytes + len(self._arrived)

    def clear(self) -> None:
        """Drop all bytes, because the connection has ended. A sweep may refer to it for another second. See
        test_a_closed_connection_keeps_no_incomplete_request.
        """
        self.backlog, self._arrived = NO_BYTES, bytearray()
        self.frames, self._frame_space = FrameReader(self.frames.max_frame_bytes), None
