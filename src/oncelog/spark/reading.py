"""What a task does: read one range of offsets and hand it to Spark in Arrow batches of 1 to 4 MB."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa

from oncelog.edge.consumer import Consumer
from oncelog.errors import OffsetOutOfRange, TimedOut
from oncelog.spark.offsets import DataLossError, Loss, OffsetRange, loss_text

SMALL_BATCH_BYTES = 1 << 20
"""Smaller ones are joined: each batch costs Spark a fixed time."""
LARGE_BATCH_BYTES = 4 << 20

_log = logging.getLogger("oncelog.spark")


def read_range(
    client: Mapping[str, object], wanted: OffsetRange, *, include_headers: bool, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    """The visible records of a range, in order. Raises DataLossError when some of it is gone.

    Offsets without a visible record (markers, aborted transactions, compaction) are no loss.
    """
    with Consumer(client) as consumer:
        yield from regroup(_read(consumer, wanted, include_headers, fail_on_data_loss))


def _read(
    consumer: Consumer, wanted: OffsetRange, include_headers: bool, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    tp, position, end = wanted
    while position < end:
        try:
            for batch in consumer.fetch_range(tp, position, end, include_headers=include_headers):
                position = batch.column("offset")[-1].as_py() + 1
                yield batch
            return
        except (OffsetOutOfRange, TimedOut) as error:
            position = _after_loss(consumer, wanted, position, fail_on_data_loss, error)


def _after_loss(
    consumer: Consumer, wanted: OffsetRange, position: int, fail_on_data_loss: bool, error: Exception
) -> int:
    """Where to go on when nothing could be read at `position`; raises when that is not allowed."""
    tp, _, end = wanted
    low, high = consumer.beginning_offsets([tp])[tp], consumer.end_offsets([tp])[tp]
    if low <= position < high:
        raise error
    text = (
        f"{tp}: offsets {position} to {end - 1} were wanted, and it holds offsets {low} up to (not "
        f"including) {high}: retention, delete-records or a re-created topic removed the others"
    )
    if fail_on_data_loss:
        raise DataLossError(loss_text([Loss(tp, None, text)])) from error
    resume = min(low, end) if position < low else end
    _log.warning("%s; going on at offset %d, since failOnDataLoss is false", text, resume)
    return resume


def regroup(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, small batches joined and large ones cut."""
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        if waiting and waiting_bytes + batch.nbytes > LARGE_BATCH_BYTES:
            yield _joined(waiting)
            waiting, waiting_bytes = [], 0
        if batch.nbytes > LARGE_BATCH_BYTES:
            yield from _cut(batch)
            continue
        waiting.append(batch)
        waiting_bytes += batch.nbytes
        if waiting_bytes >= SMALL_BATCH_BYTES:
            yield _joined(waiting)
            waiting, waiting_bytes = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    pieces = -(-batch.nbytes // LARGE_BATCH_BYTES)
    rows = max(1, -(-batch.num_rows // pieces))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)
