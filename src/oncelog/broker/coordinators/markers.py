"""The one way a transaction marker reaches a partition: from a finished transaction, and from operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from oncelog.broker.coordinators.internal_topic import Written
from oncelog.broker.coordinators.internal_topics import CONSUMER_OFFSETS
from oncelog.broker.topics.topics import Topics
from oncelog.log.partition import Partition
from oncelog.types import Origin, TopicPartition
from oncelog.wire.control import encode_end_marker

MARKER_COST = 10
"""How many other elements of a request a marker takes the time of: it is a batch of its own."""


class Marker(NamedTuple):
    """The outcome of a producer's transaction, as its coordinator of `coordinator_epoch` says."""

    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    is_commit: bool


class MarkerWriter:
    """Appends transaction markers to partitions.

    `note_stored` gets each append. `on_offsets_marker` gets the markers of `__consumer_offsets`, as
    partition, producer id, True for a commit, and `now_ms`.
    """

    def __init__(
        self,
        topics: Topics,
        note_stored: Callable[[Partition, int], None],
        on_offsets_marker: Callable[[int, int, bool, int], None],
    ) -> None:
        self._topics, self._note_stored, self._on_offsets_marker = topics, note_stored, on_offsets_marker

    def write(self, tp: TopicPartition, marker: Marker, now_ms: int) -> Written:
        """Append the marker. What it commits or drops counts at once for readers and for committed offsets.

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
        return Written(topic, partition, appended.last_offset)
