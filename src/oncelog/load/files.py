"""Readers that split files into chunks. A chunk is an Arrow table, with the file's position and digest after
the records of the table.

Text files (csv, jsonl, lines) are split by `load.record_boundaries`; their digest covers the bytes before the
position. Parquet files are read by rows; their digest covers the whole file.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from oncelog.errors import LoadRefused, MisuseError, StorageError
from oncelog.load.decisions import Layout, Source, default_delimiter
from oncelog.load.parsing import Options, ParquetRows, TextRows, open_file, text_rows
from oncelog.load.record_boundaries import chunk_ends

_HEAD_BYTES = 1 << 20
"""Number of bytes at the start of a CSV file from which the columns' names and kinds are determined."""
_LONGEST_RECORD_BYTES = 256 << 20
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
"""Byte order marks of UTF-16 and UTF-32."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of a file. `table` has the column value, and the column key if the load has a key.

    - `size_bytes`: the size of the records' text after decompression, or of Parquet rows in memory.
    - `position`, `digest`: the values for the FileCheckpoint after this chunk.
    - `consumed_bytes`: for progress, about how many bytes of the file on disk have been read.
    - `is_last`: True if the file ends after this chunk.
    """

    source: Source
    table: Any
    size_bytes: int
    position: int
    digest: str
    consumed_bytes: int
    is_last: bool

    @property
    def records(self) -> int:
        return int(self.table.num_rows)


class Reader(Protocol):
    """A reader of one file.

    Its methods raise StorageError if the file cannot be read or parsed, and LoadRefused if the file was
    changed while it was being read.
    """

    def digest_at(self, position: int) -> str | None:
        """Move to `position`. Return the digest that a FileCheckpoint with this position has.

        Return None if the file ends before `position`.
        """

    def is_at_end(self) -> bool:
        """Return True if the current position is the end of the file."""

    def chunks(self, *, max_records: int, max_bytes: int) -> Iterator[Chunk]:
        """Yield the chunks from the current position on.

        There is at least one chunk. The last chunk has `is_last`.
        """

    def close(self) -> None: ...


def source_of(path: Path) -> Source:
    """Return the current state of a file.

    Raises StorageError if the file cannot be found, and MisuseError if it is not a regular file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise MisuseError(f"{path} is not a regular file, so a load could not continue in its middle")
    return Source(str(path.absolute()), status.st_size, status.st_mtime_ns)


def check_given_once(paths: Sequence[Path], begun_count: int) -> None:
    """Raise LoadRefused if a new file is given twice, even through a symbolic link.

    The first `begun_count` files already belong to the load and are not checked. Hard links are treated as
    separate files.
    """
    indexes: dict[Path, int] = {}
    for index, path in enumerate(paths):
        first = indexes.setdefault(path.resolve(), index)
        if first < index >= begun_count:
            also = "" if paths[first] == path else f", also as {paths[first]}"
            raise LoadRefused(f"{path} is given twice{also}; all its records would be stored twice")


def open_reader(path: Path, layout: Layout, options: Options) -> Reader:
    """Return a reader for a file.

    Raises StorageError if the file cannot be read, and MisuseError if the file and the options do not match.
    """
    source = source_of(path)
    options = replace(options, delimiter=delimiter_of(path, options))
    try:
        if layout.format == "parquet":
            return _ParquetReader(source, options)
        return _TextReader(source, layout, options)
    except MisuseError as error:
        raise MisuseError(f"{path}: {error}") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise StorageError(f"{path}: {error}") from error


def delimiter_of(path: Path, options: Options) -> str:
    """Return the column delimiter of a CSV file: the option, a tab for .tsv, otherwise a comma."""
    return options.delimiter or default_delimiter(path.name)


def _check_unchanged(source: Source) -> None:
    if source_of(Path(source.name)) != source:
        raise LoadRefused(f"{source.name} was changed while it was being read")


class _TextReader:
    """A reader of text files. The part of `_buffer` from `_at` on has been read and decompressed, but is not
    in a chunk yet.
    """

    def __init__(self, source: Source, layout: Layout, options: Options) -> None:
        self._source = source
        self._raw = open_file(source.name)
        self._stream = pa.CompressedInputStream(self._raw, layout.codec) if layout.codec else self._raw
        self._hash = hashlib.sha256()
        self._position = self._at = 0
        self._buffer = b""
        self._is_end = False
        self._fill(_HEAD_BYTES)
        head = self._buffer[:_HEAD_BYTES]
        if head.startswith(_WIDE_MARKS):
            # Refuse UTF-16 and UTF-32: splitting them at the byte \n would cut characters apart.
            raise MisuseError("it is UTF-16 or UTF-32 (by its byte order mark); convert it to UTF-8")
        is_whole = self._is_end and len(head) == len(self._buffer)
        self._rows: TextRows = text_rows(layout.format, head, is_whole, options)

    def close(self) -> None:
        self._raw.close()

    def digest_at(self, position: int) -> str | None:
        while self._position < position:
            self._fill(1)
            if self._at == len(self._buffer):
                return None
            self._take(min(len(self._buffer) - self._at, position - self._position))
        return self._hash.hexdigest()

    def is_at_end(self) -> bool:
        self._fill(1)
        return self._at == len(self._buffer)

    def chunks(self, *, max_records: int, max_bytes: int) -> Iterator[Chunk]:
        self.digest_at(self._rows.header_bytes)
        fill_bytes, is_last = max_bytes, False
        while not is_last:
            self._fill(fill_bytes)
            unread = memoryview(self._buffer)[self._at :]
            record_ends = self._rows.record_ends(unread, is_end=self._is_end)
            ends = chunk_ends(record_ends, len(unread), max_records=max_records, is_end=self._is_end)
            if not ends and not self._is_end:
                fill_bytes = self._more_than(len(unread))
                continue
            fill_bytes, start = max_bytes, 0
            for end in ends or [0]:
                is_last = self._is_end and end == len(unread)
                yield self._chunk(unread[start:end], is_last)
                start = end

    def _more_than(self, size_bytes: int) -> int:
        if size_bytes > _LONGEST_RECORD_BYTES:
            raise StorageError(f"{self._location()}: no end of a record in {size_bytes} bytes")
        return 2 * size_bytes

    def _chunk(self, data: memoryview, is_last: bool) -> Chunk:
        try:
            table = self._rows.parse(data)
        except (ValueError, RecursionError, pa.ArrowException) as error:
            raise StorageError(f"{self._location()}: {error}") from error
        self._take(len(data))
        if is_last:
            _check_unchanged(self._source)
        digest = self._hash.hexdigest()
        consumed = self._source.size_bytes if is_last else self._raw.tell()
        return Chunk(self._source, table, len(data), self._position, digest, consumed, is_last)

    def _fill(self, count: int) -> None:
        """Read until the buffer has at least `count` bytes, or until the end of the file."""
        parts = [self._buffer[self._at :]]
        size = len(parts[0])
        while size < count and not self._is_end:
            try:
                part = self._stream.read(max(count - size, _HEAD_BYTES))
            except OSError as error:
                raise StorageError(f"{self._source.name}: {error}") from error
            self._is_end = not part
            parts.append(part)
            size += len(part)
        self._buffer, self._at = b"".join(parts), 0

    def _take(self, count: int) -> None:
        self._hash.update(memoryview(self._buffer)[self._at : self._at + count])
        self._at += count
        self._position += count

    def _location(self) -> str:
        return f"{self._source.name}, in the records from byte {self._position} on"


class _ParquetReader:
    def __init__(self, source: Source, options: Options) -> None:
        self._source, self._row = source, 0
        self._rows = ParquetRows(source.name, options)

    @cached_property
    def _digest(self) -> str:
        """The digest of the whole file, computed at the first use.

        The file is opened again by its name. `_check_unchanged` then makes sure that the name still means the
        same file. Guard: test_a_parquet_file_that_is_replaced_after_it_was_opened.
        """
        with Path(self._source.name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        _check_unchanged(self._source)
        return digest

    def close(self) -> None:
        self._rows.close()

    def digest_at(self, position: int) -> str | None:
        self._row = position
        return self._digest if position <= self._rows.count else None

    def is_at_end(self) -> bool:
        return self._row == self._rows.count

    def chunks(self, *, max_records: int, max_bytes: int) -> Iterator[Chunk]:
        for table, size_bytes in self._tables(max_records, max_bytes):
            self._row += table.num_rows
            yield self._chunk(table, size_bytes)
        if not self._rows.count:
            yield self._chunk(self._rows.nothing(), 0)

    def _tables(self, max_records: int, max_bytes: int) -> Iterator[tuple[Any, int]]:
        try:
            yield from self._rows.tables(self._row, max_records, max_bytes)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise StorageError(f"{self._source.name}, from row {self._row} on: {error}") from error

    def _chunk(self, table: Any, size_bytes: int) -> Chunk:
        is_last = self._row >= self._rows.count
        if is_last:
            _check_unchanged(self._source)
        consumed = self._source.size_bytes * self._row // max(self._rows.count, 1)
        return Chunk(self._source, table, size_bytes, self._row, self._digest, consumed, is_last)
