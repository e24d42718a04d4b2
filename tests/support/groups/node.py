"""A group coordinator without sockets, in virtual time, and the requests that tests of groups need."""

from __future__ import annotations

from itertools import count
from typing import Any

from oncelog.broker.dispatch import handle, next_wakeup_ms, tick
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.limits import DEFAULT_LIMITS
from oncelog.log.manager import LogManager
from oncelog.rules.groups.classic import ClassicGroup, GroupState
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.wire.frames import RequestHeader
from oncelog.wire.message import Message
from oncelog.wire.messages import (
    ConsumerGroupHeartbeatRequest,
    CreateTopicsRequest,
    JoinGroupRequest,
    OffsetCommitRequest,
    SyncGroupRequest,
)
from oncelog.wire.stored import ConsumerProtocolSubscription

NOW_MS = 1_700_000_000_000
_CALM = (GroupState.EMPTY, GroupState.STABLE)


class GroupNode:
    """A node with a clock that only `pass_time` moves."""

    def __init__(self, **settings: Any) -> None:
        small = {
            "num.partitions": 2,
            "offsets.topic.num.partitions": 2,
            "transaction.state.log.num.partitions": 1,
        }
        self.limits = DEFAULT_LIMITS
        given = {key.replace("_", "."): value for key, value in settings.items()}
        self._settings = BROKER.parse({"node.id": 1, **small, **given})
        self._disk, self._numbers, self.now_ms = MemoryDisk(), count(1), NOW_MS
        self.node = self._open()

    def _open(self) -> BrokerState:
        manager = LogManager.open(
            self._disk, node_id=1, new_uuid=self._uuid, now_ms=self.now_ms, limits=self.limits
        )
        return BrokerState(manager, self._settings, new_uuid=self._uuid, now_ms=self.now_ms)

    def _uuid(self) -> bytes:
        return next(self._numbers).to_bytes(16, "big")

    def ask(self, message: Message, version: int, client_id: str = "client") -> list[Any]:
        """Send a request. Return a list that has the response, or will get it if the response is pending."""
        header = RequestHeader(message.api.key, version, 1, client_id, 0)
        answer = handle(self.node, Request(1, header, message, "/127.0.0.1"), self.now_ms)
        answers: list[Any] = []
        if isinstance(answer, PendingResponse):
            answer.add_done_callback(answers.append)
        else:
            answers.append(answer)
        return answers

    def pass_time(self, ms: int) -> None:
        """Advance the clock, and run the work of each deadline on the way."""
        end_ms = self.now_ms + ms
        while (due_ms := max(next_wakeup_ms(self.node), self.now_ms)) <= end_ms:
            self.now_ms = due_ms
            tick(self.node, due_ms)
        self.now_ms = end_ms

    def restart(self) -> None:
        """Stop cleanly and start again from the files."""
        self.node.close(self.now_ms)
        self.start()

    def start(self) -> None:
        """Start from the files, after the old process has ended."""
        self.node = self._open()

    def state(self) -> dict[str, Any]:
        """Return the state that a replay of the coordinator's topic must give.

        Classic groups between two generations are left out, because their records describe the previous
        generation.
        """
        groups = self.node.groups
        classic = {
            group_id: _classic(group)
            for group_id, group in groups._groups.items()
            if group.state in _CALM and group.generation_id
        }
        consumers = {
            group_id: (group.epoch, group.assignment_epoch, group.members, group.targets)
            for group_id, group in groups.consumers._groups.items()
        }
        offsets = {group_id: dict(groups.offsets.of(group_id)) for group_id in groups.offsets.groups()}
        return {"classic": classic, "consumers": consumers, "offsets": offsets}

    @property
    def between_generations(self) -> set[str]:
        """Return the classic groups that `state` leaves out."""
        return {name for name, group in self.node.groups._groups.items() if group.state not in _CALM}


def _classic(group: ClassicGroup) -> tuple[Any, ...]:
    """Return a classic group in the form in which its record stores it.

    The time of the last state change is included only for a group without members, because the
    offsets of such a group expire a certain time after that change.
    """
    members = [
        (
            member.member_id,
            member.group_instance_id,
            (member.client_id, member.client_host),
            (member.session_timeout_ms, member.rebalance_timeout_ms),
            member.metadata(group.protocol_name),
            member.assignment,
        )
        for member in group.members.values()
    ]
    since_ms = None if members else group.state_since_ms
    protocol = (group.protocol_type, group.protocol_name)
    return group.generation_id, protocol, group.members.leader_id, group.members.static_ids, since_ms, members


def heartbeat(group: str, member: str, epoch: int = 0, **fields: Any) -> ConsumerGroupHeartbeatRequest:
    first: dict[str, Any] = {
        "rebalance_timeout_ms": 5_000,
        "subscribed_topic_names": ["t"],
        "topic_partitions": [],
    }
    body = (first if epoch == 0 else {}) | fields
    return ConsumerGroupHeartbeatRequest(group_id=group, member_id=member, member_epoch=epoch, **body)


def join(group: str, member: str = "", **fields: Any) -> JoinGroupRequest:
    subscription = ConsumerProtocolSubscription(topics=["t"]).to_bytes(0)
    plain: dict[str, Any] = {
        "session_timeout_ms": 10_000,
        "rebalance_timeout_ms": 5_000,
        "protocol_type": "consumer",
        "protocols": [JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=subscription)],
    }
    return JoinGroupRequest(group_id=group, member_id=member, **(plain | fields))


def sync(group: str, member: str, generation: int, shares: dict[str, bytes]) -> SyncGroupRequest:
    return SyncGroupRequest(
        group_id=group,
        generation_id=generation,
        member_id=member,
        assignments=[
            SyncGroupRequest.SyncGroupRequestAssignment(member_id=each, assignment=share)
            for each, share in shares.items()
        ],
    )


def commit(group: str, offset: int, topic: str = "t", **fields: Any) -> OffsetCommitRequest:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(
        partition_index=offset % 2, committed_offset=offset, committed_metadata="m"
    )
    asked = OffsetCommitRequest.OffsetCommitRequestTopic(name=topic, partitions=[partition])
    return OffsetCommitRequest(group_id=group, topics=[asked], **fields)


def create(name: str, partition_count: int = 2) -> CreateTopicsRequest:
    topic = CreateTopicsRequest.CreatableTopic(
        name=name, num_partitions=partition_count, replication_factor=1
    )
    return CreateTopicsRequest(topics=[topic])
