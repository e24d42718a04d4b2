"""Count the records of each key in bounded memory.

Records arrive as columns. At most ROWS_AT_ONCE of them are in memory: then their counts by key go to a
temporary file, sorted into buckets by a hash of the key. `merged` adds up the counts of one bucket after
another. So memory also holds the distinct keys of one bucket, about ROWS_PER_BUCKET if no record has a key
twice. The records of one frequent key take one row for each file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncelog.spark.audit.row_hash import checksums_in_step

ROWS_AT_ONCE = 1 << 20
ROWS_PER_BUCKET = 1 << 20
_MAX_BUCKETS = 4096
_HASHED_BYTES = 64
"""The hash covers the first bytes of a key. Its cost grows with the longest key of all."""
_KEYS = ["group", "key"]
_PLACES = ("first_tp", "first_offset", "last_tp", "last_offset")


class KeyCounts:
    """The number of records, and the first and last place, of each (group, key).

    A group is a topic, or a side of a comparison. Add records in the order of their places. `tp` is a number
    for the partition, in the order of partitions. Records without a key are only counted, in `without_key`.
    """

    def __init__(self, expected_rows: int) -> None:
        self._bucket_count = min(max(1, -(-expected_rows // ROWS_PER_BUCKET)), _MAX_BUCKETS)
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._files = 0
        self._directory: TemporaryDirectory[str] | None = None
        self.without_key = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._directory is not None:
            self._directory.cleanup()

    def add(self, group: int, keys: Any, tp: int, offsets: Any) -> None:
        """Add records of one partition: a binary column of keys, and a column of their offsets."""
        if keys.null_count:
            self.without_key += keys.null_count
            offsets, keys = offsets.filter(keys.is_valid()), keys.drop_null()
        count = len(keys)
        if not count:
            return
        numbers = pa.repeat(pa.scalar(tp, pa.int32()), count)
        places = (numbers, offsets, numbers, offsets)
        columns = {"group": pa.repeat(pa.scalar(group, pa.int32()), count), "key": keys.cast(pa.binary())}
        columns |= {"count": pa.repeat(pa.scalar(1, pa.int64()), count)}
        self._waiting.append(pa.table(columns | dict(zip(_PLACES, places, strict=True))))
        self._waiting_rows += count
        if self._waiting_rows >= ROWS_AT_ONCE:
            self._write()

    def merged(self) -> Iterator[Any]:
        """Yield a table of group, key, count and places, in pieces. Each key is in one piece only."""
        if not self._files:
            yield _counted(self._waiting)
            return
        self._write()
        readers = [pa.ipc.open_file(pa.memory_map(str(self._path(n)))) for n in range(self._files)]
        for bucket in range(self._bucket_count):
            yield _counted([pa.Table.from_batches([reader.get_batch(bucket)]) for reader in readers])

    def _write(self) -> None:
        if not self._waiting:
            return
        table = _counted(self._waiting).combine_chunks()
        self._waiting, self._waiting_rows = [], 0
        if self._directory is None:
            self._directory = TemporaryDirectory(prefix="oncelog-audit-")
        buckets = _bucket_of(table["key"], self._bucket_count)
        table = table.take(pa.array(np.argsort(buckets, kind="stable")))
        bounds = np.searchsorted(np.sort(buckets), np.arange(self._bucket_count + 1))
        with (
            pa.OSFile(str(self._path(self._files)), "wb") as file,
            pa.ipc.new_file(file, table.schema) as out,
        ):
            for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                piece = table.slice(start, end - start).combine_chunks().to_batches()
                out.write_batch(piece[0] if piece else _empty(table.schema))
        self._files += 1

    def _path(self, number: int) -> Path:
        assert self._directory is not None
        return Path(self._directory.name, f"{number}.arrow")


def _counted(tables: list[Any]) -> Any:
    """Return one row for each (group, key), with the sum of the counts."""
    if not tables:
        return _EMPTY
    # The aggregates `first` and `last` need the order of rows, which several threads would not keep.
    grouped = pa.concat_tables(tables).group_by(_KEYS, use_threads=False)
    ends = [(name, name.partition("_")[0]) for name in _PLACES]
    counted = grouped.aggregate([("count", "sum"), *ends])
    names = {"count_sum": "count", **{f"{name}_{end}": name for name, end in ends}}
    counted = counted.rename_columns([names.get(name, name) for name in counted.column_names])
    return counted.select(_EMPTY.column_names)


def _bucket_of(keys: Any, bucket_count: int) -> Any:
    start = pc.binary_slice(keys.combine_chunks(), 0, _HASHED_BYTES)
    return (checksums_in_step(start) % np.uint64(bucket_count)).astype(np.int64)


def _empty(schema: Any) -> Any:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


_EMPTY = pa.table(
    {
        "group": pa.array([], pa.int32()),
        "key": pa.array([], pa.binary()),
        "count": pa.array([], pa.int64()),
        "first_tp": pa.array([], pa.int32()),
        "first_offset": pa.array([], pa.int64()),
        "last_tp": pa.array([], pa.int32()),
        "last_offset": pa.array([], pa.int64()),
    }
)
