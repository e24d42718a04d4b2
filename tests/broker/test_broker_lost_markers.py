"""A power loss can take the markers of decided transactions. The next start of the broker writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.log.partitions import values_and_markers

from oncelog.broker.coordinators.internal_topic_config import CONSUMER_OFFSETS, TRANSACTION_STATE
from oncelog.broker.coordinators.transaction_verification import ClientCapabilities, TransactionVerification
from oncelog.broker.coordinators.transactions import MARKERS_REACH_THE_DISK_MS, TransactionCoordinator
from oncelog.broker.dispatch import tick
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.limits import Limits
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.entry import EXHAUSTED_EPOCH, NO_ID
from oncelog.runtime.clock import Clock
from oncelog.server.disk import RealDisk
from oncelog.server.embedded import recover_node
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.header import iter_batches
from oncelog.wire.records import NewRecord

NOW_MS = 1_700_000_000_000
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
OFFSETS, STATE = TopicPartition(CONSUMER_OFFSETS, 0), TopicPartition(TRANSACTION_STATE, 0)
ROUND_MS = 15_000
SETTINGS = {"offsets.topic.num.partitions": 1, "transaction.state.log.num.partitions": 1}


class StoppedClock(Clock):
    """A clock that stands still, so that each broker starts at NOW_MS."""

    def now_ms(self) -> int:
        return NOW_MS


class Producer:
    """A producer with an epoch per transaction, and the broker that loses its power."""

    def __init__(self, directory: Path, first_epoch: int = 0) -> None:
        self.directory, self.first_epoch = directory, first_epoch
        self.round_ms = NOW_MS
        self.node = self._open()
        self.node.topics.create("t", 2, {}, NOW_MS)
        entry = self.node.transactions.init("x", None, 60_000, NOW_MS).entry
        self.who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
        self.sequences: dict[TopicPartition, int] = {}

    def _open(self) -> BrokerState:
        limits = Limits(coordinator_roll_bytes=1, first_producer_epoch=self.first_epoch)
        self.directory.mkdir(exist_ok=True)
        return recover_node(RealDisk(self.directory), BROKER.parse(SETTINGS), StoppedClock(), limits=limits)

    def begin(self) -> None:
        """Initialize the transactional id again. The new instance replaces the producer."""
        entry = self.node.transactions.init("x", None, 60_000, NOW_MS).entry
        self.who, self.sequences = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch), {}

    def add(self, tp: TopicPartition) -> None:
        """Make a partition part of the transaction, as AddPartitionsToTxn does."""
        self.node.transactions.add_partitions("x", self.who, [tp], NOW_MS)

    def admission(self, tp: TopicPartition, dialect: ClientCapabilities) -> TransactionVerification:
        node = self.node
        return TransactionVerification(
            "x",
            {tp: self.who},
            dialect,
            NOW_MS,
            transactions=node.transactions,
            flush_queue=node.flush_queue,
            settings=node.settings,
        )

    def send(self, tp: TopicPartition, value: str, *, is_classic: bool = False) -> None:
        """Store a record in the producer's transaction, as Produce version 12 does, or version 11 with
        `is_classic`.
        """
        _, partition = self.node.topics.partition(tp)
        if is_classic:
            self.add(tp)
        if not partition.has_open_transaction(*self.who):
            self.admission(tp, ClientCapabilities(not is_classic, True)).check(tp)
        sequence = self.sequences.get(tp, 0)
        self.sequences[tp] = sequence + 1
        batch = build_batch(
            [NewRecord(NOW_MS, None, value.encode())],
            producer_id=self.who.producer_id,
            producer_epoch=self.who.producer_epoch,
            base_sequence=sequence,
            is_transactional=True,
        )
        partition.append(memoryview(batch), origin=Origin.CLIENT, now_ms=NOW_MS)

    def send_offset(self, value: int) -> None:
        assert self.node.groups.offsets_partition("g", NOW_MS) == OFFSETS
        self.admission(OFFSETS, ClientCapabilities(True, True)).check(OFFSETS)
        committed = CommittedOffset(value, -1, "", NOW_MS, -1, -1)
        self.node.groups.offsets.commit_pending("g", self.who, {T0: committed}, NOW_MS)

    def end(self, is_commit: bool, *, is_classic: bool = False) -> None:
        version = 0 if is_classic else 2
        entry = self.node.transactions.end("x", self.who, is_commit, version, NOW_MS).entry
        if entry.next_producer_id != NO_ID:
            entry = entry._replace(producer_id=entry.next_producer_id, producer_epoch=0)
        if not is_classic:
            self.who, self.sequences = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch), {}

    def size(self, tp: TopicPartition) -> int:
        return self._file(tp).stat().st_size

    def bytes_of(self, tp: TopicPartition) -> memoryview:
        return memoryview(self._file(tp).read_bytes())

    def _file(self, tp: TopicPartition) -> Path:
        return self.directory / str(tp) / f"{0:020d}.log"

    def compact(self) -> None:
        """Sync the coordinator's log, and begin the next round of compaction."""
        now_ms = self.round_ms = self.round_ms + ROUND_MS
        self.node.transactions.topic.roll_for_compaction(now_ms)
        self.node.topics.partition(STATE)[1].flush()
        tick(self.node, now_ms)

    def record_count(self, tp: TopicPartition) -> int:
        return sum(len(batch.records) for batch in self.node.transactions.topic.replay(tp.partition))

    def lose_power(self, **sizes: int) -> None:
        """Stop the broker, truncate logs to earlier sizes, and start the next one."""
        self.node.log_manager.release()
        for name, tp in (("t0", T0), ("t1", T1), ("offsets", OFFSETS), ("state", STATE)):
            if name in sizes:
                with self._file(tp).open("r+b") as file:
                    file.truncate(sizes[name])
        self.round_ms = NOW_MS
        self.node = self._open()

    def restart(self) -> None:
        """Stop the broker cleanly, and start the next one."""
        self.node.close(NOW_MS)
        self.node = self._open()

    def log(self, tp: TopicPartition) -> list[str]:
        """Return the values and markers of a partition."""
        _, partition = self.node.topics.partition(tp)
        return values_and_markers(partition)

    def open_count(self, tp: TopicPartition) -> int:
        return self.node.topics.partition(tp)[1].open_transaction_count


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[Producer]:
    made = Producer(tmp_path / "data")
    yield made
    made.node.log_manager.release()


@pytest.mark.behaviour("T6")
@pytest.mark.parametrize("is_commit", [True, False])
@pytest.mark.parametrize("since", ["nothing", "an end", "a begin"])
def test_a_start_writes_the_marker_that_a_power_loss_took(
    producer: Producer, is_commit: bool, since: str
) -> None:
    producer.send(T0, "a")
    size = producer.size(T0)
    producer.end(is_commit)
    if since != "nothing":
        producer.send(T1, "b")
    if since == "an end":
        producer.end(not is_commit)
    producer.lose_power(t0=size)
    marker = "<commit>" if is_commit else "<abort>"
    assert producer.log(T0) == ["a", marker]
    assert producer.open_count(T0) == 0
    producer.lose_power()
    assert producer.log(T0) == ["a", marker], "once"


@pytest.mark.behaviour("T6")
@pytest.mark.parametrize("is_commit", [True, False])
def test_a_start_writes_the_marker_of_the_last_epoch_of_a_producer_id(
    tmp_path: Path, is_commit: bool
) -> None:
    """Regression: read_committed readers waited forever, because the next transaction had another producer id
    and did not end the open one.
    """
    producer = Producer(tmp_path / "data", EXHAUSTED_EPOCH)
    producer.send(T0, "a")
    size = producer.size(T0)
    producer.end(is_commit)
    producer.send(T0, "b")
    producer.lose_power(t0=size)
    assert producer.log(T0) == ["a", "<commit>" if is_commit else "<abort>"]
    assert producer.open_count(T0) == 0
    producer.node.log_manager.release()


@pytest.mark.behaviour("T6")
@pytest.mark.parametrize("when", ["before the start", "after it"])
@pytest.mark.parametrize("way", ["classic", "undecided"])
def test_an_open_transaction_is_ended_when_another_producer_id_takes_over(
    tmp_path: Path, way: str, when: str
) -> None:
    """Regression: read_committed readers waited forever. Only a next transaction of the older producer id
    would have ended the open one, and none began.
    """
    producer = Producer(tmp_path / "data", EXHAUSTED_EPOCH)
    sizes = {"state": producer.size(STATE)}
    producer.send(T0, "a", is_classic=way == "classic")
    if way == "classic":
        sizes = {"t0": producer.size(T0)}
        producer.end(False, is_classic=True)
    if when == "before the start" and way == "classic":
        producer.begin()
    producer.lose_power(**sizes)
    if when == "before the start" and way == "undecided":
        producer.begin()
        producer.lose_power()
    if when == "after it":
        assert producer.log(T0) == ["a"], "its producer may still live"
        producer.begin()
        tick(producer.node, NOW_MS + 10_000)
    assert producer.who.producer_epoch == 0
    assert producer.log(T0) == ["a", "<abort>"]
    assert producer.open_count(T0) == 0
    producer.node.log_manager.release()


@pytest.mark.behaviour("T6")
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_decision_is_not_compacted_away_while_a_power_loss_may_take_its_markers(
    producer: Producer, is_lost: bool
) -> None:
    producer.send(T0, "a")
    size = producer.size(T0)
    producer.end(True)
    producer.send(T1, "b")
    producer.end(True)
    before = producer.record_count(STATE)
    for _ in range(MARKERS_REACH_THE_DISK_MS // ROUND_MS):
        producer.compact()
    assert producer.record_count(STATE) == before
    if is_lost:
        producer.lose_power(t0=size)
        assert producer.log(T0) == ["a", "<commit>"]
        producer.compact()
        assert producer.record_count(STATE) >= before, "what the last process wrote is young again"
    for _ in range(MARKERS_REACH_THE_DISK_MS // ROUND_MS + 1):
        producer.compact()
    assert producer.record_count(STATE) == 1


@pytest.mark.behaviour("T6")
def test_a_clock_that_jumps_forward_makes_no_decision_old(producer: Producer) -> None:
    """Regression: compaction removed the decision, because the clock made it look old, and a power loss took
    the marker. The next start then aborted "a", which had been committed.
    """
    producer.send(T0, "a")
    size = producer.size(T0)
    producer.end(True)
    producer.send(T1, "b")
    producer.end(True)
    producer.compact()
    producer.round_ms += 3_600_000
    producer.compact()
    producer.lose_power(t0=size)
    assert producer.log(T0) == ["a", "<commit>"]


@pytest.mark.behaviour("T6")
def test_an_aborted_record_is_not_committed_with_the_next_transaction(producer: Producer) -> None:
    producer.send(T0, "aborted")
    size = producer.size(T0)
    producer.end(False)
    producer.send(T0, "lost")
    producer.end(True)
    producer.lose_power(t0=size)
    producer.send(T0, "next")
    producer.end(True)
    assert producer.log(T0) == ["aborted", "<abort>", "next", "<commit>"]


@pytest.mark.behaviour("T7")
@pytest.mark.parametrize("is_commit", [True, False])
def test_offsets_whose_marker_is_lost_are_committed_or_dropped_at_the_start(
    producer: Producer, is_commit: bool
) -> None:
    producer.send_offset(7)
    size = producer.size(OFFSETS)
    producer.end(is_commit)
    producer.send(T1, "b")
    producer.lose_power(offsets=size)
    offsets = producer.node.groups.offsets
    assert offsets.pending_of("g") == set()
    held = offsets.of("g").get(T0)
    assert (held.offset if held else None) == (7 if is_commit else None)


@pytest.mark.behaviour("T6")
def test_an_undecided_transaction_is_aborted_before_its_producer_begins_another(producer: Producer) -> None:
    before = producer.size(STATE)
    producer.send(T0, "undecided")
    producer.lose_power(state=before)
    assert producer.log(T0) == ["undecided"], "its producer may still live"
    entry = producer.node.transactions.init("x", None, 60_000, NOW_MS).entry
    producer.who, producer.sequences = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch), {}
    producer.send(T1, "elsewhere")
    assert producer.log(T0) == ["undecided"]
    producer.send(T0, "next")
    producer.end(True)
    assert producer.log(T0) == ["undecided", "<abort>", "next", "<commit>"]


@pytest.mark.behaviour("T6")
def test_a_decision_that_a_start_follows_does_not_end_an_older_transaction(producer: Producer) -> None:
    """The decision about the older transaction is unknown: compaction of `__transaction_state` has removed
    it.
    """
    producer.send(T0, "aborted")
    size = producer.size(T0)
    producer.end(False)
    producer.send(T0, "lost")
    producer.end(True)
    *_, (_, complete) = iter_batches(producer.bytes_of(STATE))
    state = producer.size(STATE) - complete.size_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionCoordinator, "_note_decision", lambda self, record: None)
        producer.lose_power(t0=size, state=state)
    assert producer.log(T0) == ["aborted", "<abort>", "<commit>"]


@pytest.mark.behaviour("T6")
def test_a_marker_written_again_does_not_end_the_next_transaction(producer: Producer) -> None:
    producer.send(T0, "a")
    producer.end(True)
    *_, (_, complete) = iter_batches(producer.bytes_of(STATE))
    size = producer.size(STATE) - complete.size_bytes
    producer.send(T0, "open")
    producer.lose_power(state=size)
    assert producer.log(T0) == ["a", "<commit>", "open"], "the record that it was written is lost"
    assert producer.open_count(T0) == 1


@pytest.mark.behaviour("T6")
@pytest.mark.parametrize("classic_is_commit", [True, False])
@pytest.mark.parametrize("is_commit", [True, False])
@pytest.mark.parametrize("when", ["at the start", "later"])
def test_an_aborted_classic_transaction_is_not_committed_with_the_next_one_of_its_epoch(
    producer: Producer, classic_is_commit: bool, is_commit: bool, when: str
) -> None:
    """A producer keeps its epoch when the broker starts to offer an epoch per transaction."""
    producer.send(T0, "classic")
    size = producer.size(T0)
    producer.node.transactions.end("x", producer.who, classic_is_commit, 1, NOW_MS)
    producer.send(T0, "lost")
    producer.end(is_commit)
    with pytest.MonkeyPatch.context() as patch:
        if when == "later":
            patch.setattr(TransactionCoordinator, "write_lost_markers", lambda self, now_ms: None)
        producer.lose_power(t0=size)
    producer.send(T0, "next")
    marker = "<commit>" if classic_is_commit and is_commit else "<abort>"
    assert producer.log(T0) == ["classic", marker, "next"]


@pytest.mark.parametrize("has_clean_stop", [False, True], ids=["at once", "after a clean stop"])
@pytest.mark.parametrize("is_classic", [False, True], ids=["epochs", "classic"])
@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "open"])
def test_an_epoch_that_only_a_partition_remembers_is_not_given_again(
    producer: Producer, is_ended: bool, is_classic: bool, has_clean_stop: bool
) -> None:
    """Regression: the broker gave a new instance a producer id and epoch that a partition still remembered.

    The new instance's record counted as a duplicate, so the broker acknowledged it without storing it.
    """
    producer.send(T0, "first", is_classic=is_classic)
    producer.end(True, is_classic=is_classic)
    state_size = producer.size(STATE)
    producer.begin()
    producer.send(T0, "older", is_classic=is_classic)
    if is_ended:
        producer.end(True, is_classic=True)
    producer.lose_power(state=state_size)
    if has_clean_stop:
        producer.restart()
    producer.begin()
    producer.send(T0, "newer", is_classic=is_classic)
    producer.end(True, is_classic=is_classic)
    end_of_older = "<commit>" if is_ended else "<abort>"
    assert producer.log(T0) == ["first", "<commit>", "older", end_of_older, "newer", "<commit>"]


def test_an_epoch_of_the_next_producer_id_that_only_a_partition_remembers_is_not_given_again(
    tmp_path: Path,
) -> None:
    """The power loss takes the record that completes the transaction of the last epoch.

    In the log, the next producer id then occurs only in an earlier record, which announces it.
    """
    producer = Producer(tmp_path / "data", EXHAUSTED_EPOCH)
    producer.send(T0, "first")
    producer.end(True)
    *_, (_, complete) = iter_batches(producer.bytes_of(STATE))
    state_size = producer.size(STATE) - complete.size_bytes
    producer.begin()
    producer.send(T0, "older")
    producer.lose_power(state=state_size)
    producer.begin()
    producer.send(T0, "newer")
    producer.end(True)
    written_again = "<commit>"
    assert producer.log(T0) == ["first", "<commit>", "older", written_again, "<abort>", "newer", "<commit>"]
    producer.node.log_manager.release()


@pytest.mark.behaviour("T6")
@pytest.mark.parametrize("way", ["records", "offsets", "nothing"])
def test_an_aborted_record_is_not_committed_by_a_newer_classic_instance(producer: Producer, way: str) -> None:
    """Clients without an epoch per transaction, such as librdkafka, have one epoch for each instance."""
    tp = OFFSETS if way == "offsets" else T0
    if way == "offsets":
        producer.send_offset(5)
    else:
        producer.send(tp, "aborted", is_classic=True)
    size = producer.size(tp)
    producer.end(False, is_classic=True)
    producer.begin()
    producer.lose_power(**{"offsets" if way == "offsets" else "t0": size})
    assert producer.open_count(tp) == 1
    if way == "records":
        producer.send(tp, "next", is_classic=True)
        assert producer.log(tp) == ["aborted", "<abort>", "next"]
    else:
        producer.add(tp)
    producer.end(True, is_classic=True)
    assert producer.open_count(tp) == 0
    if way == "offsets":
        assert not producer.node.groups.offsets.of("g")
    else:
        own = ["next"] if way == "records" else []
        assert producer.log(tp) == ["aborted", "<abort>", *own, "<commit>"]
