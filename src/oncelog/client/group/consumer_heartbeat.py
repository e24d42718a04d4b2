"""A member of a consumer-protocol group without I/O: what its heartbeats say, and what answers mean.

The coordinator shares out partitions. A heartbeat tells it what the member subscribes to and owns, and
brings back the member's epoch and, when it changed, what the member is to own. What that lacks the member
gives back, and only when a heartbeat has said so do others get it.

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
"""Epochs that mean something else. A static member that leaves so keeps its partitions for its successor."""
CLASSIC_ONLY = ("partition.assignment.strategy", "session.timeout.ms", "heartbeat.interval.ms")
"""With the consumer protocol the coordinator decides these."""


class Place(NamedTuple):
    """A partition of a topic that may be deleted and made again under its name."""

    topic_id: bytes
    partition: int


class _Said(NamedTuple):
    topics: frozenset[str]
    owned: frozenset[Place]


def _check_settings(settings: Settings) -> None:
    """Refuse what the protocol leaves to the coordinator. Raises ConfigError."""
    if given := [key for key in CLASSIC_ONLY if settings.is_user_set(key)]:
        raise ConfigError(
            f"{', '.join(given)} cannot be set with group.protocol=consumer, where the coordinator decides: "
            "see group.remote.assignor, and the broker's group.consumer.* settings"
        )


class Heartbeats:
    """What a member tells its coordinator: all, to join or after a lost answer; else what changed."""

    def __init__(self, settings: Settings, member_id: str) -> None:
        _check_settings(settings)
        self._settings = settings
        self.member_id = member_id
        self.epoch = JOINING
        self.interval_ms = 0
        """The coordinator's wish."""
        self._known: _Said | None = None
        self._said: _Said | None = None
        self.is_heard = True
        """False from a heartbeat that says what is owned to its answer, or to that of a later one.

        The coordinator may give what it does not name to others, so nothing may be taken until then.
        """

    def request(self, topics: frozenset[str], owned: Collection[Place]) -> ConsumerGroupHeartbeatRequest:
        """The next heartbeat; `answered` or `failed` must follow."""
        if self.epoch == JOINING:
            self._known, owned = None, ()
        said, known = _Said(topics, frozenset(owned)), self._known
        self._said = said
        request = self._empty(self.epoch)
        if known is None:
            request.rebalance_timeout_ms = self._settings["max.poll.interval.ms"]
            request.server_assignor = self._settings["group.remote.assignor"]
        if known is None or topics != known.topics:
            request.subscribed_topic_names = sorted(topics)
        if known is None or said.owned != known.owned:
            request.topic_partitions = [
                ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=topic_id, partitions=partitions)
                for topic_id, partitions in _by_id(said.owned).items()
            ]
            self.is_heard = False
        return request

    def leave(self) -> ConsumerGroupHeartbeatRequest:
        """The member goes."""
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

    def answered(self, answer: ConsumerGroupHeartbeatResponse) -> frozenset[Place] | None:
        """What the member is to own from now on; None: nothing new. Raises BrokerError."""
        if answer.error_code:
            raise error_for_code(answer.error_code, answer.error_message or "")
        self._known, self.is_heard = self._said, True
        self.epoch, self.interval_ms = answer.member_epoch, answer.heartbeat_interval_ms
        self.member_id = answer.member_id or self.member_id
        if answer.assignment is None:
            return None
        return frozenset(
            Place(topic.topic_id, partition)
            for topic in answer.assignment.topic_partitions
            for partition in topic.partitions
        )

    def failed(self) -> None:
        """Whether it was heard is not known: the next one says everything."""
        self._known = None

    def fenced(self) -> None:
        """The group goes on without the member, which may join again; it owns nothing."""
        self.epoch, self._known, self.is_heard = JOINING, None, True


class Difference(NamedTuple):
    """What a member has to do to own what it is to own."""

    leaving: list[TopicPartition]
    added: list[TopicPartition]
    unknown: bool
    """Some topics' names are not known yet."""


def difference(
    owned: Mapping[TopicPartition, bytes], wanted: Collection[Place], names: Mapping[bytes, str]
) -> Difference:
    """`owned` with the topics' ids; a topic made again under its name is another one."""
    leaving = [at for at, topic_id in owned.items() if Place(topic_id, at.partition) not in wanted]
    held = {Place(topic_id, at.partition) for at, topic_id in owned.items()}
    new = sorted(place for place in wanted if place not in held)
    added = [TopicPartition(names[each.topic_id], each.partition) for each in new if each.topic_id in names]
    return Difference(leaving, added, len(added) < len(new))


def _by_id(places: Collection[Place]) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for each in sorted(places):
        found.setdefault(each.topic_id, []).append(each.partition)
    return found
