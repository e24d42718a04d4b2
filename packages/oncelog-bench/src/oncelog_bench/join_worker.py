"""Members of a classic group in a process of their own, each a blocking connection: rebalances, timed.

`python -m oncelog_bench.join_worker JSON` reads an Order, joins and leaves, and prints a Report as JSON.

Every member does what a consumer does: heartbeat until told of the rebalance, JoinGroup, SyncGroup. Its
heartbeats follow each other without pause, so that their interval (3 s by default) is not in the time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oncelog.client.group.core import (
    NOBODY,
    Joined,
    heartbeat_request,
    join_request,
    joined_from,
    leave_request,
    sync_request,
)
from oncelog.client.group.subscription import OwnedPartitions, decode_assignment
from oncelog.config import CONSUMER
from oncelog.errors import OncelogError, raise_for_code
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, TopicPartition
from oncelog.wire.frames import decode_response, encode_request
from oncelog.wire.message import Message
from oncelog.wire.messages import FindCoordinatorRequest
from oncelog_bench.process import cpu_seconds, settle
from oncelog_bench.raw_wire import CLIENT_ID, ask, connect, receive_frame

JOIN_VERSION, SYNC_VERSION, HEARTBEAT_VERSION, LEAVE_VERSION = 9, 5, 4, 5
_FIND_VERSION = 4
_NOT_YET = (14, 15, 16)
"""Apache Kafka makes the topic of the groups when it is first asked for a coordinator."""
_REBALANCE_IN_PROGRESS, _MEMBER_ID_REQUIRED = 27, 79
_COORDINATOR_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Order:
    """`members` are in the group before one more joins, and after it has left again; `rounds` times."""

    bootstrap_servers: str
    broker_pid: int
    topic: str
    partitions: int
    members: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Report:
    """Of each round: from the join (the leave) of one member until every member has its new share.

    The seconds are those of all rounds together.
    """

    join_ms: list[float]
    leave_ms: list[float]
    seconds: float
    cpu_seconds: float
    broker_cpu_seconds: float


class Member:
    """One connection, in or outside the group."""

    def __init__(self, order: Order, settings: Settings) -> None:
        self.socket = connect(order.bootstrap_servers)
        self.share: list[TopicPartition] = []
        self._topic, self._partitions, self._settings = order.topic, order.partitions, settings
        self._member = NOBODY
        self._joined: Joined | None = None
        self._version = 0
        self._asked: Message | None = None

    # Sending and receiving stand apart, so that all members can be at it at once.

    def send(self, message: Message, version: int) -> None:
        self._asked, self._version = message, version
        self.socket.sendall(encode_request(message, version, 0, CLIENT_ID))

    def receive(self) -> Any:
        assert self._asked is not None
        return decode_response(self._asked.api.response, self._version, receive_frame(self.socket))[1]

    def get_id(self) -> None:
        """A new member's first join, which the group answers with an id only."""
        deadline = time.monotonic() + _COORDINATOR_PATIENCE_S
        while True:
            self.send_join()
            answer = self.receive()
            if answer.error_code not in _NOT_YET or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if answer.error_code != _MEMBER_ID_REQUIRED:
            raise_for_code(answer.error_code, "a raw member's first join")
            raise OncelogError("a raw member's first join was answered with a generation")
        self._member = ConsumerGroupMetadata("", member_id=answer.member_id)

    def send_join(self) -> None:
        request = join_request(self._settings, self._member.member_id, [self._topic], OwnedPartitions())
        self.send(request, JOIN_VERSION)

    def send_heartbeat(self) -> None:
        self.send(heartbeat_request(self._member), HEARTBEAT_VERSION)

    def join_when_told(self) -> None:
        """Heartbeats until one tells of the rebalance; then joins. The first one is on its way."""
        while (code := self.receive().error_code) != _REBALANCE_IN_PROGRESS:
            raise_for_code(code, "a raw member's heartbeat")
            self.send_heartbeat()
        self.send_join()

    def sync_when_joined(self) -> None:
        """Awaits the generation and asks for the share in it; the leader brings everyone's."""
        answer = self.receive()
        raise_for_code(answer.error_code, "a raw member's join")
        joined = joined_from(self._settings, answer)
        self._member = joined.member
        self.send(sync_request(joined, {self._topic: self._partitions}), SYNC_VERSION)

    def take_share(self) -> None:
        answer = self.receive()
        raise_for_code(answer.error_code, "a raw member's sync")
        self.share = decode_assignment(answer.assignment)

    def leave(self) -> None:
        self.send(leave_request(self._member), LEAVE_VERSION)
        answer = self.receive()
        raise_for_code(answer.error_code or answer.members[0].error_code, "a raw member's leave")
        self._member, self.share = NOBODY, []


def rebalance(stayers: Sequence[Member], newcomers: Sequence[Member]) -> None:
    """A generation with both. Stayers learn of it from heartbeats; without newcomers someone just left."""
    for member in newcomers:
        member.get_id()
    for member in newcomers:
        member.send_join()
    for member in stayers:
        member.send_heartbeat()
    for member in stayers:
        member.join_when_told()
    for member in (*stayers, *newcomers):
        member.sync_when_joined()
    for member in (*stayers, *newcomers):
        member.take_share()


def run(order: Order) -> Report:
    """Make the group, then let one more member join and leave, again and again."""
    settings = CONSUMER.parse({"bootstrap.servers": order.bootstrap_servers, "group.id": order.topic})
    *members, last = [Member(order, settings) for _ in range(order.members + 1)]
    key = FindCoordinatorRequest(coordinator_keys=[order.topic])
    ask(members[0].socket, key, _FIND_VERSION)
    rebalance([], members[:1])
    if members[1:]:
        rebalance(members[:1], members[1:])
    settle(order.broker_pid)
    join_ms, leave_ms = [], []
    broker_began, cpu_began = cpu_seconds(order.broker_pid), time.process_time()
    began = time.perf_counter()
    for _ in range(order.rounds):
        started = time.perf_counter()
        rebalance(members, [last])
        join_ms.append((time.perf_counter() - started) * 1000)
        _check([*members, last], order)
        started = time.perf_counter()
        last.leave()
        rebalance(members, [])
        leave_ms.append((time.perf_counter() - started) * 1000)
        _check(members, order)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    broker_cpu = cpu_seconds(order.broker_pid) - broker_began
    for member in members:
        member.leave()
    return Report(join_ms, leave_ms, seconds, cpu, broker_cpu)


def _check(members: Sequence[Member], order: Order) -> None:
    """Every partition has one reader, and every member something to read."""
    read = sorted(at.partition for member in members for at in member.share)
    if read != list(range(order.partitions)) or not all(member.share for member in members):
        raise OncelogError(f"{len(members)} members share out partitions {read} of {order.partitions}")


if __name__ == "__main__":
    print(json.dumps(asdict(run(Order(**json.loads(sys.argv[1]))))))
