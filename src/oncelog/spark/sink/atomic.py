"""`write_atomic`: a whole micro-batch as one transaction, for foreachBatch.

The driver begins and ends the transaction. Tasks write into it under its producer id and epoch. Each Kafka
partition is written by one task, and only the first attempt of a task may write: a second attempt would start
its sequence numbers at 0 again. A lease (`TaskLease`) is the right to write, and only the first attempt that
asks for it gets it. Tasks without rows need it, too. After any failure the whole batch is written again under
a new epoch.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from oncelog.client.admin.blocking import Admin
from oncelog.client.producer.blocking import Producer
from oncelog.errors import ConfigError, OncelogError
from oncelog.spark.connect import check_classic
from oncelog.spark.sink.atomic_task import (
    REPORT_SCHEMA,
    SUM_SCHEMA,
    ShareReport,
    partition_chooser,
    sum_rows,
    write_share,
)
from oncelog.spark.sink.batch_plan import note_begun
from oncelog.spark.sink.decisions import (
    NO_PLAN,
    BatchCommit,
    Compare,
    Reason,
    Refuse,
    RowSum,
    SinkError,
    TaskMarker,
    Write,
    decide_atomic,
    decide_same_content,
    is_plan_repeated,
)
from oncelog.spark.sink.error_hints import explain_error
from oncelog.spark.sink.sink_metrics import SinkMetrics, publish
from oncelog.spark.sink.sink_options import (
    FULL_RETRY,
    SinkSettings,
    parse_sink_options,
    repeats_whole_stages,
)
from oncelog.spark.sink.sink_rows import KINDS, VALUE_BYTES, check_columns
from oncelog.spark.sink.task import Sink, TaskReport
from oncelog.spark.sink.topic_ids import check_topics, topic_ids
from oncelog.types import TransactionShare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
_JOB_GROUP = "spark.jobGroup.id"
"""Spark's local property with the name of the job group. A streaming query sets it to the id of its run, and
the user's function may set it to another name.
"""
_ATTEMPTS = 3
_log = logging.getLogger("oncelog.spark")


class AtomicWrite(NamedTuple):
    """The outcome of one call of `write_atomic`.

    `already_committed`: an earlier call committed the batch, and this call wrote nothing. `size_bytes` counts
    keys and values. `commit_seconds` is the time from the end of the last task to the response to the commit.
    `size_bytes` and `commit_seconds` are 0 if `already_committed`.
    """

    batch_id: int
    rows: int
    already_committed: bool
    size_bytes: int = 0
    commit_seconds: float = 0.0

    @property
    def was_there(self) -> bool:
        """Deprecated name of `already_committed`."""
        warnings.warn("AtomicWrite.was_there is already_committed now", DeprecationWarning, stacklevel=2)
        return self.already_committed


def write_atomic(
    df: DataFrame, batch_id: int, options: Mapping[str, Any], *, name: str | None = None
) -> AtomicWrite:
    """Write a micro-batch in one transaction. Repeated calls for `batch_id` store its rows once.

        stream.writeStream.foreachBatch(lambda df, batch_id: write_atomic(df, batch_id, options))

    `options` are the options of `df.write.format("oncelog")`. `name` identifies the series of batches that
    `batch_id` numbers, and is by default the streaming query's id. Two calls for one micro-batch and topic
    need different names.

    If a name first appears in a batch after batch 0, the option firstBatchId is required. To avoid that, call
    this function in every micro-batch, even with an empty DataFrame.

    Raises SinkError, ConfigError (also in a session of Spark Connect) and Spark's own exceptions. After an
    exception the same call may be repeated.
    """
    check_classic(df.sparkSession, "write_atomic")
    settings = parse_sink_options({key: str(value) for key, value in options.items()}, "stream")
    if not repeats_whole_stages(lambda setting: df.sparkSession.conf.get(setting, None)):
        # Refuse, because rows without a key get a random partition and are then shuffled. If Spark repeats
        # only a part of the shuffle, some rows are doubled and others lost (finding R408: 125 of 600). See
        # test_unsafe_atomic_writes_are_refused.
        raise ConfigError(
            f"write_atomic needs {FULL_RETRY}=true, Spark's default: otherwise lost shuffle "
            "files can double some rows and lose others"
        )
    check_columns([(field.name, field.dataType.simpleString()) for field in df.schema.fields], settings.topic)
    context = df.sparkSession.sparkContext
    query_id = context.getLocalProperty(_QUERY_ID)
    user_name, name = name, name or query_id
    if name is None:
        raise ConfigError(
            "write_atomic outside of foreachBatch needs the parameter name, because batch ids "
            "belong to a name"
        )
    sink = Sink(name, settings, part="atomic")
    run_id = _run_id_of(df, query_id) if query_id is not None else None
    call = _Call(run_id, sink.group, sink.marker_at.topic, batch_id)
    with _claimed(call, name, _plan_of(df, settings.topic) if run_id is not None else None) as is_same_call:
        is_in_stream = query_id is not None
        return _write(df, batch_id, sink, user_name, is_in_stream=is_in_stream, is_same_call=is_same_call)


def _write(
    df: DataFrame,
    batch_id: int,
    sink: Sink,
    user_name: str | None,
    *,
    is_in_stream: bool,
    is_same_call: bool = True,
) -> AtomicWrite:
    """Write the batch, and write it again if a task fails."""
    settings = sink.settings
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            written = _write_once(
                df, batch_id, sink, user_name, is_in_stream=is_in_stream, is_same_call=is_same_call
            )
            publish(_metrics(sink.name, written))
            return written
        except Exception as error:
            if isinstance(error, OncelogError):
                text = explain_error(error, f"batch {batch_id}", settings, None)
                raise type(error)(text) if isinstance(error, SinkError) else SinkError(text) from error
            # Retry after an exception of Spark, which means that a task has failed.
            if not attempts_left or "RowRefused" in str(error):
                raise
            _log.warning(
                "batch %d is written again under a new epoch, because a task failed: %s", batch_id, error
            )
    raise AssertionError("unreachable")


class _Call(NamedTuple):
    """A call of `write_atomic` for one batch in one run of a query.

    Only one call with these values may succeed, because a second call could write different rows.
    """

    run_id: str | None
    group: str
    marker_topic: str
    batch_id: int


_calls: set[_Call] = set()
"""The calls of this process that run or have succeeded, for the newest batch of each run, group and marker
topic.
"""
_Plan = tuple[int, tuple[str, ...], str | None]
_failed: dict[_Call, set[_Plan | None]] = {}
"""The calls that failed, for the same batches, with what they wrote (`_plan_of`)."""
_calls_lock = threading.Lock()


def _plan_of(df: DataFrame, topic: str | None) -> _Plan:
    """Return a value that differs for other rows: the hash of the plan, the columns, and the option topic.

    Spark's hash does not cover the names of columns. Guard:
    test_a_write_of_other_columns_is_not_taken_for_one_that_failed_after_its_commit.
    """
    return df.semanticHash(), tuple(df.columns), topic


@contextmanager
def _claimed(call: _Call, name: str, plan: _Plan | None) -> Iterator[bool]:
    """Allow only one call with these values to run or succeed. Raises SinkError for another one.

    If two threads made such calls at once, the second one would take the commit of the first one for its own.
    Guard: test_two_calls_of_write_atomic_do_not_run_at_once. A call that failed may have committed its rows.
    So yield False if such a call had another `plan`. Guard:
    test_another_write_is_not_taken_for_one_that_failed_after_its_commit.
    """
    if call.run_id is None:
        yield True
        return
    with _calls_lock:
        if call in _calls:
            raise Refuse(Reason.WRITTEN_TWICE, repr(name)).error(call.batch_id)
        for other in {other for other in (*_calls, *_failed) if other[:3] == call[:3] and other != call}:
            _calls.discard(other)
            _failed.pop(other, None)
        _calls.add(call)
        is_same_call = _failed.get(call, set()) <= {plan}
    try:
        yield is_same_call
    except BaseException:
        with _calls_lock:
            _calls.discard(call)
            _failed.setdefault(call, set()).add(plan)
        raise


def _write_once(
    df: DataFrame,
    batch_id: int,
    sink: Sink,
    user_name: str | None,
    *,
    is_in_stream: bool,
    is_same_call: bool = True,
) -> AtomicWrite:
    settings, planned = sink.settings, digest_of_plan(df) if is_in_stream else NO_PLAN
    with (
        Producer({**settings.producer, "transactional.id": sink.group}) as producer,
        Admin(settings.admin) as admin,
    ):
        # This sends InitProducerId. After it, no earlier attempt can write or commit.
        producer.init_transactions()
        marker = _marker(sink, admin)
        first = settings.first_batch_id
        match decide_atomic(batch_id, marker, first_batch_id=first, name=user_name):
            case Refuse() as refusal:
                raise refusal.error(batch_id)
            case Compare(there, committed):
                # Rows that another write of the function committed, or a call outside of the query, are not
                # those of this call.
                is_of_query = is_in_stream and is_same_call and committed != NO_PLAN
                if not (is_of_query and is_plan_repeated(committed, planned)):
                    _compare(df, batch_id, sink, there, is_of_query)
                return AtomicWrite(batch_id, there.rows, already_committed=True)
            case Write():
                note_begun(sink, admin, batch_id)
                counts = _partition_counts(admin, settings.topic)
                # Note the id of the marker topic, which must not change: the leases of tasks are deleted with
                # that topic. A second attempt of a task would then write beside the first one. Guard:
                # test_a_second_attempt_of_a_task_whose_lease_was_deleted_gets_no_rows_committed.
                leases_at = topic_ids(admin, [sink.marker_at.topic])
                with producer.transaction():
                    share = producer.share_transaction()
                    reports = _run(df, batch_id, sink, share, counts)
                    total, size_bytes = check_reports(reports)
                    # Check that no topic was created again. Otherwise the new topic would have only the rows
                    # that were sent after its creation, and the batch would count as committed. Guard:
                    # test_a_topic_created_again_while_its_tasks_write_gets_no_rows.
                    before = {(report.topic, report.topic_id) for report in reports}
                    check_topics(admin, before | set(leases_at.items()), batch_id)
                    written_at = time.monotonic()
                    kept = {sink.marker_at: TaskMarker(batch_id, total, planned).encode()}
                    producer.send_offsets_to_transaction(kept, sink.group)
                seconds = time.monotonic() - written_at
                sink.keep(admin, sink.finished_id, BatchCommit(batch_id, 1, total, planned).encode())
                return AtomicWrite(batch_id, total.rows, False, size_bytes, seconds)


def _marker(sink: Sink, admin: Admin) -> TaskMarker | None:
    """Return the newest committed batch, from its marker or from the driver's note; None if neither exists.

    If both exist, the one with the higher batch id counts. The note is needed because the marker may have
    expired; the note is stored for years.
    """
    finished = sink.finished(admin)
    noted = None
    if finished is not None and finished.sum is not None:
        noted = TaskMarker(finished.batch_id, finished.sum, finished.planned)
    marker = sink.atomic_marker(admin)
    if marker is None and noted is None:
        name = sink.id_in_0_4_1
        if sink.is_transactional_id(admin, name):
            with Producer({**sink.settings.producer, "transactional.id": name}) as producer:
                producer.init_transactions()
        return sink.marker_in_0_4_1(admin, name)
    return max(filter(None, (marker, noted)), key=lambda found: found.batch_id)


def _compare(df: DataFrame, batch_id: int, sink: Sink, there: RowSum, is_of_query: bool) -> None:
    """Raise SinkError if the rows of the committed batch differ from those of `df`.

    Do not call this for a batch that a streaming query repeats with the same plan. Its rows may differ
    (`rand()`), and the committed rows stay.
    """
    columns = [name for name in KINDS if name in df.columns]
    sums = df.select(*columns).mapInArrow(partial(sum_rows, settings=sink.settings), SUM_SCHEMA).collect()
    now = RowSum()
    for row in sums:
        now = now.plus(row["rows"], int(row["hash"]))
    refusal = decide_same_content(there, now, is_in_stream=is_of_query)
    if refusal is not None:
        raise refusal.error(batch_id)


def _running_query(df: DataFrame, query_id: str | None) -> Any:
    """Return Spark's own object of the running streaming query. Raises any exception: the calls use internals
    of Spark that another version may lack.
    """
    jvm: Any = df.sparkSession.sparkContext._jvm
    running = df.sparkSession._jsparkSession.sharedState().activeStreamingQueries()
    return running.get(jvm.java.util.UUID.fromString(query_id))


def _run_id_of(df: DataFrame, query_id: str) -> str | None:
    """Return the id of the running query's run. If Spark does not tell it, return the job group.

    The user's function may set the job group for each of its writes. Guard:
    test_a_job_group_neither_hides_a_second_write_of_a_micro_batch_nor_a_new_run.
    """
    try:
        return str(_running_query(df, query_id).runId())
    except Exception as error:
        _log.debug("the run of query %s is unknown: %s", query_id, error)
        group: str | None = df.sparkSession.sparkContext.getLocalProperty(_JOB_GROUP)
        return group


def digest_of_plan(df: DataFrame) -> str:
    """Return a digest of the checkpoint's entry for the running micro-batch, or "" if it cannot be read.

    Spark writes the entry before it begins the batch, and uses it again when it repeats the batch. The entry
    contains the time of planning, so a batch that is planned a second time has another entry.
    """
    context = df.sparkSession.sparkContext
    query_id, batch_id = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
    try:
        jvm: Any = context._jvm
        query = _running_query(df, query_id)
        path = jvm.org.apache.hadoop.fs.Path(f"{query.resolvedCheckpointRoot()}/offsets/{batch_id}")
        stream = path.getFileSystem(context._jsc.hadoopConfiguration()).open(path)
        try:
            text = jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
        finally:
            stream.close()
    except Exception as error:
        _log.debug("the checkpoint of batch %s cannot be read: %s", batch_id, error)
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _metrics(name: str, written: AtomicWrite) -> SinkMetrics:
    """Return the metrics of one call of `write_atomic`, whose transaction counts as a single task."""
    report = TaskReport(0, RowSum(written.rows), *written[2:])
    return SinkMetrics.of(name, written.batch_id, [report])


def _partition_counts(admin: Admin, topic: str | None) -> dict[str, int]:
    if topic is None:
        return {}
    return {topic: len(admin.describe_topics([topic])[topic].partitions)}


def _run(
    df: DataFrame, batch_id: int, sink: Sink, share: TransactionShare, counts: Mapping[str, int]
) -> list[ShareReport]:
    """Run the two stages of tasks (see atomic_task.py), and return the reports of the second stage."""
    shuffled = int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    tasks = min(shuffled, *counts.values()) if counts else shuffled
    written = df.transform(
        partial(shuffle_rows, settings=sink.settings, counts=dict(counts), tasks=tasks)
    ).mapInArrow(partial(write_share, sink=sink, batch_id=batch_id, share=share), REPORT_SCHEMA)
    return [ShareReport(*row) for row in written.collect()]


def shuffle_rows(df: DataFrame, *, settings: SinkSettings, counts: dict[str, int], tasks: int) -> DataFrame:
    """Choose the Kafka partition of each row, and return the rows in as many Spark partitions as `tasks`.

    All rows of a Kafka partition are in one Spark partition. Each Spark partition gets the same number of
    Kafka partitions of a topic, or one more. With a hash in place of the number of the partition, some would
    get several, and others none.
    """
    from pyspark.sql import functions as f

    has_topics = settings.topic is None
    columns = [name for name in KINDS if name in df.columns and (name != "topic" or has_topics)]
    sent = {name: f.col(name) for name in columns if name != "value"}
    sent[VALUE_BYTES] = f.octet_length("value")
    choose = partition_chooser(tuple(sent), settings, counts)
    # Do not let Spark evaluate the function twice: rows without a key get a random partition.
    chosen = f.arrow_udf(choose, "int").asNondeterministic()(*sent.values())
    placed = df.select(*(name for name in columns if name != "partition"), chosen.alias("partition"))
    number = f.col("partition") + f.crc32("topic") if has_topics else f.col("partition")
    return placed.repartitionById(tasks, (number % tasks).cast("int"))


def check_reports(reports: Sequence[ShareReport]) -> tuple[RowSum, int]:
    """Return the sum over the rows of all reports, and the number of their bytes.

    Raises SinkError if two tasks wrote one partition.
    """
    writers = Counter((report.topic, report.partition) for report in reports)
    for (topic, partition), count in writers.items():
        if count > 1:
            raise SinkError(f"two tasks wrote to {topic}-{partition}; nothing of this batch was committed")
    total = RowSum()
    for report in reports:
        total = total.plus(report.rows, int(report.hash))
    return total, sum(report.size_bytes for report in reports)
