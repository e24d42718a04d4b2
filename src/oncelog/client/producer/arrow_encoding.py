"""Arrow tables to sealed batches, for `Producer.send_table`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncelog.client.producer.options import ProducerOptions
from oncelog.client.producer.partitioner import Partitions
from oncelog.errors import MisuseError
from oncelog.runtime import system
from oncelog.wire.columns import arrow_to_batches
from oncelog.wire.primitives import WritableBuffer

_COLUMNS = {"key", "value", "timestamp", "headers"}
_BYTES_TYPES = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.null())
_BATCH_BYTES = 512 * 1024
"""Whole columns are encoded at once, which pays only in batches larger than batch.size's default."""

Choose = Callable[[Any, int], Partitions | int]


class EncodedBatch(NamedTuple):
    """A batch without numbers; `times` are its records' timestamps in ms, or the one of all of them.

    A memoryview reads the table's own column: no object per record.
    """

    partition: int
    data: WritableBuffer
    record_count: int
    times: Sequence[int] | int


def encode_table(
    table: Any, options: ProducerOptions, partition: int | None, choose: Choose
) -> Iterator[EncodedBatch]:
    """Batches for each partition, in row order within it.

    `choose(binary column of keys or None, number of rows)` gives each row's partition, or the one of all.

    Raises MisuseError for columns other than value, key, timestamp and headers.
    """
    table = arrow_table(table)
    names = set(table.schema.names)
    if "value" not in names or names - _COLUMNS:
        raise MisuseError(
            f"expected the columns value and perhaps key, timestamp, headers; got {sorted(names)}"
        )
    table = _with_bytes(table)
    for piece in table.combine_chunks().to_batches(max_chunksize=1 << 20):
        yield from _encode(*_by_partition(piece, partition, choose), options)


def arrow_table(table: Any) -> Any:
    """Return what a caller gives as one Arrow table. Raises MisuseError when it cannot be read as one."""
    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    if isinstance(table, pa.Table):
        return table
    kind = type(table).__name__
    if not hasattr(table, "__arrow_c_stream__"):
        raise MisuseError(
            "send_table takes an Arrow table, a record batch, or an object with __arrow_c_stream__ (a data "
            f"frame of Polars or pandas); got {kind}"
        )
    try:
        return pa.table(table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise MisuseError(f"this {kind} cannot be read as an Arrow table: {error}") from error


def _with_bytes(table: Any) -> Any:
    """Return the table with keys and values that are bytes or text. Raises MisuseError on other columns."""
    for index, column in enumerate(table.schema):
        if column.name not in ("key", "value") or column.type in _BYTES_TYPES:
            continue
        try:  # text and bytes of another layout, as data frames have them
            table = table.set_column(index, column.name, table.column(index).cast(pa.binary()))
        except pa.ArrowException as error:
            raise MisuseError(
                f"the column {column.name} must hold bytes or text, not {column.type}; encode it first"
            ) from error
    return table


def _by_partition(piece: Any, partition: int | None, choose: Choose) -> tuple[Any, list[int], list[int]]:
    """The rows with those of a partition together, the partitions, and after which row each of them ends."""
    if partition is not None:
        return piece, [partition], [piece.num_rows]
    keys = piece.column("key").cast(pa.binary()) if "key" in piece.schema.names else None
    chosen = choose(keys, piece.num_rows)
    if isinstance(chosen, int):
        return piece, [chosen], [piece.num_rows]
    counts = np.bincount(chosen)
    there = np.flatnonzero(counts)
    small = chosen.astype(np.uint16) if len(counts) <= 1 << 16 else chosen  # by radix, several times as fast
    rows = piece.take(pa.array(np.argsort(small, kind="stable")))
    return rows, there.tolist(), np.cumsum(counts[there]).tolist()


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
        part = times if isinstance(times, int) else memoryview(times.slice(start, count).to_numpy())
        yield EncodedBatch(partitions[bisect_right(ends, start)], data, count, part)
        start += count


def _times(rows: Any) -> Any:
    if "timestamp" not in rows.schema.names:
        return system.current().wall_ns() // 1_000_000
    column = rows.column("timestamp")
    if pa.types.is_timestamp(column.type):
        column = pc.cast(column, pa.timestamp("ms", tz=column.type.tz), safe=False)
    return column.cast(pa.int64())
