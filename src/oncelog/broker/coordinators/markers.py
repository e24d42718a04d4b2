"""The writer of transaction markers, used by the transaction coordinator and by WriteTxnMarkers requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from oncelog.broker.coordinators.internal_topic import AppendHandle
from oncelog.broker.coordinators.internal_topic_config import CONSUMER_OFFSETS
from oncelog.broker.topics.topics import Topics
from oncelog.log.partition import Partition
from oncelog.types import Origin, TopicPartition
from oncelog.wire.control import encode_end_marker

MARKER_COST = 10
"""Cost of writing a marker, in elements of a step (`StepBudget`).

The cost is high, because each marker is a separate batch.
"""
SEGMENT_COST = 250
"""Additional cost of a marker that begins a segment, in elements. See `produce.SEGMENT_COST`."""
OFFSETS_PER_ELEMENT = 8
"""Number of pending offsets that cost as much to commit or to drop as one element."""


class Marker(NamedTuple):
    """The outcome of a producer's transaction, and the epoch of the coordinator that decided the outcome."""

    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    is_commit: bool


class MarkerWriter:
    """The writer of transaction markers to partitions.

    `note_stored` is called with the partition and the size in bytes of each marker. `on_offsets_marker` is
    called for markers in `__consumer_offsets`. Its arguments are the partition index, the producer id, True
    for a commit, and `now_ms`. It returns the number of pending offsets that it has committed or dropped.

    `extra_cost` is the total cost of the segments that markers have begun, and of the offsets that they have
    committed or dropped, in elements. A writer of many markers adds it to the cost of its steps. See
    test_markers_that_begin_many_segments_are_written_in_steps and
    test_markers_that_commit_many_offsets_are_written_in_steps.
    """

    def __init__(
        self,
        topics: Topics,
        note_stored: Callable[[Partition, int], None],
        on_offsets_marker: Callable[[int, int, bool, int], int],
    ) -> None:
        self._topics, self._note_stored, self._on_offsets_marker = topics, note_stored, on_offsets_marker
        self.extra_cost = 0

    def write(self, tp: TopicPartition, marker: Marker, now_ms: int) -> AppendHandle:
        """Append the marker. In `__consumer_offsets`, also commit or drop the transaction's pending offsets.

        Raises UnknownTopicOrPartition, InvalidProducerEpoch, TransactionCoordinatorFenced, KafkaStorageError.
        """
        topic, partition = self._topics.partition(tp)
        batch = encode_end_marker(
            marker.producer_id, marker.producer_epoch, marker.is_commit, marker.coordinator_epoch, now_ms
        )
        segment = partition.log.segments.active
        try:
            appended = partition.append(memoryview(batch), origin=Origin.COORDINATOR, now_ms=now_ms)
        finally:
            if partition.log.segments.active is not segment:
                self.extra_cost += SEGMENT_COST
        self._note_stored(partition, len(batch))
        if tp.topic == CONSUMER_OFFSETS:
            count = self._on_offsets_marker(tp.partition, marker.producer_id, marker.is_commit, now_ms)
            self.extra_cost += count // OFFSETS_PER_ELEMENT
        return AppendHandle(topic, partition, appended.last_offset)
