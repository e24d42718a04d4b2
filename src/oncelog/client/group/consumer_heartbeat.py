"""The heartbeats of a member under the consumer protocol (KIP-848), without I/O.

A heartbeat reports the member's subscription and owned partitions. The response contains the member's epoch
and, if it has changed, the target assignment. The member revokes owned partitions that are not in the target.
The coordinator assigns these partitions to other members only after a heartbeat has reported the revocation.
Source: KIP-848; Kafka's ConsumerHeartbeatRequestManager.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from oncelog.errors import ConfigError, error_for_code
from oncelog.settings import Settings
from oncelog.types import TopicPartition
from oncelog.wire.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

JOINING, LEAVING, LEAVING_STATIC = 0, -1, -2
"""Special member epochs. After LEAVING_STATIC the partitions stay reserved for the member's successor."""
CLASSIC_ONLY = ("partition.assignment.strategy", "session.timeout.ms", "heartbeat.interval.ms")
"""Settings of the classic protocol. Under the consumer protocol the coordinator decides them."""


class TopicIdPartition(NamedTuple):
    """A partition with the id of its topic. A topic that is deleted and created again gets another id."""

    topic_id: bytes
    partition: int


class _Report(NamedTuple):
    """The fields of a heartbeat that are sent only when they have changed."""

    topics: frozenset[str]
    owned: frozenset[TopicIdPartition]


def _check_settings(settings: Settings) -> None:
    """Raise ConfigError for settings that the protocol leaves to the coordinator."""
    if keys := [key for key in CLASSIC_ONLY if settings.is_user_set(key)]:
        raise ConfigError(
            f"{', '.join(keys)} cannot be set with group.protocol=consumer, because the "
            "coordinator decides: use group.remote.assignor, or the broker's "
            "group.consumer.* settings"
        )


class HeartbeatState:
    """The state of a member's heartbeats: the last report that the coordinator knows, and the fields to
    report next.

    The first heartbeat, and each heartbeat after a lost response, reports everything. Other heartbeats report
    only changes.
    """

    def __init__(self, settings: Settings, member_id: str) -> None:
        _check_settings(settings)
        self._settings = settings
        self.member_id = member_id
        self.epoch = JOINING
        # The interval between heartbeats in ms, as the coordinator's last response set it.
        self.interval_ms = 0
        # The last report that the coordinator has acknowledged; None if the next heartbeat must report
        # everything.
        self._acknowledged: _Report | None = None
        self._sent: _Report | None = None
        # True if the coordinator has acknowledged the last report of owned partitions. While it is False, no
        # partition may be taken: the coordinator may assign unreported partitions to other members.
        self.is_answered = True

    def next_request(
        self, topics: frozenset[str], owned: Collection[TopicIdPartition]
    ) -> ConsumerGroupHeartbeatRequest:
        """Return the next heartbeat. `on_response` or `on_failure` must follow."""
        if self.epoch == JOINING:
            self._acknowledged, owned = None, ()
        report, acknowledged = _Report(topics, frozenset(owned)), self._acknowledged
        self._sent = report
        request = self._empty(self.epoch)
        if acknowledged is None:
            request.rebalance_timeout_ms = self._settings["max.poll.interval.ms"]
            request.server_assignor = self._settings["group.remote.assignor"]
        if acknowledged is None or topics != acknowledged.topics:
            request.subscribed_topic_names = sorted(topics)
        if acknowledged is None or report.owned != acknowledged.owned:
            request.topic_partitions = [
                ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=topic_id, partitions=partitions)
                for topic_id, partitions in _by_topic_id(report.owned).items()
            ]
            self.is_answered = False
        return request

    def leave_request(self) -> ConsumerGroupHeartbeatRequest:
        """Return the heartbeat that leaves the group."""
        return self._empty(LEAVING if self._settings["group.instance.id"] is None else LEAVING_STATIC)

    def _empty(self, epoch: int) -> ConsumerGroupHeartbeatRequest:
        return ConsumerGroupHeartbeatRequest(
            group_id=self._settings["group.id"],
            member_id=self.member_id,
            member_epoch=epoch,
            instance_id=self._settings["group.instance.id"],
            rack_id=None,
            rebalance_timeout_ms=-1,
            subscribed_topic_names=None,
            subscribed_topic_regex=None,
            server_assignor=None,
            topic_partitions=None,
        )

    def on_response(self, response: ConsumerGroupHeartbeatResponse) -> frozenset[TopicIdPartition] | None:
        """Store the member's epoch, id and heartbeat interval, and return the target assignment.

        Return None if the target assignment has not changed. Raises BrokerError.
        """
        if response.error_code:
            raise error_for_code(response.error_code, response.error_message or "")
        self._acknowledged, self.is_answered = self._sent, True
        self.epoch, self.interval_ms = response.member_epoch, response.heartbeat_interval_ms
        self.member_id = response.member_id or self.member_id
        if response.assignment is None:
            return None
        return frozenset(
            TopicIdPartition(topic.topic_id, partition)
            for topic in response.assignment.topic_partitions
            for partition in topic.partitions
        )

    def on_failure(self) -> None:
        """Report everything with the next heartbeat: the coordinator may not have handled the last one."""
        self._acknowledged = None

    def on_lost(self) -> None:
        """Join again with the next heartbeat, without partitions: the membership was lost."""
        self.epoch, self._acknowledged, self.is_answered = JOINING, None, True


class AssignmentDifference(NamedTuple):
    """The partitions to revoke and to add for a target assignment.

    `has_unknown_topics` is True if the names of some topic ids in the target are still unknown.
    """

    revoked: list[TopicPartition]
    added: list[TopicPartition]
    has_unknown_topics: bool


def compare_assignment(
    owned: Mapping[TopicPartition, bytes], target: Collection[TopicIdPartition], names: Mapping[bytes, str]
) -> AssignmentDifference:
    """Return the difference between the owned partitions and the target.

    `owned` has the topic id of each partition, and `names` has topic names by id. A topic that was deleted
    and created again has another id, and is treated as a different topic.
    """
    revoked = [tp for tp, topic_id in owned.items() if TopicIdPartition(topic_id, tp.partition) not in target]
    owned_ids = {TopicIdPartition(topic_id, tp.partition) for tp, topic_id in owned.items()}
    new = sorted(partition for partition in target if partition not in owned_ids)
    added = [
        TopicPartition(names[new_tp.topic_id], new_tp.partition) for new_tp in new if new_tp.topic_id in names
    ]
    return AssignmentDifference(revoked, added, len(added) < len(new))


def _by_topic_id(partitions: Collection[TopicIdPartition]) -> dict[bytes, list[int]]:
    grouped: dict[bytes, list[int]] = {}
    for topic_id, partition in sorted(partitions):
        grouped.setdefault(topic_id, []).append(partition)
    return grouped
