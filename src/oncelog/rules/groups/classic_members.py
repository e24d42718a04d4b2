"""The members of a classic group: who there is, who leads, what they have in common.

Source: Kafka's ClassicGroup, ClassicGroupMember.
"""

from __future__ import annotations

from collections import Counter

from oncelog.errors import BrokerError, UnknownMemberId
from oncelog.rules.groups.classic_member import (
    JoinAnswer,
    JoinedMember,
    JoinRequest,
    Member,
    SyncAnswer,
    WhenJoined,
)

NEW_MEMBER_TIMEOUT_MS = 300_000
"""How long a member waits for its first generation before it counts as gone."""


class Roster:
    """Members by id, the static ones also by instance; the longest there leads first."""

    def __init__(self) -> None:
        self.protocol_type: str | None = None
        self.protocol_name: str | None = None
        self.leader_id: str | None = None
        self.members: dict[str, Member] = {}
        self.static_members: dict[str, str] = {}
        # Kept up to date with every change: a request of one member must not look at all of them.
        # See test_joins_of_many_members_do_not_look_at_each_other.
        self.metadata_bytes = 0
        self._supporters: Counter[str] = Counter()
        """Protocol name -> how many members support it."""
        self._due_ms: int | None = None
        """No later than the first deadline of a member that does not wait."""

    def admit(self, member: Member) -> None:
        """Make this a member, in the place of none."""
        self.members[member.member_id] = member
        if member.group_instance_id is not None:
            self.static_members[member.group_instance_id] = member.member_id
        self._count(member, 1)

    def _count(self, member: Member, sign: int) -> None:
        self.metadata_bytes += sign * member.metadata_bytes
        for name in {name for name, _ in member.protocols}:
            self._supporters[name] += sign
            if not self._supporters[name]:
                del self._supporters[name]

    def common_protocols(self) -> set[str]:
        """Return the protocols that every member supports."""
        return {name for name, count in self._supporters.items() if count == len(self.members)}

    def note_deadline(self, member: Member) -> None:
        """Have `first_deadline_ms` be no later than the member's deadline."""
        if self._due_ms is None or member.deadline_ms < self._due_ms:
            self._due_ms = member.deadline_ms

    @property
    def first_deadline_ms(self) -> int | None:
        """No later than the first deadline of a member that does not wait; None without members."""
        return self._due_ms if self.members else None

    def look_at_deadlines(self, now_ms: int) -> None:
        """Make `first_deadline_ms` exact: the first one that is still to come, also of members that wait."""
        coming = (each.deadline_ms for each in self.members.values() if each.deadline_ms > now_ms)
        self._due_ms = min(coming, default=None)

    def supports(self, request: JoinRequest) -> bool:
        """Whether the request and all members have a protocol in common; any will do in an empty group."""
        if not self.members:
            return bool(request.protocol_type and request.protocols)
        if request.protocol_type != self.protocol_type:
            return False
        return any(self._supporters[name] == len(self.members) for name, _ in request.protocols)

    def longest_rebalance_ms(self) -> int:
        """How long the members may take to join anew."""
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def told(self, is_leader: bool) -> tuple[JoinedMember, ...]:
        """The members as the leader is told of them; nobody else is."""
        if not is_leader:
            return ()
        return tuple(
            JoinedMember(each.member_id, each.group_instance_id, each.metadata(self.protocol_name))
            for each in self.members.values()
        )

    def update(self, member: Member, request: JoinRequest, now_ms: int, answer: WhenJoined) -> None:
        """Let a member join with what it says now, and wait."""
        self._count(member, -1)
        member.client_id, member.client_host = request.client_id, request.client_host
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.protocols = request.protocols
        self._count(member, 1)
        member.join = answer
        member.deadline_ms = now_ms + (NEW_MEMBER_TIMEOUT_MS if member.is_new else request.session_timeout_ms)
        self.note_deadline(member)

    def touch(self, member: Member, now_ms: int) -> None:
        """Begin the member's session again."""
        member.deadline_ms = now_ms + member.session_timeout_ms
        self.note_deadline(member)

    def answer_sync(self, member: Member, answer: SyncAnswer, now_ms: int) -> None:
        """Answer a member that waits for its assignment, and begin its session again.

        Many clients send no heartbeats while they wait. The leader may take longer than a session.
        """
        if member.sync is not None:
            waiting, member.sync = member.sync, None
            self.touch(member, now_ms)
            waiting(answer)

    def forget(self, member: Member) -> None:
        """It is no member any more."""
        self.dismiss(member, UnknownMemberId, "")
        del self.members[member.member_id]
        self._count(member, -1)
        if member.group_instance_id is not None:
            self.static_members.pop(member.group_instance_id, None)
        if self.leader_id == member.member_id:
            self.leader_id = next(iter(self.members), None)

    def dismiss(self, member: Member, error: type[BrokerError], member_id: str) -> None:
        """End whatever the member waits for with an error, for `member_id` as Kafka names it then."""
        waiting, member.join = member.join, None
        if waiting is not None:
            waiting(JoinAnswer(error.code, member_id))
        if member.sync is not None:
            member.sync(SyncAnswer(error.code))
            member.sync = None
