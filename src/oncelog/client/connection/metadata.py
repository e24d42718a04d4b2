"""What the cluster looks like, as told by Metadata answers: brokers, topics, leaders.

A partition's leader epoch only grows while its topic keeps its id, so an answer from a broker
that is behind cannot bring an old leader back. Source: Kafka's Metadata.updateLatestMetadata.
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
    """The newest known state of the cluster. `updated_ms` is None before the first answer."""

    def __init__(self) -> None:
        self.brokers: dict[int, BrokerAddress] = {}
        self.cluster_id: str | None = None
        self.controller_id: int | None = None
        self.updated_ms: float | None = None
        self.version = 0
        self._topics: dict[str, _Topic] = {}
        self._errors: dict[str, BrokerError] = {}
        # Since when each answer about a topic has said that it does not exist.
        self._unknown_since_ms: dict[str, float] = {}
        self._stale: set[TopicPartition] = set()

    def update(self, response: Any, now_ms: float = 0.0) -> None:
        """Take a MetadataResponse; topics it does not name stay as they were."""
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
        """Take a broker's address from another answer than Metadata."""
        known = self.brokers.get(node_id)
        self.brokers[node_id] = BrokerAddress(node_id, host, port, known.rack if known else None)

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
        known = self._topics.get(row.name)
        same = known is not None and known.topic_id == topic_id
        partitions = {}
        for part in row.partitions:
            before = known.partitions.get(part.partition_index) if known and same else None
            partitions[part.partition_index] = self._newer(before, row.name, part)
        self._topics[row.name] = _Topic(topic_id, bool(row.is_internal), partitions)

    def _newer(self, before: PartitionInfo | None, topic: str, part: Any) -> PartitionInfo:
        # Also for an older epoch, as in Java: a cluster that was restored from a copy goes back for good, and
        # the leader would stay unknown. See test_a_stale_leader_is_asked_again_after_an_older_epoch.
        self._stale.discard(TopicPartition(topic, part.partition_index))
        leader_epoch = part.leader_epoch if part.leader_epoch >= 0 else None
        if before and leader_epoch is not None and (before.leader_epoch or -1) > leader_epoch:
            return before
        return PartitionInfo(
            topic=topic,
            partition=part.partition_index,
            leader=part.leader_id if part.leader_id >= 0 else None,
            leader_epoch=leader_epoch,
            replicas=tuple(part.replica_nodes),
            in_sync_replicas=tuple(part.isr_nodes),
        )

    def topics(self) -> list[str]:
        """Names of the topics known, sorted."""
        return sorted(self._topics)

    def partitions(self, topic: str) -> tuple[PartitionInfo, ...]:
        """The topic's partitions in order; empty when the topic is not known."""
        known = self._topics.get(topic)
        return tuple(known.partitions[index] for index in sorted(known.partitions)) if known else ()

    def partition_count(self, topic: str) -> int | None:
        """None when the topic is not known."""
        known = self._topics.get(topic)
        return len(known.partitions) if known else None

    def leader_of(self, tp: TopicPartition) -> int | None:
        """Node id of the leader; None when not known, not elected, or said to be wrong (`mark_stale`)."""
        known = self._topics.get(tp.topic)
        part = known.partitions.get(tp.partition) if known else None
        return None if part is None or tp in self._stale or part.leader not in self.brokers else part.leader

    def topic_id(self, topic: str) -> bytes | None:
        """16 bytes; None for an unknown topic or a broker without topic ids."""
        known = self._topics.get(topic)
        return known.topic_id if known else None

    def topic_error(self, topic: str) -> BrokerError | None:
        """Why the newest answer about the topic was an error; None when it was not."""
        return self._errors.get(topic)

    def mark_stale(self, partitions: Iterable[TopicPartition]) -> None:
        """The leader known for these was refused or unreachable: `leader_of` is None until an update."""
        self._stale.update(tp for tp in partitions if tp.topic in self._topics)

    def unknown_since_ms(self, topic: str) -> float | None:
        """Return when an answer first said that the topic does not exist; None if the newest one did not."""
        return self._unknown_since_ms.get(topic)

    def forget(self, topics: Collection[str]) -> None:
        """Drop what is known of topics (deleted, or created again under the same name)."""
        for topic in topics:
            self._drop(topic)
            self._errors.pop(topic, None)
            self._unknown_since_ms.pop(topic, None)

    def retain(self, topics: Collection[str]) -> None:
        """Drop what is known of all topics but these."""
        kept = frozenset(topics)
        self.forget([topic for topic in (*self._topics, *self._errors) if topic not in kept])

    def _drop(self, name: str) -> None:
        topic = self._topics.pop(name, None)
        if topic is not None:
            self._stale.difference_update(TopicPartition(name, index) for index in topic.partitions)
