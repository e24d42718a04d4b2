"""The one way a transaction marker reaches a partition: from a finished transaction, and from operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from oncelog.broker.coordinators.internal_topic import Written
from oncelog.broker.coordinators.internal_topics import CONSUMER_OFFSETS
from oncelog.types import Origin, TopicPartition
from oncelog.wire.control import encode_end_marker

if TYPE_CHECKING:
    from oncelog.broker.node import Node


MARKER_COST = 10
"""How many other elements of a request a marker takes the time of: it is a batch of its own."""


class Marker(NamedTuple):
    """The outcome of a producer's transaction, as its coordinator of `coordinator_epoch` says."""

    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    is_commit: bool


def write_marker(node: Node, at: TopicPartition, marker: Marker, now_ms: int) -> Written:
    """Append the marker. What it commits or drops counts at once for readers and for committed offsets.

    Raises UnknownTopicOrPartition, InvalidProducerEpoch, TransactionCoordinatorFenced, KafkaStorageError.
    """
    topic, partition = node.topics.partition(at)
    batch = encode_end_marker(
        marker.producer_id, marker.producer_epoch, marker.is_commit, marker.coordinator_epoch, now_ms
    )
    appended = partition.append(memoryview(batch), origin=Origin.COORDINATOR, now_ms=now_ms)
    node.note_stored(partition, len(batch))
    if at.topic == CONSUMER_OFFSETS:
        node.groups.on_marker(at.partition, marker.producer_id, marker.is_commit, now_ms)
    return Written(topic, partition, appended.last_offset)
