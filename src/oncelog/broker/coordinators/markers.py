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
    for a commit, and `now_ms`.
    """

    def __init__(
        self,
        topics: Topics,
        note_stored: Callable[[Partition, int], None],
        on_offsets_marker: Callable[[int, int, bool, int], None],
    ) -> None:
        self._topics, self._note_stored, self._on_offsets_marker = topics, note_stored, on_offsets_marker

    def write(self, tp: TopicPartition, marker: Marker, now_ms: int) -> AppendHandle:
        """Append the marker. In `__consumer_offsets`, also commit or drop the transaction's pending offsets.

        Raises UnknownTopicOrPartition, InvalidProducerEpoch, TransactionCoordinatorFenced, KafkaStorageError.
        """
        topic, partition = self._topics.partition(tp)
        batch = encode_end_marker(
            marker.producer_id, marker.producer_epoch, marker.is_commit, marker.coordinator_epoch, now_ms
        )
        appended = partition.append(memoryview(batch), origin=Origin.COORDINATOR, now_ms=now_ms)
        self._note_stored(partition, len(batch))
        if tp.topic == CONSUMER_OFFSETS:
            self._on_offsets_marker(tp.partition, marker.producer_id, marker.is_commit, now_ms)
        return AppendHandle(topic, partition, appended.last_offset)
