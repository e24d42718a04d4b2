"""The bytes of one client that the broker has received and not yet carried out."""

from __future__ import annotations

from typing import cast

from oncelog.wire.frames import FrameReader

LARGE_REST_BYTES = 65_536
"""If a frame still lacks at least this much, its bytes are received directly into the frame's own buffer."""
NO_BYTES = memoryview(b"")


class RequestReader:
    """The input of one connection: an incomplete frame, and a backlog of bytes not cut into frames.

    All connections of a server receive into one shared buffer, which the next read overwrites. Therefore
    bytes that cannot be processed at once are copied into the backlog.
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
        """Bytes that the connection cuts next. While there are any, new bytes wait behind them."""
        self.received_bytes = 0
        """Bytes received since the connection was opened."""
        self.incomplete_since_ms: int | None = None
        """Time from which the read time-out of an incomplete request counts; None without such a request."""
        self._shared = shared
        self._arrived = bytearray()
        """Bytes received while there was a backlog."""
        self._frame_space: memoryview | None = None
        """The rest of a large frame's own buffer, if the next bytes are received there."""

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next read."""
        # Bytes behind a backlog must not be added to a frame before the backlog is.
        self._frame_space = None if self.backlog else self.frames.room(LARGE_REST_BYTES)
        return self._shared if self._frame_space is None else self._frame_space

    def receive(self, size_bytes: int) -> memoryview | None:
        """Accept bytes that were read into the buffer. Return those to cut now; None if they must wait.

        The result is a view of the shared buffer. Call `keep` with the part that was not cut.
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
        """Copy bytes of the shared buffer that were not cut into the backlog."""
        if rest:
            self.backlog = memoryview(bytes(rest))

    def next_backlog(self) -> bool:
        """Replace an empty backlog by the bytes that arrived behind it. Return True if there are any."""
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
        """Bytes that were received and not cut yet."""
        return len(self.backlog) + len(self._arrived)

    @property
    def held_bytes(self) -> int:
        """Memory of the incomplete frame and of the backlog."""
        # A view keeps the whole object alive, so a backlog that is partly cut counts with all of its bytes.
        backlog_bytes = len(cast(bytes, self.backlog.obj)) if self.backlog else 0
        return self.frames.held_bytes + backlog_bytes + len(self._arrived)

    def clear(self) -> None:
        """Drop the backlog: the connection has ended."""
        self.backlog, self._arrived = NO_BYTES, bytearray()
