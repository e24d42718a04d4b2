"""Two features act on one topic, interleaved and with restarts. Readers must see exactly the records that a
model predicts.

Seven features remove records, hide them, or make a start take a directory over. Each pair of features is
tested. All limits are small, and deferred work waits until a random moment, so that later operations overtake
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, count
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.log.model import LogModel, Row, Written, newest, read_rows

from oncelog.broker.state import BrokerState
from oncelog.broker.topics.topics_file import FILE_NAME
from oncelog.config import BROKER
from oncelog.limits import Limits
from oncelog.log.background import BlockingCall
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Isolation, Origin, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord

FEATURES = ("retention", "compaction", "deletion", "recreation", "transactions", "DeleteRecords", "takeover")
NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
TP = TopicPartition("t", 0)
LIMITS = Limits(
    max_compaction_keys=2,
    compaction_step_items=2,
    index_run_entries=2,
    max_drops_per_step=1,
    max_read_cursors=1,
    scan_chunk_bytes=100,
    scan_first_chunk_bytes=61,
    scan_block_headers=2,
    max_producers_at_work=1,
    producer_shard_entries=1,
    snapshot_every_bytes=200,
    snapshot_step_shards=1,
    coordinator_read_bytes=1,
    coordinator_roll_bytes=500,
)
OVERRIDES = {
    "internal.segment.bytes": "500",
    "index.interval.bytes": "60",
    "retention.ms": str(5 * HOUR_MS),
    "min.cleanable.dirty.ratio": "0",
}


class Topic:
    """A topic `t` on a node, the records that its readers must see, and one method for each feature."""

    def __init__(self, draw: Random, *, is_compacted: bool) -> None:
        self.draw, self.is_compacted = draw, is_compacted
        self.overrides = OVERRIDES | {"cleanup.policy": "compact" if is_compacted else "delete"}
        self.now_ms, self.numbers, self.values = NOW_MS, count(1), count(1)
        self.job: BlockingCall | None = None
        self.pending: dict[str, ProducerIdAndEpoch] = {}
        self.open(MemoryDisk())
        self.create()

    def new_uuid(self) -> bytes:
        return next(self.numbers).to_bytes(16, "big")

    def open(self, disk: MemoryDisk) -> None:
        disk.now_ms = lambda: self.now_ms
        broker = BROKER.parse(
            {
                "offsets.topic.num.partitions": 1,
                "transaction.state.log.num.partitions": 1,
                "oncelog.takeover.accept": "settings",
            }
        )
        self.disk, self.job = disk, None
        manager = LogManager.open(disk, node_id=1, new_uuid=self.new_uuid, now_ms=self.now_ms, limits=LIMITS)
        self.node = BrokerState(manager, broker, new_uuid=self.new_uuid, now_ms=self.now_ms)
        self.node.log_manager.background.on_added = lambda: None

    def create(self) -> None:
        self.node.topics.create("t", 1, self.overrides, self.now_ms)
        self.model, self.compacted_to = LogModel(), 0

    @property
    def partition(self) -> Partition:
        return self.node.topics.partition(TP)[1]

    @property
    def exists(self) -> bool:
        return self.node.topics.get("t") is not None

    # Records

    def produce(self, name: str | None = None) -> None:
        """Append a few records. With `name`, they belong to the open transaction of that transactional id."""
        if not self.exists:
            self.create()
        for _ in range(self.draw.randrange(1, 4)):
            value = b"%d" % next(self.values) + bytes(self.draw.choice((0, 60)))
            rows = ((self.draw.choice((b"a", b"b", b"c", b"d")), self.draw.choice((value, value, None))),)
            numbered, model = {}, self.model
            if name is not None:
                who = self.pending[name]
                epoch, sequence = model.next_of(who.producer_id)
                sequence = sequence if epoch == who.producer_epoch else 0
                numbered = {"pid": who.producer_id, "epoch": who.producer_epoch, "sequence": sequence}
            batch = Written(
                model.end, rows, self.now_ms, self.now_ms, **numbered, is_transactional=name is not None
            )
            self.append(batch)

    def append(self, batch: Written) -> None:
        records = [NewRecord(batch.timestamp_ms, key, value) for key, value in batch.rows]
        data = build_batch(
            records,
            producer_id=batch.pid,
            producer_epoch=None if batch.pid is None else batch.epoch,
            base_sequence=None if batch.pid is None else batch.sequence,
            is_transactional=batch.is_transactional,
        )
        self.partition.append(memoryview(data), origin=Origin.CLIENT, now_ms=self.now_ms)
        self.model.add(batch)

    # Features

    def retention(self) -> None:
        self.now_ms += self.draw.choice((0, 2, 6)) * HOUR_MS
        if not self.exists:
            return
        before = [(segment.end_offset, segment.size_bytes) for segment in self.partition.log.segments]
        self.partition.enforce_retention(self.now_ms)
        expected, oldest_ms = self.model.start, self.now_ms - 5 * HOUR_MS
        for end, size in before:
            times = [batch.timestamp_ms for batch in self.model.batches if batch.end_offset <= end]
            if not self.partition.config.is_deleted or not size or max(times, default=0) >= oldest_ms:
                break
            expected = max(expected, end)
        if self.partition.config.retention_ms is None:
            expected = self.model.start
        assert self.partition.log_start_offset == expected
        self.model.start = expected

    def compaction(self) -> None:
        if not self.exists:
            return
        if self.partition.log.segments.active.size_bytes and self.draw.random() < 0.5:
            self.partition.log.roll(self.now_ms)
        self.partition.flush()
        if self.partition.config.is_compacted:
            self.compacted_to = self.partition.recovery_point
        self.node.log_manager.compact(self.now_ms)

    def deletion(self) -> None:
        if (topic := self.node.topics.get("t")) is not None:
            self.node.topics.delete([topic])
            self.model = LogModel()

    def recreation(self) -> None:
        self.deletion()
        self.create()

    def transactions(self) -> None:
        """For one of two transactional ids, begin a transaction, continue it or end it."""
        name = self.draw.choice(("x", "y"))
        if name in self.pending and self.draw.random() < 0.5:
            self.end(name)
            return
        if not self.exists:
            self.create()
        if name not in self.pending:
            entry = self.node.transactions.init(name, None, 60_000, self.now_ms).entry
            self.pending[name] = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
        self.node.transactions.add_partitions(name, self.pending[name], [TP], self.now_ms)
        self.produce(name)

    def end(self, name: str) -> None:
        who, is_commit = self.pending.pop(name), self.draw.random() < 0.5
        self.node.transactions.end(name, who, is_commit, 2, self.now_ms)
        if self.exists and self.partition.log_end_offset > self.model.end:
            # With an epoch per transaction, the marker has the epoch of the next transaction.
            epoch = who.producer_epoch + 1
            marker = Written(
                self.model.end, ((None, None),), self.now_ms, self.now_ms, who.producer_id, epoch
            )
            self.model.add(replace_outcome(marker, is_commit))

    def DeleteRecords(self) -> None:
        if self.exists:
            before = self.draw.randrange(self.model.end + 1)
            self.partition.delete_records(before, self.now_ms)
            self.model.start = max(self.model.start, before)

    def takeover(self) -> None:
        """Lose the list of topics in a kill. The next start must find the topic by its directories, and
        delete nothing.
        """
        self.finish()
        self.close()
        if self.disk.exists(FILE_NAME):
            self.disk.remove(FILE_NAME)
        self.open(self.disk.after_kill())

    # Processes

    def step(self) -> None:
        """Run a few steps of background work. A blocking call that the last step started may be left
        unfinished.
        """
        background = self.node.log_manager.background
        for _ in range(self.draw.choice((0, 1, 5))):
            self.run_job()
            if background:
                self.job = background.step()

    def run_job(self) -> None:
        job, self.job = self.job, None
        if job is not None:
            with suppress(Exception):  # the task raises this error in its next step
                job()

    def finish(self) -> None:
        while self.job is not None or self.node.log_manager.background:
            self.run_job()
            if self.node.log_manager.background:
                self.job = self.node.log_manager.background.step()

    def close(self) -> None:
        self.run_job()
        self.node.log_manager.background.on_added = None
        self.node.close(self.now_ms)

    def restart(self) -> None:
        if self.draw.random() < 0.5:
            self.close()
            self.open(self.disk.after_kill())
            return
        self.finish()  # finish all work first, so that log starts are stored
        old = self.disk
        self.open(old.after_kill())
        old.release()

    def check(self) -> None:
        if not self.exists:
            return
        partition, model = self.partition, self.model
        assert (partition.log_start_offset, partition.log_end_offset) == (model.start, model.end)
        for isolation in Isolation:
            is_committed_only = isolation is Isolation.READ_COMMITTED
            upper = partition.last_stable_offset if is_committed_only else partition.high_watermark
            expected = model.visible(upper, is_committed_only=is_committed_only)
            found = read_rows(partition, model.start, isolation, 200)
            if self.compacted_to:
                self.check_compacted(found, expected, is_committed_only=is_committed_only)
            else:
                assert found == expected

    def check_compacted(self, found: list[Row], expected: list[Row], *, is_committed_only: bool) -> None:
        assert set(found) <= set(expected)
        behind = [row for row in expected if row.offset >= self.compacted_to]
        assert [row for row in found if row.offset >= self.compacted_to] == behind
        if is_committed_only:
            assert newest(found) == newest(expected)


def replace_outcome(marker: Written, is_commit: bool) -> Written:
    """Return the marker with this outcome."""
    return replace(marker, is_commit=is_commit)


def plan(draw: Random, pair: tuple[str, str]) -> Iterator[str]:
    """Yield the actions of a run: both features in random order, with records and restarts between."""
    steps = [*pair] * 4
    draw.shuffle(steps)
    for number, feature in enumerate(steps):
        yield from ("produce",) * draw.randrange(1, 3)
        yield feature
        if number == len(steps) // 2 or draw.random() < 0.1:
            yield "restart"


@pytest.mark.behaviour("I14", "I17")
@pytest.mark.parametrize("pair", list(combinations(FEATURES, 2)), ids="-".join)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_readers_see_the_right_records_when_two_features_meet(pair: tuple[str, str], seed: int) -> None:
    draw = Random(seed)
    topic = Topic(draw, is_compacted="compaction" in pair)
    for name in plan(draw, pair):
        act: Callable[[], None] = getattr(topic, name)
        act()
        topic.check()
        topic.step()
    topic.finish()
    topic.check()
    topic.restart()
    topic.check()
