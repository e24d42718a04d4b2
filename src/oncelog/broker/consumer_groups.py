"""Groups of the consumer protocol: carries out what `rules.consumer_group` decides, and keeps it.

Regular expressions (`broker.patterns`) match whole names; internal topics match none.
Source: KIP-848; Kafka's GroupMetadataManager.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING

from oncelog.broker.consumer_group_log import encode_entry, group_entries, group_of, replay_entry
from oncelog.broker.patterns import TopicPatterns
from oncelog.broker.state_topic import StateTopic, Written
from oncelog.errors import GroupIdNotFound, NotCoordinator
from oncelog.rules.consumer_group import Beat, BeatAnswer, ConsumerGroup, TopicInfo

if TYPE_CHECKING:
    from oncelog.broker.node import Node

_MAX_CATALOGUES = 1000
"""Remembered catalogues, each of one set of names and patterns."""


class ConsumerGroups:
    """Every such group of this node."""

    def __init__(self, node: Node, topic: StateTopic) -> None:
        self._node, self._topic = node, topic
        self._groups: dict[str, ConsumerGroup] = {}
        self._due: list[tuple[int, str]] = []
        self._scheduled_ms: dict[str, int] = {}
        self.patterns = TopicPatterns(node.log_manager.chores)
        self._max_patterns = 100
        self._catalogues: dict[tuple[frozenset[str], frozenset[str]], Mapping[str, TopicInfo]] = {}
        self._catalogues_of = (-1, -1)
        """Revisions of the topics and of the patterns that `_catalogues` were made of."""

    def get(self, group_id: str) -> ConsumerGroup | None:
        return self._groups.get(group_id)

    def ids(self) -> set[str]:
        return set(self._groups)

    def heartbeat(self, group_id: str, beat: Beat, now_ms: int) -> tuple[BeatAnswer, list[Written]]:
        """The answer, and what must be durable before it is given.

        Raises GroupIdNotFound, NotCoordinator and as ConsumerGroup.heartbeat.
        """
        group = self._groups.get(group_id)
        if group is None and beat.epoch != 0:
            raise GroupIdNotFound(f"there is no consumer group {group_id!r}")
        group = group or self._open(group_id)
        self.patterns.begin()
        self._forget_patterns()
        answer = group.heartbeat(beat, self._catalogue, now_ms)
        return answer, self._settle(group, now_ms)

    def _open(self, group_id: str) -> ConsumerGroup:
        settings = self._node.settings
        group = self._groups[group_id] = ConsumerGroup(
            group_id,
            session_timeout_ms=settings["group.consumer.session.timeout.ms"],
            max_size=settings["group.consumer.max.size"],
            assignor=settings["group.consumer.assignors"][0],
        )
        return group

    def _catalogue(self, names: frozenset[str], regexes: frozenset[str]) -> Mapping[str, TopicInfo]:
        """Return the topics of these names or patterns; made once for every change of the topics."""
        topics, patterns = self._node.topics, self.patterns
        if self._catalogues_of != (topics.revision, patterns.revision):
            patterns.list_topics([topic.name for topic in topics.all() if not topic.is_internal])
            self._catalogues_of = (topics.revision, patterns.revision)
            self._catalogues.clear()
        key = names, regexes
        if key not in self._catalogues:
            wanted = set(names).union(*map(patterns.find, sorted(regexes)))
            found = [topic for name in sorted(wanted) if (topic := topics.get(name)) is not None]
            made = {topic.name: TopicInfo(topic.topic_id, len(topic.partitions)) for topic in found}
            if self._catalogues_of != (topics.revision, patterns.revision):
                return made  # a pattern was resolved meanwhile, perhaps one that `find` was asked before
            if len(self._catalogues) >= _MAX_CATALOGUES:
                self._catalogues.clear()
            self._catalogues[key] = made
        return self._catalogues[key]

    def _forget_patterns(self) -> None:
        """Forget patterns that no member has any more, once there may be as many of them as of others."""
        if len(self.patterns) > self._max_patterns:
            members = (member for group in self._groups.values() for member in group.members.values())
            self.patterns.keep({member.regex for member in members if member.regex})
            self._max_patterns = 2 * len(self.patterns) + 100

    def _settle(self, group: ConsumerGroup, now_ms: int) -> list[Written]:
        """Store what changed, and be there at the group's next deadline. Raises NotCoordinator."""
        due_ms, scheduled_ms = group.next_deadline_ms(), self._scheduled_ms.get(group.group_id)
        if due_ms is not None and (scheduled_ms is None or due_ms < scheduled_ms):
            self._scheduled_ms[group.group_id] = due_ms
            heapq.heappush(self._due, (due_ms, group.group_id))
        if not group.unsaved:
            return []
        records = [encode_entry(group, entry) for entry in group.unsaved]
        written = self._topic.append(self._topic.partition_of(group.group_id), records, now_ms)
        group.unsaved.clear()
        return [written]

    @property
    def next_deadline_ms(self) -> int | None:
        """When `tick` has something to do."""
        return self._due[0][0] if self._due else None

    def tick(self, now_ms: int) -> None:
        """Groups whose time has come."""
        while self._due and self._due[0][0] <= now_ms:
            _, group_id = heapq.heappop(self._due)
            self._scheduled_ms.pop(group_id, None)
            group = self._groups.get(group_id)
            if group is not None:
                group.tick(now_ms)
                try:
                    self._settle(group, now_ms)
                except NotCoordinator:
                    continue  # stays unsaved; goes with the next change

    def bury(self, group_id: str, now_ms: int) -> Written:
        """Forget a group without members. Raises NotCoordinator."""
        group = self._groups[group_id]
        entries = [*group.unsaved, *group_entries(group)]
        records = [encode_entry(group, entry, is_gone=True) for entry in dict.fromkeys(entries)]
        written = self._topic.append(self._topic.partition_of(group_id), records, now_ms)
        del self._groups[group_id]
        return written

    # The start

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Take a record of the topic into account. Raises PeerError."""
        group_id, entry = group_of(key)
        if group_id not in self._groups and value is None:
            return
        group = self._groups.get(group_id) or self._open(group_id)
        replay_entry(group, entry, value)
        is_gone = not (group.members or group.targets or group.epoch or group.assignment_epoch)
        if is_gone:
            del self._groups[group_id]

    def resume(self, now_ms: int) -> None:
        """After the last record: members' time begins."""
        for group in self._groups.values():
            group.resume(now_ms)
            self._settle(group, now_ms)
