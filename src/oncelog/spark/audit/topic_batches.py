"""The headers of a topic's stored batches as a Spark table with one row per batch, for the audit.

The table has the options of `format("oncelog")`. It has all stored batches, including markers and batches of
aborted transactions. A task parses the 61-byte header of a batch and verifies the checksum. With the option
`checkRecords` the task also compares the records with the header.

Offsets below the last stable offset are fetched with read_committed. So the rows of these batches say whether
a read_committed reader gets the batch. Above it, this is unknown. local_audit/stored_batches.py reads the
batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import (
    BooleanType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from oncelog.local_audit.stored_batches import read_stored_batches
from oncelog.spark.source.offset_ranges import Available, OffsetRange, ranges_between, split_ranges
from oncelog.spark.source.source_options import SourceOptions, parse_options
from oncelog.types import Isolation, TopicPartition

PLACE_COLUMNS = ("topic", "partition", "part", "place")
"""Batches that are sorted by `part`, then by `place`, are in stored order.

`part` is the first offset of the range or segment that a task reads. `place` is the batch's number in that
range, or its position in that segment's file.
"""
_COLUMNS = (
    ("topic", StringType(), pa.string()),
    ("partition", IntegerType(), pa.int32()),
    ("part", LongType(), pa.int64()),
    ("place", LongType(), pa.int64()),
    ("base_offset", LongType(), pa.int64()),
    ("last_offset", LongType(), pa.int64()),
    ("producer_id", LongType(), pa.int64()),
    ("producer_epoch", ShortType(), pa.int16()),
    ("base_sequence", IntegerType(), pa.int32()),
    ("sequence_count", IntegerType(), pa.int32()),
    ("records_count", IntegerType(), pa.int32()),
    ("is_control", BooleanType(), pa.bool_()),
    ("crc_ok", BooleanType(), pa.bool_()),
    ("is_transactional", BooleanType(), pa.bool_()),
    ("is_commit", BooleanType(), pa.bool_()),
    ("coordinator_epoch", IntegerType(), pa.int32()),
    ("is_visible", BooleanType(), pa.bool_()),
    ("is_torn", BooleanType(), pa.bool_()),
    ("problem", StringType(), pa.string()),
    ("records_problem", StringType(), pa.string()),
    ("is_removed", BooleanType(), pa.bool_()),
    ("is_index", BooleanType(), pa.bool_()),
)
"""(name, Spark type, Arrow type) of each column: PLACE_COLUMNS, and then the fields of
oncelog.audit.partition.StoredBatch.
"""
HEADERS_SCHEMA = StructType([StructField(name, spark) for name, spark, _ in _COLUMNS])
_ARROW_SCHEMA = pa.schema([(name, arrow) for name, _, arrow in _COLUMNS])
_ROWS_PER_BATCH = 20_000
CHECK_RECORDS = "checkRecords"
AVAILABLE = "available"
"""The option with the offsets to read.

The driver looks the offsets up once, so that all parts of the audit use the same ones.
"""

HeaderRow = tuple[Any, ...]


class BatchHeadersSource(DataSource):  # type: ignore[misc]
    """The data source `format("oncelog-batches")`. Register it with `spark.dataSource.register` first."""

    @classmethod
    def name(cls) -> str:
        return "oncelog-batches"

    def schema(self) -> StructType:
        return HEADERS_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        check_records = is_checking_records(self.options)
        now = decode_available(self.options[AVAILABLE])
        ours = (AVAILABLE, CHECK_RECORDS.lower())
        options = {key: value for key, value in self.options.items() if key.lower() not in ours}
        options["kafka.isolation.level"] = "read_committed"
        return BatchHeadersReader(parse_options(options, "batch"), now, check_records)


def whole_and_split(now: Available, max_offsets: int) -> tuple[list[TopicPartition], Available]:
    """Return the partitions that one task reads, largest first, and the offsets of larger partitions.

    A partition is larger if several tasks must read it, because a task reads at most `max_offsets` of its
    offsets below the last stable offset, and at most that many above it.
    """
    sizes: dict[TopicPartition, int] = {}
    larger: set[TopicPartition] = set()
    for tp, start in now.earliest.items():
        stable = max(now.latest[tp], start)
        if max(stable - start, now.written[tp] - stable) > max_offsets:
            larger.add(tp)
        elif now.written[tp] > start:
            sizes[tp] = now.written[tp] - start
    earliest, latest, written = (
        {tp: offsets[tp] for tp in larger} for offsets in (now.earliest, now.latest, now.written)
    )
    whole = sorted(sizes, key=lambda tp: (-sizes[tp], tp))
    return whole, Available(earliest, latest, written, now.topic_ids)


def encode_available(now: Available) -> str:
    """Return `now` as text, for the option AVAILABLE. Topic ids are left out."""
    return json.dumps([[*tp, now.earliest[tp], now.latest[tp], now.written[tp]] for tp in now.earliest])


def decode_available(text: str) -> Available:
    """Return the Available that `encode_available` encoded. Topic ids are not encoded, so the result has
    none.
    """
    rows = [(TopicPartition(topic, number), bounds) for topic, number, *bounds in json.loads(text)]
    earliest, latest, written = ({tp: bounds[n] for tp, bounds in rows} for n in range(3))
    return Available(earliest, latest, written)


def is_checking_records(options: Mapping[str, str]) -> bool:
    """Return True if the option `checkRecords` asks for a check of the records in each batch."""
    return any(
        key.lower() == CHECK_RECORDS.lower() and value.lower() == "true" for key, value in options.items()
    )


class _StoredRange(InputPartition):  # type: ignore[misc]
    """The offset range that one task reads, and the isolation level with which it reads."""

    def __init__(self, wanted: OffsetRange, isolation: Isolation) -> None:
        super().__init__(wanted)
        self.isolation = isolation


class BatchHeadersReader(DataSourceReader):  # type: ignore[misc]
    """A reader with one task per range. A task returns the batches whose last offset is in its range.

    So exactly one task returns a batch that spans two ranges. If a batch is stored after one with higher
    offsets, the task that reads the higher offsets returns both, in stored order. The order shows that the
    batch is in the wrong place.
    """

    def __init__(self, options: SourceOptions, now: Available, check_records: bool) -> None:
        self._options, self._now = options, now
        self._check_records = check_records

    def partitions(self) -> list[InputPartition]:
        now = self._now
        stable = {tp: max(end, now.earliest[tp]) for tp, end in now.latest.items()}
        size = self._options.max_records_per_partition
        stable_ranges = split_ranges(ranges_between(now.earliest, stable), max_records=size)
        open_ranges = split_ranges(ranges_between(stable, now.written), max_records=size)
        return [
            *[_StoredRange(piece, Isolation.READ_COMMITTED) for piece in stable_ranges],
            *[_StoredRange(piece, Isolation.READ_UNCOMMITTED) for piece in open_ranges],
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # If there are no ranges, Spark still runs one task, with a partition of a different class.
        if not isinstance(partition, _StoredRange):
            return iter(())
        tp, start, end = partition.value
        batches = read_stored_batches(
            self._options.client, tp, start, end, partition.isolation, check_records=self._check_records
        )
        return to_arrow((*tp, start, place, *batch) for place, batch in enumerate(batches))


def to_arrow(rows: Iterable[HeaderRow]) -> Iterator[pa.RecordBatch]:
    """Yield the rows as record batches of HEADERS_SCHEMA."""
    waiting: list[HeaderRow] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) == _ROWS_PER_BATCH:
            yield _record_batch(waiting)
            waiting = []
    if waiting:
        yield _record_batch(waiting)


def _record_batch(rows: list[HeaderRow]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _ARROW_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_ARROW_SCHEMA)
