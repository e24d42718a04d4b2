"""`write_atomic`: a whole micro-batch as one transaction, for foreachBatch.

The driver begins and ends the transaction; tasks write into it under its producer id and epoch. Each Kafka
partition is written by one task, and each task by its first attempt only: a second one would number its
records from 0 again. Who is first is decided by a claim, which is a lane's marker; after any failure the
whole batch is written again under a new epoch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from oncelog.edge.admin import Admin
from oncelog.edge.producer import Producer
from oncelog.errors import ConfigError, OncelogError
from oncelog.rules.lane import (
    Compare,
    LaneMarker,
    Refuse,
    RowSum,
    SinkError,
    Write,
    decide_atomic,
)
from oncelog.spark.atomic_task import REPORT_SCHEMA, place_rows, write_share
from oncelog.spark.lane import LaneReport, Sink
from oncelog.spark.metrics import SinkMetrics, publish
from oncelog.spark.remedies import failure_text
from oncelog.spark.sink_options import parse_sink_options
from oncelog.spark.sink_rows import KINDS, check_columns
from oncelog.types import TransactionShare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY_ID = "sql.streaming.queryId"
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
    streaming query's id. Raises SinkError, ConfigError, and what Spark raises.
    """
    settings = parse_sink_options({key: str(value) for key, value in options.items()}, "stream")
    check_columns([(field.name, field.dataType.simpleString()) for field in df.schema.fields], settings.topic)
    name = name or df.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
    if name is None:
        raise ConfigError("write_atomic outside of foreachBatch needs a name: whose batch ids are these?")
    sink = Sink(f"{name}-atomic", settings)
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            written = _write_once(df, batch_id, sink)
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


def _write_once(df: DataFrame, batch_id: int, sink: Sink) -> AtomicWrite:
    settings = sink.settings
    with (
        Producer({**settings.producer, "transactional.id": sink.group}) as producer,
        Admin(settings.admin) as admin,
    ):
        # From here on nothing of an earlier attempt can be written or committed any more.
        producer.init_transactions()
        marker = sink.marker(admin)
        match decide_atomic(batch_id, marker, first_batch_id=settings.first_batch_id):
            case Refuse() as refusal:
                raise refusal.error(batch_id)
            case Compare(there):
                return AtomicWrite(batch_id, there.rows, was_there=True)
            case Write():
                counts = _partition_counts(admin, settings.topic)
                with producer.transaction():
                    reports = _run(df, batch_id, sink, producer.share_transaction(), counts)
                    rows, size_bytes = check_reports(reports)
                    written_at = time.monotonic()
                    kept = {sink.marker_at: LaneMarker(batch_id, RowSum(rows)).encode()}
                    producer.send_offsets_to_transaction(kept, sink.group)
                return AtomicWrite(batch_id, rows, False, size_bytes, time.monotonic() - written_at)


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
) -> list[tuple[str, int, int, int]]:
    """(topic, partition, rows, bytes) as tasks report them."""
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


def check_reports(reports: Iterable[tuple[str, int, int, int]]) -> tuple[int, int]:
    """The number of rows and of their bytes. Raises SinkError when a partition had two writers."""
    found = list(reports)
    twice = [at for at, count in Counter((topic, part) for topic, part, *_ in found).items() if count > 1]
    if twice:
        topic, part = twice[0]
        raise SinkError(f"{topic}-{part} was written by two tasks; nothing of this batch was committed")
    return sum(report[2] for report in found), sum(report[3] for report in found)
