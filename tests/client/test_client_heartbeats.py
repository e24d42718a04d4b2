"""The heartbeats of a member under the consumer protocol, and the handling of their responses."""

from __future__ import annotations

from typing import Any

import pytest

from oncelog.client.group.consumer_heartbeat import (
    AssignmentDifference,
    HeartbeatState,
    TopicIdPartition,
    compare_assignment,
)
from oncelog.config import CONSUMER
from oncelog.errors import ConfigError, FencedMemberEpoch
from oncelog.types import TopicPartition
from oncelog.wire.messages import ConsumerGroupHeartbeatResponse

A, B = b"a" * 16, b"b" * 16
TOPICS = frozenset({"t", "s"})


def heartbeats(**settings: Any) -> HeartbeatState:
    config = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "group.protocol": "consumer"}
    return HeartbeatState(CONSUMER.parse({**config, **settings}), "me")


def response(epoch: int = 1, owns: dict[bytes, list[int]] | None = None, **more: Any) -> Any:
    parts = ConsumerGroupHeartbeatResponse.TopicPartitions
    assignment = None
    if owns is not None:
        rows = [parts(topic_id=topic_id, partitions=partitions) for topic_id, partitions in owns.items()]
        assignment = ConsumerGroupHeartbeatResponse.Assignment(topic_partitions=rows)
    fields = {"error_code": 0, "error_message": None, "member_id": "me", **more}
    return ConsumerGroupHeartbeatResponse(
        throttle_time_ms=0, member_epoch=epoch, heartbeat_interval_ms=700, assignment=assignment, **fields
    )


def reported(request: Any) -> tuple[Any, ...]:
    owned = request.topic_partitions
    return (
        request.member_epoch,
        request.rebalance_timeout_ms,
        request.subscribed_topic_names,
        None if owned is None else [(topic.topic_id, topic.partitions) for topic in owned],
    )


def test_the_first_heartbeat_reports_everything_and_later_ones_report_changes() -> None:
    mine = heartbeats(max_poll_interval_ms=9_000)
    assert reported(mine.next_request(TOPICS, ())) == (0, 9_000, ["s", "t"], [])
    target = mine.on_response(response(1, {A: [0, 1], B: [2]}))
    assert target == {TopicIdPartition(A, 0), TopicIdPartition(A, 1), TopicIdPartition(B, 2)}
    assert (mine.epoch, mine.interval_ms) == (1, 700)
    assert reported(mine.next_request(TOPICS, ())) == (1, -1, None, None)
    assert mine.on_response(response(1)) is None
    assert reported(mine.next_request(TOPICS, sorted(target))) == (1, -1, None, [(A, [0, 1]), (B, [2])])
    mine.on_response(response(2))
    assert reported(mine.next_request(TOPICS, sorted(target))) == (2, -1, None, None)
    mine.on_response(response(2))
    assert reported(mine.next_request(frozenset("t"), sorted(target))) == (2, -1, ["t"], None)


def test_the_heartbeat_after_a_lost_response_reports_everything() -> None:
    mine = heartbeats()
    mine.next_request(TOPICS, ())
    mine.on_response(response(3, {A: [0]}))
    mine.next_request(TOPICS, [TopicIdPartition(A, 0)])
    mine.on_failure()
    assert reported(mine.next_request(TOPICS, [TopicIdPartition(A, 0)])) == (
        3,
        300_000,
        ["s", "t"],
        [(A, [0])],
    )


def test_a_fenced_member_joins_again_and_owns_nothing() -> None:
    mine = heartbeats()
    mine.next_request(TOPICS, ())
    mine.on_response(response(3, {A: [0]}))
    mine.next_request(TOPICS, [TopicIdPartition(A, 0)])
    with pytest.raises(FencedMemberEpoch):
        mine.on_response(response(0, error_code=110))
    mine.on_lost()
    assert reported(mine.next_request(TOPICS, [TopicIdPartition(A, 0)])) == (0, 300_000, ["s", "t"], [])


@pytest.mark.parametrize(("instance", "epoch"), [(None, -1), ("mine", -2)])
def test_a_static_member_leaves_with_an_epoch_of_its_own(instance: str | None, epoch: int) -> None:
    mine = heartbeats(**({"group.instance.id": instance} if instance else {}))
    request = mine.leave_request()
    assert (request.member_epoch, request.instance_id, request.topic_partitions) == (epoch, instance, None)


@pytest.mark.parametrize(
    "key", ["session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy"]
)
def test_settings_that_the_coordinator_decides_are_refused(key: str) -> None:
    value = "range" if key.startswith("partition") else 1_000
    with pytest.raises(ConfigError, match=f"{key} cannot be set with group.protocol=consumer"):
        heartbeats(**{key: value})


T0, T1, S0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("s", 0)


@pytest.mark.parametrize(
    ("owned", "target", "names", "expected"),
    [
        ({}, {TopicIdPartition(A, 0)}, {A: "t"}, ([], [T0], False)),
        ({T0: A}, {TopicIdPartition(A, 0)}, {A: "t"}, ([], [], False)),
        (
            {T0: A, T1: A},
            {TopicIdPartition(A, 1), TopicIdPartition(B, 0)},
            {A: "t", B: "s"},
            ([T0], [S0], False),
        ),
        ({}, {TopicIdPartition(A, 0), TopicIdPartition(B, 0)}, {A: "t"}, ([], [T0], True)),
        # In the next two cases, the topic was deleted and created again. It has the same name but a new id,
        # so it counts as another topic.
        ({T0: A}, {TopicIdPartition(B, 0)}, {A: "t"}, ([T0], [], True)),
        ({}, {TopicIdPartition(B, 0)}, {B: "t"}, ([], [T0], False)),
        ({T0: A}, set(), {A: "t"}, ([T0], [], False)),
    ],
)
def test_the_difference_between_owned_partitions_and_a_target(
    owned: Any, target: Any, names: Any, expected: Any
) -> None:
    assert compare_assignment(owned, target, names) == AssignmentDifference(*expected)
