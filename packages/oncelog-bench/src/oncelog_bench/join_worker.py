"""Members of a classic group in a separate process, to measure the time of rebalances.

`python -m oncelog_bench.join_worker JSON` reads a WorkerSpec, joins and leaves, and prints a Report as JSON.

Each member is a blocking connection that acts like a consumer. It sends heartbeats until one reports the
rebalance, then JoinGroup and SyncGroup. A consumer sends a heartbeat every 3 s. Here heartbeats follow each
other without pause, so that the measured time does not contain that interval.
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
from oncelog_bench.raw_wire import CLIENT_ID, connect, exchange, receive_frame

JOIN_VERSION, SYNC_VERSION, HEARTBEAT_VERSION, LEAVE_VERSION = 9, 5, 4, 5
_FIND_VERSION = 4
_RETRIABLE = (14, 15, 16)
"""Errors to retry: COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE and NOT_COORDINATOR.

Apache Kafka returns them at first, because it creates `__consumer_offsets` only when a client looks for a
coordinator.
"""
_REBALANCE_IN_PROGRESS, _MEMBER_ID_REQUIRED = 27, 79
_COORDINATOR_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The worker's parameters.

    In each of `rounds`, one more member joins a group of `members` and leaves again.
    """

    bootstrap_servers: str
    broker_pid: int
    topic: str
    partitions: int
    members: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Report:
    """The result.

    `join_ms` and `leave_ms` have one time per round: from the start of the join or leave until all members
    have their new assignments. The seconds are totals over all rounds.
    """

    join_ms: list[float]
    leave_ms: list[float]
    seconds: float
    cpu_seconds: float
    broker_cpu_seconds: float


class Member:
    """One connection of a client that may join the group."""

    def __init__(self, spec: WorkerSpec, settings: Settings) -> None:
        self.socket = connect(spec.bootstrap_servers)
        self.share: list[TopicPartition] = []
        self._topic, self._partitions, self._settings = spec.topic, spec.partitions, settings
        self._member = NOBODY
        self._joined: Joined | None = None
        self._version = 0
        self._request: Message | None = None

    # Sending and receiving are separate, so that all members can have a request in flight at the same time.

    def send(self, message: Message, version: int) -> None:
        self._request, self._version = message, version
        self.socket.sendall(encode_request(message, version, 0, CLIENT_ID))

    def receive(self) -> Any:
        assert self._request is not None
        return decode_response(self._request.api.response, self._version, receive_frame(self.socket))[1]

    def get_id(self) -> None:
        """Send the first JoinGroup of a new member. Its response contains only a member id."""
        deadline = time.monotonic() + _COORDINATOR_TIMEOUT_S
        while True:
            self.send_join()
            response = self.receive()
            if response.error_code not in _RETRIABLE or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if response.error_code != _MEMBER_ID_REQUIRED:
            raise_for_code(response.error_code, "a raw member's first join")
            raise OncelogError(
                "the response to a raw member's first join had a generation, not only a member id"
            )
        self._member = ConsumerGroupMetadata("", member_id=response.member_id)

    def send_join(self) -> None:
        request = join_request(self._settings, self._member.member_id, [self._topic], OwnedPartitions())
        self.send(request, JOIN_VERSION)

    def send_heartbeat(self) -> None:
        self.send(heartbeat_request(self._member), HEARTBEAT_VERSION)

    def join_on_rebalance(self) -> None:
        """Send heartbeats until one reports the rebalance, then JoinGroup.

        The first heartbeat is already sent.
        """
        while (code := self.receive().error_code) != _REBALANCE_IN_PROGRESS:
            raise_for_code(code, "a raw member's heartbeat")
            self.send_heartbeat()
        self.send_join()

    def sync_when_joined(self) -> None:
        """Wait for the new generation and send SyncGroup. The leader's SyncGroup contains all assignments."""
        response = self.receive()
        raise_for_code(response.error_code, "a raw member's join")
        joined = joined_from(self._settings, response)
        self._member = joined.member
        self.send(sync_request(joined, {self._topic: self._partitions}), SYNC_VERSION)

    def take_share(self) -> None:
        response = self.receive()
        raise_for_code(response.error_code, "a raw member's sync")
        self.share = decode_assignment(response.assignment)

    def leave(self) -> None:
        self.send(leave_request(self._member), LEAVE_VERSION)
        response = self.receive()
        raise_for_code(response.error_code or response.members[0].error_code, "a raw member's leave")
        self._member, self.share = NOBODY, []


def rebalance(stayers: Sequence[Member], newcomers: Sequence[Member]) -> None:
    """Form a new generation of `stayers`, which are members already, and `newcomers`.

    Stayers learn of the rebalance from heartbeat responses. `newcomers` is empty after a member has left.
    """
    for member in newcomers:
        member.get_id()
    for member in newcomers:
        member.send_join()
    for member in stayers:
        member.send_heartbeat()
    for member in stayers:
        member.join_on_rebalance()
    for member in (*stayers, *newcomers):
        member.sync_when_joined()
    for member in (*stayers, *newcomers):
        member.take_share()


def run(spec: WorkerSpec) -> Report:
    """Form the group. Then, in each of `rounds`, let one more member join and leave."""
    settings = CONSUMER.parse({"bootstrap.servers": spec.bootstrap_servers, "group.id": spec.topic})
    *members, last = [Member(spec, settings) for _ in range(spec.members + 1)]
    key = FindCoordinatorRequest(coordinator_keys=[spec.topic])
    exchange(members[0].socket, key, _FIND_VERSION)
    rebalance([], members[:1])
    if members[1:]:
        rebalance(members[:1], members[1:])
    settle(spec.broker_pid)
    join_ms, leave_ms = [], []
    broker_began, cpu_began = cpu_seconds(spec.broker_pid), time.process_time()
    began = time.perf_counter()
    for _ in range(spec.rounds):
        started = time.perf_counter()
        rebalance(members, [last])
        join_ms.append((time.perf_counter() - started) * 1000)
        _check([*members, last], spec)
        started = time.perf_counter()
        last.leave()
        rebalance(members, [])
        leave_ms.append((time.perf_counter() - started) * 1000)
        _check(members, spec)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    broker_cpu = cpu_seconds(spec.broker_pid) - broker_began
    for member in members:
        member.leave()
    return Report(join_ms, leave_ms, seconds, cpu, broker_cpu)


def _check(members: Sequence[Member], spec: WorkerSpec) -> None:
    """Raise OncelogError unless every partition has exactly one member and every member has a partition."""
    read = sorted(tp.partition for member in members for tp in member.share)
    if read != list(range(spec.partitions)) or not all(member.share for member in members):
        raise OncelogError(f"{len(members)} members were assigned partitions {read} of {spec.partitions}")


if __name__ == "__main__":
    print(json.dumps(asdict(run(WorkerSpec(**json.loads(sys.argv[1]))))))
