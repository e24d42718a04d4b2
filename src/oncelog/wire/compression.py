"""The codecs of record batches, with limited output.

A batch of a few bytes may decompress to gigabytes. Therefore gzip, lz4 and zstd data are decompressed in
steps until the output ends or exceeds the limit. A block of snappy is decompressed in one call, but only if
the size that it claims is possible. Python's standard library supports gzip. The other codecs need optional
libraries (`pip install 'oncelog[compression]'`).

Snappy data comes in two framings: xerial's blocks (Java, aiokafka) and a single bare block (librdkafka). Both
can be read; batches are written in xerial's. LZ4 frames are written in the form that Java accepts: version 1,
with independent blocks.
"""

from __future__ import annotations

import importlib
import struct
import zlib
from typing import Any

from oncelog.errors import ConfigError, CorruptMessage, InvalidRecord, UnsupportedCompressionType
from oncelog.types import Compression
from oncelog.wire.primitives import Buffer

MAX_DECOMPRESSED_BYTES = 256 << 20
"""Default limit of a batch's uncompressed size in bytes."""

_STEP_BYTES = 1 << 20
_GZIP_WINDOW = 31
_GZIP_INPUT_BYTES = 4 << 10
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES = 32 << 10
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_I32 = struct.Struct(">i")
_SNAPPY_BEST_RATIO = 64
"""An upper bound of snappy's expansion: no byte yields more than 64, because a copy element yields at most 64
bytes.
"""
_MOST_GROWTH = {
    Compression.NONE: 1,
    Compression.GZIP: 1032,  # At best, two bits yield 258 bytes: 1032 for one byte.
    Compression.SNAPPY: _SNAPPY_BEST_RATIO,
    Compression.LZ4: 255,  # Each further byte of a match's length yields at most 255 bytes.
    Compression.ZSTD: 1 << 15,  # At best, four bytes yield 128 KB: 32 KB for one byte.
}

_LIBRARY = {Compression.SNAPPY: "cramjam", Compression.LZ4: "lz4.frame", Compression.ZSTD: "zstandard"}

# Creating a context costs two to three times as much as compressing a small batch, so contexts are reused.
# Threads must not share a context. Each use takes a context from its list and puts it back; list.pop and
# list.append are atomic.
_zstd_compressors: dict[int, list[Any]] = {}
_zstd_decompressors: list[Any] = []


def _library(codec: Compression) -> Any:
    return importlib.import_module(_LIBRARY[codec])


def _hint(codec: Compression) -> str:
    package = _LIBRARY[codec].partition(".")[0]
    return f"{codec.name.lower()} needs the package {package}: pip install 'oncelog[compression]'"


def check_available(codec: Compression) -> None:
    """Raise ConfigError if the codec's library is missing."""
    if codec in _LIBRARY:
        try:
            _library(codec)
        except ImportError as error:
            raise ConfigError(f"compression.type={codec.name.lower()}: {_hint(codec)}") from error


def compress(codec: Compression, data: Buffer, level: int | None = None) -> bytes:
    """Return the compressed data, in the framing that record batches use.

    If `level` is None, the codec's default is used. Raises ConfigError if the codec's library is missing.
    """
    check_available(codec)
    if codec is Compression.GZIP:
        packer = zlib.compressobj(-1 if level is None else level, zlib.DEFLATED, _GZIP_WINDOW)
        return packer.compress(data) + packer.flush()
    if codec is Compression.SNAPPY:
        return _compress_snappy(data)
    if codec is Compression.LZ4:
        return _compress_lz4(data, level)
    if codec is Compression.ZSTD:
        return _compress_zstd(data, 3 if level is None else level)
    return bytes(data)


def _compress_snappy(data: Buffer) -> bytes:
    raw = _library(Compression.SNAPPY).snappy
    view, parts = memoryview(data), [_XERIAL_HEADER]
    for start in range(0, max(1, len(view)), _XERIAL_BLOCK_BYTES):
        block = bytes(raw.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        parts += (_I32.pack(len(block)), block)
    return b"".join(parts)


def _compress_lz4(data: Buffer, level: int | None) -> bytes:
    frame = _library(Compression.LZ4)
    return bytes(
        frame.compress(
            data,
            compression_level=0 if level is None else level,
            block_size=frame.BLOCKSIZE_MAX64KB,
            block_linked=False,
            store_size=False,
        )
    )


def _compress_zstd(data: Buffer, level: int) -> bytes:
    pool = _zstd_compressors.setdefault(level, [])
    try:
        context = pool.pop()
    except IndexError:
        context = _library(Compression.ZSTD).ZstdCompressor(level=level)
    packed = bytes(context.compress(data))
    pool.append(context)
    return packed


def most_output(codec: Compression, size_bytes: int) -> int:
    """Return the maximum uncompressed size in bytes that `size_bytes` of compressed data can have."""
    return size_bytes * _MOST_GROWTH[codec]


def decompress(codec: Compression, data: Buffer, max_bytes: int = MAX_DECOMPRESSED_BYTES) -> Buffer:
    """Return the uncompressed data.

    Raises CorruptMessage if the input is incomplete or malformed, InvalidRecord if the output exceeds
    `max_bytes`, and UnsupportedCompressionType if the codec's library is missing.
    """
    out = decompress_within(codec, data, max_bytes)
    if out is None:
        raise InvalidRecord(
            f"a {codec.name.lower()} batch of {len(data)} bytes is larger than {max_bytes} "
            "bytes after decompression"
        )
    return out


def decompress_within(codec: Compression, data: Buffer, max_bytes: int) -> Buffer | None:
    """Return the uncompressed data, or None if it exceeds `max_bytes`.

    Raises CorruptMessage and UnsupportedCompressionType, as `decompress` does.
    """
    if codec is Compression.NONE:
        return data
    try:
        return _DECOMPRESS[codec](memoryview(data), max_bytes)
    except ImportError as error:
        raise UnsupportedCompressionType(_hint(codec)) from error


def _corrupt(codec: Compression, detail: object) -> CorruptMessage:
    return CorruptMessage(f"the {codec.name.lower()} data of a batch is damaged: {detail}")


def _decompress_gzip(data: memoryview, max_bytes: int) -> bytes | None:
    """Return the output of all gzip members, one after another; None if it exceeds the limit.

    The input is fed in slices: after each member, zlib copies the unread part of its input. If it got the
    complete input, many small members would make it copy almost everything again and again. See
    test_gzip_of_many_members_copies_little.
    """
    parts, total, fed = [], 0, 0
    rest: Buffer = b""
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    is_begun = False
    try:
        while len(rest) or fed < len(data):
            if not len(rest):
                rest, fed = data[fed : fed + _GZIP_INPUT_BYTES], fed + _GZIP_INPUT_BYTES
            is_begun = True
            part = unpacker.decompress(rest, _STEP_BYTES)
            total += len(part)
            if total > max_bytes:
                return None
            parts.append(part)
            rest = unpacker.unconsumed_tail
            if unpacker.eof:
                rest, unpacker, is_begun = unpacker.unused_data, zlib.decompressobj(_GZIP_WINDOW), False
            elif len(part) == _STEP_BYTES and not rest:
                # The output step is full and the input is used up. zlib returns the remaining output without
                # further input.
                while part := unpacker.decompress(b"", _STEP_BYTES):
                    total += len(part)
                    if total > max_bytes:
                        return None
                    parts.append(part)
        if is_begun:
            raise _corrupt(Compression.GZIP, "the stream is truncated")
    except zlib.error as error:
        raise _corrupt(Compression.GZIP, error) from error
    return b"".join(parts)


def _decompress_lz4(data: memoryview, max_bytes: int) -> bytes | None:
    frame = _library(Compression.LZ4)
    unpacker, parts, total = frame.LZ4FrameDecompressor(), [], 0
    chunk: Buffer = data
    try:
        while not unpacker.eof:
            part = unpacker.decompress(chunk, _STEP_BYTES)
            chunk = b""
            total += len(part)
            if total > max_bytes:
                return None
            parts.append(part)
            if unpacker.needs_input and not unpacker.eof:
                raise _corrupt(Compression.LZ4, "the frame is truncated")
    except (RuntimeError, EOFError) as error:
        raise _corrupt(Compression.LZ4, error) from error
    return b"".join(parts)


def _decompress_zstd(data: memoryview, max_bytes: int) -> bytes | None:
    _check_zstd_is_whole(data)
    zstandard = _library(Compression.ZSTD)
    try:
        context = _zstd_decompressors.pop()
    except IndexError:
        context = zstandard.ZstdDecompressor()
    parts, total = [], 0
    try:
        with context.stream_reader(data, read_across_frames=True) as reader:
            while part := reader.read(_STEP_BYTES):
                total += len(part)
                if total > max_bytes:
                    return None
                parts.append(part)
    except zstandard.ZstdError as error:
        raise _corrupt(Compression.ZSTD, error) from error
    finally:
        _zstd_decompressors.append(context)
    return b"".join(parts)


def _check_zstd_is_whole(data: memoryview) -> None:
    """Raise CorruptMessage unless the data ends exactly at the end of a frame.

    The library does not detect a truncated frame, so this function follows the block headers. Source: RFC
    8878, section 3.1.1.
    """
    position = 0
    try:
        while position < len(data):
            if data[position : position + 4] != _ZSTD_MAGIC:
                raise _corrupt(Compression.ZSTD, f"no frame begins at byte {position}")
            flags = data[position + 4]
            single_segment = flags >> 5 & 1
            position += 5 + (1 - single_segment) + (0, 1, 2, 4)[flags & 3]
            position += (single_segment, 2, 4, 8)[flags >> 6]
            last = 0
            while not last:
                head = data[position] | data[position + 1] << 8 | data[position + 2] << 16
                last, is_run_length = head & 1, head >> 1 & 3 == 1
                position += 3 + (1 if is_run_length else head >> 3)
            position += 4 * (flags >> 2 & 1)
    except IndexError:
        position = len(data) + 1
    if position > len(data):
        raise _corrupt(Compression.ZSTD, "the frame is truncated")


def _decompress_snappy(data: memoryview, max_bytes: int) -> bytes | None:
    raw = _library(Compression.SNAPPY).snappy
    if data[: len(_XERIAL_MAGIC)] != _XERIAL_MAGIC:
        return _snappy_block(raw, data, max_bytes)
    position, parts, total = len(_XERIAL_HEADER), [], 0
    while position < len(data):
        if position + 4 > len(data):
            raise _corrupt(Compression.SNAPPY, "a block's length is truncated")
        (size,) = _I32.unpack_from(data, position)
        position += 4
        if not 0 <= size <= len(data) - position:
            raise _corrupt(
                Compression.SNAPPY, f"a block says {size} bytes, but {len(data) - position} are left"
            )
        part = _snappy_block(raw, data[position : position + size], max_bytes - total)
        if part is None:
            return None
        parts.append(part)
        total += len(part)
        position += size
    return b"".join(parts)


def _snappy_block(raw: Any, block: memoryview, max_bytes: int) -> bytes | None:
    """Return the output of one bare block; None if it exceeds `max_bytes`.

    Raises CorruptMessage if the block claims a size that a block of this length cannot have.
    """
    claimed, shift = 0, 0
    for byte in block[:5]:
        claimed |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    else:
        raise _corrupt(Compression.SNAPPY, "a block has no length")
    if claimed > max_bytes:
        return None
    if claimed > _SNAPPY_BEST_RATIO * len(block):
        raise _corrupt(
            Compression.SNAPPY, f"a block of {len(block)} bytes says {claimed} bytes after decompression"
        )
    try:
        return bytes(raw.decompress_raw(block))
    # The call may raise cramjam's DecompressionError, or any error of its Rust code.
    except Exception as error:
        raise _corrupt(Compression.SNAPPY, error) from error


_DECOMPRESS = {
    Compression.GZIP: _decompress_gzip,
    Compression.SNAPPY: _decompress_snappy,
    Compression.LZ4: _decompress_lz4,
    Compression.ZSTD: _decompress_zstd,
}
