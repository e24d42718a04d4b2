"""A group of the consumer protocol (KIP-848): its members, epochs, target assignment and reconciliation.

    Empty         the group has no members
    Assigning     the group changed after the target assignment was computed
    Reconciling   members are moving to the target assignment, each at its own pace
    Stable        all members have reached the target

The group epoch rises when a member joins, leaves, times out or changes its subscription, and when the topics
that members subscribe to change. The next heartbeat of any member computes a target assignment, or target,
for the new epoch. If a large group keeps changing, not every epoch gets a target (KIP-1263).

A new epoch with its target (`_update_targets`) takes the place of a rebalance in the classic protocol.

A member gets a partition of its target only when the partition is not assigned to another member, and no
other member still has to revoke it.

The coordinator must write the records in `unsaved`. Source: KIP-848; kafka GroupMetadataManager,
ConsumerGroup, CurrentAssignmentBuilder.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import NamedTuple

from oncelog.errors import (
    BrokerError,
    FencedInstanceId,
    FencedMemberEpoch,
    GroupMaxSizeReached,
    StaleMemberEpoch,
    UnknownMemberId,
    UnreleasedInstanceId,
    UnsupportedVersion,
)
from oncelog.limits import DEFAULT_LIMITS
from oncelog.rules.groups.assignors import GroupAssignment, Subscriber, assign_range, assign_sticky
from oncelog.types import TopicPartition

TopicIdPartition = tuple[bytes, int]
"""A topic id and a partition index."""

NO_PARTITIONS: frozenset[TopicIdPartition] = frozenset()
LEAVE_EPOCH, STATIC_LEAVE_EPOCH = -1, -2
NO_REBALANCE_TIMEOUT = -1
SERVER_ASSIGNORS: dict[str, Callable[[Sequence[Subscriber], Mapping[str, int]], GroupAssignment]] = {
    "uniform": assign_sticky,
    "range": assign_range,
}
FIRST_EPOCH_COMMIT_VERSION = 9
FIRST_EPOCH = 1
"""Epoch of a new group. The first member that subscribes to topics raises it."""
ASSIGNMENT_COST_PER_MS = 20
"""The cost that a group may spend per ms on computing target assignments. The cost of a target is its number
of members plus partitions.

At this rate, computing targets takes a fifth of the time of the broker's thread. Kafka limits the targets in
another way: to one a second. Source: KIP-1263.
"""
RECORDS_PER_MEMBER = 3
"""Number of records of a member. The key of each has the id of the group, which may have 32,767 bytes."""


class TopicInfo(NamedTuple):
    """The id and partition count of a topic, as input for an assignment."""

    topic_id: bytes
    partition_count: int


TopicResolver = Callable[[frozenset[str], frozenset[str]], Mapping[str, TopicInfo]]
"""(topic names, regular expressions) -> the existing topics with these names, and those that match an
expression.

An expression must match the whole topic name.
"""

IsUnresolved = Callable[[frozenset[str]], bool]
"""(regular expressions) -> True as long as the topics that match them have not been looked up completely."""


class MemberState(IntEnum):
    """The reconciliation state of a member, with the numbers that `__consumer_offsets` stores.

    STABLE: the member has the target of its epoch. UNREVOKED: the member must revoke partitions and has not
    confirmed it. UNRELEASED: other members still have partitions of the member's target.
    """

    STABLE = 0
    UNREVOKED = 1
    UNRELEASED = 2


@dataclass(frozen=True, slots=True)
class ConsumerMember:
    """A member of a consumer protocol group.

    Only a static member has an `instance_id`. `regex` is the regular expression of its subscription, or None.
    `assigned` are its partitions, without those in `revoking`, which it must revoke.
    """

    member_id: str
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: frozenset[str] = frozenset()
    regex: str | None = None
    rebalance_timeout_ms: int = NO_REBALANCE_TIMEOUT
    server_assignor: str | None = None
    epoch: int = 0
    previous_epoch: int = -1
    state: MemberState = MemberState.STABLE
    assigned: frozenset[TopicIdPartition] = NO_PARTITIONS
    revoking: frozenset[TopicIdPartition] = NO_PARTITIONS

    @property
    def held(self) -> frozenset[TopicIdPartition]:
        """Partitions that the member still owns, so that they cannot be assigned to another member yet."""
        return self.assigned | self.revoking

    def is_reconciled_to(self, assignment_epoch: int) -> bool:
        """Return True if the member has all partitions of the target of this epoch, and no others."""
        return self.state is MemberState.STABLE and self.epoch == assignment_epoch


def reconcile(
    member: ConsumerMember,
    target: Set[TopicIdPartition],
    assignment_epoch: int,
    held_by_others: Set[TopicIdPartition],
    owned: Set[TopicIdPartition] | None,
    subscribed_ids: Set[bytes] | None = None,
) -> ConsumerMember:
    """Return the member after the next step towards `target`, its part of the target assignment of epoch
    `assignment_epoch`.

    `held_by_others` are the partitions of the target that other members still have. `owned` are the
    partitions that the member reports; None if its heartbeat does not report them. `subscribed_ids` are the
    ids of the topics that it subscribes to; None unless the subscription may be newer than the target.
    """
    if member.is_reconciled_to(assignment_epoch):
        return member if subscribed_ids is None else _without_unsubscribed(member, subscribed_ids)
    if member.state is MemberState.UNREVOKED and (owned is None or owned & member.revoking):
        return member if subscribed_ids is None else _without_unsubscribed(member, subscribed_ids)
    kept = member.assigned & target
    revoking = member.assigned - target
    if revoking and (owned is None or owned & revoking):
        return replace(
            member,
            previous_epoch=member.epoch,
            state=MemberState.UNREVOKED,
            assigned=kept,
            revoking=revoking,
        )
    waiting = (target - kept) & held_by_others
    return replace(
        member,
        epoch=assignment_epoch,
        previous_epoch=member.epoch,
        state=MemberState.UNRELEASED if waiting else MemberState.STABLE,
        assigned=frozenset(target - waiting),
        revoking=NO_PARTITIONS,
    )


def _without_unsubscribed(member: ConsumerMember, subscribed_ids: Set[bytes]) -> ConsumerMember:
    """Return the member with the additional task to revoke the partitions of topics to which it no longer
    subscribes.
    """
    kept = frozenset(tp for tp in member.assigned if tp[0] in subscribed_ids)
    if kept == member.assigned:
        return member
    revoking = member.revoking | (member.assigned - kept)
    return replace(
        member,
        previous_epoch=member.epoch,
        state=MemberState.UNREVOKED,
        assigned=kept,
        revoking=revoking,
    )


NAME_BYTES = 16
"""The overhead in bytes that is counted for each name in addition to its characters."""


class OrderedNames(frozenset[str]):
    """A set of names that keeps their order, and the sum of their lengths.

    A request may have 90,000 names. Sorting them takes longer than the rest of the heartbeat, so the caller
    sorts them in steps. See test_a_heartbeat_of_many_names_is_prepared_in_steps.
    """

    __slots__ = ("character_count", "in_order")

    in_order: tuple[str, ...]
    character_count: int

    def __new__(cls, in_order: Iterable[str]) -> OrderedNames:
        """Return the set of sorted names without duplicates."""
        names = tuple(in_order)
        result = super().__new__(cls, names)
        result.in_order, result.character_count = names, sum(map(len, names))
        return result


def in_order(names: frozenset[str]) -> Sequence[str]:
    """Return the sorted names."""
    return names.in_order if isinstance(names, OrderedNames) else sorted(names)


def character_count(names: frozenset[str]) -> int:
    """Return the sum of the lengths of the names."""
    return names.character_count if isinstance(names, OrderedNames) else sum(map(len, names))


class Subscription(NamedTuple):
    """A member's subscription: topic names, and at most one regular expression."""

    topics: frozenset[str]
    regex: str | None

    @property
    def size_bytes(self) -> int:
        """Approximate size of the subscription in memory."""
        return character_count(self.topics) + NAME_BYTES * (len(self.topics) + 1) + len(self.regex or "")


class Subscriptions:
    """The distinct subscriptions of a group, and how many members have each.

    Members may name thousands of topics. The cost of a heartbeat that changes no subscription must not depend
    on the number of topics. See test_a_heartbeat_does_not_look_at_the_topics_of_other_members.
    """

    def __init__(self) -> None:
        self._counts: dict[Subscription, int] = {}
        self._kept: dict[Subscription, Subscription] = {}
        """Maps each subscription to itself, so that members with equal subscriptions can share one object."""
        self._names: frozenset[str] | None = frozenset()
        self._regexes: frozenset[str] | None = frozenset()
        self.size_bytes = 0

    def copy(self) -> Subscriptions:
        result = Subscriptions()
        result._counts, result._kept = dict(self._counts), dict(self._kept)
        result._names, result._regexes, result.size_bytes = self._names, self._regexes, self.size_bytes
        return result

    def shared(self, subscription: Subscription) -> Subscription:
        """Return the existing object of members with an equal subscription, so that they share it. Without
        such members, return `subscription` itself.
        """
        return self._kept.get(subscription, subscription)

    def size_with(self, subscription: Subscription) -> int:
        """Return the value that `size_bytes` would have after `add(subscription)`."""
        return self.size_bytes + (0 if subscription in self._counts else subscription.size_bytes)

    def add(self, subscription: Subscription) -> None:
        """Count one more member with this subscription."""
        if subscription not in self._counts:
            self._kept[subscription] = subscription
            self.size_bytes += subscription.size_bytes
            self._names = self._regexes = None
        self._counts[subscription] = self._counts.get(subscription, 0) + 1

    def remove(self, subscription: Subscription) -> None:
        """Count one member fewer with this subscription."""
        self._counts[subscription] -= 1
        if not self._counts[subscription]:
            del self._counts[subscription], self._kept[subscription]
            self.size_bytes -= subscription.size_bytes
            self._names = self._regexes = None

    @property
    def names(self) -> frozenset[str]:
        """The topic names of all members' subscriptions."""
        if self._names is None:
            different = {subscription.topics for subscription in self._counts}
            # Often all members have the same names. Then a copy would only cost time.
            self._names = different.pop() if len(different) == 1 else frozenset[str]().union(*different)
        return self._names

    @property
    def regexes(self) -> frozenset[str]:
        """The regular expressions of all members' subscriptions."""
        if self._regexes is None:
            self._regexes = frozenset(
                subscription.regex for subscription in self._counts if subscription.regex
            )
        return self._regexes


class Heartbeat(NamedTuple):
    """A ConsumerGroupHeartbeat request. A field that is None has not changed since the last heartbeat.

    An empty `regex` removes the regular expression. `owned` are the partitions that the member reads now.
    """

    member_id: str
    epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = NO_REBALANCE_TIMEOUT
    topics: frozenset[str] | None = None
    regex: str | None = None
    server_assignor: str | None = None
    owned: frozenset[TopicIdPartition] | None = None
    client_id: str = ""
    client_host: str = ""

    @property
    def is_full(self) -> bool:
        """True if the request has all fields.

        The response must then have the assignment, even an unchanged one.
        """
        is_said = self.topics is not None or self.regex is not None
        return self.epoch == 0 or (
            self.rebalance_timeout_ms != NO_REBALANCE_TIMEOUT and is_said and self.owned is not None
        )


class HeartbeatResult(NamedTuple):
    """The response to a heartbeat. `assigned` is None if the response has no assignment."""

    member_id: str
    epoch: int
    assigned: frozenset[TopicIdPartition] | None = None


class ConsumerGroupState(Enum):
    """The states of the group, with the names that ConsumerGroupDescribe returns."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


class RecordKey(NamedTuple):
    """A record that must be written, with the current value or as a tombstone.

    `kind` is the version of the record's key. `member_id` is empty in a record about the whole group.
    """

    kind: int
    member_id: str = ""


EPOCH, MEMBER, TARGET_EPOCH, TARGET, CURRENT = 3, 5, 6, 7, 8


class TargetPlan(NamedTuple):
    """The input from which the target assignment of an epoch is computed. It does not change afterwards.

    `members` has for each member its id, its instance id, the topics that it subscribes to, and its target
    of the last epoch.
    """

    epoch: int
    topics: Mapping[str, TopicInfo]
    assignor: str
    members: Sequence[tuple[str, str | None, frozenset[str], frozenset[TopicIdPartition]]]

    def compute(self) -> dict[str, frozenset[TopicIdPartition]]:
        """Return the target of each member. May run in another thread."""
        names = {info.topic_id: name for name, info in self.topics.items()}
        subscribers = [
            Subscriber(
                member_id,
                instance_id,
                subscribed,
                tuple(
                    TopicPartition(names[topic_id], partition)
                    for topic_id, partition in sorted(target)
                    if topic_id in names
                ),
            )
            for member_id, instance_id, subscribed, target in self.members
        ]
        counts = {name: info.partition_count for name, info in self.topics.items()}
        return {
            member_id: frozenset((self.topics[tp.topic].topic_id, tp.partition) for tp in share)
            for member_id, share in SERVER_ASSIGNORS[self.assignor](subscribers, counts).items()
        }


class ConsumerGroup:
    """One group of the consumer protocol. Times are milliseconds since the epoch."""

    def __init__(
        self,
        group_id: str,
        *,
        session_timeout_ms: int,
        max_size: int = 2**31,
        max_subscription_bytes: int = 2**31,
        assignor: str = "uniform",
        assignment_burst: int = DEFAULT_LIMITS.assignment_burst_cost,
        max_immediate_cost: int = DEFAULT_LIMITS.max_immediate_assignment_cost,
    ) -> None:
        self.group_id = group_id
        self.epoch, self.assignment_epoch = FIRST_EPOCH, 0
        self.members: dict[str, ConsumerMember] = {}
        self.targets: dict[str, frozenset[TopicIdPartition]] = {}
        self.unsaved: dict[RecordKey, None] = {}
        self._topics: Mapping[str, TopicInfo] | None = None
        self._subscriptions, self._shares_subscriptions = Subscriptions(), False
        """`_subscriptions` has the subscriptions of all members. `_shares_subscriptions` is true if a copy of
        the group (see `draft`) uses the same object. The object must then be copied before a change.
        """
        self._id_bytes = 0
        """The length of all members' ids, racks and hosts, and of the group's id in the keys of their
        records. Each of these may have 32,767 bytes.
        """
        self._session_timeout_ms, self._max_size, self._default_assignor = (
            session_timeout_ms,
            max_size,
            assignor,
        )
        self._max_subscription_bytes = max_subscription_bytes
        self._assignment_burst, self._max_immediate_cost = assignment_burst, max_immediate_cost
        self.is_assigning = False
        """True while the coordinator computes a target in the background, because its cost is too high for a
        heartbeat.
        """
        self.must_assign_at_once = False
        """True if such a target could not be computed or stored. The next heartbeat computes it, so its
        client gets the target or the error.
        """
        self.computed_cost = 0
        """The cost of the targets that were computed since `draft` made this object."""
        self._assignment_cost, self._assignment_cost_ms = 0, 0
        """The cost of recent targets, which decreases with time, and the time in ms of its last update."""
        self._session_deadlines_ms: dict[str, int] = {}
        self._revocation_deadlines_ms: dict[str, int] = {}

    @property
    def state(self) -> ConsumerGroupState:
        if not self.members:
            return ConsumerGroupState.EMPTY
        if self.epoch > self.assignment_epoch:
            return ConsumerGroupState.ASSIGNING
        if all(member.is_reconciled_to(self.assignment_epoch) for member in self.members.values()):
            return ConsumerGroupState.STABLE
        return ConsumerGroupState.RECONCILING

    @property
    def assignor(self) -> str:
        """The name of the assignor that most members request. If both are requested equally often, it is
        `uniform`.

        If none is requested, it is the broker's default.
        """
        # Ignore unknown assignors: in a log of Apache Kafka, members may have requested one that this broker
        # does not have.
        requested = [
            name for member in self.members.values() if (name := member.server_assignor) in SERVER_ASSIGNORS
        ]
        ranked = sorted(set(requested), key=list(SERVER_ASSIGNORS).index)
        return max(ranked, key=requested.count, default=self._default_assignor)

    def set_session_timeout(self, session_timeout_ms: int) -> None:
        """Set the session timeout in ms. It applies to each member from the member's next heartbeat on."""
        self._session_timeout_ms = session_timeout_ms

    def draft(self) -> ConsumerGroup:
        """Return a copy of the group, to which a request makes its changes.

        Once the changes are stored, the copy replaces the group.
        """
        draft = copy.copy(self)
        draft.members, draft.targets = dict(self.members), dict(self.targets)
        draft.unsaved, draft.computed_cost = dict(self.unsaved), 0
        draft._shares_subscriptions = self._shares_subscriptions = True
        draft._session_deadlines_ms, draft._revocation_deadlines_ms = (
            dict(self._session_deadlines_ms),
            dict(self._revocation_deadlines_ms),
        )
        return draft

    def static_member(self, instance_id: str) -> ConsumerMember | None:
        """Return the static member with this instance id; None if there is none."""
        return next((member for member in self.members.values() if member.instance_id == instance_id), None)

    # Heartbeats

    def renew(
        self, request: Heartbeat, resolve_topics: TopicResolver, now_ms: int
    ) -> tuple[HeartbeatResult, int] | None:
        """Handle a heartbeat that only renews its member's session. Return the result and the session's new
        deadline.

        Return None, and change nothing, if `heartbeat` must handle the request.

        In a stable group nearly every heartbeat is of this kind. So its cost must not depend on the number of
        members. See test_a_heartbeat_of_a_stable_group_does_not_look_at_other_members.
        """
        member = self.members.get(request.member_id)
        if member is None or not _repeats(member, request) or self.unsaved:
            return None
        if self.epoch != self.assignment_epoch or not member.is_reconciled_to(self.assignment_epoch):
            return None
        topics = resolve_topics(self._subscriptions.names, self._subscriptions.regexes)
        if topics is not self._topics:
            return None
        deadline_ms = self._session_deadlines_ms[member.member_id] = now_ms + self._session_timeout_ms
        assigned = member.assigned if request.is_full else None
        return HeartbeatResult(member.member_id, member.epoch, assigned), deadline_ms

    def heartbeat(
        self,
        request: Heartbeat,
        resolve_topics: TopicResolver,
        now_ms: int,
        is_unresolved: IsUnresolved = lambda regexes: False,
        check_regex: Callable[[str], object] = str,
    ) -> HeartbeatResult:
        """Handle a heartbeat.

        Epoch 0 joins, -1 leaves, and -2 means that a static member leaves and will come back. `check_regex`
        raises an error for an invalid regular expression. As in Kafka, it is called after the member has been
        validated, and only if the expression has changed. Raises UnknownMemberId, FencedMemberEpoch,
        FencedInstanceId, UnreleasedInstanceId or GroupMaxSizeReached, and the errors of `check_regex`.
        """
        if request.epoch in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH):
            return self._leave(request)
        if len(self.members) >= self._max_size and request.member_id not in self.members:
            raise GroupMaxSizeReached(f"group {self.group_id!r} has {len(self.members)} members")
        # Before `_member_of`, which may replace a static member by one with a longer id.
        held_bytes = self._subscriptions.size_bytes + self._id_bytes
        before = self._member_of(request)
        member = self._with_heartbeat(before, request)
        self._check_subscription(member, held_bytes)
        if member.regex is not None and member.regex != before.regex:
            check_regex(member.regex)
        # As in Kafka 4.3, a new member without topics does not raise the epoch, because no assignment
        # changes.
        is_changed = (before.topics, before.regex) != (member.topics, member.regex)
        if member != self.members.get(member.member_id):
            self._set_member(member, RecordKey(MEMBER, member.member_id))
        self._update_targets(resolve_topics, is_changed, is_unresolved, now_ms)
        target = self.targets.get(member.member_id, NO_PARTITIONS)
        # The group is behind if its target has an earlier epoch. Such a target may have topics that the
        # member no longer subscribes to.
        is_behind = self.epoch > self.assignment_epoch and self._topics is not None
        is_behind = is_behind and not is_unresolved(frozenset(filter(None, [member.regex])))
        subscribed_ids = None
        if is_behind or (is_changed and not member.is_reconciled_to(self.assignment_epoch)):
            subscribed_ids = {topic.topic_id for topic in _subscribed(member, resolve_topics).values()}
        if is_behind and subscribed_ids is not None:
            target = frozenset(place for place in target if place[0] in subscribed_ids)
        after = reconcile(
            member, target, self.assignment_epoch,
            self._held_by_others(member, target), request.owned, subscribed_ids,
        )  # fmt: skip
        if after != member:
            self._set_member(after, RecordKey(CURRENT, after.member_id))
            self._watch_revocation(after, now_ms)
        self._session_deadlines_ms[after.member_id] = now_ms + self._session_timeout_ms
        sends_assignment = request.is_full or after.assigned != before.assigned
        return HeartbeatResult(after.member_id, after.epoch, after.assigned if sends_assignment else None)

    def _member_of(self, request: Heartbeat) -> ConsumerMember:
        static = None if request.instance_id is None else self.static_member(request.instance_id)
        if request.epoch == 0 and static is not None:
            if static.epoch != STATIC_LEAVE_EPOCH:
                raise UnreleasedInstanceId(
                    f"instance id {request.instance_id!r} belongs to member {static.member_id}"
                )
            return self._replace_static(static, request.member_id)
        member = self.members.get(request.member_id)
        if request.epoch == 0:
            # A known member may join again at any time, because the response to its last join may have been
            # lost. The member keeps its assignment. See the scenarios "joins again" in tests/scenarios.
            return member or ConsumerMember(request.member_id)
        self._check_instance(request, static)
        if member is None:
            raise UnknownMemberId(f"group {self.group_id!r} has no member {request.member_id!r}")
        # A static member that has left has epoch -2, which is below its previous epoch. The `<` below rejects
        # its delayed requests, which must not bring the member back.
        is_repeated = request.epoch == member.previous_epoch < member.epoch and (
            request.owned is not None and request.owned <= member.assigned
        )
        if request.epoch != member.epoch and not is_repeated:
            raise FencedMemberEpoch(
                f"member {request.member_id!r} is at epoch {member.epoch}, not {request.epoch}"
            )
        return member

    def _check_instance(self, request: Heartbeat, static: ConsumerMember | None) -> None:
        if request.instance_id is None:
            return
        if static is None:
            raise UnknownMemberId(f"instance id {request.instance_id!r} is unknown")
        if static.member_id != request.member_id:
            raise FencedInstanceId(
                f"instance id {request.instance_id!r} belongs to member {static.member_id}"
            )

    def _replace_static(self, old: ConsumerMember, member_id: str) -> ConsumerMember:
        """Give a static member a new member id, and return the member at epoch 0. It keeps its target and its
        assignment.
        """
        target = self.targets.get(old.member_id, NO_PARTITIONS)
        self._forget(old.member_id)
        member = replace(old, member_id=member_id, epoch=0, previous_epoch=0)
        self.targets[member_id] = target
        for kind in (MEMBER, TARGET, CURRENT):
            self._set_member(member, RecordKey(kind, member_id))
        return member

    def _with_heartbeat(self, member: ConsumerMember, request: Heartbeat) -> ConsumerMember:
        is_timed = request.rebalance_timeout_ms != NO_REBALANCE_TIMEOUT
        topics, regex = self._subscriptions.shared(
            Subscription(
                request.topics if request.topics is not None else member.topics,
                member.regex if request.regex is None else request.regex or None,
            )
        )
        return replace(
            member,
            instance_id=request.instance_id if request.instance_id is not None else member.instance_id,
            rack_id=request.rack_id if request.rack_id is not None else member.rack_id,
            client_id=request.client_id,
            client_host=request.client_host,
            topics=topics,
            regex=regex,
            rebalance_timeout_ms=request.rebalance_timeout_ms if is_timed else member.rebalance_timeout_ms,
            server_assignor=request.server_assignor or member.server_assignor,
        )

    def _check_subscription(self, member: ConsumerMember, held_bytes: int) -> None:
        """Raise GroupMaxSizeReached if the distinct subscriptions and the members' ids would take too much
        memory, and more than `held_bytes`, their size before the heartbeat.
        """
        added_bytes = self._bytes_of(member) - self._bytes_of(self.members.get(member.member_id))
        size_bytes = self._subscriptions.size_with(_subscription(member)) + self._id_bytes + added_bytes
        if size_bytes > max(held_bytes, self._max_subscription_bytes):
            raise GroupMaxSizeReached(
                f"the different subscriptions and the ids of group {self.group_id!r} would have "
                f"{size_bytes} bytes; the limit is {self._max_subscription_bytes}"
            )

    def _set_member(self, member: ConsumerMember, entry: RecordKey) -> None:
        self._note_member(self.members.get(member.member_id), member)
        self.members[member.member_id] = member
        self.unsaved[entry] = None

    def _bytes_of(self, member: ConsumerMember | None) -> int:
        """Return the bytes of a member that count in `_id_bytes`; 0 without a member. See
        test_the_id_of_a_group_counts_for_each_of_its_members.
        """
        return 0 if member is None else _id_bytes(member) + RECORDS_PER_MEMBER * len(self.group_id)

    def _note_member(self, before: ConsumerMember | None, after: ConsumerMember | None) -> None:
        self._id_bytes += self._bytes_of(after) - self._bytes_of(before)
        old = None if before is None else _subscription(before)
        new = None if after is None else _subscription(after)
        if old == new:
            return
        if self._shares_subscriptions:
            self._subscriptions, self._shares_subscriptions = self._subscriptions.copy(), False
        if new is not None:
            self._subscriptions.add(new)
        if old is not None:
            self._subscriptions.remove(old)

    # Assigning

    def _update_targets(
        self, resolve_topics: TopicResolver, is_changed: bool, is_unresolved: IsUnresolved, now_ms: int
    ) -> None:
        """Raise the epoch if the group or its topics changed.

        Compute a target if the epoch has none and `_assignment_cost` is below its limit. If the target is
        expensive, set `is_assigning` instead: the coordinator then computes it in another thread.
        """
        regexes = self._subscriptions.regexes
        topics = resolve_topics(self._subscriptions.names, regexes)
        if self._topics is None and self.assignment_epoch and is_unresolved(regexes):
            # After a restart of the broker, regular expressions may still be resolved in the background.
            # Until they are, the stored target stays in force, even if a member joins. Otherwise all members
            # would have to revoke all partitions. The target of the raised epoch is computed once the topics
            # are known.
            if is_changed:
                self._raise_epoch()
            return
        if self._topics is None:
            is_other = self._targets_differ_from(topics)
        else:
            is_other = topics is not self._topics and topics != self._topics
        # If the epoch has no target yet, changed topics need no new epoch: the target will be computed from
        # these topics.
        if is_changed or (is_other and self.epoch == self.assignment_epoch):
            self._raise_epoch()
        self._topics = topics
        # Limit the cost: if a thousand members join in a row, each join would otherwise compute a target for
        # all members. See test_many_joins_share_few_assignments.
        if self.epoch == self.assignment_epoch or self.is_assigning or not self._can_compute_targets(now_ms):
            return
        cost = len(self.members) + sum(topic.partition_count for topic in topics.values())
        self._assignment_cost += cost
        if cost <= self._max_immediate_cost or self.must_assign_at_once:
            self.computed_cost += cost
            self.set_targets(self.epoch, self.plan_targets(resolve_topics).compute())
            return
        if self.assignment_epoch == 0:
            # A member that joins must get an epoch above 0 at once, so the first target is empty.
            self.set_targets(self.epoch, {})
            self._raise_epoch()
        self.is_assigning = True

    def _can_compute_targets(self, now_ms: int) -> bool:
        passed_ms = max(now_ms - self._assignment_cost_ms, 0)
        self._assignment_cost = max(self._assignment_cost - passed_ms * ASSIGNMENT_COST_PER_MS, 0)
        self._assignment_cost_ms = now_ms
        return self._assignment_cost < self._assignment_burst

    def _targets_differ_from(self, topics: Mapping[str, TopicInfo]) -> bool:
        """Return True if the stored targets together do not have exactly the partitions of `topics`.

        This is used after a restart, when the topics of the stored target are unknown.
        """
        there = {
            (topic.topic_id, index) for topic in topics.values() for index in range(topic.partition_count)
        }
        return there != set().union(*self.targets.values())

    def _raise_epoch(self) -> None:
        self.epoch += 1
        self.unsaved[RecordKey(EPOCH)] = None

    def plan_targets(self, resolve_topics: TopicResolver) -> TargetPlan:
        """Return the input for the target of the current epoch."""
        subscribed: dict[Subscription, frozenset[str]] = {}
        for member in self.members.values():
            if _subscription(member) not in subscribed:
                subscribed[_subscription(member)] = frozenset(_subscribed(member, resolve_topics))
        members = [
            (
                member.member_id,
                member.instance_id,
                subscribed[_subscription(member)],
                self.targets.get(member.member_id, NO_PARTITIONS),
            )
            for member in self.members.values()
        ]
        return TargetPlan(self.epoch, self._topics or {}, self.assignor, members)

    def is_current(self, plan: TargetPlan) -> bool:
        """Return True if the group still needs the target of a plan: neither its members nor its topics have
        changed since.
        """
        member_ids = {member_id for member_id, *_ in plan.members}
        return plan.epoch == self.epoch and member_ids == self.members.keys() and plan.topics == self._topics

    def set_targets(self, epoch: int, targets: Mapping[str, frozenset[TopicIdPartition]]) -> None:
        """Set the target assignment of an epoch."""
        self.must_assign_at_once = False
        for member_id, target in targets.items():
            if self.targets.get(member_id) != target:
                self.targets[member_id] = target
                self.unsaved[RecordKey(TARGET, member_id)] = None
        if self.assignment_epoch == 0:
            # Store the epoch: this is the group's first target. If its first members have no topics,
            # `_raise_epoch` was never called, so nothing has stored FIRST_EPOCH yet.
            self.unsaved[RecordKey(EPOCH)] = None
        self.assignment_epoch = epoch
        self.unsaved[RecordKey(TARGET_EPOCH)] = None

    def _held_by_others(self, member: ConsumerMember, target: Set[TopicIdPartition]) -> set[TopicIdPartition]:
        """Return the partitions of `target` that the member lacks and that other members still have.

        Every member that reconciles calls this, so it must not build a set of all partitions of the group.
        """
        held: set[TopicIdPartition] = set()
        lacks = target - member.assigned
        if not lacks or member.is_reconciled_to(self.assignment_epoch):
            return held
        for other in self.members.values():
            if other.member_id != member.member_id:
                for places in (other.assigned, other.revoking):
                    if places and not lacks.isdisjoint(places):
                        held.update(lacks & places)
        return held

    # Leaving

    def _leave(self, request: Heartbeat) -> HeartbeatResult:
        static = None if request.instance_id is None else self.static_member(request.instance_id)
        self._check_instance(request, static)
        member = self.members.get(request.member_id)
        if member is None:
            raise UnknownMemberId(f"group {self.group_id!r} has no member {request.member_id!r}")
        if request.epoch == STATIC_LEAVE_EPOCH and member.instance_id is not None:
            gone = replace(member, epoch=STATIC_LEAVE_EPOCH, revoking=NO_PARTITIONS)
            self._set_member(gone, RecordKey(CURRENT, member.member_id))
            self._revocation_deadlines_ms.pop(member.member_id, None)
        else:
            self._remove(member.member_id)
        return HeartbeatResult(request.member_id, request.epoch)

    def remove_members(self, identities: Sequence[tuple[str, str | None]]) -> list[int]:
        """Remove members; `identities` has their (member id, instance id). Return an error code for each.

        If the instance id is given, the member id may be empty. All members are looked up before the first
        one is removed, so a member that is listed twice gets success twice. The epoch rises once.
        """
        # Look at all members once: a request may have 20,000 instance ids, and a group thousands of members.
        # Guard: test_members_are_looked_up_by_instance_id_without_a_look_at_all_others.
        static_ids = {member.instance_id: member.member_id for member in self.members.values()}
        removed: dict[str, None] = {}
        codes = [0] * len(identities)
        for index, (member_id, instance_id) in enumerate(identities):
            try:
                removed[self._find_member_id(member_id, instance_id, static_ids)] = None
            except BrokerError as error:
                codes[index] = error.code
        for member_id in removed:
            self._forget(member_id)
        if removed:
            self._raise_epoch()
        return codes

    def _find_member_id(
        self, member_id: str, instance_id: str | None, static_ids: Mapping[str | None, str]
    ) -> str:
        if instance_id is None:
            return self._require_member(member_id).member_id
        static_id = static_ids.get(instance_id)
        if static_id is None:
            raise UnknownMemberId(f"instance id {instance_id!r} is unknown")
        if member_id and member_id != static_id:
            raise FencedInstanceId(f"instance id {instance_id!r} belongs to member {static_id}")
        return static_id

    def _remove(self, member_id: str) -> None:
        self._forget(member_id)
        self._raise_epoch()

    def _forget(self, member_id: str) -> None:
        for timers in (self._session_deadlines_ms, self._revocation_deadlines_ms):
            timers.pop(member_id, None)
        self.targets.pop(member_id, None)
        self._note_member(self.members.pop(member_id), None)
        for kind in (CURRENT, TARGET, MEMBER):
            self.unsaved[RecordKey(kind, member_id)] = None

    def _watch_revocation(self, member: ConsumerMember, now_ms: int) -> None:
        if member.state is not MemberState.UNREVOKED:
            self._revocation_deadlines_ms.pop(member.member_id, None)
        else:
            self._revocation_deadlines_ms[member.member_id] = now_ms + member.rebalance_timeout_ms

    def restore(self, member: ConsumerMember) -> None:
        """Set a member that is read from the log. It shares the subscription of an equal member at once:
        hundreds of members may have the same thousands of names. See
        test_a_start_keeps_equal_names_of_members_once.
        """
        before = self.members.get(member.member_id)
        topics, regex = self._subscriptions.shared(_subscription(member))
        self.members[member.member_id] = after = replace(member, topics=topics, regex=regex)
        self._note_member(before, after)

    def remove_restored(self, member_id: str) -> None:
        """Remove a member whose removal is read from the log."""
        before = self.members.pop(member_id, None)
        if before is not None:
            self._note_member(before, None)

    def resume(self, now_ms: int) -> None:
        """Start the session and revocation timeouts of all members after a restart of the broker."""
        for member in self.members.values():
            self._session_deadlines_ms[member.member_id] = now_ms + self._session_timeout_ms
            self._watch_revocation(member, now_ms)

    def tick(self, now_ms: int) -> None:
        """Handle the deadlines that have passed: remove members whose session or revocation timeout has
        expired.
        """
        for member_id in list(self.members):
            dues = (self._session_deadlines_ms.get(member_id), self._revocation_deadlines_ms.get(member_id))
            if any(due is not None and due <= now_ms for due in dues):
                self._remove(member_id)

    def next_deadline_ms(self) -> int | None:
        """Return the next time in ms at which `tick` must run; None if there is no deadline."""
        return min(
            [*self._session_deadlines_ms.values(), *self._revocation_deadlines_ms.values()], default=None
        )

    # Offsets

    def check_commit(
        self,
        member_id: str,
        instance_id: str | None,
        epoch: int,
        *,
        is_transactional: bool,
        version: int,
    ) -> None:
        """Raise an error if an offset commit is not allowed.

        An empty group accepts a commit without an epoch from any client. Within a transaction, every group
        also accepts a commit without a member id, because old clients do not send one. Raises
        UnknownMemberId, StaleMemberEpoch or UnsupportedVersion.
        """
        is_anonymous = epoch < 0 and not member_id and instance_id is None
        if (epoch < 0 and not self.members) or (is_anonymous and is_transactional):
            return
        member = self._require_member(member_id)
        if not is_transactional and version < FIRST_EPOCH_COMMIT_VERSION:
            raise UnsupportedVersion("members of the consumer protocol need OffsetCommit version 9 or later")
        self._check_epoch(member, epoch)

    def check_fetch(self, member_id: str | None, epoch: int) -> None:
        """Raise an error if the member may not read offsets: UnknownMemberId or StaleMemberEpoch.

        A request without a member id and epoch may always read them.
        """
        if member_id is not None or epoch >= 0:
            self._check_epoch(self._require_member(member_id or ""), epoch)

    def _require_member(self, member_id: str) -> ConsumerMember:
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMemberId(f"group {self.group_id!r} has no member {member_id!r}")
        return member

    @staticmethod
    def _check_epoch(member: ConsumerMember, epoch: int) -> None:
        if epoch != member.epoch:
            raise StaleMemberEpoch(f"member {member.member_id!r} is at epoch {member.epoch}, not {epoch}")

    def subscribed(self) -> Iterable[str] | None:
        """Return the names of the topics that members subscribe to; an empty set if the group has no members.

        After a restart, return None until a heartbeat has resolved the members' regular expressions.
        """
        if self._topics is None and self._subscriptions.regexes:
            return None
        if not self.members:
            return frozenset()
        return self._topics or self._subscriptions.names


def _repeats(member: ConsumerMember, request: Heartbeat) -> bool:
    """Return True if the request has the member's current epoch and changes none of the member's fields."""
    return (
        0 < request.epoch == member.epoch
        and request.instance_id in (None, member.instance_id)
        and request.rack_id in (None, member.rack_id)
        and request.rebalance_timeout_ms in (NO_REBALANCE_TIMEOUT, member.rebalance_timeout_ms)
        and (request.topics is None or request.topics == member.topics)
        and (request.regex is None or (request.regex or None) == member.regex)
        and (not request.server_assignor or request.server_assignor == member.server_assignor)
        and (request.client_id, request.client_host) == (member.client_id, member.client_host)
    )


def _subscription(member: ConsumerMember) -> Subscription:
    return Subscription(member.topics, member.regex)


def _id_bytes(member: ConsumerMember) -> int:
    """Return the length of a member's ids, rack and host."""
    texts = (member.member_id, member.instance_id, member.rack_id, member.client_id, member.client_host)
    return sum(len(text) for text in texts if text)


def _subscribed(member: ConsumerMember, resolve_topics: TopicResolver) -> Mapping[str, TopicInfo]:
    """Return the existing topics that match a member's subscription."""
    return resolve_topics(member.topics, frozenset(filter(None, [member.regex])))
