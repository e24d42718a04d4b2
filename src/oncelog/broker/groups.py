"""The group coordinator: who commits offsets, and where.

Source: rows T6, T7; Kafka's GroupCoordinatorService, GroupMetadataManager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.offsets import Offsets
from oncelog.broker.state_topic import StateTopic
from oncelog.broker.topics import CONSUMER_OFFSETS
from oncelog.errors import IllegalGeneration, InvalidGroupId, PeerError, StorageError
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    from oncelog.broker.node import Node


class GroupCoordinator:
    """Every group of this node."""

    def __init__(self, node: Node) -> None:
        settings = node.settings
        self.topic = StateTopic(
            node,
            CONSUMER_OFFSETS,
            settings["offsets.topic.num.partitions"],
            {
                "compression.type": "producer",
                "segment.bytes": str(settings["offsets.topic.segment.bytes"]),
            },
        )
        self.offsets = Offsets(node, self.topic)

    def offsets_partition(self, group_id: str, now_ms: int) -> TopicPartition:
        """Where a group's offsets are kept; the topic is made if need be.

        Raises InvalidGroupId, KafkaStorageError.
        """
        if not group_id:
            raise InvalidGroupId("a group id may not be empty")
        self.topic.ensure(now_ms)
        return TopicPartition(self.topic.name, self.topic.partition_of(group_id))

    def check_commit(
        self, group_id: str, generation_id: int, member_id: str, group_instance_id: str | None
    ) -> None:
        """Raises what a commit by this member must be answered with (row T7)."""
        if generation_id >= 0:
            raise IllegalGeneration(f"group {group_id!r} has no generation {generation_id}")

    def on_marker(self, index: int, producer_id: int, is_commit: bool, now_ms: int) -> None:
        """A transaction ended in a partition of the offsets topic."""
        self.offsets.on_marker(index, producer_id, is_commit)

    def load(self, now_ms: int) -> None:
        """Read back groups and offsets. Raises StorageError on a record that cannot be read."""
        for index in range(self.topic.partition_count if self.topic.topic else 0):
            for batch in self.topic.replay(index):
                try:
                    self.offsets.replay(index, batch)
                except PeerError as error:
                    raise StorageError(f"a record of {self.topic.name} cannot be read: {error}") from error

    def forget_expired(self, now_ms: int) -> None:
        """Forget offsets past their retention."""
        for group in list(self.offsets.groups()):
            self.offsets.forget_expired(group, (), None, now_ms)
