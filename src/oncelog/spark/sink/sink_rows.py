"""The rows of a sink: check them, count them, and group them by topic and partition.

The columns are the same as in Spark's own Kafka sink: value, and optionally key, headers, topic, partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncelog.errors import ConfigError
from oncelog.spark.sink.decisions import RowRefused, RowSum
from oncelog.spark.sink.sink_options import REQUEST_OVERHEAD_BYTES
from oncelog.wire.row_hash import hash_rows

KINDS = {
    "value": ("string", "binary"),
    "key": ("string", "binary"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": ("array<struct<key:string,value:binary>>",),
}
"""The written columns and their allowed Spark types. Other columns are ignored, as by Spark's own sink."""
VALUE_BYTES = "value_bytes"
"""The name of a column with the sizes of values, for checks of rows without the values."""


def check_columns(types: Sequence[tuple[str, str]], topic: str | None) -> None:
    """Raise ConfigError if the sink cannot write a DataFrame with these columns.

    `types` has (column name, Spark's short type name). `topic` is the option topic.
    """
    types_of = dict(types)
    if "value" not in types_of:
        raise ConfigError(f"the column value is missing; the existing columns are {', '.join(types_of)}")
    if topic is None and "topic" not in types_of:
        raise ConfigError("no topic: set the option topic, or add a column named topic")
    for name, kinds in KINDS.items():
        if name in types_of and types_of[name] not in kinds:
            raise ConfigError(
                f"column {name} has the type {types_of[name]}, but must be {' or '.join(kinds)}: cast it"
            )


class Part(NamedTuple):
    """Rows for one topic.

    If `partition` is None, the producer chooses each row's partition by the row's key. `first_row` is the
    number of the first row within the task, from 0.
    """

    topic: str
    partition: int | None
    rows: pa.RecordBatch
    first_row: int


class SinkRows:
    """A checker and counter of one task's rows. Row numbers start at 0."""

    def __init__(self, topic: str | None, max_row_bytes: int) -> None:
        self._topic, self._max_row_bytes = topic, max_row_bytes
        self.count = 0
        self.size_bytes = 0
        """Bytes of the keys and values of all checked rows."""
        self.largest = (0, 0)
        """(bytes, row number) of the largest checked row."""

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Check and count the rows of a batch. Return the batch with only the columns that are written.

        Raises RowRefused, whose text names the row.
        """
        names = [name for name in KINDS if name in batch.schema.names]
        if self._topic is not None:
            names = [name for name in names if name != "topic"]
        rows = pa.RecordBatch.from_arrays([plain(batch.column(name)) for name in names], names=names)
        self.check(rows)
        return rows

    def check(self, rows: pa.RecordBatch) -> None:
        """Check and count rows with the columns that `take` returns, or with VALUE_BYTES in place of value.

        Raises RowRefused, whose text names the row.
        """
        first = self.count
        if self._topic is None:
            self._refuse_null_topics(rows.column("topic"), first)
        self._refuse_null_headers(rows, first)
        self._refuse_large(rows, first)
        self.count += rows.num_rows

    def parts(self, rows: pa.RecordBatch) -> Iterator[Part]:
        """Yield `rows`, the last result of `take`, grouped by topic and partition. Within a group, the order
        of the rows is kept.
        """
        first = self.count - rows.num_rows
        written = rows.select([name for name in ("key", "value", "headers") if name in rows.schema.names])
        for topic, partition, indices in self.groups(rows):
            yield Part(topic, partition, rows_at(written, indices), first + int(indices[0]))

    def groups(self, rows: pa.RecordBatch) -> Iterator[tuple[str, int | None, Any]]:
        """Yield topic, partition (None for "by key") and ascending row indices of each group of `rows`, which
        were checked last. Raises RowRefused for a negative partition.
        """
        if not rows.num_rows:
            return
        if self._topic is not None and "partition" not in rows.schema.names:
            yield self._topic, None, np.arange(rows.num_rows)
            return
        yield from _groups(rows, self._topic, self.count - rows.num_rows)

    def _refuse_null_topics(self, topics: Any, first: int) -> None:
        if topics.null_count:
            row = first + pc.index(pc.is_null(topics), True).as_py()
            raise RowRefused(f"row {row} has a null topic: fill the column topic, or set the option topic")

    def _refuse_null_headers(self, rows: pa.RecordBatch, first: int) -> None:
        if "headers" not in rows.schema.names:
            return
        lists = rows.column("headers")
        structs = lists.flatten()
        # Find null names and null structs, which are both refused.
        names = structs.field("key") if structs.null_count == 0 else pc.struct_field(structs, "key")
        if not structs.null_count and not names.null_count:
            return
        parents = pc.list_parent_indices(lists)
        row = first + parents[pc.index(pc.is_null(names), True).as_py()].as_py()
        what = "null in place of a header" if structs.null_count else "a header without a name (key)"
        raise RowRefused(
            f"row {row} has {what}: a header needs a name and a value; remove null headers "
            "with filter(headers, h -> h.key IS NOT NULL)"
        )

    def _refuse_large(self, rows: pa.RecordBatch, first: int) -> None:
        if not rows.num_rows:
            return
        sizes = row_sizes(rows)
        index = int(np.argmax(sizes))
        size, row = int(sizes[index]), first + index
        self.size_bytes += int(sizes.sum())
        self.largest = max(self.largest, (size, row), key=lambda largest: largest[0])
        if size > self._max_row_bytes:
            topic = self._topic or rows.column("topic")[index].as_py()
            raise RowRefused(
                f"row {row} for topic {topic!r} has {size} bytes, above "
                f"kafka.max.request.size={self._max_row_bytes + REQUEST_OVERHEAD_BYTES} minus "
                f"{REQUEST_OVERHEAD_BYTES} for the rest of the request: raise "
                "kafka.max.request.size (and the topic's max.message.bytes), or make the row "
                "smaller"
            )


class TaskRows(SinkRows):
    """A checker of one task's rows that also sums their hashes, for the `TaskMarker`."""

    def __init__(self, topic: str | None, max_row_bytes: int) -> None:
        super().__init__(topic, max_row_bytes)
        self.sum = RowSum()

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = super().take(batch)
        self.sum = self.sum.plus(rows.num_rows, hash_rows(*rows.columns))
        return rows


def plain(column: Any) -> Any:
    """Return the column with Arrow's type string or binary in place of the large types."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    return column.cast(pa.binary()) if pa.types.is_large_binary(column.type) else column


def rows_at(rows: pa.RecordBatch, indices: Any) -> pa.RecordBatch:
    """Return the rows at ascending indices, without a copy if these are all rows."""
    return rows if len(indices) == rows.num_rows else rows.take(pa.array(indices))


def row_sizes(rows: pa.RecordBatch) -> Any:
    """Return an array with the number of bytes of each row's key and value.

    The sizes of values may be in the column VALUE_BYTES.
    """
    total = np.zeros(rows.num_rows, np.int64)
    if VALUE_BYTES in rows.schema.names:
        total += pc.fill_null(rows.column(VALUE_BYTES), 0).to_numpy(zero_copy_only=False)
    for name in ("key", "value"):
        if name in rows.schema.names:
            lengths = pc.binary_length(rows.column(name).cast(pa.binary()))
            total += pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False)
    return total


def _groups(rows: pa.RecordBatch, topic: str | None, first: int) -> Iterator[tuple[str, int | None, Any]]:
    if topic is None:
        encoded = rows.column("topic").dictionary_encode()
        topics = encoded.dictionary.to_pylist()
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    else:
        topics, codes = [topic], np.zeros(rows.num_rows, np.int64)
    partitions = np.full(rows.num_rows, -1, np.int64)
    if "partition" in rows.schema.names:
        chosen = rows.column("partition").cast(pa.int64())
        # Null means "by key" and becomes -1. A negative partition p is an error. It becomes p - 1, so that
        # the loop below can tell -1 from null and refuse it.
        below = pc.if_else(pc.less(chosen, 0), pc.subtract(chosen, 1), chosen)
        partitions = pc.fill_null(below, -1).to_numpy(zero_copy_only=False)
    lowest = int(partitions.min())
    width = int(partitions.max()) - lowest + 1
    both = codes * width + (partitions - lowest)
    for group in np.unique(both).tolist():
        indices = np.flatnonzero(both == group)
        code, partition = group // width, group % width + lowest
        if partition < -1:
            raise RowRefused(
                f"row {first + int(indices[0])} for topic {topics[code]!r} names partition "
                f"{partition + 1}: partitions start at 0; use null to choose by key"
            )
        yield topics[code], None if partition == -1 else partition, indices
