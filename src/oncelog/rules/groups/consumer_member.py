"""A member of a group of the consumer protocol, and how it gets from one assignment to the next.

    STABLE        has what its target was at its epoch
    UNREVOKED     was told to give up partitions, and has not confirmed that it did
    UNRELEASED    at its epoch, but others still hold partitions it is to have

Law: a partition is given to a member only when no other member is assigned it or still has to give it up.
Source: KIP-848; Kafka's CurrentAssignmentBuilder, ConsumerGroupMember.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from enum import IntEnum

Place = tuple[bytes, int]
"""Topic id and partition."""

NOTHING: frozenset[Place] = frozenset()
LEAVE_EPOCH, STATIC_LEAVE_EPOCH = -1, -2
NO_REBALANCE_TIMEOUT = -1


class MemberState(IntEnum):
    """Kafka's numbers, as `__consumer_offsets` holds them."""

    STABLE = 0
    UNREVOKED = 1
    UNRELEASED = 2


@dataclass(frozen=True, slots=True)
class ConsumerMember:
    """A member as the group knows it. `instance_id` None: not static. `regex` None: topics by name alone."""

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
    assigned: frozenset[Place] = NOTHING
    revoking: frozenset[Place] = NOTHING

    @property
    def held(self) -> frozenset[Place]:
        """What nobody else may read yet."""
        return self.assigned | self.revoking

    def is_reconciled_to(self, assignment_epoch: int) -> bool:
        """Whether there is nothing left to do until the next target."""
        return self.state is MemberState.STABLE and self.epoch == assignment_epoch


def reconcile(
    member: ConsumerMember,
    target: Set[Place],
    assignment_epoch: int,
    held_by_others: Set[Place],
    owned: Set[Place] | None,
    subscribed_ids: Set[bytes] | None = None,
) -> ConsumerMember:
    """Return the member one step nearer to its target.

    `owned`: the partitions it says it reads; None: not said. `subscribed_ids`: the topics of its
    subscription, where that may be newer than the target; None: it is not.
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
        revoking=NOTHING,
    )


def _without_unsubscribed(member: ConsumerMember, subscribed_ids: Set[bytes]) -> ConsumerMember:
    """Move what the member no longer subscribes to from its assignment to what it must give up."""
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
