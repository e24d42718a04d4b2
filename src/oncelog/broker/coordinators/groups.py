"""The group coordinator: classic groups, and access to consumer protocol groups and committed offsets.

`rules.groups.classic` makes the decisions; this module carries them out and stores groups in
`__consumer_offsets`.
Source: behaviours T6 and T7 (docs/behaviours.md); kafka GroupCoordinatorService, GroupMetadataManager.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from itertools import chain
from weakref import WeakKeyDictionary

from oncelog.broker.coordinators.consumer_group_log import KEY_VERSIONS as CONSUMER_KEY_VERSIONS
from oncelog.broker.coordinators.consumer_groups import RETRY_MS, ConsumerGroups
from oncelog.broker.coordinators.expiry import ExpiryRounds
from oncelog.broker.coordinators.group_log import decode_group, encode_group, group_key
from oncelog.broker.coordinators.internal_topic import (
    AppendHandle,
    InternalTopic,
    StoredBatch,
    when_durable,
    when_synced,
)
from oncelog.broker.coordinators.member_responses import MemberResponses
from oncelog.broker.coordinators.offsets import Offsets
from oncelog.broker.group_commit import FlushQueue
from oncelog.broker.settings.dynamic_config import DynamicConfig
from oncelog.broker.stepwise import RoundMeter, StepBudget, Work, name_cost
from oncelog.broker.topics.topics import Topics
from oncelog.errors import (
    BrokerError,
    GroupIdNotFound,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidGroupId,
    NonEmptyGroup,
    PeerError,
    StaleMemberEpoch,
    UnknownMemberId,
)
from oncelog.limits import Limits
from oncelog.log.background import BackgroundQueue, BackgroundTask
from oncelog.rules.groups.classic import MAX_UNUSED_IDS_AT_ONCE, ClassicGroup, GroupState
from oncelog.rules.groups.consumer import Heartbeat, HeartbeatResult
from oncelog.rules.groups.deadlines import MAX_GROUPS_AT_ONCE, Deadlines
from oncelog.settings import Settings
from oncelog.types import TopicPartition
from oncelog.wire.message import version_of
from oncelog.wire.stored import ConsumerProtocolSubscription, GroupMetadataKey

GROUP_KEY_VERSION = 2
CONSUMER_PROTOCOL_TYPE = "consumer"
FIRST_NOT_FOUND_COMMIT_VERSION = 9
METADATA_RECORDS = 4
"""Largest total size of the metadata of a classic group's members in memory, as a multiple of
message.max.bytes.

A group's record has the metadata of one protocol only. The limit is above 1, because a member that changes
its assignor sends metadata for both.
"""
MAX_UNUSED_IDS_BYTES, GROUP_BYTES = 32 << 20, 2048
"""Largest total size of the unused member ids of all classic groups in memory. A group with such ids counts
as GROUP_BYTES in addition: without members it takes 1.8 KB.
"""
MEMBER_RECORDS, BYTES_PER_RECORD = 8, 64
"""Cost of each member of a classic group that is stored, and the bytes of its record that cost as much as one
record, in records of `RoundMeter`. Every change stores all members: 8 ms for 1,000.
"""
SUBSCRIPTION_BYTES_PER_ELEMENT, SUBSCRIPTION_BYTES_PER_RECORD = 64, 4
"""Bytes of a subscription whose decoding costs one element of a step, and one record of `RoundMeter`.

The slowest subscriptions have a topic in every two bytes.
"""


class GroupCoordinator:
    """The coordinator of all groups of this broker."""

    def __init__(
        self,
        topic: InternalTopic,
        settings: Settings,
        *,
        topics: Topics,
        dynamic: DynamicConfig,
        round_meter: RoundMeter,
        flush_queue: FlushQueue,
        background: BackgroundQueue,
        limits: Limits,
        is_closing: Callable[[], bool],
    ) -> None:
        self.topic, self._settings, self._topics = topic, settings, topics
        self._flush_queue, self._limits, self._is_closing = flush_queue, limits, is_closing
        self._round_meter = round_meter
        self.offsets = Offsets(topic, settings, limits)
        self.consumers = ConsumerGroups(
            topic, settings, topics, dynamic, round_meter, background, limits, is_closing
        )
        self._groups: dict[str, ClassicGroup] = {}
        self._offsets_left: set[str] = set()
        """Deleted topics whose offsets could not be deleted from the log. The next start tries again."""
        self._deadlines = Deadlines()
        self._unused_id_bytes: OrderedDict[str, int] = OrderedDict()
        """Classic group -> size of its unused member ids and of the group itself, as `GROUP_BYTES` counts it.

        The group that changed last comes last. `_unused_bytes` is the sum.
        """
        self._unused_bytes = 0
        self.responses = MemberResponses(background, limits.step_member_responses)
        """The responses to requests of classic groups' members."""
        self._expiring = ExpiryRounds(background, limits.expire_step_entries)
        self._subscribed: WeakKeyDictionary[ClassicGroup, tuple[int, str, set[str] | None]] = (
            WeakKeyDictionary()
        )
        """The last result of decoding the subscriptions of a classic group: the revision of its members, its
        protocol and the topics. At most one group, and none that was removed.
        """

    # Groups

    def get(self, group_id: str) -> ClassicGroup | None:
        """Return a classic group; None if no such group exists.

        A group that only has committed offsets does not count. Raises NotCoordinator.
        """
        self.topic.check(group_id)
        return self._groups.get(group_id)

    def group_ids(self) -> Iterator[str]:
        """Return an iterator over the ids of all groups, including groups that only have offsets.

        The ids are those at the time of the call. Each call takes some ms for 100,000 groups, and so the
        iteration needs steps.
        """
        # The order must be deterministic, because groups expire in this order: a seed of the simulator must
        # give the same bytes in every process. See
        # test_groups_expire_in_the_order_in_which_they_were_created.
        return _distinct(chain(list(self.consumers.ids()), list(self._groups), self.offsets.groups()))

    def has(self, group_id: str) -> bool:
        """Return True if the group exists or has committed or pending offsets. Raises NotCoordinator."""
        is_group = self.get(group_id) is not None or self.consumers.get(group_id) is not None
        return is_group or self.offsets.has(group_id)

    def has_only_offsets(self, group_id: str) -> bool:
        """Return True if the group has offsets, but is a group of neither protocol. Raises NotCoordinator."""
        has_joined = self.get(group_id) is not None or self.consumers.get(group_id) is not None
        return not has_joined and self.offsets.has(group_id)

    def get_or_create(self, group_id: str, now_ms: int) -> ClassicGroup:
        """Return the classic group, creating it if necessary.

        An empty consumer protocol group with this id is deleted. Raises InvalidGroupId,
        InconsistentGroupProtocol (the consumer protocol group has members), NotCoordinator.
        """
        if not group_id:
            raise InvalidGroupId("a group id may not be empty")
        group = self.get(group_id)
        if group is None:
            consumers = self.consumers.get(group_id)
            if consumers is not None and consumers.members:
                raise InconsistentGroupProtocol(f"group {group_id!r} has members of the consumer protocol")
            if consumers is not None:
                self.consumers.write_tombstones(group_id, now_ms)
            group = self._groups[group_id] = self._new(group_id, now_ms)
        return group

    def _new(self, group_id: str, now_ms: int) -> ClassicGroup:
        settings = self._settings
        return ClassicGroup(
            group_id,
            now_ms,
            initial_delay_ms=settings["group.initial.rebalance.delay.ms"],
            max_size=settings["group.max.size"],
            max_metadata_bytes=METADATA_RECORDS * settings["message.max.bytes"],
        )

    def consumer_heartbeat(
        self, group_id: str, request: Heartbeat, now_ms: int
    ) -> tuple[HeartbeatResult, list[AppendHandle]]:
        """Handle a heartbeat of the consumer protocol. Return the result, and the appends to wait for.

        A member that joins replaces an empty classic group. Both changes are in one batch, so the classic
        group stays if the member is rejected. Raises GroupIdNotFound for a classic group with members, and
        the errors of ConsumerGroups.heartbeat.
        """
        classic = self.get(group_id) if request.epoch == 0 else None
        if classic is None:
            return self.consumers.heartbeat(group_id, request, now_ms)
        if classic.state is not GroupState.EMPTY:
            raise GroupIdNotFound(f"group {group_id!r} has members of the classic protocol")
        tombstone = group_key(group_id), None
        result, written = self.consumers.heartbeat(group_id, request, now_ms, [tombstone])
        self._remove(classic)
        return result, written

    def get_existing(self, group_id: str) -> ClassicGroup:
        """Return an existing classic group.

        Raises InvalidGroupId, UnknownMemberId (no group), NotCoordinator.
        """
        if not group_id:
            raise InvalidGroupId("a group id may not be empty")
        group = self.get(group_id)
        if group is None:
            raise UnknownMemberId(f"there is no group {group_id!r}")
        return group

    def publish_changes(self, group: ClassicGroup, now_ms: int) -> None:
        """Store a group that may have changed, and schedule its next deadline.

        Call this after every change.
        """
        try:
            self._publish_changes(group, now_ms)
            self._limit_unused_ids(group, now_ms)
        finally:
            self.responses.end_step()

    def _publish_changes(self, group: ClassicGroup, now_ms: int) -> None:
        if group.state is GroupState.DEAD:
            # Store nothing: the group was deleted while the record of an earlier version waited for its
            # flush.
            return
        if group.is_unused:
            # The group was created for a join that was rejected. Forget it, so that such groups do not
            # accumulate.
            if self._groups.get(group.group_id) is group:
                del self._groups[group.group_id]
                self._deadlines.discard(group.group_id)
            return
        if group.is_unsaved:
            self._save(group, now_ms)
        self._schedule(group, now_ms)

    def _limit_unused_ids(self, changed: ClassicGroup, now_ms: int) -> None:
        """Count the unused member ids of a group that may have changed. If those of all groups take too much
        memory, forget those of the groups that have not changed for longest, a few at once.

        Each group limits its own ids, but a client may ask any number of groups for ids, which they keep for
        up to group.max.session.timeout.ms. See test_the_unused_member_ids_of_all_groups_are_limited.
        """
        counted = self._unused_id_bytes
        self._count_unused_ids(changed)
        while self._unused_bytes > MAX_UNUSED_IDS_BYTES and len(counted) > 1:
            group_id = next(iter(counted))
            group = self._groups.get(group_id)
            if group is None:
                self._unused_bytes -= counted.pop(group_id)
                continue
            group.forget_unused_ids()
            group.tick(now_ms)
            self._publish_changes(group, now_ms)
            self._count_unused_ids(group)
            if group_id in counted:
                counted.move_to_end(group_id, last=False)

    def _count_unused_ids(self, group: ClassicGroup) -> None:
        counted = self._unused_id_bytes
        self._unused_bytes -= counted.pop(group.group_id, 0)
        if group.unused_id_bytes and self._groups.get(group.group_id) is group:
            counted[group.group_id] = group.unused_id_bytes + len(group.group_id) + GROUP_BYTES
            self._unused_bytes += counted[group.group_id]

    def _schedule(self, group: ClassicGroup, now_ms: int) -> None:
        due_ms = group.next_deadline_ms()
        # If the append or the flush of the group's record has failed, try again later.
        if group.is_unsaved:
            retry_ms = now_ms + RETRY_MS
            due_ms = retry_ms if due_ms is None else min(due_ms, retry_ms)
        if due_ms is not None:
            self._deadlines.set_if_earlier(group.group_id, due_ms)

    def _save(self, group: ClassicGroup, now_ms: int) -> None:
        # Clear the flag before the append: a rebalance that begins before the record is durable may set it
        # again.
        group.is_unsaved, version = False, group.version
        index = self.topic.partition_of(group.group_id)
        # Small requests can store a large group: a static member that restarts, for example. See
        # test_storing_a_large_group_costs_more_of_the_round.
        self._round_meter.add(MEMBER_RECORDS * len(group.members))
        try:
            key, value = encode_group(group, self._settings["message.max.bytes"])
            self._round_meter.add(len(value) // BYTES_PER_RECORD)
            written = [self.topic.append(index, [(key, value)], now_ms)]
        except BrokerError as error:
            group.complete_save(error, version, now_ms)
            return

        def on_durable(error: BrokerError | None) -> None:
            group.complete_save(error, version, now_ms)
            if error is not None:
                self._schedule(group, now_ms)
            elif group.is_unsaved:
                self.publish_changes(group, now_ms)

        when_durable(self._flush_queue, written, on_durable)

    @property
    def next_deadline_ms(self) -> int | None:
        """The next time in ms at which `tick` must run; None if no classic group has a deadline."""
        return self._deadlines.next_ms

    def tick(self, now_ms: int) -> None:
        """Handle the deadlines that have passed of at most MAX_GROUPS_AT_ONCE classic groups, fewer if the
        groups forget many unused member ids or have long ids.

        The others stay due, so the server soon calls this again.
        """
        ids_left = MAX_UNUSED_IDS_AT_ONCE
        while ids_left > 0 and (due := self._deadlines.take(now_ms, 1)):
            ids_left -= MAX_UNUSED_IDS_AT_ONCE // MAX_GROUPS_AT_ONCE * name_cost(due[0])
            group = self._groups.get(due[0])
            if group is not None:
                ids_left -= group.tick(now_ms)
                # The call does not raise an error: if the group cannot be stored, the waiting requests get
                # the error.
                self.publish_changes(group, now_ms)

    def delete(self, group_id: str, budget: StepBudget, now_ms: int) -> Work[AppendHandle | None]:
        """Delete a group and its offsets in steps. Return the last append.

        Until the last step, other requests for the group are rejected. Raises GroupIdNotFound, NonEmptyGroup,
        NotCoordinator.
        """
        group = self.get(group_id)
        consumers = self.consumers.get(group_id)
        if not self.has(group_id):
            raise GroupIdNotFound(f"there is no group {group_id!r}")
        if (group and group.state is not GroupState.EMPTY) or (consumers and consumers.members):
            raise NonEmptyGroup(f"group {group_id!r} has members")
        with self.topic.reserved(group_id):
            written = yield from self.delete_offsets(
                group_id, self.offsets.partitions_of(group_id), budget, now_ms
            )
            # The group may be gone: if it had only member ids that were given to clients, the last of them
            # may have expired between two steps.
            group = self._groups.get(group_id)
            if group is not None:
                written = self._write_tombstone(group, now_ms)
            if consumers is not None:
                written = self.consumers.write_tombstones(group_id, now_ms)
        return written

    def _slices(self, group_id: str, partitions: list[TopicPartition]) -> Iterator[list[TopicPartition]]:
        """Split the partitions into slices. One step deletes the offsets of one slice. Each tombstone has the
        group id, which may have 32,767 bytes. See test_the_length_of_ids_costs_more_of_a_step.
        """
        size = max(self._limits.max_tombstones_per_batch // name_cost(group_id), 1)
        return (partitions[first : first + size] for first in range(0, len(partitions), size))

    def delete_offsets(
        self, group_id: str, partitions: Collection[TopicPartition], budget: StepBudget, now_ms: int
    ) -> Work[AppendHandle | None]:
        """Delete offsets of a group in steps. The caller has reserved the group.

        Return the last append; None if there were no offsets. Raises NotCoordinator.
        """
        written = None
        for part in self._slices(group_id, list(partitions)):
            written = self.offsets.delete(group_id, part, now_ms) or written
            if budget.spend(len(part) * name_cost(group_id)):
                yield None
        return written

    def _write_tombstone(self, group: ClassicGroup, now_ms: int) -> AppendHandle:
        index = self.topic.partition_of(group.group_id)
        written = self.topic.append(index, [(group_key(group.group_id), None)], now_ms)
        self._remove(group)
        return written

    def _remove(self, group: ClassicGroup) -> None:
        group.state = GroupState.DEAD
        del self._groups[group.group_id]
        self._count_unused_ids(group)

    # Offsets

    def offsets_partition(self, group_id: str, now_ms: int) -> TopicPartition:
        """Return the partition of `__consumer_offsets` for a group, creating the topic if necessary.

        Raises NotCoordinator.
        """
        self.topic.ensure(now_ms)
        self.topic.check(group_id)
        return TopicPartition(self.topic.name, self.topic.partition_of(group_id))

    def check_commit(
        self,
        group_id: str,
        generation_id: int,
        member_id: str,
        group_instance_id: str | None,
        *,
        is_transactional: bool = False,
        version: int = 0,
    ) -> None:
        """Raise an error if an offset commit is not allowed: behaviour T7 (docs/behaviours.md).

        Raises NotCoordinator, IllegalGeneration, UnknownMemberId, GroupIdNotFound, StaleMemberEpoch, or the
        error of ClassicGroup.commit_error.
        """
        self.topic.check(group_id)
        consumers = self.consumers.get(group_id)
        if consumers is not None:
            try:
                consumers.check_commit(
                    member_id,
                    group_instance_id,
                    generation_id,
                    is_transactional=is_transactional,
                    version=version,
                )
            except StaleMemberEpoch as stale:
                raise (IllegalGeneration(str(stale)) if is_transactional else stale) from stale
            return
        group = self._groups.get(group_id)
        if group is None:
            if generation_id < 0:
                return
            text = f"there is no group {group_id!r}"
            if self.offsets.of(group_id) or self.offsets.pending_of(group_id):
                raise UnknownMemberId(f"group {group_id!r} has no members")
            knows_not_found = not is_transactional and version >= FIRST_NOT_FOUND_COMMIT_VERSION
            raise GroupIdNotFound(text) if knows_not_found else IllegalGeneration(text)
        error = group.commit_error(
            member_id, group_instance_id, generation_id, is_transactional=is_transactional
        )
        if error is not None:
            raise error(f"group {group_id!r} is at generation {group.generation_id}: {group.state.value}")

    def note_commit(self, group_id: str, member_id: str, now_ms: int) -> None:
        """Renew the session of a classic group's member whose commit was accepted."""
        group = self._groups.get(group_id)
        if group is not None:
            group.note_commit(member_id, now_ms)

    def has_non_consumer_members(self, group_id: str) -> bool:
        """Return True if the members' protocol type is not "consumer", as for Kafka Connect's workers."""
        group = self._groups.get(group_id)
        return group is not None and bool(group.members) and group.protocol_type != CONSUMER_PROTOCOL_TYPE

    def subscribed_topics(self, group_id: str, budget: StepBudget) -> Work[set[str] | None]:
        """Return the topics that the group's members subscribe to; None if they are unknown.

        They are unknown if the members have another protocol type or an unreadable subscription, while a
        pattern is not resolved yet, or if the members change between the steps.
        """
        if group_id in self.consumers.ids():
            return self.consumers.subscribed_topics(group_id)
        group = self._groups.get(group_id)
        if group is None or not group.members:
            return set()
        if group.protocol_type != CONSUMER_PROTOCOL_TYPE or group.protocol_name is None:
            return None
        # Decoding all subscriptions may take 0.2 s, and OffsetDelete and each step of expiry need them. See
        # test_subscriptions_are_decoded_once_until_the_members_change, and
        # test_subscriptions_of_large_groups_are_decoded_in_steps.
        revision = group.members.revision, group.protocol_name
        known = self._subscribed.get(group)
        if known is None or known[:2] != revision:
            topics = yield from self._decode_subscriptions(group, budget)
            if self._groups.get(group_id) is not group or revision != (
                group.members.revision,
                group.protocol_name,
            ):
                return None
            known = *revision, topics
            self._subscribed.clear()
            self._subscribed[group] = known
        return known[2]

    def _decode_subscriptions(self, group: ClassicGroup, budget: StepBudget) -> Work[set[str] | None]:
        """Return the topics to which the members of a classic group subscribe; None if one of the
        subscriptions cannot be read.
        """
        topics: set[str] = set()
        protocol_name = group.protocol_name
        for member in list(group.members.values()):
            subscription = member.metadata(protocol_name)
            self._round_meter.add(len(subscription) // SUBSCRIPTION_BYTES_PER_RECORD)
            try:
                topics.update(ConsumerProtocolSubscription.from_bytes(subscription).topics)
            except PeerError:
                return None
            if budget.spend(1 + len(subscription) // SUBSCRIPTION_BYTES_PER_ELEMENT):
                yield None
        return topics

    def on_marker(self, index: int, producer_id: int, is_commit: bool, now_ms: int) -> int:
        """Apply or drop the pending offsets of a transaction that ended in a partition of
        `__consumer_offsets`. Return their number.
        """
        return self.offsets.on_marker(index, producer_id, is_commit)

    def delete_topic_offsets(self, deleted: Iterable[str], now_ms: int) -> Generator[None, None, None]:
        """Delete the offsets of deleted topics in bounded steps.

        Until the last step no topic with these names can be created, because consumers of the new topic would
        start at the old offsets. If some offsets cannot be deleted, or the broker stops, the next start
        deletes them.
        """
        topics = self._topics
        deletions = {name: deletion for name in deleted if (deletion := topics.offsets_to_delete.get(name))}
        before = {
            name: deletion.before for name, deletion in deletions.items() if deletion.before is not None
        }
        if not before:
            return
        with topics.hold_names(before):
            steps = self.offsets.delete_topics(before, now_ms)
            try:
                while not self._is_closing():
                    yield next(steps)
                return
            except StopIteration as done:
                self._offsets_left |= done.value
        done_names = {name: deletions[name] for name in before if name not in self._offsets_left}
        # Sync up to the newest record, not only this call's tombstones. An earlier run of the broker may have
        # written tombstones for these topics, which may still be in the page cache only.
        indexes = {index for name in done_names for index in before[name]}
        written = [self.topic.last_append(index) for index in sorted(indexes)]
        when_synced(self._flush_queue, written, lambda: topics.forget_deletions(done_names))

    def resume_deletions(self, now_ms: int) -> None:
        """Finish deletions of topics' offsets that a stop or crash interrupted. Raises StorageError."""
        for name, deletion in list(self._topics.offsets_to_delete.items()):
            before = self.topic.log_end_offsets() if deletion.before is None else deletion.before
            # A power loss may have truncated the log. Records that are appended from now on do not belong to
            # the deleted topic, so `before` must not be above the log end.
            ends = {index: self.topic.last_append(index).last_offset + 1 for index in before}
            self._topics.bound_deletion(name, {index: min(before[index], ends[index]) for index in ends})
        for _ in self.delete_topic_offsets(list(self._topics.offsets_to_delete), now_ms):
            pass

    def expire(self, now_ms: int) -> None:
        """Begin a background round that deletes expired offsets, and empty groups without offsets."""
        budget = StepBudget(self._limits.request_step_elements)
        self._expiring.begin(self.group_ids(), lambda group_id: self._expire_group(group_id, budget, now_ms))

    def _expire_group(self, group_id: str, budget: StepBudget, now_ms: int) -> BackgroundTask:
        try:
            for partitions in self._slices(group_id, [*self.offsets.of(group_id)]):
                yield from self._expire_offsets(group_id, partitions, budget, now_ms)
                if budget.spend(len(partitions) * name_cost(group_id)):
                    yield None
            if not self.offsets.has(group_id):
                self._expire_empty_group(group_id, now_ms)
        except BrokerError:
            # The append failed, or another request is deleting the group. The next round tries again.
            return

    def _expire_offsets(
        self, group_id: str, partitions: list[TopicPartition], budget: StepBudget, now_ms: int
    ) -> Work[None]:
        """Delete expired offsets of a group. Only offsets for these partitions are examined.

        Raises NotCoordinator.
        """
        if self._is_rebalancing(group_id):
            # Until the rebalance is complete, the subscriptions are unknown, so nothing may expire.
            return
        subscribed = yield from self.subscribed_topics(group_id, budget)
        if subscribed is None or self._is_rebalancing(group_id):
            # The members may subscribe to any of the topics, so nothing may expire.
            return
        group = self.get(group_id)
        is_empty = group is not None and group.state is GroupState.EMPTY
        since_ms = group.state_since_ms if group is not None and is_empty and group.protocol_type else None
        self.offsets.expire(group_id, partitions, subscribed, since_ms, now_ms)

    def _is_rebalancing(self, group_id: str) -> bool:
        """Return True during a rebalance of a classic group. Raises NotCoordinator."""
        group = self.get(group_id)
        return group is not None and group.state not in (GroupState.EMPTY, GroupState.STABLE)

    def _expire_empty_group(self, group_id: str, now_ms: int) -> None:
        """Delete a group without offsets if it has no members and, for a classic group, no deadline.

        A classic group with a deadline stays, because a client that was given a member id may still join.
        Raises NotCoordinator.
        """
        group, consumers = self.get(group_id), self.consumers.get(group_id)
        if consumers is not None and not consumers.members:
            self.consumers.write_tombstones(group_id, now_ms)
        if group is not None and group.state is GroupState.EMPTY and group.next_deadline_ms() is None:
            self._write_tombstone(group, now_ms)

    def close(self) -> None:
        """Stop the current round of expiry."""
        self._expiring.close()

    # Replay at the start of the broker

    def load(self, now_ms: int) -> None:
        """Replay groups and offsets at the start. Unreadable partitions are in `topic.damaged` afterwards."""

        def read(index: int, batches: Iterator[StoredBatch]) -> None:
            for batch in batches:
                self.offsets.replay(index, batch)
                self._replay(batch, now_ms)

        self.topic.load(read, self._forget_partition)
        for group in list(self._groups.values()):
            self.publish_changes(group, now_ms)
        self.consumers.resume(now_ms)

    def _forget_partition(self, index: int) -> None:
        partition_of = self.topic.partition_of
        self._groups = {
            group_id: group for group_id, group in self._groups.items() if partition_of(group_id) != index
        }
        self.consumers.forget_partition(index)
        self.offsets.forget_partition(index)

    def _replay(self, batch: StoredBatch, now_ms: int) -> None:
        for record in batch.records:
            key = record.key or b""
            if version_of(key) in CONSUMER_KEY_VERSIONS:
                self.consumers.replay(key, record.value)
            if version_of(key) != GROUP_KEY_VERSION:
                continue
            group_id = GroupMetadataKey.from_bytes(key).group
            self._groups.pop(group_id, None)
            if record.value is not None:
                self._groups[group_id] = group = self._new(group_id, now_ms)
                decode_group(group, record.value, now_ms)


def _distinct(texts: Iterable[str]) -> Iterator[str]:
    """Yield each text once."""
    seen: set[str] = set()
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text
