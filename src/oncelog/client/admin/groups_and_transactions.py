"""What operators ask coordinators about groups and transactions: values, and what answers say.

Source: rows T14; KIP-664, KIP-518; Kafka's Admin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oncelog.client.group.core import PROTOCOL_TYPE
from oncelog.client.group.subscription import decode_share
from oncelog.errors import PeerError
from oncelog.rules.transactions.hanging import KnownTransaction
from oncelog.types import TopicPartition


@dataclass(frozen=True, slots=True)
class TransactionListing:
    """A transactional id and its state, as one broker lists it."""

    transactional_id: str
    producer_id: int
    state: str
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """What the coordinator knows. `start_ms` None: no transaction was ever begun."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    start_ms: int | None
    partitions: tuple[TopicPartition, ...]

    def known(self) -> KnownTransaction:
        """As `rules.transactions.hanging` asks for it."""
        return KnownTransaction(
            self.transactional_id,
            self.producer_id,
            self.producer_epoch,
            self.state,
            frozenset(self.partitions),
        )


@dataclass(frozen=True, slots=True)
class GroupListing:
    """A group and its state; `protocol_type` is "consumer" for groups of consumers, "" if nobody joined."""

    group_id: str
    protocol_type: str
    state: str
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member; `partitions` as far as its protocol is the consumers' own."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    host: str
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group with its members. `assignor` "" while there is none."""

    group_id: str
    state: str
    protocol_type: str
    assignor: str
    members: tuple[GroupMember, ...]


def transaction_from(told: Any) -> TransactionDescription:
    """A DescribeTransactions row without an error."""
    return TransactionDescription(
        told.transactional_id,
        told.producer_id,
        told.producer_epoch,
        told.transaction_state,
        told.transaction_timeout_ms,
        told.transaction_start_time_ms if told.transaction_start_time_ms >= 0 else None,
        tuple(TopicPartition(topic.topic, index) for topic in told.topics for index in topic.partitions),
    )


def group_from(told: Any) -> GroupDescription:
    """A DescribeGroups row without an error."""
    is_consumers = told.protocol_type == PROTOCOL_TYPE
    return GroupDescription(
        told.group_id,
        told.group_state,
        told.protocol_type,
        told.protocol_data,
        tuple(
            GroupMember(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host.removeprefix("/"),
                _share(member.member_assignment) if is_consumers else (),
            )
            for member in told.members
        ),
    )


def consumer_group_from(row: Any) -> GroupDescription:
    """Return a ConsumerGroupDescribe row without an error (KIP-848), as the classic groups' are returned."""
    return GroupDescription(
        row.group_id,
        row.group_state,
        PROTOCOL_TYPE,
        row.assignor_name,
        tuple(
            GroupMember(
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host.removeprefix("/"),
                tuple(
                    TopicPartition(topic.topic_name, partition)
                    for topic in (member.assignment.topic_partitions if member.assignment else ())
                    for partition in topic.partitions
                ),
            )
            for member in row.members
        ),
    )


def _share(assignment: bytes) -> tuple[TopicPartition, ...]:
    try:
        return tuple(decode_share(assignment))
    except PeerError:  # another client's own idea of an assignment
        return ()
