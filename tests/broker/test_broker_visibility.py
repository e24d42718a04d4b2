"""With flush.messages, readers do not see records that a power loss could still remove."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.broker import RawClient, batch, fetch_request, produce_request, split_batches, wait_until

from oncelog.broker.coordinators.internal_topic_config import CONSUMER_OFFSETS
from oncelog.broker.coordinators.markers import Marker
from oncelog.broker.dispatch import end_round, handle, tick
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.log.disk import SyncFailed
from oncelog.log.partition import Partition
from oncelog.runtime.clock import Clock
from oncelog.server.embedded import Broker, recover_node
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import RequestHeader
from oncelog.wire.messages import FetchResponse, ListOffsetsRequest, Message, OffsetCommitRequest
from oncelog.wire.records import NewRecord, decode_records

TP = TopicPartition("t", 0)
NOW_MS = Clock().now_ms()
_PartitionOffset = OffsetCommitRequest.OffsetCommitRequestPartition


class _Place:
    """A node on a disk in memory, whose syncs the test runs."""

    def __init__(self, **overrides: object) -> None:
        self.overrides = {"log.flush.interval.messages": 1, **overrides}
        self.disk = MemoryDisk()
        self.node = self._open()
        self.node.topics.create("t", 1, {}, NOW_MS)

    def _open(self) -> BrokerState:
        return recover_node(self.disk, BROKER.parse(self.overrides), Clock())

    @property
    def partition(self) -> Partition:
        return self.node.topics.partition(TP)[1]

    def ask(self, message: Message, version: int) -> Any:
        header = RequestHeader(message.api.key, version, 1, "test", 0)
        answer = handle(self.node, Request(1, header, message), NOW_MS)
        end_round(self.node)
        return answer

    def produce(self, value: bytes, **numbered: Any) -> Any:
        return self.ask(produce_request("t", batch(value, **numbered)), 9)

    def fetch(self, offset: int = 0, *, isolation: int = 0, max_wait_ms: int = 0) -> Any:
        request = fetch_request([("t", 0, offset)], max_wait_ms=max_wait_ms, isolation_level=isolation)
        return self.ask(request, 12)

    def values(self, isolation: int = 0) -> list[bytes | None]:
        return _values(self.fetch(isolation=isolation))

    def latest(self, isolation: int = 0) -> int:
        asked = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=-1)
        topic = ListOffsetsRequest.ListOffsetsTopic(name="t", partitions=[asked])
        request = ListOffsetsRequest(replica_id=-1, isolation_level=isolation, topics=[topic])
        return int(self.ask(request, 7).topics[0].partitions[0].offset)

    def flush(self) -> None:
        for partition in self.node.flush_queue.take_due():
            partition.flush()
            self.node.flush_queue.complete(partition, None)
        end_round(self.node)

    def lose_power(self) -> None:
        self.disk = self.disk.after_power_loss(_Worst(1))
        self.node = self._open()

    def kill(self) -> None:
        self.disk = self.disk.after_kill()
        self.node = self._open()


class _Worst(Random):
    """A random generator with which a power loss removes everything unsynced."""

    def random(self) -> float:
        return 0.9

    def choice(self, seq: Any) -> Any:
        return "synced" if "synced" in seq else seq[0]


def _values(response: Any) -> list[bytes | None]:
    assert response.error_code == 0
    (topic,) = response.responses
    (found,) = topic.partitions
    assert found.error_code == 0
    return [record.value for batch in split_batches(found.records) for record in decode_records(batch)]


@pytest.mark.behaviour("I28")
@pytest.mark.parametrize("isolation", [0, 1])
def test_a_reader_sees_nothing_that_a_power_loss_could_take(isolation: int) -> None:
    place = _Place()
    answer = place.produce(b"A")
    assert isinstance(answer, PendingResponse) and not answer.is_done
    assert (place.values(isolation), place.latest(isolation)) == ([], 0)
    place.flush()
    assert answer.is_done
    assert (place.values(isolation), place.latest(isolation)) == ([b"A"], 1)


@pytest.mark.behaviour("I28")
def test_a_group_does_not_pass_over_an_acknowledged_record_after_a_power_loss() -> None:
    """A group can read, and so commit, only records that are on the disk.

    Records that are stored after the power loss therefore get higher offsets.
    """
    place = _Place()
    place.produce(b"A")
    position = len(place.values())
    partitions = [_PartitionOffset(partition_index=0, committed_offset=position, committed_metadata="")]
    place.ask(
        OffsetCommitRequest(
            group_id="g",
            generation_id_or_member_epoch=-1,
            member_id="",
            topics=[OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=partitions)],
        ),
        8,
    )
    for partition in place.node.flush_queue.take_due():  # syncs the group's commit, but not the record
        if partition.topic_partition.topic == CONSUMER_OFFSETS:
            partition.flush()
            place.node.flush_queue.complete(partition, None)
    place.lose_power()
    answer = place.produce(b"B")
    place.flush()
    assert answer.is_done
    assert _values(place.fetch(position)) == [b"B"]


@pytest.mark.behaviour("I28")
@pytest.mark.parametrize("isolation", [0, 1])
def test_a_long_poll_is_answered_by_the_sync_not_by_the_append(isolation: int) -> None:
    place = _Place()
    waiting = place.fetch(isolation=isolation, max_wait_ms=60_000)
    answers: list[Any] = []
    waiting.add_done_callback(answers.append)
    place.produce(b"A")
    assert not answers
    place.flush()
    assert [_values(answer) for answer in answers] == [[b"A"]]


def test_a_fetch_between_the_high_watermark_and_the_log_end_waits() -> None:
    """Like Apache Kafka, the broker must not answer OFFSET_OUT_OF_RANGE between the high watermark and the
    log end: the reader would reset its position.
    """
    place = _Place()
    place.produce(b"A")
    place.flush()
    place.produce(b"B")
    place.produce(b"C")
    assert _values(place.fetch(2)) == []
    assert place.fetch(4).responses[0].partitions[0].error_code == 1


@pytest.mark.behaviour("I28")
def test_a_transaction_is_committed_for_readers_when_its_marker_is_synced() -> None:
    place = _Place()
    data = build_batch(
        [NewRecord(NOW_MS, None, b"A")],
        producer_id=7,
        producer_epoch=0,
        base_sequence=0,
        is_transactional=True,
    )
    place.partition.append(memoryview(data), origin=Origin.CLIENT, now_ms=NOW_MS)
    place.node.note_stored(place.partition, len(data))
    place.flush()
    waiting = place.fetch(isolation=1, max_wait_ms=60_000)
    answers: list[Any] = []
    waiting.add_done_callback(answers.append)
    place.node.markers.write(TP, Marker(7, 0, 0, True), NOW_MS)
    end_round(place.node)
    # The marker is not synced. A power loss could remove it, and the transaction might then be aborted.
    assert (answers, place.values(isolation=1), place.latest(isolation=1)) == ([], [], 0)
    place.flush()
    assert [_values(answer)[0] for answer in answers] == [b"A"]
    assert place.latest(isolation=1) == 2


def test_a_read_committed_fetch_keeps_waiting_while_nothing_is_committed() -> None:
    place = _Place()
    waiting = place.fetch(isolation=1, max_wait_ms=60_000)
    answers: list[Any] = []
    waiting.add_done_callback(answers.append)
    data = build_batch(
        [NewRecord(NOW_MS, None, b"A")],
        producer_id=7,
        producer_epoch=0,
        base_sequence=0,
        is_transactional=True,
    )
    place.partition.append(memoryview(data), origin=Origin.CLIENT, now_ms=NOW_MS)
    place.node.note_stored(place.partition, len(data))
    place.flush()
    assert answers == []
    place.node.markers.write(TP, Marker(7, 0, 0, True), NOW_MS)
    place.flush()
    assert [_values(answer)[0] for answer in answers] == [b"A"]


def test_a_record_stored_during_a_sync_is_visible_after_the_next_one() -> None:
    place = _Place()
    place.produce(b"A")
    (partition,) = place.node.flush_queue.take_due()
    partition.flush()
    place.produce(b"B", pid=None)
    waiting = place.fetch(1, max_wait_ms=60_000)
    place.node.flush_queue.complete(partition, None)
    end_round(place.node)
    assert place.values() == [b"A"] and not waiting.is_done
    place.flush()
    assert waiting.is_done and place.values() == [b"A", b"B"]


def test_readers_see_up_to_the_last_sync_when_the_disk_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    place = _Place()
    place.produce(b"A")
    place.flush()
    place.produce(b"B")
    segment = place.partition.log.segments.active

    def fail(**_: object) -> None:
        raise SyncFailed("the disk is gone")

    monkeypatch.setattr(type(segment), "sync", lambda self, **how: fail(**how))
    for partition in place.node.flush_queue.take_due():
        with pytest.raises(Exception, match="sync failed"):
            partition.flush()
        place.node.flush_queue.complete(partition, SyncFailed("the disk is gone"))
    assert place.partition.is_offline
    assert (place.values(), place.latest()) == ([b"A"], 1)


def test_a_sync_that_could_not_begin_is_asked_for_again() -> None:
    """For example, a sync cannot begin without a free file descriptor.

    The broker must retry it, even if nothing else is written to the partition.
    """
    place = _Place()
    place.produce(b"A")
    for partition in place.node.flush_queue.take_due():
        place.node.flush_queue.complete(partition, OSError("no descriptor"))
    assert place.values() == []
    tick(place.node, Clock().now_ms() + 10_000)
    place.flush()
    assert place.values() == [b"A"]


def test_readers_see_after_a_kill_what_they_saw_before_it() -> None:
    place = _Place()
    place.produce(b"A")
    place.flush()
    place.produce(b"B")
    place.kill()
    # The checkpoint of recovery points is older than the last sync, so the start recovered the records and
    # synced them.
    assert place.partition.recovery_point == place.partition.log_end_offset == 2
    assert place.values() == [b"A", b"B"]


def test_a_smaller_flush_messages_hides_nothing_that_was_visible() -> None:
    place = _Place(**{"log.flush.interval.messages": 1 << 40})
    place.produce(b"A")
    assert place.values() == [b"A"]
    topic = place.node.topics.get("t")
    assert topic is not None
    topic.configure(place.node.settings, {"flush.messages": "1"})
    for partition in topic.partitions:
        partition.reconfigure(replace(partition.config, flush_messages=1))
    place.produce(b"B")
    assert place.values() == [b"A"]
    place.flush()
    assert place.values() == [b"A", b"B"]


@settings(max_examples=200, deadline=None)
@given(
    every=st.integers(1, 4),
    steps=st.lists(st.sampled_from(["append", "append", "open", "commit", "abort", "flush"]), max_size=25),
)
def test_a_power_loss_takes_fewer_visible_records_than_flush_messages(every: int, steps: list[str]) -> None:
    """High watermark and stable offset never go back, and at most flush.messages - 1 visible records are
    unsynced.
    """
    place = _Place(**{"log.flush.interval.messages": every})
    partition, high, stable, sequence, is_open = place.partition, 0, 0, 0, False
    decided: dict[int, int] = {}
    begun = 0
    for step in steps:
        if step == "flush":
            partition.flush()
        elif step == "append":
            partition.append(memoryview(batch(b"v")), origin=Origin.CLIENT, now_ms=NOW_MS)
        elif step == "open":
            begun = begun if is_open else partition.log_end_offset
            data = build_batch(
                [NewRecord(NOW_MS, None, b"t")],
                producer_id=7,
                producer_epoch=0,
                base_sequence=sequence,
                is_transactional=True,
            )
            partition.append(memoryview(data), origin=Origin.CLIENT, now_ms=NOW_MS)
            sequence, is_open = sequence + 1, True
        elif is_open:
            decided[begun] = partition.log_end_offset
            place.node.markers.write(TP, Marker(7, 0, 0, step == "commit"), NOW_MS)
            is_open = False
        assert partition.high_watermark >= high and partition.last_stable_offset >= stable
        high, stable = partition.high_watermark, partition.last_stable_offset
        assert high - partition.recovery_point < every or high == partition.recovery_point
        undecided = [first for first, marker in decided.items() if marker >= high]
        assert stable == min([high, *undecided, *([begun] if is_open else [])])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event. Syncs of topic t wait until it is set, as on a slow disk."""
    opened, original = threading.Event(), Partition.flush

    def flush(self: Partition) -> None:
        if self.topic_partition == TP:
            assert opened.wait(60)
        original(self)

    monkeypatch.setattr(Partition, "flush", flush)
    yield opened
    opened.set()


@pytest.mark.behaviour("I28")
def test_a_client_sees_a_record_when_the_broker_has_synced_it(gate: threading.Event) -> None:
    with (
        Broker(config={"log.flush.interval.messages": 1}) as broker,
        RawClient(broker.bootstrap_servers) as writer,
        RawClient(broker.bootstrap_servers) as reader,
        RawClient(broker.bootstrap_servers) as poller,
    ):
        writer.create_topic("t")
        poller.send(fetch_request([("t", 0, 0)], max_wait_ms=60_000), 12)
        writer.send(produce_request("t", batch(b"A")), 9)
        # A fetch of offset 1 is out of range until A is in the log.
        wait_until(lambda: reader.fetch("t", 1).error_code == 0)
        assert (reader.values("t"), reader.offset("t")) == ([], 0)
        gate.set()
        response = poller.receive(FetchResponse, 12)[1]
        assert _values(response) == [b"A"]
        assert reader.offset("t") == 1
