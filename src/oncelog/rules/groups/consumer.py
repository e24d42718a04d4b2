"""A group of the consumer protocol: its members, its epochs, who is to read what, and who may.

    Empty         no members
    Assigning     the group changed since the target assignment was made
    Reconciling   members are on their way to the target, each at its own pace
    Stable        all have arrived

The group's epoch rises when a member joins, leaves, times out or changes its subscription, and when a
topic grows. The next heartbeat of any member makes a target of that epoch. Targets of large groups that
change again and again are made less often than their epochs rise (KIP-1263). `unsaved` names the entries
that must be stored.
Source: KIP-848; Kafka's GroupMetadataManager, ConsumerGroup.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from enum import Enum
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
from oncelog.rules.groups.assignors import Shares, Subscriber, assign_range
from oncelog.rules.groups.consumer_member import (
    LEAVE_EPOCH,
    NO_REBALANCE_TIMEOUT,
    NOTHING,
    STATIC_LEAVE_EPOCH,
    ConsumerMember,
    MemberState,
    Place,
    reconcile,
)
from oncelog.rules.groups.consumer_subscriptions import Subscription, Subscriptions
from oncelog.rules.groups.sticky import assign_sticky
from oncelog.types import TopicPartition

SERVER_ASSIGNORS: dict[str, Callable[[Sequence[Subscriber], Mapping[str, int]], Shares]] = {
    "uniform": assign_sticky,
    "range": assign_range,
}
FIRST_EPOCH_COMMIT_VERSION = 9
FIRST_EPOCH = 1
"""Of a group nobody joined yet; the first member raises it."""
ASSIGNMENT_COST_PER_MS = 20
"""Members and partitions a millisecond for which a group's targets may be made: a fifth of the broker's time.

Source: KIP-1263 for the idea; Kafka makes one target a second.
"""


class TopicInfo(NamedTuple):
    """A topic as an assignment needs it."""

    topic_id: bytes
    partition_count: int


Catalogue = Callable[[frozenset[str], frozenset[str]], Mapping[str, TopicInfo]]
"""The topics that are there, of these names and matching these regular expressions as a whole."""

IsPending = Callable[[frozenset[str]], bool]
"""True while the topics that regular expressions match are not all known yet."""


class Beat(NamedTuple):
    """A heartbeat. None: as before. `regex` "": none any more. `owned`: what the member reads now."""

    member_id: str
    epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = NO_REBALANCE_TIMEOUT
    topics: frozenset[str] | None = None
    regex: str | None = None
    server_assignor: str | None = None
    owned: frozenset[Place] | None = None
    client_id: str = ""
    client_host: str = ""

    @property
    def is_full(self) -> bool:
        """Whether all is said, so that all is to be answered."""
        is_said = self.topics is not None or self.regex is not None
        return self.epoch == 0 or (
            self.rebalance_timeout_ms != NO_REBALANCE_TIMEOUT and is_said and self.owned is not None
        )


class BeatAnswer(NamedTuple):
    """`assigned` None: as before."""

    member_id: str
    epoch: int
    assigned: frozenset[Place] | None = None


class ConsumerGroupState(Enum):
    """Kafka's names, as ConsumerGroupDescribe tells them."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


class Entry(NamedTuple):
    """Something to be stored as it is now, or as gone. `kind` is the key version of its record."""

    kind: int
    member_id: str = ""


EPOCH, MEMBER, TARGET_EPOCH, TARGET, CURRENT = 3, 5, 6, 7, 8


class ConsumerGroup:
    """One group. Times are milliseconds since the epoch."""

    def __init__(
        self,
        group_id: str,
        *,
        session_timeout_ms: int,
        max_size: int = 2**31,
        max_subscription_bytes: int = 2**31,
        assignor: str = "uniform",
        assignment_burst: int = DEFAULT_LIMITS.assignment_burst_cost,
    ) -> None:
        self.group_id = group_id
        self.epoch, self.assignment_epoch = FIRST_EPOCH, 0
        self.members: dict[str, ConsumerMember] = {}
        self.targets: dict[str, frozenset[Place]] = {}
        self.unsaved: dict[Entry, None] = {}
        self._topics: Mapping[str, TopicInfo] | None = None
        self._subscriptions, self._shares_subscriptions = Subscriptions(), False
        """Those of all members; and whether another draft of the group uses the same object."""
        self._session_ms, self._max_size, self._default_assignor = session_timeout_ms, max_size, assignor
        self._max_subscription_bytes = max_subscription_bytes
        self._assignment_burst = assignment_burst
        self._assignment_cost, self._assignment_cost_ms = 0, 0
        """Cost of the targets made so far, less what time has taken off, and when that was reckoned."""
        self._silent_until_ms: dict[str, int] = {}
        self._revoked_by_ms: dict[str, int] = {}

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
        """Return the assignor most members ask for (`uniform` in a tie), or the broker's if none asks."""
        # A directory of Apache Kafka may hold members of an assignor that is not offered here.
        wishes = [
            name for each in self.members.values() if (name := each.server_assignor) in SERVER_ASSIGNORS
        ]
        ranked = sorted(set(wishes), key=list(SERVER_ASSIGNORS).index)
        return max(ranked, key=wishes.count, default=self._default_assignor)

    def set_session_timeout(self, session_timeout_ms: int) -> None:
        """Give members this long between heartbeats, from each one's next heartbeat on."""
        self._session_ms = session_timeout_ms

    def draft(self) -> ConsumerGroup:
        """Return a copy to apply a request to. This group stays as it is until the copy is stored."""
        draft = copy.copy(self)
        draft.members, draft.targets = dict(self.members), dict(self.targets)
        draft.unsaved = dict(self.unsaved)
        draft._shares_subscriptions = self._shares_subscriptions = True
        draft._silent_until_ms, draft._revoked_by_ms = dict(self._silent_until_ms), dict(self._revoked_by_ms)
        return draft

    def static_member(self, instance_id: str) -> ConsumerMember | None:
        """The member of this instance."""
        return next((each for each in self.members.values() if each.instance_id == instance_id), None)

    # Heartbeats

    def heartbeat(
        self,
        beat: Beat,
        catalogue: Catalogue,
        now_ms: int,
        is_pending: IsPending = lambda regexes: False,
        check_regex: Callable[[str], object] = str,
    ) -> BeatAnswer:
        """A member joins (epoch 0), is there, or leaves (-1; -2 a static one, to come back).

        `check_regex` raises for a pattern that cannot be used. It is asked about a member's new pattern once
        the member itself is known, as by Kafka. Raises UnknownMemberId, FencedMemberEpoch, FencedInstanceId,
        UnreleasedInstanceId, GroupMaxSizeReached.
        """
        if beat.epoch in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH):
            return self._leave(beat)
        if len(self.members) >= self._max_size and beat.member_id not in self.members:
            raise GroupMaxSizeReached(f"group {self.group_id!r} has {len(self.members)} members")
        before = self._member_of(beat)
        member = self._updated(before, beat)
        self._check_subscription(before, member)
        if member.regex is not None and member.regex != before.regex:
            check_regex(member.regex)
        # A new member without topics changes nobody's assignment, so it raises no epoch, as in Kafka 4.3.
        is_changed = (before.topics, before.regex) != (member.topics, member.regex)
        if member != self.members.get(member.member_id):
            self._put(member, Entry(MEMBER, member.member_id))
        self._assign(catalogue, is_changed, is_pending, now_ms)
        target = self.targets.get(member.member_id, NOTHING)
        # The target is of an earlier epoch, perhaps of an earlier subscription of this member.
        is_behind = self.epoch > self.assignment_epoch and self._topics is not None
        is_behind = is_behind and not is_pending(frozenset(filter(None, [member.regex])))
        subscribed_ids = None
        if is_behind or (is_changed and not member.is_reconciled_to(self.assignment_epoch)):
            subscribed_ids = {each.topic_id for each in _subscribed(member, catalogue).values()}
        if is_behind and subscribed_ids is not None:
            target = frozenset(place for place in target if place[0] in subscribed_ids)
        after = reconcile(
            member, target, self.assignment_epoch,
            self._held_by_others(member, target), beat.owned, subscribed_ids,
        )  # fmt: skip
        if after != member:
            self._put(after, Entry(CURRENT, after.member_id))
            self._watch_revocation(after, now_ms)
        self._silent_until_ms[after.member_id] = now_ms + self._session_ms
        is_told = beat.is_full or after.assigned != before.assigned
        return BeatAnswer(after.member_id, after.epoch, after.assigned if is_told else None)

    def _member_of(self, beat: Beat) -> ConsumerMember:
        static = None if beat.instance_id is None else self.static_member(beat.instance_id)
        if beat.epoch == 0 and static is not None:
            if static.epoch != STATIC_LEAVE_EPOCH:
                raise UnreleasedInstanceId(f"instance {beat.instance_id!r} is member {static.member_id}")
            return self._replace_static(static, beat.member_id)
        member = self.members.get(beat.member_id)
        if beat.epoch == 0:
            # A known member may join again at any time: the answer to its last join may have been lost.
            # It owns nothing then, so it goes on from what it is assigned. See the scenarios "joins again".
            return member or ConsumerMember(beat.member_id)
        self._check_instance(beat, static)
        if member is None:
            raise UnknownMemberId(f"group {self.group_id!r} has no member {beat.member_id!r}")
        # A static member that has left is at -2. What it sent before must not bring it back.
        is_repeated = beat.epoch == member.previous_epoch < member.epoch and (
            beat.owned is not None and beat.owned <= member.assigned
        )
        if beat.epoch != member.epoch and not is_repeated:
            raise FencedMemberEpoch(f"member {beat.member_id!r} is at epoch {member.epoch}, not {beat.epoch}")
        return member

    def _check_instance(self, beat: Beat, static: ConsumerMember | None) -> None:
        if beat.instance_id is None:
            return
        if static is None:
            raise UnknownMemberId(f"instance {beat.instance_id!r} is unknown")
        if static.member_id != beat.member_id:
            raise FencedInstanceId(f"instance {beat.instance_id!r} is member {static.member_id}")

    def _replace_static(self, old: ConsumerMember, member_id: str) -> ConsumerMember:
        """The instance came back under a new id, and goes on with what it had."""
        target = self.targets.get(old.member_id, NOTHING)
        self._forget(old.member_id)
        member = replace(old, member_id=member_id, epoch=0, previous_epoch=0)
        self.targets[member_id] = target
        for kind in (MEMBER, TARGET, CURRENT):
            self._put(member, Entry(kind, member_id))
        return member

    def _updated(self, member: ConsumerMember, beat: Beat) -> ConsumerMember:
        is_timed = beat.rebalance_timeout_ms != NO_REBALANCE_TIMEOUT
        topics, regex = self._subscriptions.shared(
            Subscription(
                beat.topics if beat.topics is not None else member.topics,
                member.regex if beat.regex is None else beat.regex or None,
            )
        )
        return replace(
            member,
            instance_id=beat.instance_id if beat.instance_id is not None else member.instance_id,
            rack_id=beat.rack_id if beat.rack_id is not None else member.rack_id,
            client_id=beat.client_id,
            client_host=beat.client_host,
            topics=topics,
            regex=regex,
            rebalance_timeout_ms=beat.rebalance_timeout_ms if is_timed else member.rebalance_timeout_ms,
            server_assignor=beat.server_assignor or member.server_assignor,
        )

    def _check_subscription(self, before: ConsumerMember, member: ConsumerMember) -> None:
        """Raise GroupMaxSizeReached where the members' subscriptions would take too much together."""
        if before.member_id in self.members and _subscription(before) == _subscription(member):
            return
        size_bytes = self._subscriptions.size_with(_subscription(member))
        if size_bytes > max(self._subscriptions.size_bytes, self._max_subscription_bytes):
            raise GroupMaxSizeReached(
                f"the different subscriptions of group {self.group_id!r} would take {size_bytes} bytes; "
                f"{self._max_subscription_bytes} are allowed"
            )

    def _put(self, member: ConsumerMember, entry: Entry) -> None:
        self._note_subscription(self.members.get(member.member_id), member)
        self.members[member.member_id] = member
        self.unsaved[entry] = None

    def _note_subscription(self, before: ConsumerMember | None, after: ConsumerMember | None) -> None:
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

    def _assign(self, catalogue: Catalogue, is_changed: bool, is_pending: IsPending, now_ms: int) -> None:
        """Another epoch if the group or its topics changed, and the target that belongs to it."""
        regexes = self._subscriptions.regexes
        topics = catalogue(self._subscriptions.names, regexes)
        if self._topics is None and self.assignment_epoch and is_pending(regexes):
            # After a restart the topics that patterns match may be found in the background. Until then the
            # stored target stands, also for a member that joins; otherwise everybody would have to give up
            # everything. The raised epoch has a target made once the topics are known.
            if is_changed:
                self._raise_epoch()
            return
        if self._topics is None:
            is_other = self._is_off(topics)
        else:
            is_other = topics is not self._topics and topics != self._topics
        # An epoch that has no target yet needs no successor: its target is made of these topics below.
        if is_changed or (is_other and self.epoch == self.assignment_epoch):
            self._raise_epoch()
        self._topics = topics
        # Otherwise a thousand joins in a row would each compute a target for all members.
        # See test_many_joins_share_few_assignments.
        if self.epoch > self.assignment_epoch and self._may_make_targets(now_ms):
            self._make_targets(topics, catalogue)
            self._assignment_cost += len(self.members) + sum(each.partition_count for each in topics.values())

    def _may_make_targets(self, now_ms: int) -> bool:
        passed_ms = max(now_ms - self._assignment_cost_ms, 0)
        self._assignment_cost = max(self._assignment_cost - passed_ms * ASSIGNMENT_COST_PER_MS, 0)
        self._assignment_cost_ms = now_ms
        return self._assignment_cost < self._assignment_burst

    def _is_off(self, topics: Mapping[str, TopicInfo]) -> bool:
        """After a restart: whether the stored target misses or exceeds the topics there are now."""
        there = {(each.topic_id, index) for each in topics.values() for index in range(each.partition_count)}
        return there != set().union(*self.targets.values())

    def _raise_epoch(self) -> None:
        self.epoch += 1
        self.unsaved[Entry(EPOCH)] = None

    def _make_targets(self, topics: Mapping[str, TopicInfo], catalogue: Catalogue) -> None:
        names = {info.topic_id: name for name, info in topics.items()}
        subscribed: dict[Subscription, frozenset[str]] = {}
        for member in self.members.values():
            if _subscription(member) not in subscribed:
                subscribed[_subscription(member)] = frozenset(_subscribed(member, catalogue))
        subscribers = [
            Subscriber(
                member.member_id,
                member.instance_id,
                subscribed[_subscription(member)],
                tuple(
                    TopicPartition(names[topic_id], partition)
                    for topic_id, partition in sorted(self.targets.get(member.member_id, ()))
                    if topic_id in names
                ),
            )
            for member in self.members.values()
        ]
        counts = {name: info.partition_count for name, info in topics.items()}
        for member_id, share in SERVER_ASSIGNORS[self.assignor](subscribers, counts).items():
            target = frozenset((topics[at.topic].topic_id, at.partition) for at in share)
            if self.targets.get(member_id) != target:
                self.targets[member_id] = target
                self.unsaved[Entry(TARGET, member_id)] = None
        if self.assignment_epoch == 0:
            self.unsaved[Entry(EPOCH)] = None  # the first one, which no change has raised
        self.assignment_epoch = self.epoch
        self.unsaved[Entry(TARGET_EPOCH)] = None

    def _held_by_others(self, member: ConsumerMember, target: Set[Place]) -> set[Place]:
        """Return what others hold of the partitions that the member lacks to its target.

        Each member on its way asks, so make no set of all partitions of the group.
        """
        held: set[Place] = set()
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

    def _leave(self, beat: Beat) -> BeatAnswer:
        static = None if beat.instance_id is None else self.static_member(beat.instance_id)
        self._check_instance(beat, static)
        member = self.members.get(beat.member_id)
        if member is None:
            raise UnknownMemberId(f"group {self.group_id!r} has no member {beat.member_id!r}")
        if beat.epoch == STATIC_LEAVE_EPOCH and member.instance_id is not None:
            gone = replace(member, epoch=STATIC_LEAVE_EPOCH, revoking=NOTHING)
            self._put(gone, Entry(CURRENT, member.member_id))
            self._revoked_by_ms.pop(member.member_id, None)
        else:
            self._remove(member.member_id)
        return BeatAnswer(beat.member_id, beat.epoch)

    def remove_members(self, identities: Sequence[tuple[str, str | None]]) -> list[int]:
        """Remove members that an administrator names by (member id, instance id); return their error codes.

        An instance id goes with its member's id or with an empty one. All names are looked up before the
        first member goes, so one that is named twice succeeds twice, and the epoch rises once.
        """
        removed: dict[str, None] = {}
        codes = [0] * len(identities)
        for index, (member_id, instance_id) in enumerate(identities):
            try:
                removed[self._named(member_id, instance_id)] = None
            except BrokerError as error:
                codes[index] = error.code
        for member_id in removed:
            self._forget(member_id)
        if removed:
            self._raise_epoch()
        return codes

    def _named(self, member_id: str, instance_id: str | None) -> str:
        if instance_id is None:
            return self._known(member_id).member_id
        static = self.static_member(instance_id)
        if static is None:
            raise UnknownMemberId(f"instance {instance_id!r} is unknown")
        if member_id and member_id != static.member_id:
            raise FencedInstanceId(f"instance {instance_id!r} is member {static.member_id}")
        return static.member_id

    def _remove(self, member_id: str) -> None:
        self._forget(member_id)
        self._raise_epoch()

    def _forget(self, member_id: str) -> None:
        for timers in (self._silent_until_ms, self._revoked_by_ms):
            timers.pop(member_id, None)
        self.targets.pop(member_id, None)
        self._note_subscription(self.members.pop(member_id), None)
        for kind in (CURRENT, TARGET, MEMBER):
            self.unsaved[Entry(kind, member_id)] = None

    def _watch_revocation(self, member: ConsumerMember, now_ms: int) -> None:
        if member.state is not MemberState.UNREVOKED:
            self._revoked_by_ms.pop(member.member_id, None)
        else:
            self._revoked_by_ms[member.member_id] = now_ms + member.rebalance_timeout_ms

    def resume(self, now_ms: int) -> None:
        """After a restart: everyone's time begins anew."""
        self._subscriptions, self._shares_subscriptions = Subscriptions(), False
        for member in list(self.members.values()):
            topics, regex = self._subscriptions.shared(_subscription(member))
            self.members[member.member_id] = replace(member, topics=topics, regex=regex)
            self._subscriptions.add(Subscription(topics, regex))
            self._silent_until_ms[member.member_id] = now_ms + self._session_ms
            self._watch_revocation(member, now_ms)

    def tick(self, now_ms: int) -> None:
        """Silent members go, and those that do not give up what they must."""
        for member_id in list(self.members):
            dues = (self._silent_until_ms.get(member_id), self._revoked_by_ms.get(member_id))
            if any(due is not None and due <= now_ms for due in dues):
                self._remove(member_id)

    def next_deadline_ms(self) -> int | None:
        """When `tick` may have something to do; None: never."""
        return min([*self._silent_until_ms.values(), *self._revoked_by_ms.values()], default=None)

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
        """Raise why an offset commit is refused.

        Without an epoch an empty group takes it from anybody. Within a transaction every group does from a
        client that names no member either, because old clients name none.
        """
        is_anonymous = epoch < 0 and not member_id and instance_id is None
        if (epoch < 0 and not self.members) or (is_anonymous and is_transactional):
            return
        member = self._known(member_id)
        if not is_transactional and version < FIRST_EPOCH_COMMIT_VERSION:
            raise UnsupportedVersion("members of the consumer protocol commit with OffsetCommit 9 or above")
        self._check_epoch(member, epoch)

    def check_fetch(self, member_id: str | None, epoch: int) -> None:
        """Raises why committed offsets are not told to a member; to others they are."""
        if member_id is not None or epoch >= 0:
            self._check_epoch(self._known(member_id or ""), epoch)

    def _known(self, member_id: str) -> ConsumerMember:
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMemberId(f"group {self.group_id!r} has no member {member_id!r}")
        return member

    @staticmethod
    def _check_epoch(member: ConsumerMember, epoch: int) -> None:
        if epoch != member.epoch:
            raise StaleMemberEpoch(f"member {member.member_id!r} is at epoch {member.epoch}, not {epoch}")

    def subscribed(self) -> Iterable[str] | None:
        """Return the topics that members read. Without members there are none, so all offsets may expire.

        None is returned after a restart until a heartbeat tells which topics the members' patterns match.
        """
        if self._topics is None and self._subscriptions.regexes:
            return None
        if not self.members:
            return frozenset()
        return self._topics or self._subscriptions.names


def _subscription(member: ConsumerMember) -> Subscription:
    return Subscription(member.topics, member.regex)


def _subscribed(member: ConsumerMember, catalogue: Catalogue) -> Mapping[str, TopicInfo]:
    """Return the existing topics that a member's subscription names or matches."""
    return catalogue(member.topics, frozenset(filter(None, [member.regex])))
