"""A group of the classic protocol: its members, generations, rebalances and assignments.

    Empty                 the group has no members
    PreparingRebalance    waits for all members to join, at most for the longest rebalance timeout
    CompletingRebalance   every member knows the generation; the assignment is not stored yet
    Stable                the assignment is stored and the members have it

The group returns to PreparingRebalance when a join changes it, when a member leaves, or when a session
expires. Each JoinGroup or SyncGroup request has a callback. If the request must wait for other members, the
response is passed to the callback later. Whenever `is_unsaved` is true, the coordinator must clear this flag,
store the group, and then call `complete_save`. Members get their assignments in `complete_save`. Source:
kafka ClassicGroup, ClassicGroupMember, GroupMetadataManager.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import NamedTuple

from oncelog.errors import (
    BrokerError,
    CoordinatorNotAvailable,
    FencedInstanceId,
    GroupMaxSizeReached,
    IllegalGeneration,
    InconsistentGroupProtocol,
    MemberIdRequired,
    NotCoordinator,
    RebalanceInProgress,
    UnknownMemberId,
)
from oncelog.rules.groups.deadlines import Deadlines

NEW_MEMBER_TIMEOUT_MS = 300_000
"""Timeout in ms of a new member until its first generation. Source: kafka ClassicGroup."""
PROTOCOL_BYTES = 64
"""The overhead in bytes that is counted for each protocol in addition to its name and metadata, so that even
empty protocols count.
"""
MAX_UNUSED_IDS_AT_ONCE = 1000
"""Largest number of unused member ids that one call of `tick` or `forget_unused_ids` forgets. It takes 2
ms.
"""
_MIN_EXTENSION_MS = 1000
"""Minimum extension, in ms, of a rebalance that no member has joined."""

Protocol = tuple[str, bytes]
"""(name of an assignor, the member's metadata for it, such as its subscription)"""


class GroupState(Enum):
    """The states of a classic group, with the names that DescribeGroups returns."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class JoinRequest(NamedTuple):
    """A JoinGroup request. `member_id` is empty if the client has no member id yet.

    If `requires_known_member_id` (version 4 and later), a client without a member id only gets one, and must
    join again with it. If `supports_skip_assignment` (version 9 and later), the response may ask the leader
    not to assign partitions.
    """

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[Protocol, ...]
    requires_known_member_id: bool
    supports_skip_assignment: bool


class JoinedMember(NamedTuple):
    """A member in the list that the leader gets in order to assign the partitions."""

    member_id: str
    group_instance_id: str | None
    metadata: bytes


class JoinResult(NamedTuple):
    """The response to JoinGroup. Only the leader gets `members`.

    The leader assigns the partitions unless `skip_assignment` is true.
    """

    error_code: int
    member_id: str
    generation_id: int = -1
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = ""
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


class SyncResult(NamedTuple):
    """The response to SyncGroup. The broker does not decode `assignment`."""

    error_code: int
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


JoinCallback = Callable[[JoinResult], None]
SyncCallback = Callable[[SyncResult], None]


@dataclass(slots=True)
class Member:
    """A member of a classic group.

    `join_callback` and `sync_callback` are set while a JoinGroup or SyncGroup request waits for other
    members. If no request waits, the member is removed at `deadline_ms`. `is_new` is true until the member's
    first generation. A new member is removed at `deadline_ms` even while its JoinGroup request waits.
    """

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[Protocol, ...]
    assignment: bytes = b""
    deadline_ms: int = 0
    is_new: bool = True
    has_synced: bool = False
    join_callback: JoinCallback | None = None
    sync_callback: SyncCallback | None = None

    def metadata(self, protocol_name: str | None) -> bytes:
        """Return the member's metadata for a protocol; empty if the member does not support it."""
        return next((data for name, data in self.protocols if name == protocol_name), b"")

    @property
    def metadata_bytes(self) -> int:
        """Approximate size of the member's protocols and ids in memory."""
        return metadata_bytes(self.protocols) + _id_bytes(self, self.member_id)

    def complete_join(self, result: JoinResult) -> None:
        """Answer the member's JoinGroup request if one is waiting."""
        callback, self.join_callback = self.join_callback, None
        if callback is not None:
            callback(result)

    def fail_pending_requests(self, error: type[BrokerError], member_id: str) -> None:
        """Answer the member's waiting JoinGroup and SyncGroup requests with an error.

        As in Kafka, the response to JoinGroup also contains `member_id`.
        """
        self.complete_join(JoinResult(error.code, member_id))
        callback, self.sync_callback = self.sync_callback, None
        if callback is not None:
            callback(SyncResult(error.code))


def metadata_bytes(protocols: Collection[Protocol]) -> int:
    """Return the approximate size of protocols in memory: names, metadata and PROTOCOL_BYTES for each."""
    return sum(len(name) + len(data) + PROTOCOL_BYTES for name, data in protocols)


def _id_bytes(member: Member | JoinRequest, member_id: str) -> int:
    """Return the length of a member's ids and host. Each may have 32,767 bytes.

    They are in the group's record, and the leader gets the member ids of all members. See
    test_long_ids_of_members_count_as_metadata.
    """
    instance_id = member.group_instance_id or ""
    return len(member_id) + len(instance_id) + len(member.client_id) + len(member.client_host)


def select_protocol(members: Collection[Member], common: Container[str]) -> str:
    """Return the protocol that most members prefer. Each member votes for the first of its protocols that is
    in `common`.

    Every member must support at least one protocol in `common`.
    """
    votes = Counter(next(name for name, _ in member.protocols if name in common) for member in members)
    return votes.most_common(1)[0][0]


def _pending_bytes(member_id: str) -> int:
    return len(member_id) + PROTOCOL_BYTES


class MemberList(Mapping[str, Member]):
    """The members of a classic group by member id, in the order in which they joined.

    Sums over all members are updated incrementally, because a request of one member must not examine all
    members. See test_joins_of_many_members_do_not_look_at_each_other.
    """

    def __init__(self) -> None:
        self.leader_id: str | None = None
        self.static_ids: dict[str, str] = {}
        """Instance id -> member id, for static members."""
        self.metadata_bytes = 0
        self.revision = 0
        """Incremented by every change of the members or of their protocols."""
        # Not a dict: if members are removed from its front, finding the new first one takes longer each time.
        # See test_members_that_expire_together_are_removed_in_linear_time.
        self._by_id: OrderedDict[str, Member] = OrderedDict()
        self._supporter_counts: Counter[str] = Counter()
        """Protocol name -> number of members that support it."""
        self._due_ms: int | None = None
        """A time in ms at or before the first `deadline_ms` of all members; None if no deadline is set."""

    def __getitem__(self, member_id: str) -> Member:
        return self._by_id[member_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def values(self) -> ValuesView[Member]:
        """Return the members. This is faster than the inherited method, which looks up each key."""
        return self._by_id.values()

    @property
    def leader(self) -> Member | None:
        """The member that assigns partitions; None if there is none."""
        return self._by_id.get(self.leader_id or "")

    def add(self, member: Member) -> None:
        """Add a member. Its member id must be new."""
        self._by_id[member.member_id] = member
        if member.group_instance_id is not None:
            self.static_ids[member.group_instance_id] = member.member_id
        self._count(member, 1)

    def remove(self, member: Member) -> None:
        """Remove a member. If it is the leader, the member that joined first becomes the leader."""
        del self._by_id[member.member_id]
        self._count(member, -1)
        if member.group_instance_id is not None:
            self.static_ids.pop(member.group_instance_id, None)
        if self.leader_id == member.member_id:
            self.leader_id = next(iter(self._by_id), None)

    def replace(self, old: Member, new: Member) -> None:
        """Replace `old` by `new`, which is the same static member under a new member id.

        `new` gets the place of `old` in the order.
        """
        assert new.group_instance_id is not None
        self._count(old, -1)
        self._count(new, 1)
        self._by_id = OrderedDict(
            (new.member_id if member is old else member_id, new if member is old else member)
            for member_id, member in self._by_id.items()
        )
        self.static_ids[new.group_instance_id] = new.member_id
        if self.leader_id == old.member_id:
            self.leader_id = new.member_id

    def update(self, member: Member, request: JoinRequest) -> None:
        """Set the fields of a member from its JoinGroup request."""
        self._count(member, -1)
        member.client_id, member.client_host = request.client_id, request.client_host
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.protocols = request.protocols
        self._count(member, 1)

    def _count(self, member: Member, sign: int) -> None:
        self.revision += 1
        self.metadata_bytes += sign * member.metadata_bytes
        for name in {name for name, _ in member.protocols}:
            self._supporter_counts[name] += sign
            if not self._supporter_counts[name]:
                del self._supporter_counts[name]

    def common_protocols(self) -> set[str]:
        """Return the protocols that every member supports."""
        return {name for name, count in self._supporter_counts.items() if count == len(self._by_id)}

    def supports_any(self, protocols: Iterable[Protocol]) -> bool:
        """Return True if at least one of these protocols is supported by every member."""
        return any(self._supporter_counts[name] == len(self._by_id) for name, _ in protocols)

    def max_rebalance_timeout_ms(self) -> int:
        """Return the longest rebalance timeout of all members in ms; 0 without members."""
        return max((member.rebalance_timeout_ms for member in self._by_id.values()), default=0)

    def set_deadline(self, member: Member, deadline_ms: int) -> None:
        """Set the time in ms at which `tick` removes the member, unless a waiting request protects it (see
        `Member`).
        """
        member.deadline_ms = deadline_ms
        if self._due_ms is None or deadline_ms < self._due_ms:
            self._due_ms = deadline_ms

    @property
    def first_deadline_ms(self) -> int | None:
        """A time in ms at or before the first deadline of the members; None if there are no members."""
        return self._due_ms if self._by_id else None

    def update_first_deadline(self, now_ms: int) -> None:
        """Set `first_deadline_ms` to the first deadline after `now_ms`. Members with an earlier deadline are
        protected by a waiting request.
        """
        coming = (member.deadline_ms for member in self._by_id.values() if member.deadline_ms > now_ms)
        self._due_ms = min(coming, default=None)


class GroupVersion(NamedTuple):
    """A version of a group's state. Requests wait until the version with their changes is stored.

    The generation changes with each rebalance. The other fields distinguish versions within a generation.
    """

    generation_id: int
    has_assignments: bool
    replacement_count: int


class _Replacement(NamedTuple):
    """A static member's new member id in a stable group. Its JoinGroup request waits until the id is stored.

    `number` counts the group's replacements up to this one. `old_leader_id` is the leader before the
    replacement.
    """

    number: int
    supports_skip_assignment: bool
    old_leader_id: str | None


_CAN_REBALANCE = (GroupState.STABLE, GroupState.COMPLETING_REBALANCE, GroupState.EMPTY)


class ClassicGroup:
    """One group of the classic protocol. Times are milliseconds since the epoch."""

    def __init__(
        self,
        group_id: str,
        now_ms: int,
        *,
        initial_delay_ms: int = 0,
        max_size: int = 2**31,
        max_metadata_bytes: int = 2**31,
    ) -> None:
        self.group_id = group_id
        self.state = GroupState.EMPTY
        self.state_since_ms = now_ms
        self.generation_id = 0
        self.protocol_type: str | None = None
        self.protocol_name: str | None = None
        self.members = MemberList()
        self.is_unsaved = False
        self._pending_member_ids = Deadlines()
        """Member ids that the group has given to clients and that have not been used in a join yet, with the
        deadline for that join.
        """
        self._pending_order: OrderedDict[str, None] = OrderedDict()
        """The keys of `_pending_member_ids` in the order in which they were given."""
        self._pending_bytes = 0
        """The memory of `_pending_member_ids`, as `metadata_bytes` counts it."""
        self._initial_delay_ms, self._max_size = initial_delay_ms, max_size
        self._max_metadata_bytes = max_metadata_bytes
        self._is_initial_rebalance = False
        self._deadline_ms: int | None = None
        """During a rebalance, the time in ms at which it ends.

        After a rebalance, the time in ms at which members that have not sent SyncGroup are removed.
        """
        self._replacement_count = 0
        self._replacements: dict[str, _Replacement] = {}
        """Replacements of static members whose new member id is not stored yet, by that id."""

    @property
    def is_unused(self) -> bool:
        """True if no client has ever joined or been given a member id. Such a group is not stored."""
        return not (self.generation_id or self.members or self._pending_member_ids)

    # JoinGroup

    def join(self, request: JoinRequest, new_member_id: str, now_ms: int, callback: JoinCallback) -> None:
        """Handle JoinGroup: add a new member, or let an existing one join again.

        `new_member_id` is the id for a member that has none. The callback gets the result when all members
        have joined, or immediately if the join fails or needs no rebalance.
        """
        error = self._join_error(request, new_member_id)
        if error is not None:
            callback(JoinResult(error.code, "" if error is GroupMaxSizeReached else request.member_id))
        elif request.member_id:
            self._join_with_id(request, now_ms, callback)
        elif request.group_instance_id in self.members.static_ids:
            self._replace_static(request, new_member_id, now_ms, callback)
        elif request.group_instance_id is None and request.requires_known_member_id:
            self._add_pending(new_member_id, now_ms + request.session_timeout_ms)
            callback(JoinResult(MemberIdRequired.code, new_member_id))
        else:
            self._add(request, new_member_id, now_ms, callback)

    def _join_error(self, request: JoinRequest, new_member_id: str) -> type[BrokerError] | None:
        if self.state is GroupState.DEAD:
            return CoordinatorNotAvailable
        if self._is_full_for(request) or self._is_too_large_with(request, new_member_id):
            return GroupMaxSizeReached
        if not self.supports(request):
            return InconsistentGroupProtocol
        if not request.member_id:
            return None
        if request.member_id in self._pending_member_ids:
            # Only dynamic members get an id before they join. If a static member could join with such an id,
            # two members could have its instance id. See
            # test_an_id_given_to_a_dynamic_member_takes_no_instance.
            return UnknownMemberId if request.group_instance_id is not None else None
        return self._member_error(request.member_id, request.group_instance_id)

    def _is_full_for(self, request: JoinRequest) -> bool:
        if self.state is GroupState.EMPTY or len(self.members) < self._max_size:
            return False
        existing = self.members.get(request.member_id)
        if self.state is GroupState.PREPARING_REBALANCE:
            joined_count = sum(member.join_callback is not None for member in self.members.values())
            has_joined = existing is not None and existing.join_callback is not None
            return not has_joined and joined_count >= self._max_size
        return existing is None and request.group_instance_id not in self.members.static_ids

    def _is_too_large_with(self, request: JoinRequest, new_member_id: str) -> bool:
        old_id = request.member_id or self.members.static_ids.get(request.group_instance_id or "", "")
        old = self.members.get(old_id)
        others_bytes = self.members.metadata_bytes - (0 if old is None else old.metadata_bytes)
        own_bytes = metadata_bytes(request.protocols) + _id_bytes(request, request.member_id or new_member_id)
        return others_bytes + own_bytes > self._max_metadata_bytes

    def supports(self, request: JoinRequest) -> bool:
        """Return True if the request has the group's protocol type and a protocol that all members support.

        An empty group accepts every request that has a protocol type and at least one protocol.
        """
        if not self.members:
            return bool(request.protocol_type and request.protocols)
        return request.protocol_type == self.protocol_type and self.members.supports_any(request.protocols)

    def _join_with_id(self, request: JoinRequest, now_ms: int, callback: JoinCallback) -> None:
        if request.member_id in self._pending_member_ids:
            self._remove_pending(request.member_id)
            self._add(request, request.member_id, now_ms, callback)
            return
        member = self.members[request.member_id]
        is_leader = member.member_id == self.members.leader_id
        is_same = member.protocols == request.protocols
        is_completing = self.state is GroupState.COMPLETING_REBALANCE
        if is_same and (is_completing or (self.state is GroupState.STABLE and not is_leader)):
            self._renew_session(member, now_ms)
            callback(self._join_result(member, self._members_for_leader() if is_leader else ()))
            return
        self._update(member, request, now_ms, callback)
        self._rebalance(now_ms)

    def _add_pending(self, member_id: str, deadline_ms: int) -> None:
        """Note a member id that a client was given.

        If the unused ids are too large together, forget those that were given first. A client with such an
        id gets UNKNOWN_MEMBER_ID, and asks for another one. A member id contains the client id, which may
        have 32,767 bytes, and is kept for up to group.max.session.timeout.ms. See
        test_the_memory_of_unused_member_ids_is_limited.
        """
        self._pending_member_ids.set(member_id, deadline_ms)
        self._pending_order[member_id] = None
        self._pending_bytes += _pending_bytes(member_id)
        while self._pending_bytes > self._max_metadata_bytes and len(self._pending_order) > 1:
            self._remove_pending(next(iter(self._pending_order)))

    @property
    def unused_id_bytes(self) -> int:
        """Approximate size in memory of the member ids that clients were given and have not used."""
        return self._pending_bytes

    def forget_unused_ids(self) -> None:
        """Forget the member ids that clients were given first and have not used, at most
        MAX_UNUSED_IDS_AT_ONCE of them. Call `tick` afterwards, because a rebalance may have waited for these
        clients.
        """
        for member_id in list(islice(self._pending_order, MAX_UNUSED_IDS_AT_ONCE)):
            self._remove_pending(member_id)

    def _remove_pending(self, member_id: str) -> None:
        self._pending_member_ids.remove(member_id)
        self._forget_pending(member_id)

    def _forget_pending(self, member_id: str) -> None:
        del self._pending_order[member_id]
        self._pending_bytes -= _pending_bytes(member_id)

    def _add(self, request: JoinRequest, member_id: str, now_ms: int, callback: JoinCallback) -> None:
        member = Member(member_id, request.group_instance_id, "", "", 0, 0, ())
        if not self.members:
            self.protocol_type = request.protocol_type
        self.members.add(member)
        self.members.leader_id = self.members.leader_id or member_id
        self._update(member, request, now_ms, callback)
        if self._is_initial_rebalance and self._deadline_ms is not None:
            latest_ms = self.state_since_ms + self.members.max_rebalance_timeout_ms()
            self._deadline_ms = min(now_ms + self._initial_delay_ms, latest_ms)
        self._rebalance(now_ms)

    def _update(self, member: Member, request: JoinRequest, now_ms: int, callback: JoinCallback) -> None:
        """Set the member's fields from its JoinGroup request. The request waits until `join_callback` is
        called.
        """
        self.members.update(member, request)
        member.join_callback = callback
        timeout_ms = NEW_MEMBER_TIMEOUT_MS if member.is_new else request.session_timeout_ms
        self.members.set_deadline(member, now_ms + timeout_ms)

    def _replace_static(
        self, request: JoinRequest, new_member_id: str, now_ms: int, callback: JoinCallback
    ) -> None:
        """Give a new member id to a static member that has restarted.

        In a stable group this needs no rebalance, unless the group's protocol changes.
        """
        old_leader_id = self.members.leader_id
        old = self.members[self.members.static_ids[request.group_instance_id or ""]]
        old.fail_pending_requests(FencedInstanceId, old.member_id)
        member = Member(
            new_member_id, request.group_instance_id, "", "", 0, 0, (), old.assignment, is_new=False
        )
        # As in Kafka, do not remove this member of a stable group for not sending SyncGroup.
        member.has_synced = True
        self.members.replace(old, member)
        self._update(member, request, now_ms, callback)
        protocols = self.members.common_protocols()
        if (
            self.state is not GroupState.STABLE
            or select_protocol(self.members.values(), protocols) != self.protocol_name
        ):
            self._rebalance(now_ms)
            return
        # The request waits until the new id is stored. Otherwise a broker that restarts could have only the
        # old id in its log, and would fence this client forever. See
        # test_a_static_member_gets_its_new_id_only_after_it_is_stored.
        self._replacement_count += 1
        self._replacements[new_member_id] = _Replacement(
            self._replacement_count, request.supports_skip_assignment, old_leader_id
        )
        self.is_unsaved = True

    def _complete_replacements(self, error: BrokerError | None, version: GroupVersion, now_ms: int) -> None:
        """Answer the static members whose new ids are in the stored `version`.

        If storing failed, these members get `error`. If a rebalance has begun in the meantime, they get no
        response here, and wait for the end of the rebalance like all other members.
        """
        for member_id, replacement in list(self._replacements.items()):
            if replacement.number > version.replacement_count:
                continue
            del self._replacements[member_id]
            member = self.members.get(member_id)
            if member is None or member.join_callback is None or self.state is not GroupState.STABLE:
                continue
            self._renew_session(member, now_ms)
            is_leader = self.members.leader_id == member_id
            if error is not None:
                result = JoinResult(error.code, "")
            elif replacement.supports_skip_assignment:
                listed = self._members_for_leader() if is_leader else ()
                result = self._join_result(member, listed)._replace(skip_assignment=is_leader)
            else:
                # An old client would assign partitions again if the response named it as the leader. So name
                # the previous leader.
                result = self._join_result(member, ())._replace(leader=replacement.old_leader_id or "")
            member.complete_join(result)

    # Rebalances

    def _rebalance(self, now_ms: int) -> None:
        """Begin a rebalance, unless one is in progress. All members must join again."""
        if self.state in _CAN_REBALANCE:
            if self.state is GroupState.COMPLETING_REBALANCE:
                for member in self.members.values():
                    member.assignment = b""
                    self._complete_sync(member, SyncResult(RebalanceInProgress.code), now_ms)
            self._is_initial_rebalance = self.state is GroupState.EMPTY
            timeout_ms = self.members.max_rebalance_timeout_ms()
            delay_ms = self._initial_delay_ms if self._is_initial_rebalance else timeout_ms
            self._enter(GroupState.PREPARING_REBALANCE, now_ms, now_ms + delay_ms)
        if self._is_initial_rebalance and not self._initial_delay_ms:
            # A group's first rebalance does not wait for clients that got a member id and have not joined,
            # because they may be dead. See the scenario "A member id that was given out holds up nobody".
            self._complete(now_ms)
        elif not self._is_initial_rebalance:
            self._complete_if_all_joined(now_ms)

    def _complete_if_all_joined(self, now_ms: int) -> None:
        is_open = self.state is GroupState.PREPARING_REBALANCE and not self._pending_member_ids
        if is_open and all(member.join_callback is not None for member in self.members.values()):
            self._complete(now_ms)

    def _complete(self, now_ms: int) -> None:
        """Begin the next generation with the members that have joined and with all static members. Remove the
        other dynamic members. If no member is left, the group becomes Empty.
        """
        self._is_initial_rebalance = False
        for member in list(self.members.values()):
            if member.join_callback is None and member.group_instance_id is None:
                self._remove(member)
        joined = [member for member in self.members.values() if member.join_callback is not None]
        if self.members and not joined:
            # Only static members are left, and none has joined yet. Wait longer, because they may still join.
            # The minimum is needed because their rebalance timeout may be 0 or -1.
            timeout_ms = max(self.members.max_rebalance_timeout_ms(), _MIN_EXTENSION_MS)
            self._deadline_ms = now_ms + timeout_ms
            return
        self.generation_id += 1
        if not joined:
            self.protocol_name, self.is_unsaved = None, True
            self._enter(GroupState.EMPTY, now_ms, None)
            return
        if self.members.leader_id not in {member.member_id for member in joined}:
            self.members.leader_id = joined[0].member_id
        self.protocol_name = select_protocol(self.members.values(), self.members.common_protocols())
        timeout_ms = self.members.max_rebalance_timeout_ms()
        self._enter(GroupState.COMPLETING_REBALANCE, now_ms, now_ms + timeout_ms)
        for member in self.members.values():
            member.has_synced = False
        for member in joined:
            self._renew_session(member, now_ms)
            member.is_new = False
            is_leader = member.member_id == self.members.leader_id
            member.complete_join(self._join_result(member, self._members_for_leader() if is_leader else ()))

    def _enter(self, state: GroupState, now_ms: int, deadline_ms: int | None) -> None:
        self.state, self.state_since_ms, self._deadline_ms = state, now_ms, deadline_ms

    def _members_for_leader(self) -> tuple[JoinedMember, ...]:
        return tuple(
            JoinedMember(member.member_id, member.group_instance_id, member.metadata(self.protocol_name))
            for member in self.members.values()
        )

    def _join_result(self, member: Member, members: tuple[JoinedMember, ...]) -> JoinResult:
        return JoinResult(
            0,
            member.member_id,
            self.generation_id,
            self.protocol_type,
            self.protocol_name,
            self.members.leader_id or "",
            members,
        )

    # SyncGroup

    def sync(
        self,
        member_id: str,
        group_instance_id: str | None,
        generation_id: int,
        protocol: tuple[str | None, str | None],
        assignments: Mapping[str, bytes],
        now_ms: int,
        callback: SyncCallback,
    ) -> None:
        """Handle SyncGroup: answer the member with its assignment once the assignment is stored.

        The leader's request has the `assignments` of all members. `protocol` is the protocol's type and name,
        each None if the request does not have it.
        """
        error = self._member_error(member_id, group_instance_id, generation_id)
        if error is None and not self._is_protocol(*protocol):
            error = InconsistentGroupProtocol
        if error is None and self.state is GroupState.PREPARING_REBALANCE:
            error = RebalanceInProgress
        if error is not None:
            callback(SyncResult(error.code))
            return
        member = self.members[member_id]
        self._renew_session(member, now_ms)
        member.has_synced = True
        if self.state is GroupState.STABLE:
            callback(self._sync_result(member))
            return
        member.sync_callback = callback
        if member_id == self.members.leader_id:
            for other in self.members.values():
                other.assignment = assignments.get(other.member_id, b"")
            self.is_unsaved = True

    @property
    def version(self) -> GroupVersion:
        """The version of the group's current state. It has assignments once the leader has sent SyncGroup."""
        leader = self.members.leader
        has_assignments = leader is not None and leader.has_synced
        return GroupVersion(self.generation_id, has_assignments, self._replacement_count)

    def complete_save(self, error: BrokerError | None, version: GroupVersion, now_ms: int) -> None:
        """Answer the requests that wait until this version is stored. If storing failed, they get `error`.

        A record proves only the version that was encoded. Requests that changed the group later wait for a
        later record. See test_a_late_save_of_an_empty_group_does_not_end_a_rebalance.
        """
        if isinstance(error, NotCoordinator) and self.state in (GroupState.EMPTY, GroupState.STABLE):
            # The change could not be stored, so store the group again. Otherwise a restart would bring back
            # members that have left.
            self.is_unsaved = True
        self._complete_replacements(error, version, now_ms)
        is_completing = self.state is GroupState.COMPLETING_REBALANCE
        if version != self.version or not is_completing or not version.has_assignments:
            return
        if error is None:
            # Keep `_deadline_ms`: members that have joined must send SyncGroup before it passes (see `tick`).
            self._enter(GroupState.STABLE, now_ms, self._deadline_ms)
        for member in self.members.values():
            if error is not None:
                member.assignment = b""
            result = self._sync_result(member) if error is None else SyncResult(error.code)
            self._complete_sync(member, result, now_ms)
        if error is not None:
            self._rebalance(now_ms)

    def _complete_sync(self, member: Member, result: SyncResult, now_ms: int) -> None:
        """Answer the member's SyncGroup request if one is waiting, and renew the member's session.

        Many clients send no heartbeats while their SyncGroup waits, and the leader may take longer than a
        session timeout.
        """
        callback, member.sync_callback = member.sync_callback, None
        if callback is not None:
            self._renew_session(member, now_ms)
            callback(result)

    def _sync_result(self, member: Member) -> SyncResult:
        return SyncResult(0, self.protocol_type, self.protocol_name, member.assignment)

    def _is_protocol(self, protocol_type: str | None, protocol_name: str | None) -> bool:
        return protocol_type in (None, self.protocol_type) and protocol_name in (None, self.protocol_name)

    # Heartbeats, LeaveGroup and deadlines

    def heartbeat(
        self, member_id: str, group_instance_id: str | None, generation_id: int, now_ms: int
    ) -> int:
        """Handle Heartbeat: renew the member's session. Return the error code of the response."""
        error = self._member_error(member_id, group_instance_id, generation_id)
        if error is not None:
            return error.code
        self._renew_session(self.members[member_id], now_ms)
        return RebalanceInProgress.code if self.state is GroupState.PREPARING_REBALANCE else 0

    def _renew_session(self, member: Member, now_ms: int) -> None:
        self.members.set_deadline(member, now_ms + member.session_timeout_ms)

    def restore_member(self, member: Member, now_ms: int) -> None:
        """Add a member that was read from the log at the start of the broker. The member's session starts at
        `now_ms`.
        """
        self.members.add(member)
        self._renew_session(member, now_ms)

    def leave(self, identities: Iterable[tuple[str, str | None]], now_ms: int) -> list[int]:
        """Handle LeaveGroup: remove the members that `identities` names as (member id, instance id).

        Return an error code for each, which is 0 for success. The remaining members rebalance once, after all
        of these have left. If they rebalanced after each removal, the first removal could complete a
        rebalance that includes a member that is about to leave. Source: kafka
        GroupMetadataManager.classicGroupLeaveToClassicGroup.
        """
        codes = [self._leave(member_id, group_instance_id) for member_id, group_instance_id in identities]
        # Rebalance even if the client that left had only a member id and had not joined yet.
        if 0 in codes and self.state is not GroupState.EMPTY:
            self._rebalance(now_ms)
        return codes

    def _leave(self, member_id: str, group_instance_id: str | None) -> int:
        """Remove one member. For a static member the instance id is enough."""
        if group_instance_id is not None and not member_id:
            member_id = self.members.static_ids.get(group_instance_id, "")
        if member_id in self._pending_member_ids:
            self._remove_pending(member_id)
            return 0
        error = self._member_error(member_id, group_instance_id)
        if error is not None:
            return error.code
        self._remove(self.members[member_id])
        return 0

    def _remove(self, member: Member) -> None:
        member.fail_pending_requests(UnknownMemberId, "")
        self.members.remove(member)

    def tick(self, now_ms: int) -> int:
        """Handle the deadlines that have passed. Forget member ids that were not used in time. Remove members
        whose session has expired or that have not sent SyncGroup in time, and end a rebalance that waits for
        members.

        Return the number of forgotten ids, at most MAX_UNUSED_IDS_AT_ONCE. Other such ids stay due. See
        test_many_unused_member_ids_are_forgotten_a_few_at_once.
        """
        forgotten = self._pending_member_ids.take(now_ms, MAX_UNUSED_IDS_AT_ONCE)
        for member_id in forgotten:
            self._forget_pending(member_id)
        self._tick_members(now_ms)
        return len(forgotten)

    def _tick_members(self, now_ms: int) -> None:
        expired = [
            member
            for member in self.members.values()
            if member.deadline_ms <= now_ms
            and member.sync_callback is None
            and (member.join_callback is None or member.is_new)
        ]
        for member in expired:
            self._remove(member)
        # As in `leave`, rebalance once, after the last removal.
        if expired:
            self._rebalance(now_ms)
        self.members.update_first_deadline(now_ms)
        if not self._is_initial_rebalance:
            self._complete_if_all_joined(now_ms)
        if self._deadline_ms is None or self._deadline_ms > now_ms:
            return
        if self.state is GroupState.PREPARING_REBALANCE:
            self._complete(now_ms)
        elif self.state in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE):
            # Remove members that have not sent SyncGroup, even from a stable group. A member that only sends
            # heartbeats, and never SyncGroup, does not read the partitions that are assigned to it. Source:
            # kafka GroupMetadataManager.expirePendingSync. See
            # test_a_member_that_sends_no_sync_in_time_is_removed_even_from_a_stable_group.
            self._deadline_ms = None
            late = [member for member in self.members.values() if not member.has_synced]
            for member in late:
                self._remove(member)
            if late:
                self._rebalance(now_ms)

    def next_deadline_ms(self) -> int | None:
        """Return the next time in ms at which `tick` must run; None if there is no deadline."""
        deadlines = (self.members.first_deadline_ms, self._pending_member_ids.next_ms, self._deadline_ms)
        return min((due_ms for due_ms in deadlines if due_ms is not None), default=None)

    def _member_error(
        self, member_id: str, group_instance_id: str | None, generation_id: int | None = None
    ) -> type[BrokerError] | None:
        """Return the error that rejects a request with this member id; None if the request is accepted.

        `generation_id` is None for a kind of request that has no generation.
        """
        if self.state is GroupState.DEAD:
            return CoordinatorNotAvailable
        if group_instance_id is not None:
            current_id = self.members.static_ids.get(group_instance_id)
            if current_id is None:
                return UnknownMemberId
            if current_id != member_id:
                return FencedInstanceId
        if member_id not in self.members:
            return UnknownMemberId
        if generation_id is not None and generation_id != self.generation_id:
            return IllegalGeneration
        return None

    # OffsetCommit

    def commit_error(
        self, member_id: str, group_instance_id: str | None, generation_id: int, *, is_transactional: bool
    ) -> type[BrokerError] | None:
        """Return the error that rejects an offset commit; None if the commit is accepted.

        An empty group accepts a commit without a generation from any client. Within a transaction, every
        group also accepts a commit without a member id, because old clients do not send one. Source:
        behaviour T7 (docs/behaviours.md).
        """
        if self.state is GroupState.DEAD:
            return CoordinatorNotAvailable
        is_anonymous = generation_id < 0 and not member_id and group_instance_id is None
        if generation_id < 0 and self.state is GroupState.EMPTY:
            return None
        if is_anonymous:
            return None if is_transactional else UnknownMemberId
        error = self._member_error(member_id, group_instance_id, generation_id)
        if error is None and not is_transactional and self.state is GroupState.COMPLETING_REBALANCE:
            return RebalanceInProgress
        return error

    def note_commit(self, member_id: str, now_ms: int) -> None:
        """Renew a member's session after an offset commit outside of transactions.

        A client that commits in time stays in its group even without heartbeats.
        Source: kafka OffsetMetadataManager.commitOffset.
        """
        member = self.members.get(member_id)
        if member is not None and self.state in (GroupState.STABLE, GroupState.PREPARING_REBALANCE):
            self._renew_session(member, now_ms)
