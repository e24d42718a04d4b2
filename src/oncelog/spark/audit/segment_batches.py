"""The headers of the batches in segment files as a Spark table. The driver lists the files, and tasks read
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from oncelog.local_audit.segment_files import PartitionFiles, read_segment
from oncelog.spark.audit.topic_batches import HEADERS_SCHEMA, is_checking_records, to_arrow

BYTES_PER_TASK = 256 << 20
"""The maximum total size of the segments that one task reads. A segment above this size gets a task of its
own.
"""


class SegmentHeadersSource(DataSource):  # type: ignore[misc]
    """`format("oncelog-segments")`. The option `partitions` is the result of `find_segments` as JSON."""

    @classmethod
    def name(cls) -> str:
        return "oncelog-segments"

    def schema(self) -> StructType:
        return HEADERS_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        found = [PartitionFiles.from_plain(p) for p in json.loads(self.options["partitions"])]
        return SegmentReader(found, check_records=is_checking_records(self.options))


class SegmentReader(DataSourceReader):  # type: ignore[misc]
    """A reader of segment files. Each task reads a group of segments, one after another."""

    def __init__(self, found: Sequence[PartitionFiles], *, check_records: bool = False) -> None:
        self._found = found
        self._check_records = check_records

    def partitions(self) -> list[InputPartition]:
        tasks: list[list[tuple[PartitionFiles, int]]] = []
        room = 0
        for files in self._found:
            for index, segment in enumerate(files.segments):
                if not tasks or segment.size_bytes > room:
                    tasks.append([])
                    room = BYTES_PER_TASK
                tasks[-1].append((files, index))
                room -= segment.size_bytes
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # If there are no segments, Spark still runs one task. Its partition has no value.
        task = partition.value or ()
        return to_arrow(
            (*files.tp, files.segments[index].base_offset, position, *batch)
            for files, index in task
            for position, batch in read_segment(files, index, check_records=self._check_records)
        )
