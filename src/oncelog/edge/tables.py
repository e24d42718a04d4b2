"""Arrow tables to sealed batches, for `Producer.send_table`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncelog.client.producer_options import ProducerOptions
from oncelog.edge import machine
from oncelog.errors import MisuseError
from oncelog.wire.columns import arrow_to_batches

_COLUMNS = {"key", "value", "timestamp", "headers"}
_BATCH_BYTES = 512 * 1024
"""Whole columns are encoded at once, which pays only in batches larger than batch.size's default."""

Choose = Callable[[list[bytes | None] | None, int], list[int] | int]


class EncodedBatch(NamedTuple):
    """A batch without numbers; `times` are its records' timestamps in ms, or the one of all of them.

    A memoryview reads the table's own column: no object per record.
    """

    partition: int
    data: bytearray
    record_count: int
    times: Sequence[int] | int


def encode_table(
    table: Any, options: ProducerOptions, partition: int | None, choose: Choose
) -> Iterator[EncodedBatch]:
    """Batches for each partition, in row order within it.

    `choose(keys or None, number of rows)` gives a partition for every row, or the one of all.

    Raises MisuseError for columns other than value, key, timestamp and headers.
    """
    names = set(table.schema.names)
    if "value" not in names or names - _COLUMNS:
        raise MisuseError(
            f"expected the columns value and perhaps key, timestamp, headers; got {sorted(names)}"
        )
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    for piece in table.combine_chunks().to_batches(max_chunksize=1 << 20):
        for chosen, rows in _by_partition(piece, partition, choose):
            yield from _encode(rows, options, chosen)


def _by_partition(piece: Any, partition: int | None, choose: Choose) -> Iterator[tuple[int, Any]]:
    if partition is not None:
        yield partition, piece
        return
    keys = None
    if "key" in piece.schema.names:  # by way of NumPy: a third of what to_pylist() takes
        keys = piece.column("key").cast(pa.binary()).to_numpy(zero_copy_only=False).tolist()
    choice = choose(keys, piece.num_rows)
    if isinstance(choice, int):
        yield choice, piece
        return
    chosen = np.array(choice, dtype=np.int32)
    for each in np.flatnonzero(np.bincount(chosen)).tolist():
        yield each, piece.take(pa.array(np.flatnonzero(chosen == each)))


def _encode(rows: Any, options: ProducerOptions, partition: int) -> Iterator[EncodedBatch]:
    names = rows.schema.names
    times = _times(rows)
    start = 0
    for data, count in arrow_to_batches(
        rows.column("key") if "key" in names else None,
        rows.column("value"),
        times,
        headers=rows.column("headers") if "headers" in names else None,
        max_batch_bytes=max(options.batch_bytes, min(_BATCH_BYTES, options.max_request_bytes)),
        compression=options.compression,
        level=options.level,
    ):
        part = times if isinstance(times, int) else memoryview(times.slice(start, count).to_numpy())
        yield EncodedBatch(partition, data, count, part)
        start += count


def _times(rows: Any) -> Any:
    if "timestamp" not in rows.schema.names:
        return machine.current().wall_ns() // 1_000_000
    column = rows.column("timestamp")
    if pa.types.is_timestamp(column.type):
        column = pc.cast(column, pa.timestamp("ms", tz=column.type.tz), safe=False)
    return column.cast(pa.int64())
