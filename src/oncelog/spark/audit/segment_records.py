"""The committed records of segment files, with the columns of `format("oncelog")`, for the check of keys.

The outcome of a transaction is the next marker of its producer in the partition. If there is no such marker,
the transaction is open. `.txnindex` files are not used, because they lack the newest entries after a kill.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import LongType, StructField, StructType

from oncelog.errors import CorruptMessage, InvalidRecord
from oncelog.local_audit.segment_files import (
    Damage,
    PartitionFiles,
    file_system,
    open_segment,
    walk_segment,
)
from oncelog.spark.audit.segment_batches import SegmentHeadersSource, SegmentReader
from oncelog.spark.source.reader import regroup
from oncelog.spark.source.source import COLUMNS
from oncelog.wire.columns import batches_to_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PLACE = ("part", "place")


def committed_records(spark: SparkSession, found: Sequence[PartitionFiles]) -> DataFrame:
    """Return the records that a read_committed reader gets if every open transaction is aborted."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    option = json.dumps([files.to_plain() for files in found])
    frames = []
    for source in (SegmentRecordsSource, SegmentHeadersSource):
        spark.dataSource.register(source)
        frames.append(spark.read.format(source.name()).option("partitions", option).load())
    records, headers = frames
    backwards = [f.col(name).desc() for name in _PLACE]
    later = Window.partitionBy("topic", "partition", "producer_id").orderBy(*backwards)
    ended = f.last("is_commit", ignorenulls=True).over(later.rowsBetween(Window.unboundedPreceding, -1))
    hidden = (
        headers.where("is_transactional OR is_control")
        .withColumn("is_committed", f.coalesce(ended, f.lit(False)))
        .where("NOT is_control AND NOT is_committed")
    )
    # Hint that `hidden` is small: hidden batches are few, but Spark cannot estimate this, and would shuffle
    # all records.
    return records.join(f.broadcast(hidden), ["topic", "partition", *_PLACE], "left_anti").drop(*_PLACE)


class SegmentRecordsSource(SegmentHeadersSource):
    """`format("oncelog-segment-records")`: all records, each with the place of its batch."""

    @classmethod
    def name(cls) -> str:
        return "oncelog-segment-records"

    def schema(self) -> StructType:
        columns = (*COLUMNS, *((name, LongType()) for name in _PLACE))
        return StructType([StructField(name, kind) for name, kind in columns])

    def reader(self, schema: StructType) -> DataSourceReader:
        return _RecordsReader([PartitionFiles.from_plain(p) for p in json.loads(self.options["partitions"])])


class _RecordsReader(SegmentReader):
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        task = partition.value or ()
        return regroup(rows for files, index in task for rows in _read_records(files, index))


def _read_records(files: PartitionFiles, index: int) -> Iterator[pa.RecordBatch]:
    """Yield the records of a segment from the log start on.

    Damaged ranges are skipped, because the audit of headers reports them.
    """
    segment, (topic, partition) = files.segments[index], files.tp
    system, _ = file_system(files.root)
    with open_segment(system, files.path(segment)) as (file, size_bytes):
        for found in walk_segment(file, size_bytes, segment.base_offset):
            if isinstance(found, Damage) or found.header.is_control or not found.header.records_count:
                continue
            if found.header.last_offset < files.log_start_offset:
                continue
            with suppress(CorruptMessage, InvalidRecord):
                rows = batches_to_arrow(found.bytes(), topic=topic, partition=partition)
                for name, value in zip(_PLACE, (segment.base_offset, found.position), strict=True):
                    rows = rows.append_column(name, pa.repeat(pa.scalar(value, pa.int64()), rows.num_rows))
                if found.header.base_offset < files.log_start_offset:
                    rows = rows.filter(pc.greater_equal(rows.column("offset"), files.log_start_offset))
                yield rows
