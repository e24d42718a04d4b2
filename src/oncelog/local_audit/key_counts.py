"""Count the records of each key in bounded memory.

Records arrive as columns. They are buffered until there are ROWS_AT_ONCE records or BYTES_AT_ONCE bytes of
keys. Then they are counted by key, and the counts go to a temporary file, in buckets by a hash of the key.
`merged` then adds up the counts of a few buckets at a time, within the same limits. Only a single bucket may
exceed the limits; it has about one thousandth of the keys. The records of a frequent key take only one row in
each file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncelog.local_audit.spill_directory import SpillDirectory
from oncelog.wire.row_hash import checksums

ROWS_AT_ONCE = 1 << 20
BYTES_AT_ONCE = 1 << 26
_BUCKETS = 1024
_KEYS = ["group", "key"]
_PLACES = ("first_tp", "first_offset", "last_tp", "last_offset")


class KeyCounts:
    """The number of records, and the first and last place, of each (group, key).

    A group is a topic, or a side of a comparison. Add records in the order of their places. `tp` is the
    number of the partition in the sorted list of partitions. Records without a key are not in these counts;
    `without_key` is their number.
    """

    def __init__(self, spill: SpillDirectory) -> None:
        self._spill = spill
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._files = 0
        self._bucket_rows = np.zeros(_BUCKETS, np.int64)
        self._bucket_bytes = np.zeros(_BUCKETS, np.int64)
        self.without_key = 0

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
        self._waiting_bytes += pc.sum(pc.binary_length(columns["key"])).as_py()
        if self._waiting_rows >= ROWS_AT_ONCE or self._waiting_bytes >= BYTES_AT_ONCE:
            self._write()

    def merged(self) -> Iterator[Any]:
        """Yield the counts as several tables with a row for each (group, key). All rows of a key are in the
        same table.
        """
        if not self._files:
            yield _counted(self._waiting)
            return
        self._write()
        paths = [str(self._spill.path(f"{number}.arrow")) for number in range(self._files)]
        readers = [pa.ipc.open_file(pa.memory_map(path)) for path in paths]
        for first, end in self._pieces():
            buckets = range(first, end)
            yield _counted([pa.Table.from_batches(map(reader.get_batch, buckets)) for reader in readers])

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield ranges (first, end) of buckets whose counts fit in memory together. A bucket that is too
        large is a range by itself.
        """
        first = rows = size = 0
        for bucket in range(_BUCKETS):
            more_rows, more_bytes = int(self._bucket_rows[bucket]), int(self._bucket_bytes[bucket])
            is_full = rows + more_rows > ROWS_AT_ONCE or size + more_bytes > BYTES_AT_ONCE
            if is_full and first < bucket:
                yield first, bucket
                first, rows, size = bucket, 0, 0
            rows, size = rows + more_rows, size + more_bytes
        yield first, _BUCKETS

    def _write(self) -> None:
        if not self._waiting:
            return
        table = _counted(self._waiting).combine_chunks()
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        keys = table["key"].combine_chunks()
        # Hash the whole key: long keys may differ only at their end. Guard:
        # test_keys_take_bounded_memory_whatever_they_look_like.
        buckets = ((checksums(keys) & np.uint64(0xFFFFFFFF)) % np.uint64(_BUCKETS)).astype(np.int64)
        sizes = pc.binary_length(keys).to_numpy()
        self._bucket_rows += np.bincount(buckets, minlength=_BUCKETS)
        self._bucket_bytes += np.bincount(buckets, sizes, minlength=_BUCKETS).astype(np.int64)
        table = table.take(pa.array(np.argsort(buckets, kind="stable")))
        bounds = np.searchsorted(np.sort(buckets), np.arange(_BUCKETS + 1))
        path = self._spill.path(f"{self._files}.arrow")
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
            for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                piece = table.slice(start, end - start).combine_chunks().to_batches()
                out.write_batch(piece[0] if piece else _empty(table.schema))
        self._files += 1


def _counted(tables: list[Any]) -> Any:
    """Return one row for each (group, key), with the sum of the counts."""
    if not tables:
        return _EMPTY
    # Use one thread: the aggregates `first` and `last` depend on the order of the rows.
    grouped = pa.concat_tables(tables).group_by(_KEYS, use_threads=False)
    ends = [(name, name.partition("_")[0]) for name in _PLACES]
    counted = grouped.aggregate([("count", "sum"), *ends])
    names = {"count_sum": "count", **{f"{name}_{end}": name for name, end in ends}}
    counted = counted.rename_columns([names.get(name, name) for name in counted.column_names])
    return counted.select(_EMPTY.column_names)


def _empty(schema: Any) -> Any:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


_SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("key", pa.binary()),
        ("count", pa.int64()),
        ("first_tp", pa.int32()),
        ("first_offset", pa.int64()),
        ("last_tp", pa.int32()),
        ("last_offset", pa.int64()),
    ]
)
# `pa.array` of a list, and `Schema.empty_table`, import pandas if it is installed, which takes 0.25 s.
_EMPTY = pa.Table.from_batches([], _SCHEMA)
