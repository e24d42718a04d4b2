"""The members of a classic group: who there is, who leads, what they have in common.

Source: Kafka's ClassicGroup, ClassicGroupMember.
"""

from __future__ import annotations

from oncelog.errors import BrokerError, UnknownMemberId
from oncelog.rules.group_member import (
    JoinAnswer,
    JoinedMember,
    JoinRequest,
    Member,
    SyncAnswer,
    WhenJoined,
    common_protocols,
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

    def supports(self, request: JoinRequest) -> bool:
        """Whether the request and all members have a protocol in common; any will do in an empty group."""
        if not self.members:
            return bool(request.protocol_type and request.protocols)
        if request.protocol_type != self.protocol_type:
            return False
        offered = {name for name, _ in request.protocols}
        # Members always have something in common, so who offers all that one of them does has it too.
        anyone = next(iter(self.members.values()))
        if all(name in offered for name, _ in anyone.protocols):
            return True
        return bool(offered & common_protocols(self.members.values()))

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

    @staticmethod
    def update(member: Member, request: JoinRequest, now_ms: int, answer: WhenJoined) -> None:
        """A member joins with what it says now, and waits."""
        member.client_id, member.client_host = request.client_id, request.client_host
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.protocols = request.protocols
        member.join = answer
        member.deadline_ms = now_ms + (NEW_MEMBER_TIMEOUT_MS if member.is_new else request.session_timeout_ms)

    @staticmethod
    def answer_sync(member: Member, answer: SyncAnswer, now_ms: int) -> None:
        """Answer a member that waits for its assignment, and begin its session again.

        Many clients send no heartbeats while they wait. The leader may take longer than a session.
        """
        if member.sync is not None:
            waiting, member.sync = member.sync, None
            member.touch(now_ms)
            waiting(answer)

    def forget(self, member: Member) -> None:
        """It is no member any more."""
        self.dismiss(member, UnknownMemberId, "")
        del self.members[member.member_id]
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
