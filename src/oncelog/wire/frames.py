"""Frames: the size prefix, the request and response headers, and a splitter of byte streams into frames.

The layout of a frame is `i32 size | header | body`. A request header is `i16 api_key | i16 api_version | i32
correlation_id | nullable string client_id`, with a 16-bit string length at every version. A response header
is `i32 correlation_id`. At flexible versions, both headers end in a tag block. The response header of
ApiVersions has no tag block at any version, because a client must read this response before it knows the
broker's versions.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeVar

from oncelog.errors import PeerError
from oncelog.wire.message import Api, Message
from oncelog.wire.messages import API_BY_KEY
from oncelog.wire.primitives import Buffer, read_uvarint_rest

API_VERSIONS_KEY = 18
SIZE_BYTES = 4
LARGE_BYTES = 1 << 15
"""A part of at least this many bytes is written as a separate buffer, because copying it would cost more than
another buffer.
"""
FIRST_ROOM_BYTES = 1 << 12
"""Size of the first buffer for an incomplete frame, in bytes."""
_ROOM_GROWTH = 8
"""A buffer larger than FIRST_ROOM_BYTES is at most this many times as large as the received part of its
frame.

A FrameReader with `keeps_size` may use a larger buffer.
"""
_MIN_SPARE_BYTES, _MAX_SPARE_BYTES = 1 << 16, 8 << 20
"""Size of the smallest and of the largest buffer that a client keeps for later frames, in bytes."""
MAX_REPAIRED_CHARACTERS = 8_191
"""Maximum number of characters that are kept of a client id that is not UTF-8.

The text with its replacement characters then fits into 32,767 bytes.
"""
MAX_HEADER_TAGS = 1_000
"""Maximum number of tagged fields in a header. Kafka 4.3 defines none, so all are skipped."""
_SIZE = struct.Struct(">i")
_REQUEST = struct.Struct(">ihhih")
_REQUEST_HEAD = struct.Struct(">hhih")
_RESPONSE = struct.Struct(">ii")
_RESPONSE_FLEXIBLE = struct.Struct(">iiB")
_EMPTY = memoryview(b"")

_M = TypeVar("_M", bound=Message)


class RequestHeader(NamedTuple):
    """The header of a request. `body_position` is the start of the body in the frame.

    `client_id` is None if the client sent null.
    """

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body_position: int


def encode_request(message: Message, version: int, correlation_id: int, client_id: str | None) -> bytes:
    """Return a whole request frame, including the size prefix."""
    return b"".join(_request_parts(message, version, correlation_id, client_id))


def encode_large_request(
    message: Message, version: int, correlation_id: int, client_id: str | None
) -> list[Buffer]:
    """Return a request frame in parts.

    Records of LARGE_BYTES or more are separate parts and are not copied.
    """
    return _in_pieces(_request_parts(message, version, correlation_id, client_id))


def _request_parts(
    message: Message, version: int, correlation_id: int, client_id: str | None
) -> list[Buffer]:
    api = message.api
    name = b"" if client_id is None else client_id.encode()
    head = name + b"\0" if api.is_flexible(version) else name
    parts: list[Buffer] = [b"", head]
    message.encode_into(version, parts.append)
    size = sum(map(len, parts)) + _REQUEST_HEAD.size
    length = -1 if client_id is None else len(name)
    parts[0] = _REQUEST.pack(size, api.key, version, correlation_id, length)
    return parts


def encode_response(message: Message, version: int, correlation_id: int) -> bytes:
    """Return a whole response frame, including the size prefix."""
    return b"".join(_response_parts(message, version, correlation_id))


def encode_large_response(message: Message, version: int, correlation_id: int) -> list[Buffer]:
    """Return a response frame in parts, as `encode_large_request` does."""
    return _in_pieces(_response_parts(message, version, correlation_id))


def _in_pieces(parts: list[Buffer]) -> list[Buffer]:
    if max(map(len, parts)) < LARGE_BYTES:
        return [b"".join(parts)]
    pieces: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if len(part) < LARGE_BYTES:
            small.append(part)
        else:
            pieces += (b"".join(small), part)
            small = []
    pieces.append(b"".join(small))
    return pieces


def _response_parts(message: Message, version: int, correlation_id: int) -> list[Buffer]:
    parts: list[Buffer] = [b""]
    message.encode_into(version, parts.append)
    size = sum(map(len, parts))
    if _has_tagged_header(message.api, version):
        parts[0] = _RESPONSE_FLEXIBLE.pack(size + 5, correlation_id, 0)
    else:
        parts[0] = _RESPONSE.pack(size + 4, correlation_id)
    return parts


def _has_tagged_header(api: Api, version: int) -> bool:
    return api.key != API_VERSIONS_KEY and version >= api.flexible_from


def decode_request_header(frame: Buffer) -> RequestHeader:
    """Parse the header of a request frame (without size prefix), even for an unsupported API or version.

    For an unknown API, no tag block is expected. As in Kafka, a client id that is not UTF-8 gets replacement
    characters: a client id is only a label. Raises PeerError.
    """
    try:
        api_key, version, correlation_id, length = _REQUEST_HEAD.unpack_from(frame, 0)
    except struct.error as error:
        raise PeerError(f"a request of {len(frame)} bytes is too short for its header") from error
    position = _REQUEST_HEAD.size
    client_id = None
    if length != -1:
        raw = bytes(frame[position : position + length]) if length >= 0 else b""
        if len(raw) != length:
            raise PeerError(f"the client id says {length} bytes, but {len(frame) - position} are left")
        client_id = _label(raw)
        position += length
    api = API_BY_KEY.get(api_key)
    if api is not None and version >= api.flexible_from:
        position = _skip_tags(frame, position)
    return RequestHeader(api_key, version, correlation_id, client_id, position)


def _label(raw: bytes) -> str:
    """Decode a client id, with replacement characters for bytes that are not UTF-8.

    A replacement character takes three bytes, so the length of such an id is limited.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode(errors="replace")[:MAX_REPAIRED_CHARACTERS]


def _skip_tags(frame: Buffer, position: int) -> int:
    """Return the position after a header's tag block. The tags are ignored."""
    if position < len(frame) and not frame[position]:
        return position + 1
    view = memoryview(frame)
    try:
        count, position = _uvarint(view, position)
        if count > MAX_HEADER_TAGS:
            raise PeerError(f"the header has {count} tagged fields; the limit is {MAX_HEADER_TAGS}")
        for _ in range(count):
            _, position = _uvarint(view, position)
            size, position = _uvarint(view, position)
            position += size
    except IndexError as error:
        raise PeerError("the header's tagged fields are truncated") from error
    if position > len(view):
        raise PeerError("the header's tagged fields are longer than the frame")
    return position


def _uvarint(view: memoryview, position: int) -> tuple[int, int]:
    first = view[position]
    return (first, position + 1) if first < 128 else read_uvarint_rest(view, position + 1, first)


def decode_request(frame: Buffer) -> tuple[RequestHeader, Message]:
    """Return header and body of a request frame (without size prefix).

    Raises PeerError for an invalid frame, and for an unknown API or version.
    """
    header = decode_request_header(frame)
    api = API_BY_KEY.get(header.api_key)
    if api is None:
        raise PeerError(f"API key {header.api_key} is unknown")
    return header, api.request.decode(header.api_version, frame, header.body_position)


def decode_response(response_cls: type[_M], version: int, frame: Buffer) -> tuple[int, _M]:
    """Return correlation id and body of a response frame (without size prefix). Raises PeerError."""
    if len(frame) < 4:
        raise PeerError(f"a response of {len(frame)} bytes is too short for its header")
    (correlation_id,) = _SIZE.unpack_from(frame, 0)
    position = 4
    if _has_tagged_header(response_cls.api, version):
        position = _skip_tags(frame, position)
    return correlation_id, response_cls.decode(version, frame, position)


class FrameReader:
    """Splits a byte stream into frames.

    A frame that is complete in the input is returned as a view of the input. The caller must not change these
    bytes while the frame is in use, and must copy the bytes that it keeps after the request. See
    test_batches_left_for_later_steps_do_not_refer_to_the_receive_buffer.

    A frame that arrives in parts is collected in a separate buffer. The buffer grows with the bytes that have
    arrived, never by the claimed size. `room` returns the free part of this buffer, so that the bytes of a
    large frame can be received in place.

    With `keeps_size`, the buffer initially has room for the largest earlier frame of the stream, and the
    buffers of the last two frames are used again once no view of them is left. A client that fetches much
    then neither allocates nor copies repeatedly. A broker must not use `keeps_size`: each of its many clients
    could make it allocate that much again and again for a few bytes.
    """

    __slots__ = (
        "_earlier_bytes",
        "_frame_bytes",
        "_gathered",
        "_keeps_size",
        "_spares",
        "max_frame_bytes",
        "pending_bytes",
    )

    def __init__(self, max_frame_bytes: int, *, keeps_size: bool = False) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._keeps_size = keeps_size
        self._earlier_bytes = 0
        """Size of the largest frame that was gathered so far; 0 without `keeps_size`."""
        self._spares: list[bytearray] = []
        """The buffers of the last two frames; empty without `keeps_size`."""
        self._gathered = bytearray()
        """The buffer of an incomplete frame: size prefix, bytes that have arrived, and free space."""
        self.pending_bytes = 0
        """Number of bytes of the incomplete frame that have arrived."""
        self._frame_bytes = 0
        """Size of the whole incomplete frame; 0 until its size prefix has arrived."""

    @property
    def held_bytes(self) -> int:
        """The size in bytes of the buffer for an incomplete frame."""
        return len(self._gathered)

    @property
    def spare_bytes(self) -> int:
        """The memory of the buffers that are kept for later frames, in bytes."""
        return sum([len(buffer) for buffer in self._spares])

    def feed(self, data: Buffer) -> list[memoryview]:
        """Return the frames that `data` completes, without their size prefixes.

        Raises PeerError if a size is negative or above the maximum. The stream cannot continue after such an
        error.
        """
        frames: list[memoryview] = []
        frame, rest = self.first(memoryview(data))
        while frame is not None:
            frames.append(frame)
            frame, rest = self.first(rest)
        return frames

    def first(self, data: memoryview) -> tuple[memoryview | None, memoryview]:
        """Return the first frame that `data` completes, and the remaining bytes of `data`.

        If no frame is complete, keep a copy of `data` and return (None, empty). Raises PeerError, as `feed`
        does.
        """
        position = 0
        if self.pending_bytes:
            position = self._complete_gathered(data)
        elif len(data) >= SIZE_BYTES:
            (size,) = _SIZE.unpack_from(data)
            if not 0 <= size <= self.max_frame_bytes:
                self._refuse(size)
            stop = SIZE_BYTES + size
            if stop <= len(data):
                return data[SIZE_BYTES:stop], data[stop:]
            self._frame_bytes = stop
        if not self.pending_bytes:
            self._gather(data)
        elif self.pending_bytes == self._frame_bytes:
            return self._take(), data[position:]
        return None, _EMPTY

    def room(self, least_bytes: int) -> memoryview | None:
        """Return free space for the next bytes of an incomplete frame.

        Return None if the frame lacks fewer than `least_bytes`.

        After writing into this space, call `fill` or `filled`.
        """
        if self._frame_bytes - self.pending_bytes < least_bytes:
            return None
        self._grow(self.pending_bytes + 1)
        # A buffer that is used again may be larger than the frame, but bytes of the next frame must not get
        # into it. Guard: test_a_larger_buffer_that_is_used_again_ends_with_its_frame.
        return memoryview(self._gathered)[self.pending_bytes : self._frame_bytes]

    def fill(self, size_bytes: int) -> None:
        """Record that `size_bytes` were written into the space that `room` returned. The frame is not
        returned yet.
        """
        self.pending_bytes += size_bytes

    def filled(self, size_bytes: int) -> memoryview | None:
        """Do the work of `fill`, and return the frame if it is now complete.

        The frame has no size prefix. Return None if it is not complete.
        """
        self.fill(size_bytes)
        return self.first(_EMPTY)[0]

    def _complete_gathered(self, view: memoryview) -> int:
        """Copy the missing bytes of the incomplete frame from `view`. Return how many bytes were copied."""
        taken = 0
        if not self._frame_bytes:
            taken = min(SIZE_BYTES - self.pending_bytes, len(view))
            self._gather(view[:taken])
            if not self._frame_bytes:
                return taken
        missing = min(self._frame_bytes - self.pending_bytes, len(view) - taken)
        self._gather(view[taken : taken + missing])
        return taken + missing

    def _gather(self, view: memoryview) -> None:
        self._grow(self.pending_bytes + len(view))
        self._gathered[self.pending_bytes : self.pending_bytes + len(view)] = view
        self.pending_bytes += len(view)
        if not self._frame_bytes and self.pending_bytes >= SIZE_BYTES:
            self._frame_bytes = SIZE_BYTES + self._size(self._gathered, 0)

    def _grow(self, least_bytes: int) -> None:
        """Make the buffer at least `least_bytes` large.

        The new size is _ROOM_GROWTH times the bytes that have arrived, and at least FIRST_ROOM_BYTES. Once
        the size of the frame is known, it is also at least the size of the largest earlier frame, and never
        larger than the frame.
        """
        if least_bytes <= len(self._gathered):
            return
        size = max(least_bytes, _ROOM_GROWTH * self.pending_bytes, FIRST_ROOM_BYTES)
        if self._frame_bytes:
            size = min(max(size, self._earlier_bytes), self._frame_bytes)
        # A new buffer is needed, because views of the old one may be in use and forbid resizing.
        grown = self._spare(size) or bytearray(size)
        grown[: self.pending_bytes] = memoryview(self._gathered)[: self.pending_bytes]
        self._gathered = grown

    def _spare(self, least_bytes: int) -> bytearray | None:
        """Return the buffer of an earlier frame, if it is large enough and no view of it is left."""
        if least_bytes < _MIN_SPARE_BYTES:
            return None
        for index, buffer in enumerate(self._spares):
            if len(buffer) < least_bytes:
                continue
            try:
                # `buffer.pop()` raises BufferError while a view of the buffer exists. Neither `pop` nor
                # `append` moves the buffer's memory.
                buffer.append(buffer.pop())
            except BufferError:
                continue
            del self._spares[index]
            return buffer
        return None

    def _take(self) -> memoryview:
        frame = memoryview(self._gathered)[SIZE_BYTES : self._frame_bytes]
        if self._keeps_size:
            self._earlier_bytes = max(self._earlier_bytes, self._frame_bytes)
            if _MIN_SPARE_BYTES <= len(self._gathered) <= _MAX_SPARE_BYTES:
                self._spares = [*self._spares[-1:], self._gathered]
        self._gathered, self.pending_bytes, self._frame_bytes = bytearray(), 0, 0
        return frame

    def _size(self, buffer: Buffer, position: int) -> int:
        (size,) = _SIZE.unpack_from(buffer, position)
        if not 0 <= size <= self.max_frame_bytes:
            self._refuse(size)
        return int(size)

    def _refuse(self, size: int) -> None:
        raise PeerError(f"a frame of {size} bytes; must be 0 to {self.max_frame_bytes}")
