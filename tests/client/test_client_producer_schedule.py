"""The schedule of batches: it returns what a scan of all partitions would, at a fixed cost."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncelog.client.connection.metadata import ClusterMetadata
from oncelog.client.producer.core import ProducerCore
from oncelog.client.producer.options import resolve
from oncelog.client.producer.produce_messages import ProduceCall
from oncelog.client.producer.queues import PartitionQueue
from oncelog.client.producer.rows import row_size_bytes
from oncelog.config import PRODUCER
from oncelog.errors import DisconnectedError, NotConnectedError, NotLeaderOrFollower
from oncelog.wire.messages import MetadataResponse, ProduceResponse

PARTITIONS = 4


def describe(leaders: list[int]) -> MetadataResponse:
    """Return metadata of topic t with each partition's leader: broker 1, broker 2, or -1 for none."""
    partitions = [
        MetadataResponse.MetadataResponsePartition(partition_index=number, leader_id=leader, leader_epoch=-1)
        for number, leader in enumerate(leaders)
    ]
    brokers = [
        MetadataResponse.MetadataResponseBroker(node_id=node_id, host="h", port=node_id) for node_id in (1, 2)
    ]
    topic = MetadataResponse.MetadataResponseTopic(name="t", partitions=partitions)
    return MetadataResponse(brokers=brokers, topics=[topic], cluster_id="c", controller_id=1)


def core_of(partitions: int, **options: object) -> ProducerCore:
    metadata = ClusterMetadata()
    metadata.update(describe([1 + number % 2 for number in range(partitions)]))
    given_settings = {"bootstrap.servers": "h:1", "retry.backoff.ms": 20, **options}
    core = ProducerCore(resolve(PRODUCER.parse(given_settings)), metadata, random.Random(0))
    core.set_partition_count("t", partitions, 0.0)
    core.set_identity(7, 0)
    return core


def send(core: ProducerCore, partition: int, value: bytes, now_ms: float) -> None:
    core.append("t", partition, (0, None, value, ()), row_size_bytes(None, value, ()), now_ms)


def answer(core: ProducerCore, call: ProduceCall, error_code: int, now_ms: float) -> None:
    rows = [
        ProduceResponse.PartitionProduceResponse(
            index=batch.tp.partition, error_code=error_code, base_offset=-1 if error_code else 0
        )
        for batch in call.batches
    ]
    topic = ProduceResponse.TopicProduceResponse(name="t", partition_responses=rows)
    core.on_response(call, ProduceResponse(responses=[topic]), now_ms)


def check_against_a_walk(core: ProducerCore, now_ms: float) -> None:
    """Walk over all partitions: check that no batch is left that could be sent, and that the next wake-up is
    not too late.
    """
    wakeup_ms = core.next_wakeup_ms()
    queues = list(core._partitions.values())
    for queue in queues:
        following = queue.next_to_send(core.identity, core._flush_below, core._is_urgent)
        if following is None:
            continue
        leader = core.metadata.leader_of(queue.tp)
        if leader is None or core._in_flight_requests.get(leader, 0) >= core.options.max_in_flight:
            continue  # the batch cannot be sent now; new metadata or a response will cause another drain
        assert following[1] > now_ms
        assert wakeup_ms is not None and wakeup_ms <= following[1]
    unsettled = [batch for queue in queues for batch in queue.batches()]
    assert core.is_idle == (not unsettled)
    if unsettled:
        assert wakeup_ms is not None
        assert wakeup_ms <= min(batch.created_ms for batch in unsettled) + core.options.delivery_timeout_ms
    for mark in range(core._serial + 1):
        assert core.is_completed_to(mark) == all(batch.serial > mark for batch in unsettled)


STEPS = st.one_of(
    st.tuples(st.just("send"), st.integers(0, PARTITIONS - 1), st.sampled_from([10, 200])),
    st.tuples(st.just("pass"), st.sampled_from([1, 4, 30, 400]), st.just(0)),
    st.tuples(st.just("answer"), st.integers(0, 5), st.sampled_from(["stored", "refused", "lost", "unsent"])),
    st.tuples(st.just("lead"), st.integers(0, PARTITIONS - 1), st.sampled_from([1, 2, -1])),
    st.tuples(st.just("flush"), st.just(0), st.just(0)),
    st.tuples(st.just("hurry"), st.sampled_from([0, 1]), st.just(0)),
)
ERRORS = {"lost": DisconnectedError("cut"), "unsent": NotConnectedError("refused")}


@pytest.mark.parametrize("is_idempotent", [True, False])
@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEPS, max_size=60))
def test_the_schedule_agrees_with_a_scan_of_all_partitions(
    is_idempotent: bool, steps: list[tuple[str, int, object]]
) -> None:
    options: dict[str, object] = {
        "batch.size": 300, "linger.ms": 5, "request.timeout.ms": 100, "delivery.timeout.ms": 500,
        "max.in.flight.requests.per.connection": 2, "buffer.memory": 4000,
        "enable.idempotence": is_idempotent,
    }  # fmt: skip
    core, now_ms = core_of(PARTITIONS, **options), 1000.0
    leaders = [1 + number % 2 for number in range(PARTITIONS)]
    calls: list[ProduceCall] = []
    for what, number, detail in steps:
        match what:
            case "send":
                send(core, number, bytes(int(str(detail))), now_ms)
            case "pass":
                now_ms += number
            case "answer" if calls:
                call = calls.pop(number % len(calls))
                if detail in ERRORS:
                    core.on_failure(call, ERRORS[str(detail)], now_ms)
                else:
                    answer(core, call, 0 if detail == "stored" else NotLeaderOrFollower.code, now_ms)
            case "lead":
                leaders[number] = int(str(detail))
                core.metadata.update(describe(leaders))
            case "flush":
                core.flush()
            case "hurry":
                core.room_waiter_count = number
        calls += core.drain(now_ms)
        if core.is_identity_needed:
            core.set_identity(8, 0)
            calls += core.drain(now_ms)
        check_against_a_walk(core, now_ms)


def count_looks(partitions: int) -> int:
    """Return how many queues the producer examines to send and complete one record."""
    core = core_of(partitions, **{"linger.ms": 0})
    for partition in range(partitions):
        send(core, partition, b"x", 1.0)
    while not core.is_idle:
        for call in core.drain(1.0):
            answer(core, call, 0, 1.0)
    real, looks = PartitionQueue.next_to_send, 0

    def counted(queue: PartitionQueue, *args: object) -> object:
        nonlocal looks
        looks += 1
        return real(queue, *args)  # type: ignore[arg-type]

    with patch.object(PartitionQueue, "next_to_send", counted):
        send(core, 1, b"x", 2.0)
        (call,) = core.drain(2.0)
        answer(core, call, 0, 3.0)
        core.drain(3.0)
        core.next_wakeup_ms()
    assert core.is_idle
    return looks


def test_a_send_examines_no_partition_that_has_nothing_to_send() -> None:
    assert count_looks(3000) == count_looks(2) <= 6


def test_a_batch_behind_sealed_ones_neither_moves_its_partition_nor_wakes_the_loop() -> None:
    """Such a batch changes nothing in the schedule, so adding it must cost nothing there."""
    core = core_of(1, **{"linger.ms": 0, "batch.size": 100})
    wakes = [core.append("t", 0, (0, None, b"x", ()), 60, 1.0)[2] for _ in range(50)]
    assert wakes == [True, True] + [False] * 48
    core.room_waiter_count = 1
    assert core.append("t", 0, (0, None, b"x", ()), 60, 1.0)[2]
    assert core.drain(1.0)
    check_against_a_walk(core, 1.0)
