"""The tasks of `write_atomic`, in two stages.

The first stage chooses the Kafka partition of each row. After a shuffle by partition, the second stage writes
the rows.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from oncelog.client.admin.blocking import Admin
from oncelog.client.producer.blocking import Delivery, Producer
from oncelog.client.producer.column_partitions import Partitions, partitions_of_keys
from oncelog.client.producer.partitioner import Partitioner
from oncelog.config import PRODUCER
from oncelog.errors import OncelogError, TimedOut, UnsupportedVersion
from oncelog.spark.python_worker import freeze_modules
from oncelog.spark.sink.decisions import RowRefused, RowSum, SinkError, WriteLease, may_acquire_lease
from oncelog.spark.sink.error_hints import explain_error
from oncelog.spark.sink.sink_options import SinkSettings
from oncelog.spark.sink.sink_rows import Part, SinkRows, plain, row_sizes, rows_at
from oncelog.spark.sink.task import Sink, send_part
from oncelog.spark.sink.topic_ids import topic_ids
from oncelog.types import TransactionShare
from oncelog.wire.row_hash import hash_rows

REPORT_SCHEMA = "topic string, partition int, rows bigint, size_bytes bigint, hash string, topic_id string"
_REPORT = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("rows", pa.int64()),
        ("size_bytes", pa.int64()),
        ("hash", pa.string()),
        ("topic_id", pa.string()),
    ]
)
SUM_SCHEMA = "rows bigint, hash string"
_SUM = pa.schema([("rows", pa.int64()), ("hash", pa.string())])
"""The hash is text, because it is an unsigned 64-bit number, for which Spark has no type."""
_CAUSE_CHARS = 600


class ShareReport(NamedTuple):
    """The rows that a task wrote to one Kafka partition: a row of REPORT_SCHEMA.

    `hash` is the sum of the rows' hashes as text. `topic_id` is the topic's id before the task sent its first
    row, or None on a cluster without topic ids.
    """

    topic: str
    partition: int
    rows: int
    size_bytes: int
    hash: str
    topic_id: str | None


def choose_partitions(
    batches: Iterable[Sequence[pa.Array]],
    *,
    names: Sequence[str],
    settings: SinkSettings,
    counts: dict[str, int],
) -> Iterator[pa.Array]:
    """Yield the Kafka partition of each row. Raises RowRefused for a row that cannot be written.

    `names` are the names of the columns: VALUE_BYTES, and the existing ones of key, headers, topic and
    partition. The values are not needed, so they stay in Spark's virtual machine. `counts` maps topics to
    their number of partitions. Missing topics are looked up and added.
    """
    freeze_modules()
    checker = SinkRows(settings.topic, settings.max_row_bytes)
    partitioner = Partitioner(str(PRODUCER.parse(settings.producer)["partitioner"]), random.randrange)
    for columns in batches:
        rows = pa.RecordBatch.from_arrays([plain(column) for column in columns], names=list(names))
        checker.check(rows)
        chosen: Partitions = np.empty(rows.num_rows, np.int32)
        for topic, partition, indices in checker.groups(rows):
            if topic not in counts:
                counts[topic] = _count(settings, topic)
            count = counts[topic]
            if partition is None:
                chosen[indices] = _choose(rows_at(rows, indices), partitioner, count)
            elif partition < count:
                chosen[indices] = partition
            else:
                row = checker.count - rows.num_rows + int(indices[0])
                raise RowRefused(
                    f"row {row} names partition {partition} of topic {topic!r}, "
                    f"which has partitions 0 to {count - 1}"
                )
        yield pa.array(chosen, pa.int32())


def partition_chooser(
    names: Sequence[str], settings: SinkSettings, counts: dict[str, int]
) -> Callable[[Iterator[tuple[pa.Array, ...]]], Iterator[pa.Array]]:
    """Return `choose_partitions` as the function of an Arrow UDF whose arguments are the columns `names`."""

    def choose(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        # Spark passes a single column without a tuple.
        columns = (batch if isinstance(batch, tuple) else (batch,) for batch in batches)
        return choose_partitions(columns, names=names, settings=settings, counts=counts)

    return choose


def _count(settings: SinkSettings, topic: str) -> int:
    with Admin(settings.admin) as admin:
        return len(admin.describe_topics([topic])[topic].partitions)


def _choose(rows: pa.RecordBatch, partitioner: Partitioner, count: int) -> Partitions:
    """Return each row's partition. It is chosen by the row's key, as a producer does; rows without a key are
    spread evenly.
    """
    spread: Partitions = ((np.arange(rows.num_rows) + random.randrange(count)) % count).astype(np.int32)
    if "key" not in rows.schema.names or partitioner.is_round_robin:
        return spread
    return partitions_of_keys(partitioner, rows.column("key").cast(pa.binary()), count, spread)


def write_share(
    batches: Iterable[pa.RecordBatch],
    *,
    sink: Sink,
    batch_id: int,
    share: TransactionShare,
    task: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Write rows into the driver's transaction, and yield one batch of REPORT_SCHEMA: a row per partition.

    `task` is the number of the task, by default the number of its Spark partition. A task without rows yields
    nothing, but needs the lease as well: an earlier attempt may have rows, which Spark has moved to another
    task since. Guard: test_an_attempt_that_lives_on_writes_nothing_after_a_later_one_without_rows. Raises
    SinkError.
    """
    freeze_modules()
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    lease = TaskLease(sink, _task_number() if task is None else task, batch_id, share)
    rows = SinkRows(sink.settings.topic, sink.settings.max_row_bytes)
    try:
        with Admin(sink.settings.admin) as admin:
            lease.acquire(admin)
            if first is None:
                return
            reports = _write(sink, admin, share, rows, chain((first,), filled))
    except Exception as error:
        text = str(error)
        if isinstance(error, OncelogError):
            text = explain_error(error, f"task {lease.task} of batch {batch_id}", sink.settings, rows.largest)
        lease.record_failure(text)
        kind = type(error) if isinstance(error, SinkError) else SinkError
        raise kind(text) from error
    columns = zip(*reports, strict=True)
    yield pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, _REPORT, strict=True)], schema=_REPORT
    )


def _task_number() -> int:
    from pyspark import TaskContext

    task = TaskContext.get()
    return task.partitionId() if task else 0


def hash_part(part: Part) -> int:
    """Return the sum of the rows' hashes. A row's hash covers key, value, headers and topic, but not the
    partition.
    """
    rows = part.rows
    names = [name for name in ("key", "value", "headers") if name in rows.schema.names]
    return hash_rows(*(rows.column(name) for name in names), pa.scalar(part.topic, pa.string()))


def sum_rows(batches: Iterable[pa.RecordBatch], *, settings: SinkSettings) -> Iterator[pa.RecordBatch]:
    """Count and hash rows as `write_share` does, without writing them. Yield one row of SUM_SCHEMA."""
    rows, total = SinkRows(settings.topic, settings.max_row_bytes), RowSum()
    for batch in batches:
        for part in rows.parts(rows.take(batch)):
            total = total.plus(part.rows.num_rows, hash_part(part))
    yield pa.RecordBatch.from_arrays(
        [pa.array([total.rows], pa.int64()), pa.array([str(total.hash)], pa.string())], schema=_SUM
    )


def _write(
    sink: Sink,
    admin: Admin,
    share: TransactionShare,
    rows: SinkRows,
    batches: Iterable[pa.RecordBatch],
) -> list[ShareReport]:
    """Send the rows, and return a report for each partition once all of them are stored."""
    before: dict[str, str | None] = {}
    written: dict[tuple[str, int], tuple[RowSum, int]] = defaultdict(lambda: (RowSum(), 0))
    deliveries: list[Delivery] = []
    producer = Producer({**sink.settings.producer, "transactional.id": share.transactional_id})
    try:
        producer.join_transaction(share)
        for batch in batches:
            for part in rows.parts(rows.take(batch)):
                assert part.partition is not None
                if part.topic not in before:
                    before |= topic_ids(admin, [part.topic])
                deliveries.append(send_part(producer, part))
                sums, size = written[part.topic, part.partition]
                sums = sums.plus(part.rows.num_rows, hash_part(part))
                written[part.topic, part.partition] = sums, size + int(row_sizes(part.rows).sum())
        producer.flush()
        for delivery in deliveries:
            delivery.result()
    except BaseException:
        with suppress(TimedOut):
            # Drop unsent rows, because the whole batch will be written again under a new epoch.
            producer.close(0)
        raise
    producer.close()
    return [
        ShareReport(topic, partition, sums.rows, size, str(sums.hash), before[topic])
        for (topic, partition), (sums, size) in written.items()
    ]


class TaskLease:
    """The right of one attempt to write a task's share, stored as a committed offset of a consumer group.

    All attempts of a task store the lease under one transactional id. InitProducerId for that id fences an
    attempt that is still acquiring the lease. The stored lease shows that an earlier attempt has acquired it.
    So at most one attempt of a task writes, and Kafka alone decides which. An attempt succeeds only with the
    lease. So if all tasks succeed, no other attempt has written or will write to the transaction.
    """

    def __init__(self, sink: Sink, task: int, batch_id: int, share: TransactionShare) -> None:
        self.task, self._sink = task, sink
        self._mine = WriteLease(batch_id, share.producer_id, share.producer_epoch)
        self._name = sink.task_id(task)
        self._is_mine = False

    def acquire(self, admin: Admin) -> None:
        """Acquire the lease. Raises SinkError if another attempt has acquired it."""
        with self._session(admin) as (producer, found):
            if not may_acquire_lease(self._mine, found):
                cause = (found.cause if found else "") or "its cause is unknown"
                raise SinkError(
                    f"an earlier attempt of task {self.task} of batch {self._mine.batch_id} had begun to "
                    f"write, so the whole batch is written again (the earlier attempt: {cause})"
                )
            self._check_producer_id(admin, found)
            self._commit(producer, self._mine)
            self._is_mine = True

    def _check_producer_id(self, admin: Admin, found: WriteLease | None) -> None:
        """Raise SinkError if the lease `found` is for a newer transaction of another producer id.

        Producer ids have no order, so only the coordinator knows which one is newer. It assigns another one
        after the last epoch. Guard: test_an_attempt_with_a_former_producer_id_takes_no_lease.
        """
        if found is None or found[:2] == self._mine[:2] or found.batch_id != self._mine.batch_id:
            return
        with suppress(UnsupportedVersion):
            # Brokers before Kafka 3.0 do not describe transactions.
            current = admin.describe_transactions(self._sink.group)[self._sink.group]
            if (current.producer_id, current.producer_epoch) != self._mine[1:3]:
                raise SinkError(
                    f"a newer attempt writes batch {self._mine.batch_id}, so task {self.task} writes nothing"
                )

    def record_failure(self, text: str) -> None:
        """Store the reason why this attempt failed, so that the next attempt's error can quote it."""
        if not self._is_mine:
            return
        with (
            suppress(OncelogError),
            Admin(self._sink.settings.admin) as admin,
            self._session(admin) as (producer, found),
        ):
            if self._mine.is_same_attempt(found):
                self._commit(producer, self._mine._replace(cause=text[:_CAUSE_CHARS]))

    @contextmanager
    def _session(self, admin: Admin) -> Iterator[tuple[Producer, WriteLease | None]]:
        with Producer({**self._sink.settings.producer, "transactional.id": self._name}) as producer:
            producer.init_transactions()
            kept = admin.group_offsets(self._name, [self._sink.marker_at]).get(self._sink.marker_at)
            yield producer, WriteLease.decode(self._name, kept)

    def _commit(self, producer: Producer, lease: WriteLease) -> None:
        with producer.transaction():
            producer.send_offsets_to_transaction({self._sink.marker_at: lease.encode()}, self._name)
