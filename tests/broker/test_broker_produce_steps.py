"""Produce requests with many batches are carried out in steps if the broker must decompress the batches or
begin segments.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import tracemalloc
from itertools import count
from typing import Any

import pytest
from support.broker import RawClient
from support.fuzz.targets import NOW_MS, open_node
from support.log.partitions import marker, put, put_marker
from support.wait import wait_until

from oncelog.broker import dispatch
from oncelog.broker.coordinators import transaction_verification
from oncelog.broker.handlers import produce
from oncelog.broker.handlers.produce_direct import MAX_BATCHES, MAX_BATCHES_WITH_SEGMENTS
from oncelog.broker.handlers.produce_direct import answer as answer_directly
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.errors import InvalidRecord, InvalidTxnState, TransactionAbortable, UnknownTopicId
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.server.background import BackgroundRunner
from oncelog.server.embedded import Broker
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Compression
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import RequestHeader, decode_request_header, encode_request
from oncelog.wire.messages import ProduceRequest
from oncelog.wire.records import NewRecord

COUNT, MANY = 100, 10
COMPACTED, RECODED = {"cleanup.policy": "compact"}, {"compression.type": "gzip"}
_Data = ProduceRequest.PartitionProduceData


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit a step to the decompression of two batches."""
    monkeypatch.setattr(produce, "STEP_COST", 2 * COUNT)


def records(key: bytes | None = b"k", **fields: Any) -> bytes:
    rows = [NewRecord(NOW_MS, key, b"v")] * COUNT
    return bytes(build_batch(rows, compression=Compression.ZSTD, **fields))


def request(*parts: tuple[int, bytes | None], acks: int = 1, **fields: Any) -> ProduceRequest:
    """Return a request for topic t. Each of `parts` is a partition and its batch."""
    data = [_Data(index=index, records=batch) for index, batch in parts]
    topic = ProduceRequest.TopicProduceData(name="t", partition_data=data)
    return ProduceRequest(acks=acks, timeout_ms=5_000, topic_data=[topic], **fields)


def driven(settings: dict[str, str]) -> BrokerState:
    """Return a node with topic t, whose background tasks wait for `finish`."""
    node, numbers = open_node(MemoryDisk()), count(1)
    node.topics._new_uuid = lambda: bytes([next(numbers)]) * 16
    node.log_manager.background.on_added = lambda: None
    node.topics.create("t", MANY, settings, NOW_MS)
    return node


def handle(node: BrokerState, message: ProduceRequest, version: int) -> PendingResponse:
    header = RequestHeader(message.api.key, version, 1, "c", 0)
    answer = dispatch.handle(node, Request(1, header, message, "/127.0.0.1"), NOW_MS)
    assert isinstance(answer, PendingResponse)
    return answer


def finish(node: BrokerState, deferred: PendingResponse) -> tuple[int, list[int]]:
    """Run the steps until the response is ready; return their number and the partitions' error codes."""
    answers: list[Any] = []
    deferred.add_done_callback(answers.append)
    steps = 0
    while not answers:
        if job := node.log_manager.background.step():
            job()
        steps += 1
    return steps, [part.error_code for topic in answers[0].responses for part in topic.partition_responses]


def ends(node: BrokerState) -> list[int]:
    topic = node.topics.get("t")
    assert topic is not None
    return [partition.log_end_offset for partition in topic.partitions]


@pytest.mark.behaviour("I29")
@pytest.mark.parametrize("settings", [COMPACTED, RECODED])
def test_a_request_of_many_batches_that_are_opened_is_carried_out_in_steps(settings: dict[str, str]) -> None:
    node = driven(settings)
    deferred = handle(node, request(*((i, records()) for i in range(MANY))), 9)
    assert deferred.blocks_pipeline and not deferred.outlives_client
    assert ends(node) == [COUNT] * 2 + [0] * 8
    assert finish(node, deferred) == (MANY // 2, [0] * MANY)
    assert ends(node) == [COUNT] * MANY


@pytest.mark.parametrize("many", [MAX_BATCHES_WITH_SEGMENTS, 100])
def test_a_request_that_begins_many_segments_is_carried_out_in_steps(
    monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    """R1340: 1,000 partitions that began a segment at the same time blocked all clients for 5 s."""
    monkeypatch.setattr(produce, "STEP_COST", 4 * produce.SEGMENT_COST)
    node = driven({"segment.ms": "1000"})
    node.topics.create("new", many, {"segment.ms": "1000"}, NOW_MS)
    topic = node.topics.get("new")
    assert topic is not None

    def plain(time_ms: int) -> tuple[ProduceRequest, bytes | None]:
        batch = build_batch([NewRecord(time_ms, b"k", b"v")])
        message = request(*((i, bytes(batch)) for i in range(many)))
        message.topic_data[0].name = "new"
        return message, answer_directly(node, memoryview(encode_request(message, 9, 1, "c")[4:]), NOW_MS)

    assert plain(NOW_MS - 5_000)[1] is not None
    message, response = plain(NOW_MS)
    if many > MAX_BATCHES_WITH_SEGMENTS:
        assert response is None
        deferred = handle(node, message, 9)
        assert [len(partition.log.segments) for partition in topic.partitions[:5]] == [2, 2, 2, 2, 1]
        steps, errors = finish(node, deferred)
        assert steps >= many // 4 and not any(errors)
    assert [(p.log_end_offset, len(p.log.segments)) for p in topic.partitions] == [(2, 2)] * many
    assert plain(NOW_MS + 1)[1] is not None


@pytest.mark.parametrize("topic", ["t", "unknown"])
def test_a_request_of_many_partitions_is_carried_out_in_steps(
    monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    """R1567: a request of 600 KB for 99,000 partitions blocked all clients for 0.7 s."""
    monkeypatch.setattr(produce, "STEP_COST", 1_000 * produce.PARTITION_COST)
    node, many = driven({}), 2 * MAX_BATCHES + 1
    message = request(*((i % MANY, bytes(build_batch([NewRecord(NOW_MS, b"k", b"v")]))) for i in range(many)))
    message.topic_data[0].name = topic
    assert answer_directly(node, memoryview(encode_request(message, 9, 1, "c")[4:]), NOW_MS) is None
    deferred = handle(node, message, 9)
    assert sum(ends(node)) == (1_000 if topic == "t" else 0)
    steps, errors = finish(node, deferred)
    assert steps >= 2 and len(errors) == many
    assert sum(ends(node)) == errors.count(0) == (many if topic == "t" else 0)


@pytest.mark.behaviour("I29")
@pytest.mark.parametrize("batch", [None, bytes(12)])
def test_the_partitions_of_waiting_requests_count_as_memory(
    monkeypatch: pytest.MonkeyPatch, batch: bytes | None
) -> None:
    """R1552: a request of 600 KB took 22 MB until its last step, and any number of them could wait."""
    monkeypatch.setattr(produce, "STEP_COST", 100 * produce.PARTITION_COST)
    node, peak_bytes = driven({}), 0
    finish(node, handle(node, request(*[(0, batch)] * MANY * COUNT), 9))  # compiles the codecs
    frame = memoryview(bytearray(encode_request(request(*[(0, batch)] * MANY * COUNT), 9, 1, "c")[4:]))
    tracemalloc.start()
    try:
        header = decode_request_header(frame)
        deferred = handle(node, ProduceRequest.decode(9, frame, header.body_position), 9)
        while not deferred.is_done:
            peak_bytes = max(peak_bytes, tracemalloc.get_traced_memory()[0])
            node.log_manager.background.step()
    finally:
        tracemalloc.stop()
    assert 0 < peak_bytes <= deferred.request_bytes


def test_batches_that_are_refused_when_they_are_opened_count_as_others() -> None:
    node = driven(COMPACTED)
    deferred = handle(node, request(*((i, records(None)) for i in range(MANY))), 9)
    assert finish(node, deferred) == (MANY // 2, [InvalidRecord.code] * MANY)


def test_a_refused_request_leaves_no_reference_cycle() -> None:
    """R1602: GcTuner freezes objects, and reference cycles among frozen objects are never freed."""
    node = driven({})
    gc.collect()
    gc.disable()
    try:
        finish(node, handle(node, request(*((MANY + i, records()) for i in range(MANY))), 9))
        assert not [each for each in gc.get_objects() if type(each) is produce._Produce]
    finally:
        gc.enable()


def test_batches_left_for_later_steps_do_not_refer_to_the_receive_buffer() -> None:
    node = driven(COMPACTED)
    buffer = bytearray(records())
    message = request(*((i, memoryview(buffer)) for i in range(MANY)))  # type: ignore[misc]
    deferred = handle(node, message, 9)
    own_bytes = MANY * produce.PARTITION_BYTES + produce.TOPIC_BYTES
    assert deferred.request_bytes == (MANY - 2) * len(buffer) + own_bytes
    buffer[:] = bytes(len(buffer))
    assert finish(node, deferred)[1] == [0] * MANY


def test_batches_for_a_topic_that_is_made_again_between_the_steps_are_refused() -> None:
    node = driven(COMPACTED)
    topic = node.topics.get("t")
    assert topic is not None
    message = request(*((i, records()) for i in range(MANY)))
    message.topic_data[0].topic_id = topic.topic_id
    deferred = handle(node, message, 13)
    node.topics.delete([topic])
    node.topics.create("t", MANY, COMPACTED, NOW_MS)
    assert finish(node, deferred)[1] == [0] * 2 + [UnknownTopicId.code] * 8
    assert ends(node) == [0] * MANY


def test_batches_of_a_transaction_that_ends_between_the_steps_are_refused() -> None:
    """Batches that are stored behind the marker would begin a transaction that is never ended."""
    node = driven(COMPACTED)
    topic = node.topics.get("t")
    assert topic is not None
    who = ProducerIdAndEpoch(5, 0)

    def batch(sequence: int) -> bytes:
        return records(producer_id=5, producer_epoch=0, base_sequence=sequence, is_transactional=True)

    for partition in topic.partitions:
        put(partition, memoryview(batch(0)))
    message = request(*((i, batch(COUNT)) for i in range(MANY)), acks=-1, transactional_id="x")
    deferred = handle(node, message, 9)
    for partition in topic.partitions:
        put_marker(partition, marker(who.producer_id, commit=False))
    assert finish(node, deferred)[1] == [0] * 2 + [InvalidTxnState.code] * 8
    assert not any(partition.has_open_transaction(*who) for partition in topic.partitions)


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_transaction_that_is_committed_between_the_steps_that_began_it_takes_no_more_batches(
    is_commit: bool,
) -> None:
    """The case exists because Produce 12 adds partitions implicitly, and EndTxn below version 5 does not
    raise the epoch.
    """
    node = driven(COMPACTED)
    transactions, topic = node.transactions, node.topics.get("t")
    assert topic is not None
    entry = transactions.init("x", None, 60_000, NOW_MS).entry
    who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
    batch = records(
        producer_id=who.producer_id, producer_epoch=who.producer_epoch, base_sequence=0, is_transactional=True
    )
    message = request(*((i, batch) for i in range(MANY)), acks=-1, transactional_id="x")
    deferred = handle(node, message, 12)
    transactions.end("x", who, is_commit, 0, NOW_MS)
    assert finish(node, deferred)[1] == [0] * 2 + [TransactionAbortable.code] * 8
    assert not any(partition.has_open_transaction(*who) for partition in topic.partitions)


def in_transaction(producer: ProducerIdAndEpoch, sequence: int) -> bytes:
    batch = build_batch(
        [NewRecord(NOW_MS, b"k", b"v")],
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        base_sequence=sequence,
        is_transactional=True,
    )
    return bytes(batch)


def begun(sequence: int = 0) -> tuple[BrokerState, ProducerIdAndEpoch, ProduceRequest]:
    """Return a node whose steps have two elements, a transactional producer, and its request."""
    node = driven({})
    node.limits = dataclasses.replace(node.limits, request_step_elements=2)
    topic, entry = node.topics.get("t"), node.transactions.init("x", None, 60_000, NOW_MS).entry
    assert topic is not None
    producer = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
    batch = in_transaction(producer, sequence)
    message = request(*((i, batch) for i in range(MANY)), acks=-1, transactional_id="x")
    message.topic_data[0].topic_id = topic.topic_id
    return node, producer, message


def run_steps(node: BrokerState, count: int) -> None:
    for _ in range(count):
        if job := node.log_manager.background.step():
            job()


@pytest.mark.behaviour("I29")
def test_the_batches_of_a_transaction_are_verified_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1554: 49,000 small batches of a transaction blocked all clients for 0.4 s before the first append."""
    node, _, message = begun()
    read: list[object] = []
    original = transaction_verification.read_header
    monkeypatch.setattr(
        transaction_verification, "read_header", lambda records: read.append(records) or original(records)
    )
    deferred = handle(node, message, 12)
    assert len(read) <= 2
    assert finish(node, deferred)[1] == [0] * MANY
    assert ends(node) == [1] * MANY


@pytest.mark.parametrize("steps", range(1, 10))
@pytest.mark.parametrize("count", [MANY, 1])
def test_a_topic_that_is_made_again_while_its_batches_are_verified_joins_no_transaction(
    steps: int, count: int
) -> None:
    """R1766: if the new topic had fewer partitions, the connection was closed with an internal error."""
    node, _, message = begun()
    deferred = handle(node, message, 13)
    run_steps(node, steps)
    topic = node.topics.get("t")
    assert topic is not None and ends(node) == [0] * MANY
    node.topics.delete([topic])
    node.topics.create("t", count, {}, NOW_MS)
    assert finish(node, deferred)[1] == [UnknownTopicId.code] * MANY
    assert ends(node) == [0] * count
    entry = node.transactions.get("x")
    assert entry is not None and not entry.partitions


@pytest.mark.parametrize("steps", range(9))
def test_a_transaction_that_ends_while_its_batches_are_verified_takes_none(steps: int) -> None:
    """Partitions in which it was open when they were read must not take batches behind its marker."""
    node, producer, message = begun(sequence=1)
    topic = node.topics.get("t")
    assert topic is not None
    node.transactions.add_partitions("x", producer, [p.topic_partition for p in topic.partitions], NOW_MS)
    for partition in topic.partitions:
        put(partition, memoryview(bytearray(in_transaction(producer, 0))))
    deferred = handle(node, message, 11)
    run_steps(node, steps)
    assert ends(node) == [1] * MANY
    node.transactions.end("x", producer, True, 0, NOW_MS)
    assert all(finish(node, deferred)[1])
    assert ends(node) == [2] * MANY
    assert not any(partition.has_open_transaction(*producer) for partition in topic.partitions)


@pytest.mark.parametrize("acks", [0, 1])
def test_a_stop_between_the_steps_writes_to_no_closed_log(acks: int) -> None:
    """Regression: a cancelled request wrote to closed files, so the log reported a failing disk."""
    node = driven(COMPACTED)
    deferred = handle(node, request(*((i, records()) for i in range(MANY)), acks=acks), 9)
    assert node.log_manager.background.step() is None
    assert node.log_manager.background.step() is None
    stored = ends(node)
    deferred.cancel()
    node.close(NOW_MS)
    assert ends(node) == stored
    assert not any(node.metrics.append_errors.values())


def test_a_request_goes_with_its_client_unless_it_expects_no_answer() -> None:
    node = driven(COMPACTED)
    handle(node, request(*((i, records()) for i in range(MANY))), 9).cancel()
    node.log_manager.background.finish()
    assert ends(node) == [COUNT] * 2 + [0] * 8
    assert handle(node, request(*((i, records()) for i in range(MANY)), acks=0), 9).outlives_client


def test_requests_of_several_steps_without_a_response_are_handled_after_a_disconnect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Java's producer with acks=0 closes as soon as the system has accepted the last request."""
    gate, work = threading.Event(), BackgroundRunner._work
    monkeypatch.setattr(BackgroundRunner, "_work", lambda self: work(self) if gate.is_set() else None)
    message = request(*((i, records()) for i in range(MANY)), acks=0)
    frame = encode_request(message, 9, 1, "c")
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        assert broker._running is not None
        node, metrics = broker._running.node, broker._running.node.metrics
        client.create_topic("t", MANY, cleanup_policy="compact")
        connections = broker._running.server.connections
        with RawClient(broker.bootstrap_servers) as other:
            other.socket.sendall(frame * 3)
            wait_until(lambda: metrics.records_stored == 2 * COUNT)
            kept = node.request_memory.total_bytes
        wait_until(lambda: any(connection.is_gone for connection in connections))
        assert kept >= (MANY - 2) * len(records())
        gate.set()
        wait_until(lambda: metrics.records_stored == 3 * MANY * COUNT)
        wait_until(lambda: node.connection_count == 1 and not node.request_memory.total_bytes)
