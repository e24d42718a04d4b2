"""A task of the source: read one range of offsets and return Arrow batches of about 1 to 4 MiB to Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

import pyarrow as pa

from oncelog.client.admin.blocking import Admin
from oncelog.client.consumer.blocking import Consumer
from oncelog.config import ADMIN
from oncelog.errors import OffsetOutOfRange, TimedOut, UnknownTopicOrPartition
from oncelog.spark.source.offset_ranges import DataLoss, DataLossError, OffsetRange, loss_text
from oncelog.spark.source.offset_resolver import describe_with_retry

SMALL_BATCH_BYTES = 1 << 20
"""Size in bytes below which batches are joined, because each batch costs Spark a fixed time."""
LARGE_BATCH_BYTES = 4 << 20

_log = logging.getLogger("oncelog.spark")


def read_range(
    client: Mapping[str, object],
    wanted: OffsetRange,
    *,
    topic_id: str | None,
    include_headers: bool,
    fail_on_data_loss: bool,
) -> Iterator[pa.RecordBatch]:
    """Yield the visible records of a range, in order. If some offsets no longer exist, raise DataLossError
    with `fail_on_data_loss`; otherwise log a warning and skip them.

    Offsets without a visible record (markers, aborted transactions, compaction) are not a loss. `topic_id` is
    the topic's id when the range was planned. If a topic of the same name now has another id, the range is
    lost. If `topic_id` is None, the id is not checked. If the topic is re-created after rows were returned,
    DataLossError is always raised, because these rows may belong to the new topic.
    """
    has_rows = False
    with _TopicCheck(client, wanted, topic_id) as check, Consumer(client) as consumer:
        if (loss := check.loss()) is None:
            try:
                for batch in regroup(_read(consumer, wanted, include_headers, fail_on_data_loss)):
                    has_rows = True
                    yield batch
            except UnknownTopicOrPartition:
                if (loss := check.loss()) is None:
                    raise
            else:
                # Check again: topic ids are never reused, so the same id before and after the read means that
                # one topic was read.
                loss = check.loss()
                if loss is not None and has_rows:
                    # The rows already returned may belong to the new topic. The next micro-batch starts at
                    # the beginning of that topic and would return the same rows again. See
                    # test_rows_of_two_topics_are_never_one_range.
                    raise DataLossError(
                        f"{loss.explanation}, while they were read: rows of both topics may "
                        "have been read. A retry of the task or a restart of the query "
                        "detects this before it reads"
                    )
        if loss is not None:
            _report_loss(loss, wanted.end, fail_on_data_loss)


class _TopicCheck:
    """A check that a topic has not been deleted or re-created since the range was planned.

    It is a context manager, so that both checks of a range use one connection.
    """

    def __init__(self, client: Mapping[str, object], wanted: OffsetRange, topic_id: str | None) -> None:
        self._wanted, self._topic_id = wanted, topic_id
        self._admin = Admin({key: value for key, value in client.items() if ADMIN.get(key)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._admin.close()

    def loss(self) -> DataLoss | None:
        """Return a DataLoss if the topic was deleted or re-created, otherwise None."""
        tp, start, end = self._wanted
        requested = f"{tp}: offsets {start} to {end - 1} were requested"
        topic = describe_with_retry(self._admin, [tp.topic], [tp])[tp.topic]
        if topic.error is not None:
            return DataLoss(tp, None, f"{requested}, but the topic does not exist")
        if self._topic_id in (None, topic.topic_id):
            return None
        return DataLoss(
            tp, None, f"{requested}, but the topic was deleted and re-created since they were planned"
        )


def _report_loss(loss: DataLoss, resume: int, fail_on_data_loss: bool) -> None:
    if fail_on_data_loss:
        raise DataLossError(loss_text([loss]))
    _log.warning("%s; continuing at offset %d, because failOnDataLoss is false", loss.explanation, resume)


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
    """Return the offset at which to continue after a failed read at `position`.

    If `position` exists, raise `error`, because there is no loss. Otherwise raise DataLossError if
    failOnDataLoss is set.
    """
    tp, _, end = wanted
    low, high = consumer.beginning_offsets([tp])[tp], consumer.end_offsets([tp])[tp]
    if low <= position < high:
        raise error
    text = (
        f"{tp}: offsets {position} to {end - 1} were requested, but the partition contains offsets {low} to "
        f"{high} (exclusive): retention, DeleteRecords or a re-created topic removed the others"
    )
    resume = min(low, end) if position < low else end
    _report_loss(DataLoss(tp, None, text), resume, fail_on_data_loss)
    return resume


def regroup(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in the same order, with small batches joined and large ones split."""
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        if waiting and waiting_bytes + batch.nbytes > LARGE_BATCH_BYTES:
            yield _joined(waiting)
            waiting, waiting_bytes = [], 0
        if batch.nbytes > LARGE_BATCH_BYTES:
            yield from _split(batch)
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


def _split(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    pieces = -(-batch.nbytes // LARGE_BATCH_BYTES)
    rows = max(1, -(-batch.num_rows // pieces))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)
