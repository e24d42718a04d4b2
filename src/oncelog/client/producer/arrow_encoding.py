"""Encodes Arrow tables as record batches, for `Producer.send_table`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncelog.client.producer.column_partitions import Partitions
from oncelog.client.producer.options import ProducerOptions
from oncelog.errors import MisuseError
from oncelog.runtime import system
from oncelog.wire.columns import arrow_to_batches
from oncelog.wire.primitives import WritableBuffer

_COLUMNS = {"key", "value", "timestamp", "headers"}
_BYTES_TYPES = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.null())
_BATCH_BYTES = 512 * 1024
"""Batches of a table may grow to this size even if batch.size is smaller: small batches encode slowly."""

ChoosePartitions = Callable[[Any, int], Partitions | int]


class EncodedBatch(NamedTuple):
    """An encoded batch that has no producer id and sequence yet.

    `times` has the timestamp of each record in ms, or is a single int for all records. If it is a memoryview,
    it reads the table's column directly, without an object per record.
    """

    partition: int
    data: WritableBuffer
    record_count: int
    times: Sequence[int] | int


def encode_table(
    table: Any, options: ProducerOptions, partition: int | None, choose_partitions: ChoosePartitions
) -> Iterator[EncodedBatch]:
    """Yield the batches of a table. The batches of one partition keep the order of its rows.

    If `partition` is None, `choose_partitions` gets the binary column of keys (or None) and the number of
    rows. It returns the partition of each row, or one partition for all rows. Raises MisuseError for columns
    other than value, key, timestamp and headers, and for a time before 1970.
    """
    table = arrow_table(table)
    names = set(table.schema.names)
    if "value" not in names or names - _COLUMNS:
        raise MisuseError(
            f"expected the column value, and optionally key, timestamp and headers; got {sorted(names)}"
        )
    table = _with_milliseconds(_with_bytes(table))
    for rows in table.combine_chunks().to_batches(max_chunksize=1 << 20):
        yield from _encode(*_by_partition(rows, partition, choose_partitions), options)


def arrow_table(table: Any) -> Any:
    """Return an object as an Arrow table. Raises MisuseError if the object cannot be read as a table."""
    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    if isinstance(table, pa.Table):
        return table
    kind = type(table).__name__
    if not hasattr(table, "__arrow_c_stream__"):
        raise MisuseError(
            "send_table needs an Arrow table, a record batch, or an object with "
            f"__arrow_c_stream__ (a data frame of Polars or pandas); got {kind}"
        )
    try:
        return pa.table(table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise MisuseError(f"this {kind} cannot be read as an Arrow table: {error}") from error


def _with_bytes(table: Any) -> Any:
    """Return the table with keys and values of one of _BYTES_TYPES, cast if necessary. Raises MisuseError."""
    for index, column in enumerate(table.schema):
        if column.name not in ("key", "value") or column.type in _BYTES_TYPES:
            continue
        try:  # cast, because data frames use other Arrow types for text and bytes
            table = table.set_column(index, column.name, table.column(index).cast(pa.binary()))
        except pa.ArrowException as error:
            raise MisuseError(
                f"the column {column.name} must contain bytes or text, not {column.type}; encode it first"
            ) from error
    return table


def _with_milliseconds(table: Any) -> Any:
    """Return the table with timestamps cast to int64 milliseconds.

    Raises MisuseError for a column of another type, and for a time before 1970, as `make_row` does. A batch
    cannot contain times whose difference exceeds 64 bits. Guard:
    test_a_table_with_times_before_1970_is_refused.
    """
    if "timestamp" not in table.schema.names:
        return table
    index, column = table.schema.get_field_index("timestamp"), table.column("timestamp")
    try:
        if pa.types.is_timestamp(column.type):
            column = pc.cast(column, pa.timestamp("ms", tz=column.type.tz), safe=False)
        column = column.cast(pa.int64())
    except pa.ArrowException as error:
        raise MisuseError(
            f"the column timestamp must contain timestamps or int64 milliseconds, not {column.type}"
        ) from error
    earliest_ms = pc.min(column).as_py()
    if earliest_ms is not None and earliest_ms < 0:
        raise MisuseError(f"timestamp_ms={earliest_ms} must be whole milliseconds since 1970")
    return table.set_column(index, "timestamp", column)


def _by_partition(
    rows: Any, partition: int | None, choose_partitions: ChoosePartitions
) -> tuple[Any, list[int], list[int]]:
    """Return the rows sorted by partition, the partitions, and the index after the last row of each
    partition.
    """
    if partition is not None:
        return rows, [partition], [rows.num_rows]
    keys = rows.column("key").cast(pa.binary()) if "key" in rows.schema.names else None
    partitions = choose_partitions(keys, rows.num_rows)
    if isinstance(partitions, int):
        return rows, [partitions], [rows.num_rows]
    counts = np.bincount(partitions)
    used = np.flatnonzero(counts)
    # NumPy sorts 16-bit integers by radix sort, several times as fast as wider integers.
    sort_keys = partitions.astype(np.uint16) if len(counts) <= 1 << 16 else partitions
    sorted_rows = rows.take(pa.array(np.argsort(sort_keys, kind="stable")))
    return sorted_rows, used.tolist(), np.cumsum(counts[used]).tolist()


def _encode(
    rows: Any, partitions: list[int], ends: list[int], options: ProducerOptions
) -> Iterator[EncodedBatch]:
    names = rows.schema.names
    times = _times(rows)
    start = 0
    for data, count in arrow_to_batches(
        rows.column("key") if "key" in names else None,
        rows.column("value"),
        times,
        headers=rows.column("headers") if "headers" in names else None,
        ends=ends,
        max_batch_bytes=max(options.batch_bytes, min(_BATCH_BYTES, options.max_request_bytes)),
        compression=options.compression,
        level=options.level,
    ):
        batch_times = times if isinstance(times, int) else memoryview(times.slice(start, count).to_numpy())
        yield EncodedBatch(partitions[bisect_right(ends, start)], data, count, batch_times)
        start += count


def _times(rows: Any) -> Any:
    if "timestamp" not in rows.schema.names:
        return system.current().wall_ns() // 1_000_000
    return rows.column("timestamp")
