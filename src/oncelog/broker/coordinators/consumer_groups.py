"""Groups of the consumer protocol: carries out what `rules.groups.consumer` decides, and keeps it.

Regular expressions (`broker.coordinators.patterns`) match whole names; internal topics match none.
Source: KIP-848; Kafka's GroupMetadataManager.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oncelog.broker.coordinators.consumer_group_log import (
    encode_record,
    group_record_keys,
    parse_key,
    replay_record,
)
from oncelog.broker.coordinators.internal_topic import StateTopic, Written
from oncelog.broker.coordinators.patterns import Pattern, TopicPatterns
from oncelog.broker.settings.dynamic_config import DynamicConfig
from oncelog.broker.topics.topics import Topics
from oncelog.config import ASSIGNOR_NAMES
from oncelog.errors import BrokerError, GroupIdNotFound, UnknownMemberId
from oncelog.limits import Limits
from oncelog.log.background import BackgroundQueue
from oncelog.rules.groups.consumer import ConsumerGroup, Heartbeat, HeartbeatResult, TopicInfo
from oncelog.rules.groups.deadlines import Deadlines
from oncelog.settings import Settings

RETRY_MS = 1000
"""How long after its records could not be stored a group's deadlines are looked at again."""
SUBSCRIPTION_RECORDS = 4
"""How many times message.max.bytes the different subscriptions of a group's members may take in memory."""


class ConsumerGroups:
    """Every such group of this node."""

    def __init__(
        self,
        topic: StateTopic,
        settings: Settings,
        topics: Topics,
        dynamic: DynamicConfig,
        background: BackgroundQueue,
        limits: Limits,
    ) -> None:
        self._topic, self._settings, self._topics = topic, settings, topics
        self._dynamic, self._limits = dynamic, limits
        self._groups: dict[str, ConsumerGroup] = {}
        self._deadlines = Deadlines()
        self.patterns = TopicPatterns(background, limits.pattern_step_cost)
        self._max_patterns = 100
        self._catalogues: dict[tuple[frozenset[str], frozenset[str]], Mapping[str, TopicInfo]] = {}
        self._catalogued = 0
        self._catalogues_of = (-1, -1)
        """Revisions of the topics and of the patterns that `_catalogues` were made of."""

    @property
    def assignors(self) -> list[str]:
        """Names of the assignors that are offered, the default first."""
        return [ASSIGNOR_NAMES[name] for name in self._settings["group.consumer.assignors"]]

    def get(self, group_id: str) -> ConsumerGroup | None:
        """None for a group that is not there. Raises NotCoordinator."""
        self._topic.check(group_id)
        return self._groups.get(group_id)

    def ids(self) -> set[str]:
        return set(self._groups)

    def heartbeat(
        self, group_id: str, beat: Heartbeat, now_ms: int, first: Sequence[tuple[bytes, bytes | None]] = ()
    ) -> tuple[HeartbeatResult, list[Written]]:
        """Return the answer, and what must be durable before it is given.

        `first`: records to store before the group's own, in the same batch. Raises GroupIdNotFound,
        NotCoordinator, InvalidRequest, MessageTooLarge, InvalidRegularExpression; and as
        ConsumerGroup.heartbeat.
        """
        group = self.get(group_id)
        if group is None and beat.epoch != 0:
            raise GroupIdNotFound(f"there is no consumer group {group_id!r}")
        draft = self._new(group_id) if group is None else group.draft()
        self.patterns.begin()
        self._forget_patterns()
        answer = draft.heartbeat(beat, self._catalogue, now_ms, self.patterns.is_pending, Pattern)
        return answer, self._replace(draft, now_ms, first)

    def leave(
        self, group_id: str, identities: Sequence[tuple[str, str | None]], now_ms: int
    ) -> tuple[list[int], list[Written]]:
        """Remove members by (member id, instance id); return their error codes, and what must be durable.

        Raises UnknownMemberId without such a group; NotCoordinator, InvalidRequest, MessageTooLarge.
        """
        group = self.get(group_id)
        if group is None:
            raise UnknownMemberId(f"there is no consumer group {group_id!r}")
        draft = group.draft()
        return draft.remove_members(identities), self._replace(draft, now_ms)

    def _new(self, group_id: str) -> ConsumerGroup:
        settings = self._settings
        return ConsumerGroup(
            group_id,
            session_timeout_ms=self._session_ms(group_id),
            max_size=settings["group.consumer.max.size"],
            max_subscription_bytes=SUBSCRIPTION_RECORDS * settings["message.max.bytes"],
            assignor=self.assignors[0],
            assignment_burst=self._limits.assignment_burst_cost,
        )

    def _session_ms(self, group_id: str) -> int:
        return self._dynamic.group_ms(group_id, "consumer.session.timeout.ms")

    def reconfigure(self, group_id: str) -> None:
        """Let a group have its settings as they are now; a member's time-out from its next heartbeat on."""
        group = self._groups.get(group_id)
        if group is not None:
            group.set_session_timeout(self._session_ms(group_id))

    def _catalogue(self, names: frozenset[str], regexes: frozenset[str]) -> Mapping[str, TopicInfo]:
        """Return the topics of these names or patterns; made once for every change of the topics."""
        topics, patterns = self._topics, self.patterns
        if self._catalogues_of != (topics.revision, patterns.revision):
            patterns.list_topics([topic.name for topic in topics.all() if not topic.is_internal])
            self._catalogues_of = (topics.revision, patterns.revision)
            self._catalogues.clear()
            self._catalogued = 0
        key = names, regexes
        if key not in self._catalogues:
            wanted = set(names).union(*map(patterns.find, sorted(regexes)))
            found = [topic for name in sorted(wanted) if (topic := topics.get(name)) is not None]
            made = {topic.name: TopicInfo(topic.topic_id, len(topic.partitions)) for topic in found}
            if self._catalogues_of != (topics.revision, patterns.revision):
                return made  # a pattern was resolved meanwhile, perhaps one that `find` was asked before
            self._catalogued += len(made) + 1
            if self._catalogued > self._limits.max_catalogued_topics:
                self._catalogues.clear()
                self._catalogued = len(made) + 1
            self._catalogues[key] = made
        return self._catalogues[key]

    def subscribed_topics(self, group_id: str) -> set[str] | None:
        """Return the topics that members read; None while what their patterns match is not known."""
        group = self._groups[group_id]
        regexes = {member.regex for member in group.members.values() if member.regex}
        subscribed = None if self.patterns.is_pending(regexes) else group.subscribed()
        return None if subscribed is None else set(subscribed)

    def _forget_patterns(self) -> None:
        """Forget patterns that no member has any more, once there may be as many of them as of others."""
        if len(self.patterns) > self._max_patterns:
            members = (member for group in self._groups.values() for member in group.members.values())
            self.patterns.keep({member.regex for member in members if member.regex})
            self._max_patterns = 2 * len(self.patterns) + 100

    def _replace(
        self, draft: ConsumerGroup, now_ms: int, first: Sequence[tuple[bytes, bytes | None]] = ()
    ) -> list[Written]:
        """Store what the draft changed, then let it take the group's place.

        Memory moves only after the log: a change that cannot be stored has not happened.
        Raises NotCoordinator; InvalidRequest, MessageTooLarge for what no record can hold.
        """
        written = []
        if draft.unsaved:
            records = [*first, *(encode_record(draft, entry) for entry in draft.unsaved)]
            written = [self._topic.append(self._topic.partition_of(draft.group_id), records, now_ms)]
            draft.unsaved.clear()
        self._groups[draft.group_id] = draft
        self._schedule(draft.group_id, draft.next_deadline_ms())
        return written

    def _schedule(self, group_id: str, due_ms: int | None) -> None:
        if due_ms is not None:
            self._deadlines.set_if_earlier(group_id, due_ms)

    @property
    def next_deadline_ms(self) -> int | None:
        """When `tick` has something to do."""
        return self._deadlines.next_ms

    def tick(self, now_ms: int) -> None:
        """Groups whose time has come."""
        for group_id in self._deadlines.take(now_ms):
            group = self._groups.get(group_id)
            if group is None:
                continue
            draft = group.draft()
            draft.tick(now_ms)
            try:
                self._replace(draft, now_ms)
            except BrokerError:
                # The group keeps its members for now. Other groups must not miss their turn because of it.
                self._schedule(group_id, now_ms + RETRY_MS)

    def bury(self, group_id: str, now_ms: int) -> Written:
        """Forget a group without members. Raises NotCoordinator."""
        group = self._groups[group_id]
        records = [encode_record(group, entry, is_gone=True) for entry in group_record_keys(group)]
        written = self._topic.append(self._topic.partition_of(group_id), records, now_ms)
        del self._groups[group_id]
        return written

    # The start

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Take a record of the topic into account. Raises PeerError."""
        group_id, entry = parse_key(key)
        if group_id not in self._groups and value is None:
            return
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = self._new(group_id)
            group.epoch = 0  # its record says more; without one the group is gone
        replay_record(group, entry, value)
        is_gone = not (group.members or group.targets or group.epoch or group.assignment_epoch)
        if is_gone:
            del self._groups[group_id]

    def forget_partition(self, index: int) -> None:
        """Forget the groups that are kept in a partition of the topic."""
        partition_of = self._topic.partition_of
        self._groups = {name: each for name, each in self._groups.items() if partition_of(name) != index}

    def resume(self, now_ms: int) -> None:
        """After the last record: members' time begins."""
        for group in self._groups.values():
            group.resume(now_ms)
            self._schedule(group.group_id, group.next_deadline_ms())
