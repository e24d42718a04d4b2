"""The transaction coordinator on a real disk: it finishes interrupted work, and waits for the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.broker import RawClient
from support.groups.node import GroupNode, create
from support.log.partitions import values_and_markers

from oncelog.broker.coordinators import transactions as coordinator
from oncelog.broker.coordinators.internal_topic import (
    AppendHandle,
    is_pending_flush,
    partition_for,
    when_durable,
)
from oncelog.broker.coordinators.markers import Marker, MarkerWriter
from oncelog.broker.dispatch import handle
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.errors import (
    BrokerError,
    InvalidTopicException,
    KafkaStorageError,
    NotCoordinator,
    NotEnoughReplicas,
    ProducerFenced,
    UnstableOffsetCommit,
)
from oncelog.log.manager import LogManager
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.entry import TransactionEntry, TransactionState
from oncelog.runtime.clock import Clock
from oncelog.server.embedded import Broker, open_node
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import RequestHeader
from oncelog.wire.messages import (
    CreatePartitionsRequest,
    DeleteTopicsRequest,
    InitProducerIdRequest,
    OffsetFetchRequest,
    ProduceRequest,
)
from oncelog.wire.records import NewRecord

NOW_MS = 1_700_000_000_000
PARTITIONS = [TopicPartition("t", index) for index in range(3)]
S = TransactionState


class Crash(Exception):
    """Raised in place of a call, to end the broker's process there."""


class Place:
    """A data directory that the test opens repeatedly. `node` is the current process."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.directory = directory
        self.settings = BROKER.parse(settings)
        self.node = self._open()

    def _open(self) -> BrokerState:
        return open_node(self.directory, self.settings, Clock())

    def crash(self) -> None:
        """Open the directory again after a kill: memory is lost, written bytes are kept."""
        self.node.log_manager.release()
        self.node = self._open()

    def state(self, transactional_id: str = "x") -> TransactionState:
        entry = self.node.transactions.get(transactional_id)
        assert entry is not None
        return entry.state

    def begin(self, transactional_id: str = "x") -> ProducerIdAndEpoch:
        """Begin a transaction with a record in every partition and an offset of group g, and return its
        producer.
        """
        node = self.node
        if node.topics.get("t") is None:
            node.topics.create("t", len(PARTITIONS), {}, NOW_MS)
        entry = node.transactions.init(transactional_id, None, 60_000, NOW_MS).entry
        who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
        offsets_at = node.groups.offsets_partition("g", NOW_MS)
        node.transactions.add_partitions(transactional_id, who, [*PARTITIONS, offsets_at], NOW_MS)
        for at in PARTITIONS:
            data = build_batch(
                [NewRecord(NOW_MS, None, b"value")],
                producer_id=who.producer_id,
                producer_epoch=who.producer_epoch,
                base_sequence=0,
                is_transactional=True,
            )
            node.topics.partition(at)[1].append(memoryview(data), origin=Origin.CLIENT, now_ms=NOW_MS)
        node.groups.offsets.commit_pending(
            "g", who, {PARTITIONS[0]: CommittedOffset(7, -1, "", NOW_MS, -1, -1)}, NOW_MS
        )
        return who

    def log(self, at: TopicPartition) -> list[str]:
        """Return the values and markers of a partition."""
        _, partition = self.node.topics.partition(at)
        return values_and_markers(partition)

    def offset(self) -> int | None:
        held = self.node.groups.offsets.of("g").get(PARTITIONS[0])
        return held.offset if held else None


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "data")
    yield made
    made.node.log_manager.release()


def whole_or_absent(place: Place, is_commit: bool) -> None:
    marker = "<commit>" if is_commit else "<abort>"
    for at in PARTITIONS:
        assert marker in place.log(at)
        assert place.log(at)[0] == "value"
        assert place.node.topics.partition(at)[1].open_transaction_count == 0
    assert place.offset() == (7 if is_commit else None)
    assert place.node.groups.offsets.pending_of("g") == set()


@pytest.mark.behaviour("T6")
@pytest.mark.parametrize("is_commit", [True, False])
@pytest.mark.parametrize("markers", range(6))
def test_a_crash_at_every_step_of_the_end(
    place: Place, monkeypatch: pytest.MonkeyPatch, is_commit: bool, markers: int
) -> None:
    """The broker is killed after it has written the decision and `markers` markers.

    With 5 markers, only the record that completes the transaction is missing.
    """
    who = place.begin()
    real, written = MarkerWriter.write, 0

    def write(writer: MarkerWriter, at: TopicPartition, marker: Marker, now_ms: int) -> AppendHandle:
        nonlocal written
        if written == markers:
            raise Crash
        written += 1
        return real(writer, at, marker, now_ms)

    def complete(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(MarkerWriter, "write", write)
        patch.setattr(coordinator.TransactionCoordinator, "_complete", complete)
        with pytest.raises(Crash):
            place.node.transactions.end("x", who, is_commit, 2, NOW_MS)
    assert written == min(markers, 4)
    place.crash()
    assert place.state() is (S.COMPLETE_COMMIT if is_commit else S.COMPLETE_ABORT)
    whole_or_absent(place, is_commit)
    place.crash()
    whole_or_absent(place, is_commit)


@pytest.mark.behaviour("T6")
def test_a_crash_before_the_decision_leaves_the_transaction_open(place: Place) -> None:
    who = place.begin()
    place.crash()
    assert place.state() is S.ONGOING
    assert all(place.log(at) == ["value"] for at in PARTITIONS)
    assert place.offset() is None
    place.node.transactions.end("x", who, True, 0, NOW_MS)
    whole_or_absent(place, True)


def test_after_a_crash_a_new_instance_aborts_what_was_open(place: Place) -> None:
    place.begin()
    place.crash()
    with pytest.raises(Exception, match="CONCURRENT_TRANSACTIONS"):
        place.node.transactions.init("x", None, 60_000, NOW_MS)
    whole_or_absent(place, False)
    assert place.node.transactions.init("x", None, 60_000, NOW_MS).entry.producer_epoch == 2


def test_a_marker_that_cannot_be_written_is_written_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = place.begin()
    real, broken = MarkerWriter.write, {PARTITIONS[1]}

    def write(writer: MarkerWriter, at: TopicPartition, marker: Marker, now_ms: int) -> AppendHandle:
        if at in broken:
            raise KafkaStorageError("the disk is full")
        return real(writer, at, marker, now_ms)

    monkeypatch.setattr(MarkerWriter, "write", write)
    place.node.transactions.end("x", who, True, 0, NOW_MS)
    assert place.state() is S.PREPARE_COMMIT
    assert place.log(PARTITIONS[0]) == ["value", "<commit>"]
    place.node.transactions.retry_markers(NOW_MS)
    assert place.state() is S.PREPARE_COMMIT
    broken.clear()
    place.node.transactions.retry_markers(NOW_MS)
    assert place.state() is S.COMPLETE_COMMIT
    assert [place.log(at) for at in PARTITIONS] == [["value", "<commit>"]] * 3
    whole_or_absent(place, True)


def test_an_offset_is_not_told_while_a_transaction_may_change_it(place: Place) -> None:
    who = place.begin()
    topic = OffsetFetchRequest.OffsetFetchRequestTopics(name=PARTITIONS[0].topic, partition_indexes=[0])
    group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id="g", topics=[topic])
    message = OffsetFetchRequest(groups=[group], require_stable=True)

    def fetched() -> tuple[int, int]:
        request = Request(1, RequestHeader(message.api.key, 8, 1, "c", 0), message, "/127.0.0.1")
        answer: Any = handle(place.node, request, NOW_MS)
        row = answer.groups[0].topics[0].partitions[0]
        return row.error_code, row.committed_offset

    assert fetched()[0] == UnstableOffsetCommit.code
    place.node.transactions.end("x", who, True, 0, NOW_MS)
    assert fetched() == (0, 7)


@pytest.mark.behaviour("T9")
def test_an_idle_id_is_forgotten_with_a_tombstone(tmp_path: Path) -> None:
    place = Place(tmp_path / "data", transactional_id_expiration_ms=1_000)
    who = place.begin()
    place.node.transactions.end("x", who, True, 0, NOW_MS)
    place.begin("open")
    place.node.transactions.expire(NOW_MS + 999)
    assert place.state() is S.COMPLETE_COMMIT
    place.node.transactions.expire(NOW_MS + 1_000)
    assert place.node.transactions.get("x") is None
    assert place.state("open") is S.ONGOING
    place.crash()
    assert place.node.transactions.get("x") is None
    assert place.state("open") is S.ONGOING
    assert place.node.transactions.init("x", None, 1, NOW_MS).entry.producer_epoch == 0
    place.node.log_manager.release()


def test_answers_and_markers_wait_for_the_disk(tmp_path: Path) -> None:
    place = Place(tmp_path / "data", log_flush_interval_messages=1)
    node = place.node
    who = place.begin()
    flush_all(node)
    done = node.transactions.end("x", who, True, 0, NOW_MS)
    assert done.written
    assert place.state() is S.PREPARE_COMMIT
    assert place.log(PARTITIONS[0]) == ["value"], "no marker before the decision is on disk"
    flush_all(node)
    assert place.log(PARTITIONS[0]) == ["value", "<commit>"]
    assert place.state() is S.PREPARE_COMMIT, "complete only when the markers are on disk"
    flush_all(node)
    assert place.state() is S.COMPLETE_COMMIT
    node.log_manager.release()


@pytest.mark.behaviour("T6")
def test_nothing_is_stored_before_it_is_durable_where_it_belongs(tmp_path: Path) -> None:
    """A batch waits until the coordinator's record that adds its partition is durable.

    Otherwise a power loss could leave a batch of a transaction that no coordinator knows.
    """
    place = Place(tmp_path / "data", log_flush_interval_messages=1)
    node = place.node
    node.topics.create("t", 1, {}, NOW_MS)
    entry = node.transactions.init("x", None, 60_000, NOW_MS).entry
    flush_all(node)
    who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
    # The producer sends the same batch on two connections.
    first, second = produce(node, who, b"value"), produce(node, who, b"value")
    answers = []
    for waiting in (first, second):
        assert isinstance(waiting, PendingResponse)
        waiting.add_done_callback(answers.append)
    assert place.log(PARTITIONS[0]) == []
    flush_all(node)
    assert place.log(PARTITIONS[0]) == ["value"]
    assert answers == [], "now the batch itself is awaited"
    flush_all(node)
    results = [answer.responses[0].partition_responses[0] for answer in answers]
    assert [(result.error_code, result.base_offset) for result in results] == [(0, 0), (0, 0)]
    node.log_manager.release()


def test_a_partition_that_joined_a_transaction_takes_nothing_before_that_is_durable(
    tmp_path: Path,
) -> None:
    """The response to AddPartitionsToTxn is pending, or is NOT_COORDINATOR because the sync failed."""
    place = Place(tmp_path / "data", log_flush_interval_messages=1, oncelog_transaction_version=0)
    node = place.node
    node.topics.create("t", 1, {}, NOW_MS)
    who = identity(node.transactions.init("x", None, 60_000, NOW_MS).entry)
    flush_all(node)
    node.transactions.add_partitions("x", who, PARTITIONS[:1], NOW_MS)
    answers: list[Any] = []
    waiting = produce(node, who, b"value", 11)
    assert isinstance(waiting, PendingResponse)
    waiting.add_done_callback(answers.append)
    assert place.log(PARTITIONS[0]) == []
    for partition in node.flush_queue.take_due():
        node.flush_queue.complete(partition, OSError("no"))
    assert answers[0].responses[0].partition_responses[0].error_code == NotEnoughReplicas.code
    assert place.log(PARTITIONS[0]) == []
    produce(node, who, b"value", 11)
    flush_all(node)
    assert place.log(PARTITIONS[0]) == ["value"]
    node.log_manager.release()


def test_a_failing_flush_of_the_coordinator_stores_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path / "data", log_flush_interval_messages=1)
    node = place.node
    node.topics.create("t", 1, {}, NOW_MS)
    entry = node.transactions.init("x", None, 60_000, NOW_MS).entry
    flush_all(node)
    answers = []
    waiting = produce(node, ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch), b"value")
    assert isinstance(waiting, PendingResponse)
    waiting.add_done_callback(answers.append)
    for partition in node.flush_queue.take_due():
        node.flush_queue.complete(partition, OSError("no"))
    assert answers[0].responses[0].partition_responses[0].error_code == NotEnoughReplicas.code
    assert place.log(PARTITIONS[0]) == []
    node.log_manager.release()


def test_a_decision_that_cannot_be_made_durable_is_followed_later(tmp_path: Path) -> None:
    """The client gets a retriable error, no marker is written, and the id does not stay blocked."""
    place = Place(tmp_path / "data", log_flush_interval_messages=1)
    node = place.node
    who = place.begin()
    flush_all(node)
    done = node.transactions.end("x", who, True, 0, NOW_MS)
    failures: list[BrokerError | None] = []
    when_durable(node.flush_queue, done.written, failures.append)

    def fail_all() -> None:
        for partition in node.flush_queue.take_due():
            node.flush_queue.complete(partition, OSError("no descriptor"))

    fail_all()
    assert isinstance(failures[0], NotCoordinator)
    node.transactions.retry_markers(NOW_MS)
    fail_all()
    assert place.state() is S.PREPARE_COMMIT
    assert place.log(PARTITIONS[0]) == ["value"]
    node.transactions.retry_markers(NOW_MS)
    for _ in range(3):
        flush_all(node)
    assert place.state() is S.COMPLETE_COMMIT
    assert place.log(PARTITIONS[0]) == ["value", "<commit>"]
    node.log_manager.release()


def test_only_a_marker_whose_fate_is_unknown_is_written_again(tmp_path: Path) -> None:
    place = Place(tmp_path / "data", log_flush_interval_messages=1)
    node = place.node
    who = place.begin()
    flush_all(node)
    node.transactions.end("x", who, True, 0, NOW_MS)
    flush_all(node)  # makes the decision durable
    markers = list(node.flush_queue.take_due())
    assert len(markers) == len(PARTITIONS) + 1
    for partition in markers:
        is_lost = partition.topic_partition == PARTITIONS[1]
        if not is_lost:
            partition.flush()
        node.flush_queue.complete(partition, OSError("no descriptor") if is_lost else None)
    assert place.state() is S.PREPARE_COMMIT
    node.transactions.retry_markers(NOW_MS)
    for _ in range(3):
        flush_all(node)
    assert place.state() is S.COMPLETE_COMMIT
    logs = [place.log(at) for at in PARTITIONS]
    assert logs == [["value", "<commit>"], ["value", "<commit>", "<commit>"], ["value", "<commit>"]]
    node.log_manager.release()


def test_a_decision_that_a_start_finds_is_made_durable_before_it_is_followed(tmp_path: Path) -> None:
    """Regression (seed 6982): a start wrote markers for a decision that was not synced. A power loss then
    took the decision, but not the markers.
    """
    place = Place(tmp_path / "data", log_flush_interval_messages=1)
    who = place.begin()
    flush_all(place.node)
    (decided,) = place.node.transactions.end("x", who, True, 0, NOW_MS).written
    assert place.log(PARTITIONS[0]) == ["value"], "power may go now, and the decision with it"
    place.crash()
    assert place.state() is S.PREPARE_COMMIT
    # The start synced the log before the coordinator read it.
    state = place.node.topics.partition(decided.partition.topic_partition)[1]
    assert decided.last_offset < state.recovery_point
    assert place.log(PARTITIONS[0]) == ["value", "<commit>"]
    flush_all(place.node)
    assert place.state() is S.COMPLETE_COMMIT
    again = place.node.transactions.end("x", who, True, 0, NOW_MS)
    answered: list[BrokerError | None] = []
    when_durable(place.node.flush_queue, again.written, answered.append)
    assert answered == [], "what is told again waits as well"
    flush_all(place.node)
    assert answered == [None]
    place.node.log_manager.release()


def produce(node: BrokerState, who: ProducerIdAndEpoch, value: bytes, version: int = 12) -> Answer:
    """Produce the transaction's first batch in t/0. From version 12 on, the request itself adds the
    partition.
    """
    data = build_batch(
        [NewRecord(NOW_MS, None, value)],
        producer_id=who.producer_id,
        producer_epoch=who.producer_epoch,
        base_sequence=0,
        is_transactional=True,
    )
    part = ProduceRequest.PartitionProduceData(index=0, records=memoryview(data))
    topic = ProduceRequest.TopicProduceData(name="t", partition_data=[part])
    message = ProduceRequest(transactional_id="x", acks=-1, timeout_ms=1_000, topic_data=[topic])
    header = RequestHeader(api_key=0, api_version=version, correlation_id=1, client_id="c", body_position=0)
    return handle(node, Request(1, header, message), NOW_MS)


def flush_all(node: BrokerState) -> None:
    """Sync the partitions that wait for a sync and complete their requests, as a round of the server does."""
    for partition in node.flush_queue.take_due():
        partition.flush()
        node.flush_queue.complete(partition, None)


@pytest.mark.behaviour("T1")
@pytest.mark.parametrize(
    ("key", "expected"), [("my-tx", 11), ("test", 48), ("", 0), ("polygenelubricants", 0), ("größe", 7)]
)
def test_a_key_is_kept_in_the_partition_that_kafka_chooses(key: str, expected: int) -> None:
    """The partition is derived from Java's String.hashCode.

    If the hash is the smallest 32-bit integer, which has no absolute value, the partition is 0.
    """
    assert partition_for(key, 50) == expected


@pytest.mark.behaviour("T1")
def test_the_log_of_transactions_is_a_compacted_topic(place: Place) -> None:
    place.begin()
    topic = place.node.topics.get("__transaction_state")
    assert topic is not None
    assert len(topic.partitions) == 50
    assert topic.settings["cleanup.policy"] == ["compact"]
    assert topic.settings["segment.bytes"] == 104_857_600
    index = partition_for("x", 50)
    assert [p.log_end_offset > 0 for p in topic.partitions] == [i == index for i in range(50)]


def test_a_broker_without_transactions_makes_no_topics(place: Place) -> None:
    assert place.node.transactions.get("nobody") is None
    assert place.offset() is None
    place.crash()
    assert len(place.node.topics) == 0


def test_the_coordinators_topics_are_not_for_clients() -> None:
    """Deleting them or changing their partitions would lose the coordinators' state or misplace its keys."""
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        request = InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=1_000)
        assert client.ask(request, 4).error_code == 0
        name = "__transaction_state"
        deleted = client.ask(DeleteTopicsRequest(topic_names=[name], timeout_ms=1_000), 5)
        assert deleted.responses[0].error_code == InvalidTopicException.code
        wanted = CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=60, assignments=None)
        grown = client.ask(CreatePartitionsRequest(topics=[wanted], timeout_ms=1_000), 3)
        assert grown.results[0].error_code == InvalidTopicException.code
        assert client.ask(request, 4).producer_epoch == 1


@pytest.mark.behaviour("T8")
def test_a_time_out_at_the_last_epoch_fences_and_gives_another_producer_id(place: Place) -> None:
    node = place.node
    node.topics.create("t", len(PARTITIONS), {}, NOW_MS)
    first = node.transactions.init("x", None, 1_000, NOW_MS).entry
    node.transactions._append(first._replace(producer_epoch=32_766), NOW_MS)
    who = ProducerIdAndEpoch(first.producer_id, 32_766)
    node.transactions.add_partitions("x", who, PARTITIONS, NOW_MS)
    node.transactions.abort_timed_out(NOW_MS + 1_001)
    assert place.state() is S.COMPLETE_ABORT
    with pytest.raises(BrokerError, match="INVALID_PRODUCER_ID_MAPPING"):
        node.transactions.add_partitions("x", who, PARTITIONS, NOW_MS)
    assert [place.log(at) for at in PARTITIONS] == [["<abort>"]] * 3
    again = node.transactions.init("x", who, 1_000, NOW_MS + 2_000).entry
    assert (again.producer_id != who.producer_id, again.producer_epoch) == (True, 0)


def test_a_time_out_that_finds_no_producer_id_is_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = place.node
    node.topics.create("t", len(PARTITIONS), {}, NOW_MS)
    first = node.transactions.init("x", None, 1_000, NOW_MS).entry
    node.transactions._append(first._replace(producer_epoch=32_766), NOW_MS)
    node.transactions.add_partitions("x", ProducerIdAndEpoch(first.producer_id, 32_766), PARTITIONS, NOW_MS)

    def full() -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(node.producer_ids, "take", full)
        node.transactions.abort_timed_out(NOW_MS + 1_001)
    assert place.state() is S.ONGOING
    node.transactions.abort_timed_out(NOW_MS + 1_001)
    assert place.state() is S.COMPLETE_ABORT


@pytest.mark.behaviour("T6")
def test_a_marker_of_a_higher_coordinator_epoch_does_not_fence_the_coordinator(place: Place) -> None:
    """An operator may write a marker with a coordinator epoch above the coordinator's own.

    Regression: the next transaction was completed, but stayed open in that partition.
    """
    who = place.begin()
    forged = Marker(who.producer_id, who.producer_epoch, 7, False)
    place.node.markers.write(PARTITIONS[0], forged, NOW_MS)
    who = identity(place.node.transactions.end("x", who, True, 2, NOW_MS).entry)
    place.node.transactions.add_partitions("x", who, PARTITIONS, NOW_MS)
    for at in PARTITIONS:
        data = build_batch(
            [NewRecord(NOW_MS, None, b"two")],
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            base_sequence=0,
            is_transactional=True,
        )
        place.node.topics.partition(at)[1].append(memoryview(data), origin=Origin.CLIENT, now_ms=NOW_MS)
    place.node.transactions.end("x", who, True, 2, NOW_MS)
    assert place.state() is S.COMPLETE_COMMIT
    assert [place.log(at)[-2:] for at in PARTITIONS] == [["two", "<commit>"]] * 3
    assert [place.node.topics.partition(at)[1].open_transaction_count for at in PARTITIONS] == [0] * 3


def identity(entry: TransactionEntry) -> ProducerIdAndEpoch:
    return ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)


def test_a_durable_record_of_one_id_does_not_wait_for_those_of_another() -> None:
    place = GroupNode(log_flush_interval_messages=1)
    node, now_ms = place.node, place.now_ms
    place.ask(create("t"), 5)

    def flush() -> None:
        for partition in node.flush_queue.take_due():
            partition.flush()
            node.flush_queue.complete(partition, None)

    entries = [node.transactions.init(name, None, 60_000, now_ms).entry for name in ("x", "y")]
    x, y = (ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch) for entry in entries)
    added = node.transactions.add_partitions("x", x, [TopicPartition("t", 0)], now_ms)
    assert is_pending_flush(added.written)
    when_durable(node.flush_queue, added.written, lambda error: None)
    flush()
    other = node.transactions.add_partitions("y", y, [TopicPartition("t", 1)], now_ms)
    assert is_pending_flush(other.written)
    again = node.transactions.add_partitions("x", x, [TopicPartition("t", 0)], now_ms)
    assert not is_pending_flush(again.written)


def start(disk: MemoryDisk, **fences: bool) -> BrokerState:
    """Open a node with `flush.messages` at its default, at which appends are durable without a sync."""
    manager = LogManager.open(disk, node_id=1, new_uuid=lambda: bytes(16), now_ms=NOW_MS)
    settings = {"node.id": 1, "transaction.state.log.num.partitions": 2}
    fencing = {f"oncelog.{key.replace('_', '.')}": value for key, value in fences.items()}
    return BrokerState(manager, BROKER.parse(settings | fencing), new_uuid=lambda: bytes(16), now_ms=NOW_MS)


@pytest.mark.parametrize("seed", range(5))
def test_a_power_loss_after_a_fencing_start_brings_no_producer_back(seed: int) -> None:
    node = start(disk := MemoryDisk())
    old = {name: node.transactions.init(name, None, 60_000, NOW_MS).entry for name in "abcd"}
    node.close(NOW_MS)
    disk.release()
    fenced = {
        entry.transactional_id: entry for entry in start(disk, fence_transactions=True).transactions.all()
    }
    node = start(disk.after_power_loss(Random(seed)))
    for name, entry in old.items():
        assert node.transactions.get(name) == fenced[name]
        with pytest.raises(ProducerFenced):
            node.transactions.init(name, identity(entry), 60_000, NOW_MS)
