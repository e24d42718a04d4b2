"""The coordinator of consumer protocol groups, which carries out the decisions of `rules.groups.consumer`.

Regular expressions of subscriptions (`broker.coordinators.patterns`) match whole topic names, and never match
internal topics.
Source: KIP-848; kafka GroupMetadataManager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from weakref import ref

from oncelog.broker.coordinators.consumer_group_log import (
    encode_record,
    group_record_keys,
    parse_key,
    replay_record,
)
from oncelog.broker.coordinators.internal_topic import AppendHandle, InternalTopic
from oncelog.broker.coordinators.patterns import Pattern, TopicPatterns
from oncelog.broker.settings.dynamic_config import DynamicConfig
from oncelog.broker.stepwise import RoundMeter, name_cost
from oncelog.broker.topics.topic_names import MAX_LENGTH
from oncelog.broker.topics.topics import Topics
from oncelog.config import ASSIGNOR_NAMES
from oncelog.errors import BrokerError, GroupIdNotFound, UnknownMemberId
from oncelog.limits import Limits
from oncelog.log.background import BackgroundQueue, BackgroundTask, Kind
from oncelog.rules.groups.consumer import (
    ConsumerGroup,
    Heartbeat,
    HeartbeatResult,
    TopicIdPartition,
    TopicInfo,
    character_count,
)
from oncelog.rules.groups.deadlines import MAX_GROUPS_AT_ONCE, Deadlines
from oncelog.settings import Settings

RETRY_MS = 1000
"""Pause in ms before a group's deadlines are handled again, after its records could not be stored."""
SUBSCRIPTION_RECORDS = 4
"""Largest total size of a group's distinct subscriptions in memory, as a multiple of message.max.bytes."""
ASSIGNMENT_RECORDS, PATTERN_STEPS_PER_RECORD = 16, 256
"""Cost of each member and partition of a target that a heartbeat computes, and the steps of matching patterns
that cost as much as one record, in records of `RoundMeter`. A target of 1,000 partitions takes 10 ms.
"""
RESOLVED_RECORDS, NAMES_PER_RECORD = 4, 4
"""Cost of each existing topic that a look-up finds, and the number of names that cost one record, in records
of `RoundMeter`. To find 10,000 topics, or to join 90,000 names of several members, takes 10 ms. See
test_look_ups_of_many_names_cost_more_of_the_round.
"""
MEMBERS_PER_RECORD = 4
"""Number of members whose group costs one record of `RoundMeter` for each change.

A change copies the group, and looks for partitions that other members hold: 2 ms for 5,000 members.
"""
_Topics = Mapping[str, TopicInfo]


class ConsumerGroups:
    """All consumer protocol groups of this broker."""

    def __init__(
        self,
        topic: InternalTopic,
        settings: Settings,
        topics: Topics,
        dynamic: DynamicConfig,
        round_meter: RoundMeter,
        background: BackgroundQueue,
        limits: Limits,
        is_closing: Callable[[], bool],
    ) -> None:
        self._topic, self._settings, self._topics = topic, settings, topics
        self._dynamic, self._limits, self._round_meter = dynamic, limits, round_meter
        self._background, self._is_closing = background, is_closing
        self._groups: dict[str, ConsumerGroup] = {}
        self._deadlines = Deadlines()
        self._assigning: set[str] = set()
        """The ids of the groups whose target is being computed in the background."""
        self.patterns = TopicPatterns(background, limits.pattern_step_cost)
        self._max_patterns = 100
        self._resolved: dict[tuple[frozenset[str], frozenset[str]], _Topics] = {}
        self._resolved_by_id: dict[tuple[int, frozenset[str]], tuple[ref[frozenset[str]], _Topics]] = {}
        """The same results by the identity of the set of names, so that it is not compared with an equal one.

        A set is referred to weakly: its id may belong to another set later.
        """
        self._resolved_count = 0
        self._resolved_at = (-1, -1)
        """The revisions of the topics and of the patterns when `_resolved` was built. If either has changed
        since, `_resolved` is stale.
        """

    @property
    def assignors(self) -> list[str]:
        """Names of the enabled assignors, the default first."""
        return [ASSIGNOR_NAMES[name] for name in self._settings["group.consumer.assignors"]]

    def get(self, group_id: str) -> ConsumerGroup | None:
        """Return a group; None if it does not exist. Raises NotCoordinator."""
        self._topic.check(group_id)
        return self._groups.get(group_id)

    def ids(self) -> Collection[str]:
        """Return the ids of all groups."""
        return self._groups.keys()

    def heartbeat(
        self, group_id: str, request: Heartbeat, now_ms: int, first: Sequence[tuple[bytes, bytes | None]] = ()
    ) -> tuple[HeartbeatResult, list[AppendHandle]]:
        """Handle a heartbeat. Return the result, and the appends that the response must wait for.

        The records in `first` are stored in the same batch as the group's own records, before them. Raises
        GroupIdNotFound, NotCoordinator, InvalidRequest, MessageTooLarge, InvalidRegularExpression, and the
        errors of ConsumerGroup.heartbeat.
        """
        group = self.get(group_id)
        if group is None and request.epoch != 0:
            raise GroupIdNotFound(f"there is no consumer group {group_id!r}")
        self.patterns.begin()
        self._forget_patterns()
        renewed = None if group is None else group.renew(request, self._resolve_topics, now_ms)
        if renewed is not None:
            result, deadline_ms = renewed
            self._schedule(group_id, deadline_ms)
            return result, []
        draft = self._new(group_id) if group is None else group.draft()
        try:
            result = draft.heartbeat(
                request, self._resolve_topics, now_ms, self.patterns.is_unresolved, Pattern
            )
        finally:
            # See test_heartbeats_that_compute_targets_cost_more_of_the_round.
            pattern_records = self.patterns.steps_used // PATTERN_STEPS_PER_RECORD
            self._round_meter.add(ASSIGNMENT_RECORDS * draft.computed_cost + pattern_records)
            self._round_meter.add(len(draft.members) // MEMBERS_PER_RECORD)
        return result, self._replace(draft, now_ms, first)

    def leave(
        self, group_id: str, identities: Sequence[tuple[str, str | None]], now_ms: int
    ) -> tuple[list[int], list[AppendHandle]]:
        """Remove members. `identities` has a pair (member id, instance id) for each member.

        Return an error code for each member, and the appends that the response must wait for. Raises
        UnknownMemberId if the group does not exist, NotCoordinator, InvalidRequest, MessageTooLarge.
        """
        group = self.get(group_id)
        if group is None:
            raise UnknownMemberId(f"there is no consumer group {group_id!r}")
        draft = group.draft()
        self._round_meter.add(len(draft.members) // MEMBERS_PER_RECORD)
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
            max_immediate_cost=self._limits.max_immediate_assignment_cost,
        )

    def _session_ms(self, group_id: str) -> int:
        return self._dynamic.group_ms(group_id, "consumer.session.timeout.ms")

    def reconfigure(self, group_id: str) -> None:
        """Apply the group's current settings.

        A new session timeout applies to each member from its next heartbeat on.
        """
        group = self._groups.get(group_id)
        if group is not None:
            group.set_session_timeout(self._session_ms(group_id))

    def _resolve_topics(self, names: frozenset[str], regexes: frozenset[str]) -> _Topics:
        """Return the topics with these names or matching these patterns.

        Results are cached until a topic changes, or more topics that match a pattern are found.
        """
        topics, patterns = self._topics, self.patterns
        if self._resolved_at != (topics.revision, patterns.revision):
            patterns.list_topics([topic.name for topic in topics.all() if not topic.is_internal])
            self._resolved_at = (topics.revision, patterns.revision)
            self._forget_resolved()
        by_id = self._resolved_by_id.get((id(names), regexes))
        if by_id is not None and by_id[0]() is names:
            return by_id[1]
        # A result for an equal set costs this, too: the names are joined, hashed and compared.
        self._round_meter.add(len(names) // NAMES_PER_RECORD)
        resolved = self._resolved.get((names, regexes))
        if resolved is None:
            resolved = self._look_up(names, regexes)
            self._round_meter.add(RESOLVED_RECORDS * len(resolved))
            if self._resolved_at != (topics.revision, patterns.revision):
                # `find` has raised the revision, because results that are cached for other members may lack
                # names. The next call therefore clears the cache, so this result is not cached.
                return resolved
            # The key keeps the names in memory, also those without a topic. See
            # test_the_cached_subscriptions_of_former_members_are_bounded.
            self._count_resolved(max(len(names), len(resolved)), character_count(names), regexes)
            self._resolved[names, regexes] = resolved
        else:
            self._count_resolved(0, 0, regexes)
        self._resolved_by_id[id(names), regexes] = ref(names), resolved
        return resolved

    def _look_up(self, names: frozenset[str], regexes: frozenset[str]) -> _Topics:
        topics = self._topics
        existing = topics.existing(names)
        existing += [name for regex in sorted(regexes) for name in self.patterns.find(regex)]
        found = [topic for name in sorted(set(existing)) if (topic := topics.get(name)) is not None]
        return {topic.name: TopicInfo(topic.topic_id, len(topic.partitions)) for topic in found}

    def _count_resolved(self, count: int, name_characters: int, regexes: frozenset[str]) -> None:
        """Count a new result, and forget all others if they are too many together.

        A client may send names of 30,000 characters, so as many characters as the name of a topic may have
        count as one more name. See test_long_names_of_former_subscriptions_are_bounded.
        """
        cost = 1 + count + (name_characters + sum(map(len, regexes))) // MAX_LENGTH
        if self._resolved_count + cost > self._limits.max_catalogued_topics:
            self._forget_resolved()
        self._resolved_count += cost

    def _forget_resolved(self) -> None:
        self._resolved.clear()
        self._resolved_by_id.clear()
        self._resolved_count = 0

    def subscribed_topics(self, group_id: str) -> set[str] | None:
        """Return the topics that members subscribe to; None while one of their patterns is not resolved."""
        group = self._groups[group_id]
        regexes = {member.regex for member in group.members.values() if member.regex}
        subscribed = None if self.patterns.is_unresolved(regexes) else group.subscribed()
        return None if subscribed is None else set(subscribed)

    def _forget_patterns(self) -> None:
        """If there are more than `_max_patterns` patterns, forget those that no member uses."""
        if len(self.patterns) > self._max_patterns:
            members = (member for group in self._groups.values() for member in group.members.values())
            self.patterns.keep({member.regex for member in members if member.regex})
            self._max_patterns = 2 * len(self.patterns) + 100

    def _replace(
        self, draft: ConsumerGroup, now_ms: int, first: Sequence[tuple[bytes, bytes | None]] = ()
    ) -> list[AppendHandle]:
        """Store the draft's changes, then replace the group by the draft. Return the appends.

        If the changes cannot be stored, the group in memory does not change. Raises NotCoordinator, or
        InvalidRequest or MessageTooLarge if no record can hold the change.
        """
        written = []
        if draft.unsaved:
            records = [*first, *(encode_record(draft, record_key) for record_key in draft.unsaved)]
            written = [self._topic.append(self._topic.partition_of(draft.group_id), records, now_ms)]
            draft.unsaved.clear()
        self._groups[draft.group_id] = draft
        self._schedule(draft.group_id, draft.next_deadline_ms())
        if draft.is_assigning and draft.group_id not in self._assigning:
            self._assigning.add(draft.group_id)
            self._background.add(self._assign(draft.group_id, now_ms), Kind.ASSIGNMENT)
        return written

    def _assign(self, group_id: str, now_ms: int) -> BackgroundTask:
        """Compute a group's target in another thread, and store it unless the group has changed meanwhile.

        If the group has changed, the next heartbeat starts another computation. If the target cannot be
        stored, or no thread can be started, the next heartbeat computes the target itself. So its client gets
        the target or the error. See
        test_a_large_assignment_for_which_no_thread_can_be_started_is_computed_by_a_heartbeat.
        """
        targets: dict[str, frozenset[TopicIdPartition]] = {}
        try:
            group = self._groups.get(group_id)
            if group is None:
                return
            plan = group.plan_targets(self._resolve_topics)
            yield lambda: targets.update(plan.compute())
            group = self._groups.get(group_id)
            if group is not None and group.is_current(plan) and not self._is_closing():
                draft = group.draft()
                draft.is_assigning = False
                draft.set_targets(plan.epoch, targets)
                self._replace(draft, now_ms)
        except Exception as error:
            if group_id in self._groups:
                self._groups[group_id].must_assign_at_once = True
            if not isinstance(error, BrokerError):
                raise
        finally:
            self._assigning.discard(group_id)
            if group_id in self._groups:
                self._groups[group_id].is_assigning = False

    def _schedule(self, group_id: str, due_ms: int | None) -> None:
        if due_ms is not None:
            self._deadlines.set_if_earlier(group_id, due_ms)

    @property
    def next_deadline_ms(self) -> int | None:
        """The next time in ms at which `tick` must run; None if no group has a deadline."""
        return self._deadlines.next_ms

    def tick(self, now_ms: int) -> None:
        """Handle the deadlines that have passed of at most MAX_GROUPS_AT_ONCE groups, fewer if they have long
        ids.

        The others stay due, so the server soon calls this again.
        """
        cost_left = MAX_GROUPS_AT_ONCE
        while cost_left > 0 and (due := self._deadlines.take(now_ms, 1)):
            # See test_the_length_of_ids_costs_more_of_a_step.
            cost_left -= name_cost(due[0])
            group = self._groups.get(due[0])
            if group is None:
                continue
            draft = group.draft()
            draft.tick(now_ms)
            try:
                self._replace(draft, now_ms)
            except BrokerError:
                # This group keeps its members until the retry. Its failure must not affect other groups.
                self._schedule(due[0], now_ms + RETRY_MS)

    def write_tombstones(self, group_id: str, now_ms: int) -> AppendHandle:
        """Delete a group without members by appending a tombstone for each of its records.

        Raises NotCoordinator.
        """
        group = self._groups[group_id]
        records = [encode_record(group, record_key, is_gone=True) for record_key in group_record_keys(group)]
        written = self._topic.append(self._topic.partition_of(group_id), records, now_ms)
        del self._groups[group_id]
        return written

    # Replay at the start of the broker

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply a record of `__consumer_offsets` at the start. Raises PeerError."""
        group_id, record_key = parse_key(key)
        if group_id not in self._groups and value is None:
            return
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = self._new(group_id)
            # 0 means that no epoch record has been replayed. A group without any record is deleted below.
            group.epoch = 0
        replay_record(group, record_key, value)
        is_gone = not (group.members or group.targets or group.epoch or group.assignment_epoch)
        if is_gone:
            del self._groups[group_id]

    def forget_partition(self, index: int) -> None:
        """Forget the groups of a damaged partition of `__consumer_offsets`."""
        partition_of = self._topic.partition_of
        self._groups = {
            group_id: group for group_id, group in self._groups.items() if partition_of(group_id) != index
        }

    def resume(self, now_ms: int) -> None:
        """Start the timeouts of all members after the replay."""
        for group in self._groups.values():
            group.resume(now_ms)
            self._schedule(group.group_id, group.next_deadline_ms())
