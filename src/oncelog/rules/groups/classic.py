"""A classic consumer group: who belongs to it, in which generation, and when they must join anew.

    Empty                 no members
    PreparingRebalance    members are to join; ends when all have, or after the longest rebalance timeout
    CompletingRebalance   all know the generation; the leader is to tell who reads what
    Stable                all have been told

A join that changes anything, a member that leaves or falls silent: PreparingRebalance again, from any state
but itself. Who waits is answered through the callable it came with. `is_unsaved`: the shell is to take the
flag back, to store the group and then to call `saved`, before anyone is told an assignment.
Source: Kafka's ClassicGroup, GroupMetadataManager.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from oncelog.rules.groups.classic_member import (
    GroupState,
    JoinAnswer,
    JoinedMember,
    JoinRequest,
    Member,
    SyncAnswer,
    WhenJoined,
    WhenSynced,
    metadata_bytes,
    select_protocol,
)
from oncelog.rules.groups.classic_members import Roster
from oncelog.rules.groups.deadlines import Deadlines

_MIN_EXTENSION_MS = 1000
"""How long a rebalance for which nobody came goes on at least, before it is looked at again."""


class Mark(NamedTuple):
    """What there is to store of a group: of which generation, and with which changes since it began."""

    generation_id: int
    has_assignments: bool
    replacement_count: int


class _Replacement(NamedTuple):
    """A static member's new id in a stable group, whose JoinGroup waits until it is stored.

    `number`: the count of replacements with it. `old_leader_id`: who led before it.
    """

    number: int
    knows_skip: bool
    old_leader_id: str | None


_CAN_REBALANCE = (GroupState.STABLE, GroupState.COMPLETING_REBALANCE, GroupState.EMPTY)


class ClassicGroup(Roster):
    """One group. Times are milliseconds since the epoch."""

    def __init__(
        self,
        group_id: str,
        now_ms: int,
        *,
        initial_delay_ms: int = 0,
        max_size: int = 2**31,
        max_metadata_bytes: int = 2**31,
    ) -> None:
        super().__init__()
        self.group_id = group_id
        self.state = GroupState.EMPTY
        self.state_since_ms = now_ms
        self.generation_id = 0
        self.is_unsaved = False
        self._pending = Deadlines()
        """Member ids that were given out, until their clients join with them."""
        self._initial_delay_ms, self._max_size = initial_delay_ms, max_size
        self._max_metadata_bytes = max_metadata_bytes
        self._is_initial = False
        self._deadline_ms: int | None = None
        self._replacement_count = 0
        self._replacements: dict[str, _Replacement] = {}
        """New member id -> the replacement that is not stored yet."""

    @property
    def is_unused(self) -> bool:
        """True when nobody ever joined or is about to: nothing of it is stored."""
        return not (self.generation_id or self.members or self._pending)

    # Joining

    def join(self, request: JoinRequest, fresh_id: str, now_ms: int, answer: WhenJoined) -> None:
        """A member joins, again or as `fresh_id`; answered when all have, at once if nothing changes."""
        error = self._refusal_of_join(request)
        if error is not None:
            answer(JoinAnswer(error.code, "" if error is GroupMaxSizeReached else request.member_id))
        elif request.member_id:
            self._join_known(request, now_ms, answer)
        elif request.group_instance_id in self.static_members:
            self._replace_static(request, fresh_id, now_ms, answer)
        elif request.group_instance_id is None and request.requires_known_id:
            self._pending.set(fresh_id, now_ms + request.session_timeout_ms)
            answer(JoinAnswer(MemberIdRequired.code, fresh_id))
        else:
            self._add(request, fresh_id, now_ms, answer)

    def _refusal_of_join(self, request: JoinRequest) -> type[BrokerError] | None:
        if self.state is GroupState.DEAD:
            return CoordinatorNotAvailable
        if self._is_full_for(request) or self._is_too_large_with(request):
            return GroupMaxSizeReached
        if not self.supports(request):
            return InconsistentGroupProtocol
        if not request.member_id:
            return None
        if request.member_id in self._pending:
            # Only dynamic members are given ids. A static one would join twice under its instance.
            return UnknownMemberId if request.group_instance_id is not None else None
        return self._refusal_of(request.member_id, request.group_instance_id)

    def _is_full_for(self, request: JoinRequest) -> bool:
        if self.state is GroupState.EMPTY or len(self.members) < self._max_size:
            return False
        if self.state is GroupState.PREPARING_REBALANCE:
            waiting = [each for each in self.members.values() if each.join is not None]
            known = self.members.get(request.member_id)
            return (known is None or known.join is None) and len(waiting) >= self._max_size
        is_known = request.member_id in self.members or request.group_instance_id in self.static_members
        return not is_known

    def _is_too_large_with(self, request: JoinRequest) -> bool:
        old_id = request.member_id or self.static_members.get(request.group_instance_id or "", "")
        old = self.members.get(old_id)
        others = self.metadata_bytes - (0 if old is None else old.metadata_bytes)
        return others + metadata_bytes(request.protocols) > self._max_metadata_bytes

    def _join_known(self, request: JoinRequest, now_ms: int, answer: WhenJoined) -> None:
        if request.member_id in self._pending:
            self._pending.remove(request.member_id)
            self._add(request, request.member_id, now_ms, answer)
            return
        member = self.members[request.member_id]
        is_leader = member.member_id == self.leader_id
        is_same = member.protocols == request.protocols
        is_completing = self.state is GroupState.COMPLETING_REBALANCE
        if is_same and (is_completing or (self.state is GroupState.STABLE and not is_leader)):
            self.touch(member, now_ms)
            answer(self._joined(member, self.told(is_leader and is_completing)))
            return
        self.update(member, request, now_ms, answer)
        self._rebalance(now_ms)

    def _add(self, request: JoinRequest, member_id: str, now_ms: int, answer: WhenJoined) -> None:
        member = Member(member_id, request.group_instance_id, "", "", 0, 0, ())
        if not self.members:
            self.protocol_type = request.protocol_type
        self.admit(member)
        self.leader_id = self.leader_id or member_id
        self.update(member, request, now_ms, answer)
        if self._is_initial and self._deadline_ms is not None:
            longest_ms = self.state_since_ms + self.longest_rebalance_ms()
            self._deadline_ms = min(now_ms + self._initial_delay_ms, longest_ms)
        self._rebalance(now_ms)

    def _replace_static(self, request: JoinRequest, fresh_id: str, now_ms: int, answer: WhenJoined) -> None:
        """A static member came back under a new member id; nobody joins anew if nothing else changed."""
        assert request.group_instance_id is not None
        old_id, old_leader = self.static_members[request.group_instance_id], self.leader_id
        old = self.members[old_id]
        self.dismiss(old, FencedInstanceId, old_id)
        self._count(old, -1)
        member = Member(fresh_id, request.group_instance_id, "", "", 0, 0, (), old.assignment, is_new=False)
        member.has_synced = True  # in a stable group nothing more is expected of it, as in Kafka
        self.members = {
            (fresh_id if each is old else member_id): (member if each is old else each)
            for member_id, each in self.members.items()
        }
        self.static_members[request.group_instance_id] = fresh_id
        if old_leader == old_id:
            self.leader_id = fresh_id
        self.update(member, request, now_ms, answer)
        if (
            self.state is not GroupState.STABLE
            or select_protocol(self.members.values(), self.common_protocols()) != self.protocol_name
        ):
            self._rebalance(now_ms)
            return
        # A restart that knew the old id alone would fence the client for good.
        # See test_a_static_member_gets_its_new_id_once_that_is_stored.
        self._replacement_count += 1
        self._replacements[fresh_id] = _Replacement(self._replacement_count, request.knows_skip, old_leader)
        self.is_unsaved = True

    def _answer_replacements(self, error: BrokerError | None, mark: Mark, now_ms: int) -> None:
        """Answer the static members whose new ids are stored as of `mark`, or could not be.

        Those that a rebalance overtook wait for its end with all others.
        """
        for member_id, replacement in list(self._replacements.items()):
            if replacement.number > mark.replacement_count:
                continue
            del self._replacements[member_id]
            member = self.members.get(member_id)
            if member is None or member.join is None or self.state is not GroupState.STABLE:
                continue
            waiting, member.join = member.join, None
            self.touch(member, now_ms)
            is_leader = self.leader_id == member_id
            if error is not None:
                waiting(JoinAnswer(error.code, ""))
            elif replacement.knows_skip:
                waiting(self._joined(member, self.told(is_leader))._replace(skip_assignment=is_leader))
            else:
                waiting(self._joined(member, ())._replace(leader=replacement.old_leader_id or ""))

    # From generation to generation

    def _rebalance(self, now_ms: int) -> None:
        """Something changed: all members are to join anew."""
        if self.state in _CAN_REBALANCE:
            if self.state is GroupState.COMPLETING_REBALANCE:
                for member in self.members.values():
                    member.assignment = b""
                    self.answer_sync(member, SyncAnswer(RebalanceInProgress.code), now_ms)
            self._is_initial = self.state is GroupState.EMPTY
            delay_ms = self._initial_delay_ms if self._is_initial else self.longest_rebalance_ms()
            self._enter(GroupState.PREPARING_REBALANCE, now_ms, now_ms + delay_ms)
        if self._is_initial and not self._initial_delay_ms:
            # A group's first rebalance ends after the initial delay, whoever was only given a member id.
            # Such a client may be dead. See the scenario "A member id that was given out holds up nobody".
            self._complete(now_ms)
        elif not self._is_initial:
            self._complete_if_all_joined(now_ms)

    def _complete_if_all_joined(self, now_ms: int) -> None:
        is_open = self.state is GroupState.PREPARING_REBALANCE and not self._pending
        if is_open and all(member.join is not None for member in self.members.values()):
            self._complete(now_ms)

    def _complete(self, now_ms: int) -> None:
        """The next generation: of those that joined, and of static members that may still come."""
        self._is_initial = False
        for member in [m for m in self.members.values() if m.join is None and m.group_instance_id is None]:
            self.forget(member)
        joined = [member for member in self.members.values() if member.join is not None]
        if self.members and not joined:
            # Static members alone, which may still come. A client may have given 0 or -1 as its time-out.
            self._deadline_ms = now_ms + max(self.longest_rebalance_ms(), _MIN_EXTENSION_MS)
            return
        self.generation_id += 1
        if not joined:
            self.protocol_name, self.is_unsaved = None, True
            self._enter(GroupState.EMPTY, now_ms, None)
            return
        if self.leader_id not in {member.member_id for member in joined}:
            self.leader_id = joined[0].member_id
        self.protocol_name = select_protocol(self.members.values(), self.common_protocols())
        self._enter(GroupState.COMPLETING_REBALANCE, now_ms, now_ms + self.longest_rebalance_ms())
        for member in self.members.values():
            member.has_synced = False
        for member in joined:
            self.touch(member, now_ms)
            member.is_new, waiting, member.join = False, member.join, None
            assert waiting is not None
            waiting(self._joined(member, self.told(member.member_id == self.leader_id)))

    def _enter(self, state: GroupState, now_ms: int, deadline_ms: int | None) -> None:
        self.state, self.state_since_ms, self._deadline_ms = state, now_ms, deadline_ms

    def _joined(self, member: Member, members: tuple[JoinedMember, ...]) -> JoinAnswer:
        return JoinAnswer(
            0,
            member.member_id,
            self.generation_id,
            self.protocol_type,
            self.protocol_name,
            self.leader_id or "",
            members,
        )

    # The assignment

    def sync(
        self,
        member_id: str,
        group_instance_id: str | None,
        generation_id: int,
        protocol: tuple[str | None, str | None],
        assignments: Mapping[str, bytes],
        now_ms: int,
        answer: WhenSynced,
    ) -> None:
        """A member asks for its share; the leader brings all. `protocol`: type and name, None unsaid."""
        error = self._refusal_of(member_id, group_instance_id, generation_id)
        if error is None and not self._is_protocol(*protocol):
            error = InconsistentGroupProtocol
        if error is None and self.state is GroupState.PREPARING_REBALANCE:
            error = RebalanceInProgress
        if error is not None:
            answer(SyncAnswer(error.code))
            return
        member = self.members[member_id]
        self.touch(member, now_ms)
        member.has_synced = True
        if self.state is GroupState.STABLE:
            answer(self._share(member))
            return
        member.sync = answer
        if member_id == self.leader_id:
            for each in self.members.values():
                each.assignment = assignments.get(each.member_id, b"")
            self.is_unsaved = True

    @property
    def mark(self) -> Mark:
        """What there is to store. The assignments are there once the leader has brought them."""
        leader = self.members.get(self.leader_id or "")
        has_assignments = leader is not None and leader.has_synced
        return Mark(self.generation_id, has_assignments, self._replacement_count)

    def saved(self, error: BrokerError | None, mark: Mark, now_ms: int) -> None:
        """The group is stored as of `mark`, or could not be; those that wait for that are told.

        What came since is stored by itself. A group at rest that the disk refused is to be stored again:
        otherwise a restart would bring back members that have left.
        """
        if isinstance(error, NotCoordinator) and self.state in (GroupState.EMPTY, GroupState.STABLE):
            self.is_unsaved = True
        self._answer_replacements(error, mark, now_ms)
        is_completing = self.state is GroupState.COMPLETING_REBALANCE
        if mark != self.mark or not is_completing or not mark.has_assignments:
            return
        if error is None:
            # The deadline stays: who has joined must also ask for its share in time (see `tick`).
            self._enter(GroupState.STABLE, now_ms, self._deadline_ms)
        for member in self.members.values():
            if error is not None:
                member.assignment = b""
            answer = self._share(member) if error is None else SyncAnswer(error.code)
            self.answer_sync(member, answer, now_ms)
        if error is not None:
            self._rebalance(now_ms)

    def _share(self, member: Member) -> SyncAnswer:
        return SyncAnswer(0, self.protocol_type, self.protocol_name, member.assignment)

    def _is_protocol(self, protocol_type: str | None, protocol_name: str | None) -> bool:
        return protocol_type in (None, self.protocol_type) and protocol_name in (None, self.protocol_name)

    # Staying and leaving

    def heartbeat(
        self, member_id: str, group_instance_id: str | None, generation_id: int, now_ms: int
    ) -> int:
        """The error code for a member that says it is there."""
        error = self._refusal_of(member_id, group_instance_id, generation_id)
        if error is not None:
            return error.code
        self.touch(self.members[member_id], now_ms)
        return RebalanceInProgress.code if self.state is GroupState.PREPARING_REBALANCE else 0

    def leave(self, identities: Iterable[tuple[str, str | None]], now_ms: int) -> list[int]:
        """Remove members, given by member id and instance; return an error code for each.

        The others join again once, after all of these have left: the first to go must not complete a
        rebalance that still counts the next one. Source: kafka GroupMetadataManager,
        classicGroupLeaveToClassicGroup.
        """
        codes = [self._leave(member_id, group_instance_id) for member_id, group_instance_id in identities]
        # They join again also after a client that had only been given a member id.
        if 0 in codes and self.state is not GroupState.EMPTY:
            self._rebalance(now_ms)
        return codes

    def _leave(self, member_id: str, group_instance_id: str | None) -> int:
        """Forget one member. A static one may be named by its instance alone."""
        if group_instance_id is not None and not member_id:
            member_id = self.static_members.get(group_instance_id, "")
        if member_id in self._pending:
            self._pending.remove(member_id)
            return 0
        error = self._refusal_of(member_id, group_instance_id)
        if error is not None:
            return error.code
        self.forget(self.members[member_id])
        return 0

    def tick(self, now_ms: int) -> None:
        """What time brings: silent members go, a rebalance ends without those that did not come."""
        self._pending.take(now_ms)  # their clients may have died
        for member in list(self.members.values()):
            is_waiting = member.sync is not None or (member.join is not None and not member.is_new)
            if member.deadline_ms <= now_ms and not is_waiting and member.member_id in self.members:
                self._remove(member, now_ms)
        self.look_at_deadlines(now_ms)
        if not self._is_initial:
            self._complete_if_all_joined(now_ms)
        if self._deadline_ms is None or self._deadline_ms > now_ms:
            return
        if self.state is GroupState.PREPARING_REBALANCE:
            self._complete(now_ms)
        elif self.state in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE):
            # Also in a stable group: its partitions would be nobody's while such a member sends heartbeats.
            # Source: kafka GroupMetadataManager.expirePendingSync.
            self._deadline_ms = None
            late = [member for member in self.members.values() if not member.has_synced]
            for member in late:
                self.forget(member)
            if late:
                self._rebalance(now_ms)

    def next_deadline_ms(self) -> int | None:
        """When `tick` may have something to do; None: never."""
        dues = (self.first_deadline_ms, self._pending.next_ms, self._deadline_ms)
        return min((due for due in dues if due is not None), default=None)

    def _remove(self, member: Member, now_ms: int) -> None:
        self.forget(member)
        self._rebalance(now_ms)

    # Who may speak

    def _refusal_of(
        self, member_id: str, group_instance_id: str | None, generation_id: int | None = None
    ) -> type[BrokerError] | None:
        """Why a request in this member's name is refused. `generation_id` None: it names none."""
        if self.state is GroupState.DEAD:
            return CoordinatorNotAvailable
        if group_instance_id is not None:
            known_id = self.static_members.get(group_instance_id)
            if known_id is None:
                return UnknownMemberId
            if known_id != member_id:
                return FencedInstanceId
        if member_id not in self.members:
            return UnknownMemberId
        if generation_id is not None and generation_id != self.generation_id:
            return IllegalGeneration
        return None

    def refusal_of_commit(
        self, member_id: str, group_instance_id: str | None, generation_id: int, *, is_transactional: bool
    ) -> type[BrokerError] | None:
        """Return why an offset commit is refused (row T7); None: it is not.

        Without a generation an empty group takes it from anybody. Within a transaction every group does from
        a client that names no member either, because old clients name none.
        """
        if self.state is GroupState.DEAD:
            return CoordinatorNotAvailable
        is_anonymous = generation_id < 0 and not member_id and group_instance_id is None
        if generation_id < 0 and self.state is GroupState.EMPTY:
            return None
        if is_anonymous:
            return None if is_transactional else UnknownMemberId
        error = self._refusal_of(member_id, group_instance_id, generation_id)
        if error is None and not is_transactional and self.state is GroupState.COMPLETING_REBALANCE:
            return RebalanceInProgress
        return error

    def note_commit(self, member_id: str, now_ms: int) -> None:
        """Extend the session of a member whose offset commit, outside of transactions, was accepted.

        Clients without a heartbeat thread stay in their group by their commits.
        Source: Kafka's OffsetMetadataManager.commitOffset.
        """
        member = self.members.get(member_id)
        if member is not None and self.state in (GroupState.STABLE, GroupState.PREPARING_REBALANCE):
            self.touch(member, now_ms)
