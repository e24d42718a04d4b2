"""`ProvenanceFilter`: drop the records that an at-least-once job wrote to a topic more than once."""

from __future__ import annotations

import json
from typing import Any

from oncelog.errors import MisuseError, ProvenanceError
from oncelog.rules.idempotence.provenance import HighestOffsets, Provenance, Verdict, read_provenance
from oncelog.types import OffsetAndMetadata, Record, TopicPartition

_KEY = "oncelog.provenance"


class ProvenanceFilter:
    """A filter that drops repeated records, by the source topic, partition and offset in their headers.

        distinct = oncelog.ProvenanceFilter()
        consumer.assign([tp])
        consumer.seek_to_beginning(tp)
        distinct.start(tp)
        for record in consumer.poll():
            if distinct.accept(record):
                ...

    `oncelog.spark.provenance_headers()` writes such headers with Spark's own Kafka sink. The state of a
    partition is one number for each source partition, so the filter takes no memory for single records.

    The state belongs to a position. `committable` returns both in one object, for `Consumer.commit` or
    `Producer.send_offsets_to_transaction`, and `start` takes them back from `Consumer.committed`.

    The filter is exact if the job writes in order: see docs/spark.md. `oncelog audit --distinct provenance`
    checks whether it does. With `pass_unmarked`, records without valid provenance headers are accepted.
    Otherwise they raise ProvenanceError.
    """

    def __init__(self, *, pass_unmarked: bool = False) -> None:
        self._pass_unmarked = pass_unmarked
        self._highest: dict[TopicPartition, HighestOffsets] = {}
        self._next: dict[TopicPartition, int] = {}

    def start(self, tp: TopicPartition, committed: OffsetAndMetadata | None = None) -> None:
        """Begin to filter a partition from `committed` on, with the state in the metadata of `committed`.

        Without `committed` the state is empty. That is right only if reading starts at the first record of
        the partition. Raises MisuseError if the metadata is not the state of a filter.
        """
        offset, state = (0, {}) if committed is None else (committed.offset, _parse(tp, committed))
        self._highest[tp], self._next[tp] = HighestOffsets(state), offset

    def accept(self, record: Record) -> bool:
        """Return False if the record is a repetition. Call it for each record of a partition, in order.

        Raises ProvenanceError for a record without valid provenance headers, unless `pass_unmarked` is set.
        Raises MisuseError before `start`, and for a record below the position: after a seek backwards, call
        `start` with the committed offset.
        """
        tp = TopicPartition(record.topic, record.partition)
        position = self._next.get(tp)
        if position is None:
            raise MisuseError(f"call start({tp}) before the first record of the partition is filtered")
        if record.offset < position:
            raise MisuseError(
                f"{tp}: the record at offset {record.offset} is below the filter's position {position}: "
                "after a seek backwards, call start() with the committed offset"
            )
        provenance = read_provenance(record.headers)
        if isinstance(provenance, Provenance):
            self._next[tp] = record.offset + 1
            return self._highest[tp].see(provenance) is Verdict.NEW
        if not self._pass_unmarked:
            reason = "it has no provenance headers" if provenance is None else provenance.reason
            raise ProvenanceError(reason, record.topic, record.partition, record.offset)
        self._next[tp] = record.offset + 1
        return True

    def committable(self, tp: TopicPartition) -> OffsetAndMetadata:
        """Return the position after the last record passed to `accept`, with the filter's state as metadata.

        With offsets of ten digits, the metadata takes about 17 bytes for each source partition. Brokers
        accept 4096 bytes by default (offset.metadata.max.bytes), and refuse a commit with longer metadata.
        Raises MisuseError if `start` was not called for the partition.
        """
        if tp not in self._next:
            raise MisuseError(f"call start({tp}) first")
        by_topic: dict[str, dict[str, int]] = {}
        for source, highest in sorted(self._highest[tp].items().items()):
            by_topic.setdefault(source.topic, {})[str(source.partition)] = highest
        text = json.dumps({_KEY: by_topic}, separators=(",", ":"))
        return OffsetAndMetadata(self._next[tp], None, text)


def _parse(tp: TopicPartition, committed: OffsetAndMetadata) -> dict[TopicPartition, int]:
    try:
        by_topic: dict[str, dict[str, Any]] = json.loads(committed.metadata)[_KEY]
        return {
            TopicPartition(topic, int(partition)): int(highest)
            for topic, partitions in by_topic.items()
            for partition, highest in partitions.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise MisuseError(
            f"{tp}: the committed offset {committed.offset} has no state of a ProvenanceFilter: read the "
            "partition from its beginning, with start(tp)"
        ) from None
