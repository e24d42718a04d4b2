"""`spark.read` and `spark.readStream.format("oncelog")`: Spark's Python Data Source API over our clients.

Spark makes the objects here in several processes and pickles them, so they hold only options; what they
need of the cluster they ask when a method is called. Planning is in offsets.py, reading in reading.py.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from oncelog.errors import ConfigError
from oncelog.spark.source.offset_ranges import (
    Available,
    DataLossError,
    Loss,
    OffsetRange,
    Offsets,
    Position,
    count_waiting,
    loss_text,
    next_position,
    ranges_between,
    ranges_of_batch,
    split_ranges,
)
from oncelog.spark.source.offset_resolver import Lookup
from oncelog.spark.source.pushed_filters import Narrowing, narrowing_of, times_beyond_python
from oncelog.spark.source.reader import read_range
from oncelog.spark.source.source_options import SourceOptions, parse_options
from oncelog.spark.source.trigger_limit import Admission
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = (
    ("key", BinaryType()),
    ("value", BinaryType()),
    ("topic", StringType()),
    ("partition", IntegerType()),
    ("offset", LongType()),
    ("timestamp", TimestampType()),
    ("timestampType", IntegerType()),
)
"""Names, types and order of Spark's own Kafka source."""
HEADERS_COLUMN = (
    "headers",
    ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
)

_PUSH_DOWN_PROCESS = "pyspark.sql.worker.data_source_pushdown_filters"

_log = logging.getLogger("oncelog.spark")


class RangePartition(InputPartition):  # type: ignore[misc]
    """The range one task reads, of the topic with this id (None: the broker knows no ids)."""

    def __init__(self, wanted: OffsetRange, topic_id: str | None) -> None:
        super().__init__(wanted)
        self.topic_id = topic_id


class OncelogSource(DataSource):  # type: ignore[misc]
    """The data source behind `format("oncelog")`; docs/spark.md lists its options."""

    @classmethod
    def name(cls) -> str:
        return "oncelog"

    def schema(self) -> StructType:
        columns = (*COLUMNS, HEADERS_COLUMN) if parse_options(self.options).include_headers else COLUMNS
        return StructType([StructField(name, kind) for name, kind in columns])

    def reader(self, schema: StructType) -> DataSourceReader:
        self._check_schema(schema)
        options = parse_options(self.options, "batch")
        return NarrowingReader(options) if _is_push_down_on() else BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        self._check_schema(schema)
        return StreamReader(parse_options(self.options, "stream"))

    def _check_schema(self, schema: StructType) -> None:
        own = self.schema()
        if schema.simpleString() != own.simpleString():
            raise ConfigError(
                f"format('oncelog') has fixed columns: {own.simpleString()}; leave .schema(...) out and use "
                "cast() or from_json() on value"
            )


def plan_batch(options: SourceOptions, lookup: Lookup, narrowing: Narrowing | None) -> list[RangePartition]:
    """The ranges of a batch read, by what the cluster holds now. Raises DataLossError, ConfigError."""
    now = lookup.available()
    start, end = lookup.resolve(options.starting, now), lookup.resolve(options.ending, now)
    # Resolved ones are inside by construction; numbers that the user gave may not be.
    losses = [loss for tp in sorted(now.earliest) for loss in _outside(tp, start[tp], end[tp], now, options)]
    report_losses(losses, options)
    inside = {tp: min(max(at, now.earliest[tp]), now.written[tp]) for tp, at in start.items()}
    ranges = ranges_between(inside, {tp: min(at, now.latest[tp]) for tp, at in end.items()})
    if narrowing is not None:
        times = {} if narrowing.since_ms is None else {r.tp: narrowing.since_ms for r in ranges}
        ranges = narrowing.apply(ranges, lookup.first_at(times) if times else None)
    return _tasks(ranges, now.topic_ids, options)


def _tasks(
    ranges: Sequence[OffsetRange], topic_ids: Mapping[str, str], options: SourceOptions
) -> list[RangePartition]:
    pieces = split_ranges(
        ranges, min_partitions=options.min_partitions, max_records=options.max_records_per_partition
    )
    return [RangePartition(piece, topic_ids.get(piece.tp.topic)) for piece in pieces]


def _outside(
    tp: TopicPartition, start: int, end: int, now: Available, options: SourceOptions
) -> Iterator[Loss]:
    low, high = now.earliest[tp], now.written[tp]
    held = f"{tp} holds offsets {low} up to (not including) {high}"
    if not low <= start <= high:
        yield Loss(tp, None, f"{held}, and {options.starting.option} asks for {start}")
    if end > high:
        yield Loss(tp, None, f"{held}, and {options.ending.option} asks for offsets up to {end - 1}")


def report_losses(losses: Sequence[Loss], options: SourceOptions) -> None:
    """Fail, or warn, as failOnDataLoss says."""
    if losses and options.fail_on_data_loss:
        raise DataLossError(loss_text(losses))
    for loss in losses:
        _log.warning("%s; going on without, since failOnDataLoss is false", loss.explanation)


class BatchReader(DataSourceReader):  # type: ignore[misc]
    """Reads what is there when the query is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._narrowing: Narrowing | None = None

    def partitions(self) -> list[InputPartition]:
        with Lookup(self._options) as lookup:
            return [*plan_batch(self._options, lookup, self._narrowing)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)


class NarrowingReader(BatchReader):
    """Leaves out offsets by the conditions of the query. Spark refuses it while push-down is off."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        # Spark's planning process makes the reader, reads the conditions, and gives them to `pushFilters`.
        self._reading_conditions = ExitStack()
        self._reading_conditions.enter_context(times_beyond_python())

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_narrowing": None}

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._reading_conditions.close()
        self._narrowing = narrowing_of(filters)
        return filters


def _is_push_down_on() -> bool:
    # Spark tells a reader nothing of spark.sql.python.filterPushdown.enabled, but then plans in a process
    # of this module, and in one of another if it is off.
    return _PUSH_DOWN_PROCESS in sys.modules or (
        getattr(sys.modules["__main__"].__spec__, "name", None) == _PUSH_DOWN_PROCESS
    )


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    # A batch without ranges: Spark still runs one task, with an empty partition of its own.
    if not isinstance(partition, RangePartition):
        return iter(())
    return read_range(
        options.client,
        partition.value,
        topic_id=partition.topic_id,
        include_headers=options.include_headers,
        fail_on_data_loss=options.fail_on_data_loss,
    )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Plans micro-batches on the driver, one object per query; its copies on executors only read."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._lookup: Lookup | None = None
        self._initial: Position | None = None
        self._target: Offsets | None = None
        self._seen: Available | None = None
        self._admission = Admission(options.min_offsets_per_trigger, options.max_trigger_delay_ms)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lookup": None}

    def _available(self, *, may_miss: bool, expected: Collection[TopicPartition] = ()) -> Available:
        if self._lookup is None:
            self._lookup = Lookup(self._options)
        self._seen = self._lookup.available(may_miss=may_miss, expected=expected)
        return self._seen

    def initialOffset(self) -> dict[str, Any]:
        # Spark asks twice before the first micro-batch; "latest" must mean the same both times.
        if self._initial is None:
            now = self._available(may_miss=False)
            assert self._lookup is not None
            start = self._lookup.resolve(self._options.starting, now)
            self._initial = Position(start, now.topic_ids, is_initial=True)
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        # Spark's Python API has no limit with two ends and a delay: latestOffset() has them of the options.
        limit, least = self._options.max_offsets_per_trigger, self._options.min_offsets_per_trigger
        if limit is None:
            return ReadAllAvailable() if least is None else ReadMinRows(least)
        return ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = dict(self._available(may_miss=True).latest)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        before = Position.from_json(start)
        now = self._available(may_miss=True, expected=before.offsets)
        takes_all = isinstance(limit, ReadAllAvailable)
        count = None if takes_all else self._options.max_offsets_per_trigger
        end, losses = next_position(before, now, limit=count, target=self._target)
        report_losses(losses, self._options)
        may_wait = not (takes_all or losses or self._target is not None)
        if may_wait and not self._admission.lets_begin(count_waiting(before, now), _now_ms()):
            return start
        return start if end is before else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._seen is None else Position(self._seen.latest).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        upto = Position.from_json(end)
        return _tasks(ranges_of_batch(Position.from_json(start), upto), upto.topic_ids, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)

    def stop(self) -> None:
        if self._lookup is not None:
            self._lookup.close()
            self._lookup = None
