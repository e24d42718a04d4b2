"""`df.write` and `df.writeStream.format("oncelog")`, on Spark's Python Data Source API.

Spark sends pickled copies of a writer to its tasks, and calls `commit` on another object. So a writer
contains only options and ids. A task reads its query id and batch id from Spark's local properties.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from oncelog.errors import ConfigError, OncelogError
from oncelog.spark.python_worker import freeze_modules
from oncelog.spark.sink.decisions import SinkError
from oncelog.spark.sink.kept_clients import KeptClients
from oncelog.spark.sink.sink_metrics import SinkMetrics, publish
from oncelog.spark.sink.sink_options import FULL_RETRY, SinkSettings, parse_sink_options, repeats_whole_stages
from oncelog.spark.sink.sink_rows import check_columns
from oncelog.spark.sink.state import new_run_id
from oncelog.spark.sink.task import Sink, TaskReport, abandon, finish, write_task
from oncelog.spark.sink.topic_ids import marker_topic_id
from oncelog.spark.source.source import OncelogSource
from oncelog.spark.task_input import TaskInput

if TYPE_CHECKING:
    import pyarrow as pa

_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
_ONLY_BATCH = 0
_kept = KeptClients()
"""The clients that this process keeps from one task or commit to the next."""
_log = logging.getLogger("oncelog.spark")


@dataclass(frozen=True)
class Written(WriterCommitMessage):  # type: ignore[misc]
    """The message that a task sends to the driver after its rows are written. `query_id` is None in a batch
    write.
    """

    report: TaskReport
    query_id: str | None = None


class OncelogFormat(OncelogSource):
    """`format("oncelog")`, reading and writing; docs/spark.md lists the options."""

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        freeze_modules()
        if overwrite:
            raise ConfigError("a topic cannot be overwritten: use mode('append')")
        settings = parse_sink_options(self.options, "batch")
        _check(schema, settings)
        return BatchWriter(settings)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        freeze_modules()
        # Ignore `overwrite`, which Spark sets in complete mode: the rows are appended, as by Spark's own
        # Kafka sink.
        settings = parse_sink_options(self.options, "stream")
        _check(schema, settings)
        return StreamWriter(settings)


def _check(schema: StructType, settings: SinkSettings) -> None:
    check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields], settings.topic)


class BatchWriter(DataSourceArrowWriter):  # type: ignore[misc]
    """A batch write.

    Without a writeId, the rows of a retried task are stored once, but a write that the user repeats is stored
    twice.
    """

    def __init__(self, settings: SinkSettings) -> None:
        # Generate the name here: the driver creates this object once and sends pickled copies to the tasks,
        # so all tasks and their retries use the same name.
        name, is_named = settings.write_id or str(uuid.uuid4()), settings.write_id is not None
        sink = Sink(name, settings, is_named=is_named)
        # With a writeId and a separate marker topic, rows stay when that topic is created again. If the write
        # failed then, its repetition would double them. Guard:
        # test_a_write_with_an_id_continues_although_its_separate_marker_topic_was_replaced.
        is_separate = is_named and settings.marker_topic != settings.topic
        self._sink = sink if is_separate else replace(sink, marker_topic_id=_marker_topic_id(settings))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        freeze_modules()
        task = _task()
        _warn_of_shuffles(task)
        return Written(_write(self._sink, _ONLY_BATCH, task.partitionId(), iterator))

    def commit(self, messages: Sequence[Written | None]) -> None:
        freeze_modules()
        reports = [_of(message).report for message in messages]
        finish(self._sink, _ONLY_BATCH, reports, _kept)
        publish(SinkMetrics.of(self._sink.name, _ONLY_BATCH, reports))

    def abort(self, messages: Sequence[Written | None]) -> None:
        """Abort the transactions that tasks prepared.

        The rows of committed tasks stay in the topic. A repetition of the write with the same writeId does
        not write them again.
        """
        abandon(self._sink, [message.report for message in messages if message is not None])


class StreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]
    """The sink of a streaming query, identified by the query id in its checkpoint."""

    def __init__(self, settings: SinkSettings) -> None:
        # Create the run id here: the driver creates a writer for each attempt at a micro-batch and sends
        # pickled copies to the tasks. So all tasks of an attempt have the same run id, and each attempt has a
        # different one.
        self._settings, self._run_id = settings, new_run_id()
        # With a separate marker topic, rows stay when that topic is created again. If the micro-batch failed
        # then, its repetition would double them.
        is_separate = settings.marker_topic != settings.topic
        self._marker_topic_id = None if is_separate else _marker_topic_id(settings)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        freeze_modules()
        task = _task()
        _warn_of_shuffles(task)
        query_id, batch_id = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        if query_id is None or batch_id is None:
            raise SinkError(f"Spark gave the task no {_QUERY_ID} or {_BATCH_ID}: use Spark 4.2 or newer")
        report = _write(self._sink(query_id), int(batch_id), task.partitionId(), iterator)
        return Written(report, query_id)

    def _sink(self, query_id: str) -> Sink:
        return Sink(query_id, self._settings, run_id=self._run_id, marker_topic_id=self._marker_topic_id)

    def commit(self, messages: Sequence[Written | None], batchId: int) -> None:
        written = [_of(message) for message in messages]
        if written and written[0].query_id is not None:
            sink = self._sink(written[0].query_id)
            reports = [message.report for message in written]
            finish(sink, batchId, reports, _kept)
            publish(SinkMetrics.of(sink.name, batchId, reports))

    def abort(self, messages: Sequence[Written | None], batchId: int) -> None:
        """Abort the transactions that tasks have prepared (see task.py). All other tasks commit or abort
        their own transactions.
        """
        written = [message for message in messages if message is not None]
        if written and written[0].query_id is not None:
            sink = self._sink(written[0].query_id)
            abandon(sink, [message.report for message in written])


def _marker_topic_id(settings: SinkSettings) -> str | None:
    """Return the current id of the marker topic, or None if the look-up fails."""
    with suppress(OncelogError), _kept.borrow(settings) as clients:
        return marker_topic_id(clients.admin, settings)
    return None


def _write(sink: Sink, batch_id: int, task: int, iterator: Iterator[pa.RecordBatch]) -> TaskReport:
    rows = TaskInput(iterator)
    return write_task(sink, batch_id, task, rows.batches, _kept, commits=rows.is_checked)


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise SinkError("the sink's write() runs only in Spark tasks")
    return task


@cache
def _warn() -> None:
    _log.warning(
        "%s is off: if an executor's shuffle files are lost, a plan that is not "
        "deterministic may write some rows twice and lose others. Set it to true, Spark's "
        "default",
        FULL_RETRY,
    )


def _warn_of_shuffles(task: TaskContext) -> None:
    """Warn once per Python worker if a lost shuffle file can double rows.

    Only task 0 checks. Tasks see Spark's settings only as local properties.
    """
    if task.partitionId() == 0 and not repeats_whole_stages(task.getLocalProperty):
        _warn()


def _of(message: Written | None) -> Written:
    if message is None:
        raise SinkError("Spark committed a write although a task sent no message")
    return message
