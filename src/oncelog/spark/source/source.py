"""`spark.read` and `spark.readStream.format("oncelog")`, on Spark's Python Data Source API.

Spark creates these objects in several processes and pickles them. So only their methods connect to the
cluster, and a pickled object contains no connection. offset_ranges.py plans what to read, and reader.py reads
it.
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
from oncelog.spark.python_worker import freeze_modules
from oncelog.spark.source.group_offsets import GroupOffsets
from oncelog.spark.source.offset_ranges import (
    Available,
    DataLoss,
    DataLossError,
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
from oncelog.spark.source.offset_resolver import OffsetResolver
from oncelog.spark.source.pushed_filters import PushedFilters, combine_filters, times_beyond_python
from oncelog.spark.source.reader import read_range
from oncelog.spark.source.source_options import SourceOptions, parse_options
from oncelog.spark.source.trigger_limit import TriggerLimit
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
"""The names and types of the columns, the same and in the same order as in Spark's own Kafka source."""
HEADERS_COLUMN = (
    "headers",
    ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
)

_PUSH_DOWN_PROCESS = "pyspark.sql.worker.data_source_pushdown_filters"

_log = logging.getLogger("oncelog.spark")


class RangePartition(InputPartition):  # type: ignore[misc]
    """The range that one task reads. `topic_id` is None if the broker has no topic ids."""

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
        return FilteringReader(options) if _is_push_down_on() else BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        self._check_schema(schema)
        return StreamReader(parse_options(self.options, "stream"))

    def _check_schema(self, schema: StructType) -> None:
        own = self.schema()
        if schema.simpleString() != own.simpleString():
            raise ConfigError(
                f"format('oncelog') has fixed columns: {own.simpleString()}; omit .schema(...) and use "
                "cast() or from_json() on value"
            )


def plan_batch(
    options: SourceOptions, resolver: OffsetResolver, filters: PushedFilters | None
) -> list[RangePartition]:
    """Look up the offsets that exist on the cluster now, and return the partitions of a batch read.

    Raises DataLossError and ConfigError.
    """
    now = resolver.available()
    start, end = resolver.resolve(options.starting, now), resolver.resolve(options.ending, now)
    # Only offsets that the user gave as numbers can be outside the existing range.
    losses = [loss for tp in sorted(now.earliest) for loss in _outside(tp, start[tp], end[tp], now, options)]
    report_losses(losses, options)
    inside = {tp: min(max(offset, now.earliest[tp]), now.written[tp]) for tp, offset in start.items()}
    ranges = ranges_between(inside, {tp: min(offset, now.latest[tp]) for tp, offset in end.items()})
    if filters is not None:
        times = {} if filters.since_ms is None else {r.tp: filters.since_ms for r in ranges}
        ranges = filters.apply(ranges, resolver.first_at(times) if times else None)
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
) -> Iterator[DataLoss]:
    low, high = now.earliest[tp], now.written[tp]
    held = f"{tp} contains offsets {low} to {high} (exclusive)"
    if not low <= start <= high:
        yield DataLoss(tp, None, f"{held}, but {options.starting.option} starts at {start}")
    if end > high:
        yield DataLoss(tp, None, f"{held}, but {options.ending.option} ends at {end} (exclusive)")


def report_losses(losses: Sequence[DataLoss], options: SourceOptions) -> None:
    """Raise DataLossError if failOnDataLoss is set, otherwise log a warning for each loss."""
    if losses and options.fail_on_data_loss:
        raise DataLossError(loss_text(losses))
    for loss in losses:
        _log.warning("%s; continuing without them, because failOnDataLoss is false", loss.explanation)


class BatchReader(DataSourceReader):  # type: ignore[misc]
    """A batch read of the records that exist when the query is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._filters: PushedFilters | None = None

    def partitions(self) -> list[InputPartition]:
        with OffsetResolver(self._options) as resolver:
            return [*plan_batch(self._options, resolver, self._filters)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)


class FilteringReader(BatchReader):
    """A batch read that leaves out the offsets that the query's filters exclude.

    Spark refuses a reader with `pushFilters` while spark.sql.python.filterPushdown.enabled is false.
    """

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        # Enter `times_beyond_python` here and leave it in `pushFilters`: between the two calls, Spark's
        # planning process decodes the filters.
        self._filter_decoding = ExitStack()
        self._filter_decoding.enter_context(times_beyond_python())

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_filters": None}

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._filter_decoding.close()
        self._filters = combine_filters(filters)
        return filters


def _is_push_down_on() -> bool:
    # A reader cannot read spark.sql.python.filterPushdown.enabled. If the setting is on, Spark plans in a
    # process that runs the module _PUSH_DOWN_PROCESS of PySpark. Otherwise Spark plans in a process of
    # another module.
    return _PUSH_DOWN_PROCESS in sys.modules or (
        getattr(sys.modules["__main__"].__spec__, "name", None) == _PUSH_DOWN_PROCESS
    )


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    freeze_modules()
    # If a batch has no ranges, Spark still runs one task, with a partition of a different class.
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
    """The reader of a stream. One object on the driver plans the micro-batches of a query. Executors read the
    records with copies of it.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._resolver: OffsetResolver | None = None
        self._initial: Position | None = None
        self._target: Offsets | None = None
        self._seen: Available | None = None
        self._trigger_limit = TriggerLimit(options.min_offsets_per_trigger, options.max_trigger_delay_ms)
        self._group_offsets: GroupOffsets | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_resolver": None, "_group_offsets": None}

    def _group(self) -> GroupOffsets | None:
        """Return the group of the option commitOffsetsToGroup, or None. The first call raises ConfigError for
        a group with members.
        """
        name = self._options.commit_offsets_to_group
        if self._group_offsets is None and name is not None:
            group = GroupOffsets(name, self._options.client)
            try:
                group.refuse_members()
            except BaseException:
                group.close()
                raise
            self._group_offsets = group
        return self._group_offsets

    def _commit(self, finished: Position) -> None:
        if (group := self._group()) is not None:
            group.commit(finished, _now_ms())

    def _available(self, *, may_miss: bool, expected: Collection[TopicPartition] = ()) -> Available:
        self._group()
        if self._resolver is None:
            self._resolver = OffsetResolver(self._options)
        self._seen = self._resolver.available(may_miss=may_miss, expected=expected)
        return self._seen

    def initialOffset(self) -> dict[str, Any]:
        # Keep the first result: Spark calls initialOffset() twice before the first micro-batch, and "latest"
        # must mean the same offsets both times.
        if self._initial is None:
            now = self._available(may_miss=False)
            assert self._resolver is not None
            start = self._resolver.resolve(self._options.starting, now)
            self._initial = Position(start, now.topic_ids, is_initial=True)
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        # The result is only a hint: Spark's Python API has no limit that combines a minimum, a maximum and a
        # delay. latestOffset() applies all three.
        max_offsets, min_offsets = (
            self._options.max_offsets_per_trigger,
            self._options.min_offsets_per_trigger,
        )
        if max_offsets is None:
            return ReadAllAvailable() if min_offsets is None else ReadMinRows(min_offsets)
        return ReadMaxRows(max_offsets)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = dict(self._available(may_miss=True).latest)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        before = Position.from_json(start)
        # Commit here too: Spark calls commit() for a micro-batch only when it has planned another one.
        # Otherwise, tools would show the last micro-batch before a pause as lag. See
        # test_the_group_has_the_offsets_of_every_finished_micro_batch.
        self._commit(before)
        now = self._available(may_miss=True, expected=before.offsets)
        takes_all = isinstance(limit, ReadAllAvailable)
        count = None if takes_all else self._options.max_offsets_per_trigger
        end, losses = next_position(before, now, limit=count, target=self._target)
        report_losses(losses, self._options)
        may_wait = not (takes_all or losses or self._target is not None)
        if may_wait and not self._trigger_limit.may_begin(count_waiting(before, now), _now_ms()):
            return start
        return start if end is before else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._seen is None else Position(self._seen.latest).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        upto = Position.from_json(end)
        return _tasks(ranges_of_batch(Position.from_json(start), upto), upto.topic_ids, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._commit(Position.from_json(end))

    def stop(self) -> None:
        if self._group_offsets is not None:
            self._group_offsets.close()
            self._group_offsets = None
        if self._resolver is not None:
            self._resolver.close()
            self._resolver = None
