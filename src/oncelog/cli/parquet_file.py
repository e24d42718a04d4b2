"""Writes records into a Parquet file, in chunks. The file appears under its name only when it is complete."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from oncelog.errors import MisuseError
from oncelog.types import Record

CHUNK_RECORDS = 50_000
CHUNK_BYTES = 32 << 20
"""A row group is written when CHUNK_RECORDS records or CHUNK_BYTES bytes are buffered."""

SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("ms", tz="UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)


class ParquetFile:
    """A context manager that writes a Parquet file. The file replaces `path` when the `with` block ends
    without an error.

    If `path` is a symbolic link, the link stays, and the file that it points to is replaced.
    """

    def __init__(self, path: Path) -> None:
        """Raise MisuseError if `path` exists and is not a regular file, because a device or pipe must not be
        replaced.
        """
        # A superuser's `--to-parquet /dev/null` would leave the system without a null device. Guard:
        # test_a_parquet_file_replaces_no_pipe_and_no_link.
        if path.exists() and not path.is_file():
            raise MisuseError(f"{path} is not a regular file; name another one")
        self._path = path.resolve()
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        self._rows: list[Record] = []
        self._bytes = 0
        self._file: Any = None
        self._writer: Any = None

    def __enter__(self) -> Self:
        self._file = self._temporary.open("wb")
        self._writer = pq.ParquetWriter(self._file, SCHEMA, compression="zstd")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._write_chunk()
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if kind is None:
                os.replace(self._temporary, self._path)
        finally:
            # Mark the writer as closed. Otherwise its finalizer would write again, even after the disk was
            # full.
            self._writer.is_open = False
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def add(self, records: Sequence[Record]) -> None:
        """Buffer records. Each time the buffer is full, write it as a row group."""
        for record in records:
            self._rows.append(record)
            self._bytes += len(record.key or b"") + len(record.value or b"")
            # Headers count too, because they may be large. Guard: test_large_headers_end_a_row_group.
            self._bytes += sum(len(name) + len(data or b"") for name, data in record.headers)
            if len(self._rows) >= CHUNK_RECORDS or self._bytes >= CHUNK_BYTES:
                self._write_chunk()

    def _write_chunk(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        if rows:
            self._writer.write_table(_table(rows))


def _table(rows: Sequence[Record]) -> Any:
    columns = {
        "topic": [row.topic for row in rows],
        "partition": [row.partition for row in rows],
        "offset": [row.offset for row in rows],
        "timestamp": [row.timestamp_ms for row in rows],
        "key": [row.key for row in rows],
        "value": [row.value for row in rows],
        "headers": [[{"key": name, "value": data} for name, data in row.headers] for row in rows],
    }
    return pa.table({field.name: pa.array(columns[field.name], field.type) for field in SCHEMA}, SCHEMA)
