"""`spark.read` and `spark.readStream.format("oncelog")`: Spark's Python Data Source API over our clients.

Spark makes the objects here in several processes and pickles them, so they hold only options; what they
need of the cluster they ask when a method is called. Planning is in offsets.py, reading in reading.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
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
from oncelog.spark.lookup import Lookup
from oncelog.spark.offsets import (
    Available,
    DataLossError,
    Loss,
    OffsetRange,
    Offsets,
    Position,
    loss_text,
    next_position,
    ranges_between,
    ranges_of_batch,
    split_ranges,
)
from oncelog.spark.options import SourceOptions, parse_options
from oncelog.spark.reading import read_range

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

_log = logging.getLogger("oncelog.spark")


class RangePartition(InputPartition):  # type: ignore[misc]
    """The range one task reads."""

    def __init__(self, wanted: OffsetRange) -> None:
        super().__init__(wanted)


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
        return BatchReader(parse_options(self.options, "batch"))

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


def plan_batch(options: SourceOptions, lookup: Lookup) -> list[OffsetRange]:
    """The ranges of a batch read, by what the cluster holds now. Raises DataLossError, ConfigError."""
    now = lookup.available()
    start = lookup.resolve("startingOffsets", options.starting, now)
    end = lookup.resolve("endingOffsets", options.ending, now)
    # Resolved ones are inside by construction; numbers that the user gave may not be.
    losses = [loss for tp in sorted(now.earliest) for loss in _outside(tp, start[tp], end[tp], now)]
    report_losses(losses, options)
    inside = {tp: min(max(at, now.earliest[tp]), now.written[tp]) for tp, at in start.items()}
    return split_ranges(
        ranges_between(inside, {tp: min(at, now.latest[tp]) for tp, at in end.items()}),
        min_partitions=options.min_partitions,
        max_records=options.max_records_per_partition,
    )


def _outside(tp: Any, start: int, end: int, now: Available) -> Iterator[Loss]:
    low, high = now.earliest[tp], now.written[tp]
    held = f"{tp} holds offsets {low} up to (not including) {high}"
    if not low <= start <= high:
        yield Loss(tp, None, f"{held}, and startingOffsets asks for {start}")
    if end > high:
        yield Loss(tp, None, f"{held}, and endingOffsets asks for offsets up to {end - 1}")


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

    def partitions(self) -> list[InputPartition]:
        with Lookup(self._options) as lookup:
            return [RangePartition(wanted) for wanted in plan_batch(self._options, lookup)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    # A batch without ranges: Spark still runs one task, with an empty partition of its own.
    if partition.value is None:
        return iter(())
    return read_range(
        options.client,
        partition.value,
        include_headers=options.include_headers,
        fail_on_data_loss=options.fail_on_data_loss,
    )


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Plans micro-batches on the driver, one object per query; its copies on executors only read."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._lookup: Lookup | None = None
        self._initial: Position | None = None
        self._target: Offsets | None = None
        self._seen: Available | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lookup": None}

    def _available(self, *, may_miss: bool) -> Available:
        if self._lookup is None:
            self._lookup = Lookup(self._options)
        self._seen = self._lookup.available(may_miss=may_miss)
        return self._seen

    def initialOffset(self) -> dict[str, Any]:
        # Spark asks twice before the first micro-batch; "latest" must mean the same both times.
        if self._initial is None:
            now = self._available(may_miss=False)
            assert self._lookup is not None
            start = self._lookup.resolve("startingOffsets", self._options.starting, now)
            self._initial = Position(start, now.topic_ids, is_initial=True)
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = dict(self._available(may_miss=True).latest)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        count = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        before = Position.from_json(start)
        now = self._available(may_miss=True)
        end, losses = next_position(before, now, limit=count, target=self._target)
        report_losses(losses, self._options)
        return start if end is before else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._seen is None else Position(self._seen.latest).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        ranges = split_ranges(
            ranges_of_batch(Position.from_json(start), Position.from_json(end)),
            min_partitions=self._options.min_partitions,
            max_records=self._options.max_records_per_partition,
        )
        return [RangePartition(wanted) for wanted in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)

    def stop(self) -> None:
        if self._lookup is not None:
            self._lookup.close()
            self._lookup = None
