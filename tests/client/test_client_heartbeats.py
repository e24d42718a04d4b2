"""What a member of the consumer protocol tells its coordinator, and what it makes of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from oncelog.client.group.consumer_heartbeat import Difference, Heartbeats, Place, difference
from oncelog.config import CONSUMER
from oncelog.errors import ConfigError, FencedMemberEpoch
from oncelog.types import TopicPartition
from oncelog.wire.messages import ConsumerGroupHeartbeatResponse

A, B = b"a" * 16, b"b" * 16
TOPICS = frozenset({"t", "s"})


def heartbeats(**settings: Any) -> Heartbeats:
    given = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "group.protocol": "consumer"}
    return Heartbeats(CONSUMER.parse({**given, **settings}), "me")


def answer(epoch: int = 1, owns: dict[bytes, list[int]] | None = None, **more: Any) -> Any:
    parts = ConsumerGroupHeartbeatResponse.TopicPartitions
    assignment = None
    if owns is not None:
        rows = [parts(topic_id=topic_id, partitions=partitions) for topic_id, partitions in owns.items()]
        assignment = ConsumerGroupHeartbeatResponse.Assignment(topic_partitions=rows)
    fields = {"error_code": 0, "error_message": None, "member_id": "me", **more}
    return ConsumerGroupHeartbeatResponse(
        throttle_time_ms=0, member_epoch=epoch, heartbeat_interval_ms=700, assignment=assignment, **fields
    )


def said(request: Any) -> tuple[Any, ...]:
    owned = request.topic_partitions
    return (
        request.member_epoch,
        request.rebalance_timeout_ms,
        request.subscribed_topic_names,
        None if owned is None else [(each.topic_id, each.partitions) for each in owned],
    )


def test_all_is_said_to_join_and_then_what_changed() -> None:
    mine = heartbeats(max_poll_interval_ms=9_000)
    assert said(mine.request(TOPICS, ())) == (0, 9_000, ["s", "t"], [])
    wanted = mine.answered(answer(1, {A: [0, 1], B: [2]}))
    assert wanted == {Place(A, 0), Place(A, 1), Place(B, 2)}
    assert (mine.epoch, mine.interval_ms) == (1, 700)
    assert said(mine.request(TOPICS, ())) == (1, -1, None, None)
    assert mine.answered(answer(1)) is None
    assert said(mine.request(TOPICS, sorted(wanted))) == (1, -1, None, [(A, [0, 1]), (B, [2])])
    mine.answered(answer(2))
    assert said(mine.request(TOPICS, sorted(wanted))) == (2, -1, None, None)
    mine.answered(answer(2))
    assert said(mine.request(frozenset("t"), sorted(wanted))) == (2, -1, ["t"], None)


def test_after_a_lost_answer_all_is_said_again() -> None:
    mine = heartbeats()
    mine.request(TOPICS, ())
    mine.answered(answer(3, {A: [0]}))
    mine.request(TOPICS, [Place(A, 0)])
    mine.failed()
    assert said(mine.request(TOPICS, [Place(A, 0)])) == (3, 300_000, ["s", "t"], [(A, [0])])


def test_who_is_fenced_joins_owning_nothing() -> None:
    mine = heartbeats()
    mine.request(TOPICS, ())
    mine.answered(answer(3, {A: [0]}))
    mine.request(TOPICS, [Place(A, 0)])
    with pytest.raises(FencedMemberEpoch):
        mine.answered(answer(0, error_code=110))
    mine.fenced()
    assert said(mine.request(TOPICS, [Place(A, 0)])) == (0, 300_000, ["s", "t"], [])


@pytest.mark.parametrize(("instance", "epoch"), [(None, -1), ("mine", -2)])
def test_leaving(instance: str | None, epoch: int) -> None:
    mine = heartbeats(**({"group.instance.id": instance} if instance else {}))
    request = mine.leave()
    assert (request.member_epoch, request.instance_id, request.topic_partitions) == (epoch, instance, None)


@pytest.mark.parametrize(
    "key", ["session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy"]
)
def test_what_the_coordinator_decides_is_refused(key: str) -> None:
    value = "range" if key.startswith("partition") else 1_000
    with pytest.raises(ConfigError, match=f"{key} cannot be set with group.protocol=consumer"):
        heartbeats(**{key: value})


T0, T1, S0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("s", 0)


@pytest.mark.parametrize(
    ("owned", "wanted", "names", "expected"),
    [
        ({}, {Place(A, 0)}, {A: "t"}, ([], [T0], False)),
        ({T0: A}, {Place(A, 0)}, {A: "t"}, ([], [], False)),
        ({T0: A, T1: A}, {Place(A, 1), Place(B, 0)}, {A: "t", B: "s"}, ([T0], [S0], False)),
        ({}, {Place(A, 0), Place(B, 0)}, {A: "t"}, ([], [T0], True)),
        # The topic was deleted and made again: the same name, another topic.
        ({T0: A}, {Place(B, 0)}, {A: "t"}, ([T0], [], True)),
        ({}, {Place(B, 0)}, {B: "t"}, ([], [T0], False)),
        ({T0: A}, set(), {A: "t"}, ([T0], [], False)),
    ],
)
def test_what_to_give_back_and_to_take(owned: Any, wanted: Any, names: Any, expected: Any) -> None:
    assert difference(owned, wanted, names) == Difference(*expected)
