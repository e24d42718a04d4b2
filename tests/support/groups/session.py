"""A member's session with a simulated coordinator, without sockets. Tests decide when responses arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.consumer.poll_activity import PollActivity
from oncelog.client.group.aio import GroupSession
from oncelog.client.group.membership import Change, Rebalance
from oncelog.client.group.subscription import encode_assignment
from oncelog.config import CONSUMER
from oncelog.types import TopicPartition
from oncelog.wire.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)
from support.wait import attempts, clock_ms

TOPIC, TOPIC_ID = "t", b"t" * 16
ALL = [TopicPartition(TOPIC, number) for number in range(4)]
PROTOCOLS = ("range", "cooperative-sticky", "consumer")


class _Metadata:
    def set_address(self, *_: Any) -> None:
        pass

    def partition_count(self, _: str) -> int:
        return len(ALL)

    def topic_error(self, _: str) -> None:
        return None

    def topic_id(self, _: str) -> bytes:
        return TOPIC_ID


class Coordinator:
    """The cluster that a session sees, and a coordinator that assigns `share` to the member.

    For each commit, it awaits `commit_answer`, whose result is the error code. `heartbeat_code` is the error
    code of heartbeats.
    """

    metadata = _Metadata()

    def __init__(self) -> None:
        self.share = list(ALL)
        self.heartbeat_code = 0
        self.commit_answer: Callable[[], Awaitable[int]] = self._stored
        self.committed: list[dict[int, int]] = []
        self.requests: list[Any] = []
        self.generation = 0
        self._epoch, self._assigned = 0, list[TopicPartition]()

    async def _stored(self) -> int:
        return 0

    def now_ms(self) -> float:
        return clock_ms()

    def retry_pause_ms(self, _: int) -> float:
        return 1.0

    async def refresh_metadata(self, *_: Any, **__: Any) -> None:
        await asyncio.sleep(0)

    def rebalance(self, share: list[TopicPartition]) -> None:
        self.share = share
        self.heartbeat_code = 27

    async def request(self, _: int | None, request: Any, **__: Any) -> Any:
        self.requests.append(request)
        await asyncio.sleep(0)
        match request:
            case FindCoordinatorRequest():
                return FindCoordinatorResponse(node_id=0, coordinators=[])
            case JoinGroupRequest():
                self.generation += 1
                return self._joined(request)
            case SyncGroupRequest():
                self.heartbeat_code = 0
                return SyncGroupResponse(error_code=0, assignment=encode_assignment(self.share))
            case HeartbeatRequest():
                return HeartbeatResponse(error_code=self.heartbeat_code)
            case ConsumerGroupHeartbeatRequest():
                return self._beaten(request)
            case OffsetFetchRequest():
                return OffsetFetchResponse(error_code=0, topics=[], groups=[])
            case OffsetCommitRequest():
                return await self._commit(request)
            case LeaveGroupRequest():
                return LeaveGroupResponse(error_code=0)
        raise AssertionError(request)

    def _joined(self, request: JoinGroupRequest) -> JoinGroupResponse:
        return JoinGroupResponse(
            error_code=0,
            generation_id=self.generation,
            protocol_name=request.protocols[0].name,
            leader="another",
            member_id="me",
            members=[],
        )

    def _beaten(self, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
        code = self.heartbeat_code if self.heartbeat_code != 27 else 0
        assignment = None
        if request.member_epoch == 0 or self.share != self._assigned:
            self._epoch, self._assigned = self._epoch + 1, list(self.share)
            numbers = [tp.partition for tp in self.share]
            parts = ConsumerGroupHeartbeatResponse.TopicPartitions(topic_id=TOPIC_ID, partitions=numbers)
            assignment = ConsumerGroupHeartbeatResponse.Assignment(topic_partitions=[parts])
        return ConsumerGroupHeartbeatResponse(
            throttle_time_ms=0,
            error_code=code,
            error_message=None,
            member_id=request.member_id,
            member_epoch=self._epoch,
            heartbeat_interval_ms=1,
            assignment=assignment,
        )

    async def _commit(self, request: OffsetCommitRequest) -> OffsetCommitResponse:
        code = await self.commit_answer()
        rows = [row for topic in request.topics for row in topic.partitions]
        if not code:
            self.committed.append({row.partition_index: row.committed_offset for row in rows})
        partition = OffsetCommitResponse.OffsetCommitResponsePartition
        answered = [partition(partition_index=row.partition_index, error_code=code) for row in rows]
        topic = OffsetCommitResponse.OffsetCommitResponseTopic(name=TOPIC, partitions=answered)
        return OffsetCommitResponse(topics=[topic])


class Member:
    """A member's session, used as a consumer uses it.

    `notifications` has each rebalance notification, with the number of commits before it.
    """

    def __init__(self, coordinator: Coordinator, protocol: str, **settings: Any) -> None:
        config: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", **settings}
        if protocol == "consumer":
            config["group.protocol"] = "consumer"
        else:
            config |= {"partition.assignment.strategy": protocol, "heartbeat.interval.ms": 1}
        parsed = CONSUMER.parse({"auto.offset.reset": "earliest", **config})
        self.core, self.coordinator = ConsumerCore(parsed), coordinator
        self.activity = PollActivity(coordinator.now_ms())
        cluster: Any = coordinator
        self.session = GroupSession(self.core, parsed, cluster, self.activity, lambda: None)
        self.session.subscribe([TOPIC])
        self.notifications: list[tuple[Change, list[int], int]] = []

    async def step(self, seconds: float = 0.0) -> bool:
        """Call `advance` once, and record the notification that it may return.

        Return True if partitions may be read.
        """
        self.activity.enter()
        try:
            result = await self.session.advance(self.coordinator.now_ms() + seconds * 1000)
        finally:
            self.activity.leave(self.coordinator.now_ms())
        if isinstance(result, Rebalance):
            numbers = sorted(tp.partition for tp in result.partitions)
            self.notifications.append((result.change, numbers, len(self.coordinator.committed)))
            return False
        return result

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Run steps until a condition holds, for at most a minute."""
        for _ in attempts(lambda: self.notifications):
            if is_so():
                return
            await self.step(0.01)
            await asyncio.sleep(0)

    def hand_out(self, position: int) -> None:
        """Set the positions of all owned partitions, as if their records had been delivered."""
        for tp in self.core.assignment():
            self.core.seek(tp, position)
