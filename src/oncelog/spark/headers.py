"""The headers of stored batches as a Spark table, one row per batch: what the audit reads.

The same options as `format("oncelog")`; everything stored is shown, markers and aborted batches too. Only
61 bytes of a batch are looked at, and its checksum is computed over the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

from oncelog.edge.consumer import Consumer
from oncelog.errors import CorruptMessage, InvalidRecord
from oncelog.spark.offsets import OffsetRange
from oncelog.spark.options import parse_options
from oncelog.spark.source import BatchReader
from oncelog.types import TopicPartition
from oncelog.wire.batch import iter_batches, verify_crc

_COLUMNS = (
    ("topic", StringType(), pa.string()),
    ("partition", IntegerType(), pa.int32()),
    ("base_offset", LongType(), pa.int64()),
    ("last_offset", LongType(), pa.int64()),
    ("producer_id", LongType(), pa.int64()),
    ("producer_epoch", ShortType(), pa.int16()),
    ("base_sequence", IntegerType(), pa.int32()),
    ("sequence_count", IntegerType(), pa.int32()),
    ("records_count", IntegerType(), pa.int32()),
    ("is_control", BooleanType(), pa.bool_()),
    ("is_transactional", BooleanType(), pa.bool_()),
    ("size_bytes", IntegerType(), pa.int32()),
    ("crc_ok", BooleanType(), pa.bool_()),
)
"""`crc_ok` null: the bytes are no batch and nothing more could be read up to `last_offset`."""
_ARROW_SCHEMA = pa.schema([(name, arrow) for name, _, arrow in _COLUMNS])
_ROWS_PER_BATCH = 20_000
_FETCH_BYTES = "max.partition.fetch.bytes"


class BatchHeadersSource(DataSource):  # type: ignore[misc]
    """`format("oncelog-batches")`, once registered with `spark.dataSource.register`."""

    @classmethod
    def name(cls) -> str:
        return "oncelog-batches"

    def schema(self) -> StructType:
        return StructType([StructField(name, spark) for name, spark, _ in _COLUMNS])

    def reader(self, schema: StructType) -> DataSourceReader:
        given = {**self.options, "kafka.isolation.level": "read_uncommitted"}
        return BatchHeadersReader(parse_options(given, "batch"))


class BatchHeadersReader(BatchReader):
    """Plans as the source of records does; a task gives the batches whose last offset is in its range.

    So a batch across the border of two ranges comes from exactly one task.
    """

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:
            return iter(())
        return _in_batches(_read_rows(self._options.client, partition.value))


def _in_batches(rows: Iterator[tuple[Any, ...]]) -> Iterator[pa.RecordBatch]:
    waiting: list[tuple[Any, ...]] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) == _ROWS_PER_BATCH:
            yield _to_arrow(waiting)
            waiting = []
    if waiting:
        yield _to_arrow(waiting)


def _to_arrow(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _ARROW_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_ARROW_SCHEMA)


def _read_rows(client: Mapping[str, object], wanted: OffsetRange) -> Iterator[tuple[Any, ...]]:
    """A row per batch, and a last one for what could not be read.

    A fetched piece with bytes that are no batch is refused whole, so from there on batches are fetched one
    at a time up to the bad one.
    """
    tp, position, end = wanted
    for settings in (client, {**client, _FETCH_BYTES: 1}):
        with Consumer(settings) as consumer:
            try:
                for view in consumer.fetch_batches(tp, position, end):
                    for row in _rows_of(tp, view):
                        position = row[3] + 1
                        if wanted.start <= row[3] < end:
                            yield row
                return
            except (CorruptMessage, InvalidRecord):
                continue
    yield (*tp, position, end - 1, None, None, None, 0, 0, False, False, 0, None)


def _rows_of(tp: TopicPartition, view: memoryview) -> Iterator[tuple[Any, ...]]:
    for at, h in iter_batches(view):
        yield (
            *tp,
            h.base_offset,
            h.last_offset,
            h.producer_id,
            h.producer_epoch,
            h.base_sequence,
            h.last_offset_delta + 1,
            h.records_count,
            h.is_control,
            h.is_transactional,
            h.size_bytes,
            verify_crc(view, at, h.size_bytes),
        )
