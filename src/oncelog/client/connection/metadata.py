"""The client's copy of the cluster's metadata: brokers, topics, partition leaders.

While a topic keeps its id, the leader epoch of a partition only grows. Therefore a lower epoch shows that a
response is outdated, and its leader is ignored. Source: Kafka's Metadata.updateLatestMetadata.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from oncelog.errors import BrokerError, UnknownTopicOrPartition, error_for_code, named_text
from oncelog.types import BrokerAddress, PartitionInfo, TopicPartition

_NO_TOPIC_ID = bytes(16)


@dataclass(slots=True)
class _Topic:
    topic_id: bytes | None
    is_internal: bool
    partitions: dict[int, PartitionInfo]


class ClusterMetadata:
    """The latest known state of the cluster. `updated_ms` is None before the first response."""

    def __init__(self) -> None:
        self.brokers: dict[int, BrokerAddress] = {}
        self.cluster_id: str | None = None
        self.controller_id: int | None = None
        self.updated_ms: float | None = None
        self.version = 0
        self._topics: dict[str, _Topic] = {}
        self._errors: dict[str, BrokerError] = {}
        self._unknown_since_ms: dict[str, float] = {}
        """Topic -> time in ms since which every response about the topic has reported it as unknown."""
        self._stale: set[TopicPartition] = set()
        """Partitions whose leader refused a request or was unreachable, until the next update."""

    def update(self, response: Any, now_ms: float = 0.0) -> None:
        """Apply a MetadataResponse. Topics that it does not contain keep their state."""
        if response.brokers:
            self.brokers = {
                row.node_id: BrokerAddress(row.node_id, row.host, row.port, row.rack)
                for row in response.brokers
            }
        self.cluster_id = response.cluster_id or self.cluster_id
        self.controller_id = response.controller_id if response.controller_id >= 0 else None
        for row in response.topics:
            self._update_topic(row, now_ms)
        self.updated_ms = now_ms
        self.version += 1

    def set_address(self, node_id: int, host: str, port: int) -> None:
        """Set a broker's address from a response other than Metadata."""
        existing = self.brokers.get(node_id)
        self.brokers[node_id] = BrokerAddress(node_id, host, port, existing.rack if existing else None)

    def _update_topic(self, row: Any, now_ms: float) -> None:
        if row.error_code:
            self._errors[row.name] = error_for_code(
                row.error_code, named_text(row.error_code, f"topic {row.name!r}")
            )
            if row.error_code == UnknownTopicOrPartition.code:
                self._drop(row.name)
                self._unknown_since_ms.setdefault(row.name, now_ms)
            return
        self._errors.pop(row.name, None)
        self._unknown_since_ms.pop(row.name, None)
        topic_id = None if row.topic_id in (None, _NO_TOPIC_ID) else bytes(row.topic_id)
        existing = self._topics.get(row.name)
        is_same = existing is not None and existing.topic_id == topic_id
        partitions = {}
        for partition in row.partitions:
            index = partition.partition_index
            before = existing.partitions.get(index) if existing and is_same else None
            partitions[index] = self._newer(before, row.name, partition)
        self._topics[row.name] = _Topic(topic_id, bool(row.is_internal), partitions)

    def _newer(self, before: PartitionInfo | None, topic: str, row: Any) -> PartitionInfo:
        """Return the new state `row`, or `before` if the leader epoch of `row` is lower."""
        # The partition is not stale after this response, even if the response has an older epoch, as in
        # Java's client. After a restore from a backup, every response has an older epoch: a partition that
        # stayed stale would have no leader from then on. See
        # test_a_stale_leader_is_asked_again_after_an_older_epoch.
        self._stale.discard(TopicPartition(topic, row.partition_index))
        leader_epoch = row.leader_epoch if row.leader_epoch >= 0 else None
        if before and leader_epoch is not None and (before.leader_epoch or -1) > leader_epoch:
            return before
        return PartitionInfo(
            topic=topic,
            partition=row.partition_index,
            leader=row.leader_id if row.leader_id >= 0 else None,
            leader_epoch=leader_epoch,
            replicas=tuple(row.replica_nodes),
            in_sync_replicas=tuple(row.isr_nodes),
        )

    def topics(self) -> list[str]:
        """Return the names of the known topics, sorted."""
        return sorted(self._topics)

    def partitions(self, topic: str) -> tuple[PartitionInfo, ...]:
        """Return the topic's partitions in order; an empty tuple if the topic is unknown."""
        existing = self._topics.get(topic)
        return tuple(existing.partitions[index] for index in sorted(existing.partitions)) if existing else ()

    def partition_count(self, topic: str) -> int | None:
        """Return the number of partitions; None if the topic is unknown."""
        existing = self._topics.get(topic)
        return len(existing.partitions) if existing else None

    def leader_of(self, tp: TopicPartition) -> int | None:
        """Return the leader's node id.

        None if the leader is unknown, not elected, not among `brokers`, or stale (`mark_stale`).
        """
        existing = self._topics.get(tp.topic)
        info = existing.partitions.get(tp.partition) if existing else None
        return None if info is None or tp in self._stale or info.leader not in self.brokers else info.leader

    def topic_id(self, topic: str) -> bytes | None:
        """Return the topic's id (16 bytes); None if the topic is unknown or the broker has no topic ids."""
        existing = self._topics.get(topic)
        return existing.topic_id if existing else None

    def topic_error(self, topic: str) -> BrokerError | None:
        """Return the error of the latest response about the topic; None if that response had no error."""
        return self._errors.get(topic)

    def mark_stale(self, partitions: Iterable[TopicPartition]) -> None:
        """Make `leader_of` return None for these partitions until the next update.

        Call it if a leader refused a request or was unreachable.
        """
        self._stale.update(tp for tp in partitions if tp.topic in self._topics)

    def unknown_since_ms(self, topic: str) -> float | None:
        """Return the time in ms since which every response about the topic has reported it as unknown.

        Return None if no response has reported the topic as unknown, or if a later response contained it.
        """
        return self._unknown_since_ms.get(topic)

    def forget(self, topics: Collection[str]) -> None:
        """Drop the state of these topics, for example because they were deleted."""
        for topic in topics:
            self._drop(topic)
            self._errors.pop(topic, None)
            self._unknown_since_ms.pop(topic, None)

    def retain(self, topics: Collection[str]) -> None:
        """Drop the state of all topics except these."""
        kept = frozenset(topics)
        self.forget([topic for topic in (*self._topics, *self._errors) if topic not in kept])

    def _drop(self, name: str) -> None:
        topic = self._topics.pop(name, None)
        if topic is not None:
            self._stale.difference_update(TopicPartition(name, index) for index in topic.partitions)
