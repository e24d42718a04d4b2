"""`write_atomic`: a whole micro-batch as one transaction, for foreachBatch.

The driver begins and ends the transaction; tasks write into it under its producer id and epoch. Each Kafka
partition is written by one task, and each task by its first attempt only: a second one would number its
records from 0 again. Who is first is decided by a claim, which is a lane's marker; after any failure the
whole batch is written again under a new epoch.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from oncelog.client.admin.blocking import Admin
from oncelog.client.producer.blocking import Producer
from oncelog.errors import ConfigError, OncelogError
from oncelog.spark.sink.atomic_task import REPORT_SCHEMA, SUM_SCHEMA, place_rows, sum_rows, write_share
from oncelog.spark.sink.batch_plan import note_begun
from oncelog.spark.sink.decisions import (
    Compare,
    Finished,
    LaneMarker,
    Reason,
    Refuse,
    RowSum,
    SinkError,
    Write,
    decide_atomic,
    decide_same_content,
    is_plan_repeated,
)
from oncelog.spark.sink.error_hints import failure_text
from oncelog.spark.sink.rows import KINDS, check_columns
from oncelog.spark.sink.sink_metrics import SinkMetrics, publish
from oncelog.spark.sink.sink_options import FULL_RETRY, parse_sink_options, repeats_whole_stages
from oncelog.spark.sink.task import LaneReport, Sink
from oncelog.types import TransactionShare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
_RUN_ID = "spark.jobGroup.id"
"""All jobs of a query's run are in the group of its run id."""
_ATTEMPTS = 3
_log = logging.getLogger("oncelog.spark")


class AtomicWrite(NamedTuple):
    """What became of a micro-batch. `was_there`: nothing was written, it was committed before.

    `size_bytes`: of keys and values; `commit_seconds`: from the last row's acknowledgement to the commit's
    answer. Both 0 of what was there.
    """

    batch_id: int
    rows: int
    was_there: bool
    size_bytes: int = 0
    commit_seconds: float = 0.0


def write_atomic(
    df: DataFrame, batch_id: int, options: Mapping[str, Any], *, name: str | None = None
) -> AtomicWrite:
    """Write a micro-batch in one transaction, once, however often it is called for `batch_id`.

        stream.writeStream.foreachBatch(lambda df, batch_id: write_atomic(df, batch_id, options))

    `options`: those of writing with format("oncelog"). `name`: whose batch ids these are; default: the
    streaming query's id. Two calls for one micro-batch and topic need different names. A name that is
    first used in a later batch than 0 needs the option firstBatchId, so use it in every micro-batch, without
    rows too. Raises SinkError, ConfigError, and what Spark raises; after an exception the same call may be
    made again.
    """
    settings = parse_sink_options({key: str(value) for key, value in options.items()}, "stream")
    if not repeats_whole_stages(lambda setting: df.sparkSession.conf.get(setting, None)):
        # Rows without a key are dealt out by chance, and then shuffled. A script lost 125 of 600.
        raise ConfigError(
            f"write_atomic needs {FULL_RETRY}=true, Spark's default: without it a lost shuffle file doubles "
            "rows and loses others"
        )
    check_columns([(field.name, field.dataType.simpleString()) for field in df.schema.fields], settings.topic)
    context = df.sparkSession.sparkContext
    query_id = context.getLocalProperty(_QUERY_ID)
    user_name, name = name, name or query_id
    if name is None:
        raise ConfigError("write_atomic outside of foreachBatch needs a name: whose batch ids are these?")
    sink = Sink(name, settings, part="atomic")
    run_id = context.getLocalProperty(_RUN_ID) if query_id is not None else None
    call = _Call(run_id, sink.group, sink.marker_at.topic, batch_id)
    if run_id is not None and call in _returned:
        raise Refuse(Reason.WRITTEN_TWICE, repr(name)).error(batch_id)
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            written = _write_once(df, batch_id, sink, user_name, is_in_stream=query_id is not None)
            _remember(call)
            publish(_metrics(name, written))
            return written
        except OncelogError as error:
            text = failure_text(error, f"batch {batch_id}", settings, None)
            raise type(error)(text) if isinstance(error, SinkError) else SinkError(text) from error
        except Exception as error:  # Spark's own, of a task that failed
            if not attempts_left or "RowRefused" in str(error):
                raise
            _log.warning(
                "batch %d is written again under a new epoch, since a task failed: %s", batch_id, error
            )
    raise AssertionError("unreachable")


class _Call(NamedTuple):
    """What may succeed once in a run of a query: another call with it has other rows."""

    run_id: str | None
    group: str
    marker_topic: str
    batch_id: int


_returned: set[_Call] = set()
"""The calls of this process that have returned, of each run and name those of its newest batch."""


def _remember(call: _Call) -> None:
    if call.run_id is not None:
        _returned.difference_update({each for each in _returned if each[:3] == call[:3]})
        _returned.add(call)


def _write_once(
    df: DataFrame, batch_id: int, sink: Sink, user_name: str | None, *, is_in_stream: bool
) -> AtomicWrite:
    settings, planned = sink.settings, digest_of_plan(df) if is_in_stream else ""
    with (
        Producer({**settings.producer, "transactional.id": sink.group}) as producer,
        Admin(settings.admin) as admin,
    ):
        # From here on nothing of an earlier attempt can be written or committed any more.
        producer.init_transactions()
        marker = _marker(sink, admin)
        first = settings.first_batch_id
        match decide_atomic(batch_id, marker, first_batch_id=first, name=user_name):
            case Refuse() as refusal:
                raise refusal.error(batch_id)
            case Compare(there, committed):
                if not (is_in_stream and is_plan_repeated(committed, planned)):
                    _compare(df, batch_id, sink, there, is_in_stream)
                return AtomicWrite(batch_id, there.rows, was_there=True)
            case Write():
                note_begun(sink, admin, batch_id)
                counts = _partition_counts(admin, settings.topic)
                with producer.transaction():
                    reports = _run(df, batch_id, sink, producer.share_transaction(), counts)
                    total, size_bytes = check_reports(reports)
                    written_at = time.monotonic()
                    kept = {sink.marker_at: LaneMarker(batch_id, total, planned).encode()}
                    producer.send_offsets_to_transaction(kept, sink.group)
                seconds = time.monotonic() - written_at
                sink.keep(admin, sink.finished_id, Finished(batch_id, 1, total, planned).encode())
                return AtomicWrite(batch_id, total.rows, False, size_bytes, seconds)


def _marker(sink: Sink, admin: Admin) -> LaneMarker | None:
    """Return the newest batch that was committed: by its marker, or once that has expired by our own note."""
    finished = sink.finished(admin)
    noted = None
    if finished is not None and finished.sum is not None:
        noted = LaneMarker(finished.batch_id, finished.sum, finished.planned)
    marker = sink.marker(admin)
    if marker is None and noted is None:
        name = sink.id_in_0_4_1
        if sink.is_transactional_id(admin, name):
            with Producer({**sink.settings.producer, "transactional.id": name}) as producer:
                producer.init_transactions()
        return sink.marker_in_0_4_1(admin, name)
    return max(filter(None, (marker, noted)), key=lambda each: each.batch_id)


def _compare(df: DataFrame, batch_id: int, sink: Sink, there: RowSum, is_in_stream: bool) -> None:
    """Refuse other rows for a batch that is there.

    Not for one that a streaming query repeats: it may have other rows (`rand()`), and those that were
    committed stay.
    """
    columns = [name for name in KINDS if name in df.columns]
    sums = df.select(*columns).mapInArrow(partial(sum_rows, settings=sink.settings), SUM_SCHEMA).collect()
    now = RowSum()
    for row in sums:
        now = now.plus(row["rows"], int(row["hash"]))
    refusal = decide_same_content(there, now, is_in_stream=is_in_stream)
    if refusal is not None:
        raise refusal.error(batch_id)


def digest_of_plan(df: DataFrame) -> str:
    """Return a digest of what the checkpoint says of the micro-batch that runs; "" where Spark does not tell.

    Spark writes the file before it begins the batch and reads it when it repeats the batch. It holds the time
    of planning, so a checkpoint that is an older one or a copy never has the same.
    """
    context = df.sparkSession.sparkContext
    query_id, batch_id = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
    try:
        jvm: Any = context._jvm
        running = df.sparkSession._jsparkSession.sharedState().activeStreamingQueries()
        query = running.get(jvm.java.util.UUID.fromString(query_id))
        path = jvm.org.apache.hadoop.fs.Path(f"{query.resolvedCheckpointRoot()}/offsets/{batch_id}")
        stream = path.getFileSystem(context._jsc.hadoopConfiguration()).open(path)
        try:
            text = jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
        finally:
            stream.close()
    except Exception as error:  # these are internals of Spark, which another version may lack
        _log.debug("the checkpoint of batch %s cannot be read: %s", batch_id, error)
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _metrics(name: str, written: AtomicWrite) -> SinkMetrics:
    """Of one transaction, as if it were the only lane."""
    report = LaneReport(0, RowSum(written.rows), *written[2:])
    return SinkMetrics.of(name, written.batch_id, [report])


def _partition_counts(admin: Admin, topic: str | None) -> dict[str, int]:
    if topic is None:
        return {}
    return {topic: len(admin.describe_topics([topic])[topic].partitions)}


def _run(
    df: DataFrame, batch_id: int, sink: Sink, share: TransactionShare, counts: Mapping[str, int]
) -> list[tuple[str, int, int, int, str]]:
    """(topic, partition, rows, bytes, hash) as tasks report them."""
    columns = [name for name in KINDS if name in df.columns]
    placed_schema = ", ".join(
        f"{name} {_ddl(df, name)}" for name in columns if name not in ("topic", "partition")
    )
    placed = df.select(*columns).mapInArrow(
        partial(place_rows, settings=sink.settings, counts=dict(counts)),
        f"{placed_schema}, topic string, partition int",
    )
    shuffled = int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    tasks = min(shuffled, *counts.values()) if counts else shuffled
    written = placed.repartition(tasks, "topic", "partition").mapInArrow(
        partial(write_share, sink=sink, batch_id=batch_id, share=share), REPORT_SCHEMA
    )
    return [tuple(row) for row in written.collect()]


def _ddl(df: DataFrame, name: str) -> str:
    kind: str = df.schema[name].dataType.simpleString()
    return kind


def check_reports(reports: Iterable[tuple[str, int, int, int, str]]) -> tuple[RowSum, int]:
    """The sum of all rows and of their bytes. Raises SinkError when a partition had two writers."""
    found = list(reports)
    twice = [at for at, count in Counter((topic, part) for topic, part, *_ in found).items() if count > 1]
    if twice:
        topic, part = twice[0]
        raise SinkError(f"{topic}-{part} was written by two tasks; nothing of this batch was committed")
    total = RowSum()
    for report in found:
        total = total.plus(report[2], int(report[4]))
    return total, sum(report[3] for report in found)
