"""A Hypothesis state machine: one partition under random operations and crashes, with small random limits.

Operations are appends, transactions, retries, retention, DeleteRecords, compaction, and deletion and
recreation of the topic. Kills, power losses and failed syncs come between two operations or within one. The
test runs background work step by step, and the process may die during a step. `LogModel` gives the expected
records and producers' states.

docs/internals/limits.md lists bugs that were planted to check that this test fails.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oncelog.errors import BrokerError, KafkaStorageError
from oncelog.limits import Limits
from oncelog.log.background import BlockingCall
from oncelog.log.config import LogConfig
from oncelog.log.manager import LogManager
from oncelog.log.segment import Segment
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import Compression, Isolation, Origin
from oncelog.wire.batch import build_batch, iter_batches
from oncelog.wire.control import encode_end_marker
from oncelog.wire.records import NewRecord
from support.log.model import (
    REMEMBERED,
    LogModel,
    Row,
    Stored,
    Written,
    newest,
    read_rows,
    read_stored,
)
from support.log.partitions import NOW_MS, TP, config
from support.small_limits import MAX_BATCH_RECORDS, small_limits

HOUR_MS = 3_600_000
RETENTION_MS = 5 * HOUR_MS
EXPIRATION_MS = 10 * HOUR_MS
RETENTION_BYTES = 1_500
TOMBSTONE_MS = 2 * HOUR_MS
SETTINGS: dict[str, Any] = {
    "segment_bytes": 600,
    "segment_ms": 8 * HOUR_MS,
    "index_interval_bytes": 60,
    "retention_ms": RETENTION_MS,
    "delete_retention_ms": TOMBSTONE_MS,
    "min_cleanable_dirty_ratio": 0,
}
KEYS = (b"a", b"b", b"c", b"d", b"a key that is known by its digest")
T = TypeVar("T")


class NewBatch(NamedTuple):
    """A batch to produce. With `pid` 0 it is not idempotent. `hours` is the age of its records, or None for
    no timestamp.

    If the producer has an open transaction, `how` ends it first: "commit", "abort" or "fence".
    """

    pid: int
    keys: list[bytes]
    value: bytes | None
    hours: int | None
    how: str
    compression: Compression


NEW_BATCHES = (
    st.integers(0, 3),
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=MAX_BATCH_RECORDS),
    st.sampled_from((b"v", b"w" * 30, None)),
    st.sampled_from((0, 0, 0, -1, -4, -20, None)),
    st.sampled_from(("plain", "begin", "begin", "commit", "abort", "bump", "fence")),
    st.sampled_from((Compression.NONE, Compression.NONE, Compression.GZIP)),
)


class ProcessEnded(Exception):
    """The process died within an operation. It has been started again, and the model is up to date."""


def has_run_long(machine: LogMachine) -> bool:
    """Return True if the process has run enough operations since its start to make its end an interesting
    test.
    """
    return machine.operations >= 4


def may_end_process(operation: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(operation)
    def wrapped(self: LogMachine, **drawn: Any) -> None:
        self.operations += 1
        try:
            operation(self, **drawn)
        except ProcessEnded:
            pass

    return wrapped


class LogMachine(RuleBasedStateMachine):
    """One partition and its model.

    A power loss keeps everything below `durable_end`. `start_after_kill` and `start_after_power_loss` are the
    lowest log start offsets possible after each. Compaction may have removed records below
    `may_be_compacted`.
    """

    @initialize(
        limits=small_limits(),
        policy=st.sampled_from(("delete", "compact", "compact,delete")),
        flush_messages=st.sampled_from((1, 2**63 - 1)),
        retention_bytes=st.sampled_from((-1, RETENTION_BYTES)),
    )
    def begin_process(self, limits: Limits, policy: str, flush_messages: int, retention_bytes: int) -> None:
        self.settings = {
            **SETTINGS,
            "cleanup_policy": policy,
            "flush_messages": flush_messages,
            "retention_bytes": retention_bytes,
        }
        self.limits, self.is_compacted = limits, "compact" in policy
        self.shows_durable_only = flush_messages == 1
        self.now_ms, self.incarnation, self.pid_base, self.uuids = NOW_MS, 0, 0, 0
        self.power_loss: Random | None = None
        self.new_model()
        self.start_process(MemoryDisk())

    def new_model(self) -> None:
        self.model = LogModel()
        self.incarnation += 1
        self.durable_end = self.seen_end = self.may_be_compacted = 0
        self.start_after_kill = self.start_after_power_loss = 0
        self.tombstones: dict[int, int] = {}

    # Processes

    def config(self) -> LogConfig:
        return config(EXPIRATION_MS, limits=self.limits, **self.settings)

    def new_uuid(self) -> bytes:
        self.uuids += 1
        return self.uuids.to_bytes(16, "big")

    def start_process(self, disk: MemoryDisk) -> None:
        disk.now_ms = lambda: self.now_ms
        self.disk, self.call, self.operations = disk, None, 0
        self.manager = LogManager.open(
            disk, node_id=1, new_uuid=self.new_uuid, now_ms=self.now_ms, limits=self.limits
        )
        self.manager.background.on_added = lambda: None
        self.open_partition()
        self.manager.forget_last_stop()

    def open_partition(self) -> None:
        topic_id = self.incarnation.to_bytes(16, "big")
        self.partition = self.manager.open_partition(TP, self.config(), topic_id, self.now_ms)
        self.disk.sync_directory()  # sync the directory, as the creation of a topic does

    def do(self, call: Callable[[], T], pending: Written | None = None) -> T:
        """Run an operation during which the process may die. Then start it again and raise ProcessEnded.

        `pending` is the batch that the operation writes.
        """
        try:
            return call()
        except SimulatedCrash:
            self.restart_after_crash(pending)
            raise ProcessEnded from None

    def restart_after_crash(self, pending: Written | None, *, reports: bool = True) -> None:
        """Start again after a crash. The start itself may crash too, and is repeated."""
        rng, self.power_loss = self.power_loss, None
        old = self.disk
        old.release()
        survivor = old.after_kill() if rng is None else old.after_power_loss(rng)
        if rng is not None and rng.random() < 0.5:
            survivor.crash_after = rng.randrange(300)
            try:
                self.start_process(survivor)
            except SimulatedCrash:
                survivor.release()
                survivor = survivor.after_power_loss(rng)
                self.start_process(survivor)
            survivor.crash_after = None
        else:
            self.start_process(survivor)
        self.settle(pending, is_power_loss=rng is not None)
        assert reports or self.partition.recovery_warnings == []

    def settle(self, pending: Written | None, *, is_power_loss: bool) -> None:
        """Check the state that the new process recovered, and remove from the model what may be lost."""
        partition, model = self.partition, self.model
        end, start = partition.log_end_offset, partition.log_start_offset
        floor = self.start_after_power_loss if is_power_loss else self.start_after_kill
        assert floor <= start, "deleted records came back"
        if any(max(model.start, floor) <= batch.base_offset < start for batch in model.batches):
            # If the first segment is not synced, a power loss may take its name and keep those of later
            # segments.
            assert is_power_loss and self.durable_end <= model.start, "records went"
            self.recreate()
            return
        if pending is not None and end == pending.end_offset:
            model.add(pending)
        if not is_power_loss:
            assert end == model.end, "a kill takes nothing"
        assert end >= self.durable_end, "what was synced is gone"
        if self.shows_durable_only:
            assert end >= self.seen_end, "a reader saw what a power loss took"
        model.cut(end)
        if model.end < end or (is_power_loss and start == end > self.durable_end):
            # All records were deleted, and then the power loss took the end of the log. So there is nothing
            # left to compare.
            assert is_power_loss and start == end
            self.recreate()
            return
        model.start = start
        is_unsure = any(self.durable_end <= batch.base_offset < start for batch in model.batches)
        # Call has_holes even if `is_unsure`: it removes from the model the records that are lost in a gap.
        if is_power_loss and ((self.is_compacted and self.has_holes()) or is_unsure):
            # Some records were deleted before they were synced, or lost in a gap. The snapshots that are left
            # decide which producers' state is restored, so it cannot be predicted.
            self.check_views()
            self.recreate()
            return
        if partition.recovery_point > start:
            # If the recovery point is the log start, the log has no records, and the deletion of unsynced
            # records is not durable.
            self.durable_end = max(self.durable_end, partition.recovery_point)
        self.seen_end = min(self.seen_end, end)
        self.may_be_compacted = min(self.may_be_compacted, end)
        self.tombstones = {at: ms for at, ms in self.tombstones.items() if at < end}
        self.check_producers()
        self.check_views()

    def has_holes(self) -> bool:
        """Remove the lost end of a segment from the model. It leaves a gap. On compacted topics, recovery and
        Apache Kafka accept such gaps.

        Return True if there is a gap.
        """
        stored = {batch.header.base_offset for batch in read_stored(self.partition)}
        sure, start = max(self.durable_end, self.may_be_compacted), self.partition.log_start_offset
        before = self.model.batches
        self.model.batches = [
            batch
            for batch in before
            if batch.base_offset < sure or batch.end_offset <= start or batch.base_offset in stored
        ]
        return self.model.batches != before

    # Writing

    def data(self, batch: Written, compression: Compression = Compression.NONE) -> memoryview:
        how: dict[str, Any] = {"compression": compression}
        if batch.pid is not None:
            how |= {"producer_id": batch.pid, "producer_epoch": batch.epoch, "base_sequence": batch.sequence}
        records = [NewRecord(batch.timestamp_ms, key, value) for key, value in batch.rows]
        return memoryview(build_batch(records, is_transactional=batch.is_transactional, **how))

    def append(self, batch: Written, data: memoryview, origin: Origin) -> None:
        appended = self.do(lambda: self.partition.append(data, origin=origin, now_ms=self.now_ms), batch)
        assert (appended.base_offset, appended.is_duplicate) == (self.model.end, False)
        self.model.add(batch)

    @rule(wanted=st.lists(st.builds(NewBatch, *NEW_BATCHES), min_size=6, max_size=16))
    @may_end_process
    def produce(self, wanted: list[NewBatch]) -> None:
        for one in wanted:
            self.produce_one(one)

    def produce_one(self, wanted: NewBatch) -> None:
        pid, keys, value, hours, how, compression = wanted
        timestamp_ms = -1 if hours is None else self.now_ms + hours * HOUR_MS
        numbered: dict[str, Any] = {}
        if pid:
            pid += self.pid_base
            epoch, sequence = self.model.next_of(pid)
            is_open = pid in self.model.open_offsets()
            if how in ("commit", "abort", "fence") and is_open:
                self.end_transaction(pid, is_commit=how == "commit", is_fenced=how == "fence")
                return
            if how == "bump" and not is_open:
                epoch, sequence = epoch + 1, 0
            numbered = {
                "pid": pid,
                "epoch": epoch,
                "sequence": sequence,
                "is_transactional": is_open or how == "begin",
            }
        rows = tuple((key, value) for key in keys)
        batch = Written(self.model.end, rows, timestamp_ms, self.now_ms, **numbered)
        self.append(batch, self.data(batch, compression), Origin.CLIENT)

    def end_transaction(self, pid: int, *, is_commit: bool, is_fenced: bool) -> None:
        epoch = self.model.next_of(pid)[0] + is_fenced
        written = memoryview(encode_end_marker(pid, epoch, is_commit, 0, self.now_ms))
        marker = Written(
            self.model.end, ((None, None),), self.now_ms, self.now_ms, pid, epoch, is_commit=is_commit
        )
        self.append(marker, written, Origin.COORDINATOR)

    def must_know(self, pid: int) -> bool:
        """Return True if the partition must know the producer, because it cannot have expired."""
        known = self.model.producers()[pid]
        return known.open_offset is not None or self.now_ms - known.append_ms < EXPIRATION_MS

    @precondition(lambda self: self.model.producers())
    @rule(data=st.data(), back=st.integers(0, 7))
    @may_end_process
    def retry(self, data: st.DataObject, back: int) -> None:
        """Send a batch again. It must be a duplicate with its first offset, or be rejected, but never be
        stored.
        """
        pid = data.draw(st.sampled_from(sorted(self.model.producers())))
        mine = [batch for batch in self.model.batches if batch.pid == pid and batch.is_commit is None]
        if len(mine) < back or self.partition.producer(pid) is None:
            return
        if not back:
            self.leave_a_gap(pid, 1)
            return
        batch, end = mine[-back], self.partition.log_end_offset
        again = self.data(batch)
        known = self.partition.producer(pid)
        assert known is not None
        is_known = any(each.last_offset == batch.end_offset - 1 for each in known.batches)
        try:
            appended = self.do(lambda: self.partition.append(again, origin=Origin.CLIENT, now_ms=self.now_ms))
        except BrokerError:
            assert not is_known
        else:
            assert (appended.base_offset, appended.is_duplicate) == (batch.base_offset, True)
        assert self.partition.log_end_offset == end

    def leave_a_gap(self, pid: int, gap: int) -> None:
        epoch, sequence = self.model.next_of(pid)
        batch = Written(self.model.end, ((b"a", b"v"),), self.now_ms, self.now_ms, pid, epoch, sequence + gap)
        data, partition = self.data(batch), self.partition
        with pytest.raises(BrokerError):
            self.do(lambda: partition.append(data, origin=Origin.CLIENT, now_ms=self.now_ms))

    def flush(self) -> None:
        end = self.model.end
        self.do(self.partition.flush)
        assert self.partition.recovery_point == end
        self.durable_end = end
        if self.manager._is_compacting:
            # The running round of compaction reads the recovery point only when it reaches the partition, so
            # it may compact up to `end`.
            self.note_tombstones()
            self.may_be_compacted = max(self.may_be_compacted, end)

    def roll(self) -> None:
        if self.partition.log.segments.active.size_bytes:
            self.do(lambda: self.partition.log.roll(self.now_ms))

    @rule(
        ms=st.sampled_from((0, 60_000, HOUR_MS, 3 * HOUR_MS)),
        is_rolled=st.booleans(),
        is_flushed=st.booleans(),
    )
    @may_end_process
    def pass_time(self, ms: int, is_rolled: bool, is_flushed: bool) -> None:
        self.now_ms += ms
        if is_rolled:
            self.roll()
        if is_flushed:
            self.flush()

    @precondition(lambda self: self.model.end)
    @rule(is_flushed=st.booleans())
    @may_end_process
    def roll_on_a_full_disk(self, is_flushed: bool) -> None:
        """Roll while the disk has no room for the snapshot of the producers."""
        self.finish_chores()
        self.disk.errors["write", ".tmp"] = errno.ENOSPC
        try:
            self.roll()
            with suppress(OSError):
                self.finish_chores()
            if is_flushed:
                self.flush()
        finally:
            self.disk.errors.clear()

    # Deletion and expiry

    @rule(back=st.integers(0, 12))
    @may_end_process
    def delete_records(self, back: int) -> None:
        target = max(self.partition.high_watermark - back, 0)
        before = self.model.start
        self.model.start = max(before, target)
        assert self.do(lambda: self.partition.delete_records(target, self.now_ms)) == self.model.start

    @rule()
    @may_end_process
    def retain(self) -> None:
        """Enforce retention. Check that it deletes only segments that are too old or beyond the size limit,
        also on compacted topics.
        """
        partition, now_ms = self.partition, self.now_ms
        expected, excess = self.model.start, partition.size_bytes - self.settings["retention_bytes"]
        is_active = partition.config.is_deleted and not partition.log.is_swapping
        for segment in partition.log.segments if is_active else ():
            is_old = self.largest_time(segment) < now_ms - RETENTION_MS
            is_excess = self.settings["retention_bytes"] >= 0 and excess >= segment.size_bytes
            is_new = segment is partition.log.segments.active and not segment.size_bytes
            if is_new or not (is_old or is_excess) or segment.end_offset > partition.high_watermark:
                break
            expected, excess = max(expected, segment.end_offset), excess - segment.size_bytes
        self.model.start = expected
        self.do(lambda: partition.enforce_retention(now_ms))
        assert partition.log_start_offset == expected

    def largest_time(self, segment: Segment) -> int:
        """Return the segment's largest record timestamp, or the time of its file if no record has a
        timestamp.

        The segment's file shows which batches compaction has left.
        """
        # Read the open file and not the one at its path: during a swap, a new file may already have the old
        # segment's name.
        data = memoryview(segment.file.pread(segment.size_bytes, 0))
        left = {header.base_offset for _, header in iter_batches(data)}
        timed = [batch.timestamp_ms for batch in self.model.batches if batch.base_offset in left]
        largest_ms = max(timed, default=-1)
        return largest_ms if largest_ms >= 0 else self.disk.modified_ms(segment.log_path)

    @precondition(lambda self: self.is_compacted)
    @rule(is_rolled=st.booleans(), is_finished=st.booleans())
    @may_end_process
    def compact(self, is_rolled: bool, is_finished: bool) -> None:
        if is_rolled:
            self.roll()
        self.flush()
        if is_finished:
            self.finish_chores()  # compaction waits for the snapshot of the roll
        self.note_tombstones()
        self.may_be_compacted = max(self.may_be_compacted, self.partition.recovery_point)
        self.do(lambda: self.manager.compact(self.now_ms))
        if is_finished:
            self.finish_chores()
            self.check_views()

    def note_tombstones(self) -> None:
        for row in self.model.visible(self.model.end, is_committed_only=True):
            if row.value is None:
                self.tombstones.setdefault(row.offset, self.now_ms)

    def recreate(self) -> None:
        self.disk.crash_after = None
        self.manager.delete_partitions([TP])
        self.pid_base += 10
        self.new_model()
        self.open_partition()

    @precondition(lambda self: len(self.model.batches) > 20)
    @rule()
    def delete_and_create_the_topic(self) -> None:
        """Recreate the topic while deferred work of the old one is in progress."""
        self.recreate()

    # Deferred work

    @rule(is_finished=st.booleans())
    @may_end_process
    def checkpoint(self, is_finished: bool) -> None:
        partition = self.partition
        self.do(lambda: list(partition.expire_producers(self.now_ms)))
        self.do(self.manager.write_checkpoints)
        if is_finished:
            self.finish_chores()
            self.start_after_power_loss = self.start_after_kill

    @precondition(lambda self: self.call is not None or self.manager.background)
    @rule(count=st.integers(0, 10))
    @may_end_process
    def step_chores(self, count: int) -> None:
        """Run `count` steps of background work, or all if it is 0. The last step's blocking call may be left
        running.
        """
        if not count:
            self.finish_chores()
        for _ in range(count):
            self.run_job()
            if self.manager.background:
                self.call = self.do(self.manager.background.step)

    def run_job(self) -> None:
        """Finish the blocking call that is running."""
        call, self.call = self.call, None
        if call is not None:
            self.do(lambda: self.attempt(call))

    def attempt(self, call: BlockingCall) -> None:
        with suppress(Exception):  # the task raises this error in its next step
            call()

    def finish_chores(self) -> None:
        self.do(self.finish_all)
        self.start_after_kill = self.model.start

    def finish_all(self) -> None:
        background = self.manager.background
        while self.call is not None or background:
            call, self.call = self.call, None
            if call is not None:
                self.attempt(call)
            elif background:
                self.call = background.step()

    # Kills and stops

    @precondition(has_run_long)
    @rule(steps=st.integers(0, 1_500), seed=st.none() | st.integers(0, 1_000))
    def die_soon(self, steps: int, seed: int | None) -> None:
        """Kill the process after `steps` more steps of the disk. With a seed, cut the power instead."""
        self.disk.crash_after = self.disk.steps + steps
        self.power_loss = None if seed is None else Random(seed)

    @precondition(has_run_long)
    @rule(seed=st.none() | st.integers(0, 1_000))
    @may_end_process
    def end_process(self, seed: int | None) -> None:
        """Kill the process now. With a seed, cut the power instead."""
        self.power_loss = None if seed is None else Random(seed)
        self.restart_after_crash(None, reports=seed is not None)

    @precondition(has_run_long)
    @rule(seed=st.integers(0, 1_000))
    @may_end_process
    def fail_a_sync(self, seed: int) -> None:
        """Let a sync fail as on Linux: pages that were not written stay readable and count as clean."""
        self.disk.crash_after = None
        self.disk.errors[("sync", ".log")] = errno.EIO
        try:
            self.partition.flush()
        except KafkaStorageError:
            assert self.partition.is_offline
        finally:
            self.disk.errors.clear()
        self.power_loss = None
        self.restart_after_crash(None, reports=False)
        self.flush()
        self.power_loss = Random(seed)
        self.restart_after_crash(None)

    @precondition(has_run_long)
    @rule(limits=small_limits())
    @may_end_process
    def stop_and_start(self, limits: Limits) -> None:
        """Stop cleanly and start with other limits."""
        self.stop(limits)
        self.start_after_stop()
        assert self.partition.recovery_warnings == []

    def stop(self, limits: Limits) -> None:
        """Stop cleanly.

        `limits` are the limits of the next process. `disk` becomes the disk that it will find.
        """
        end = self.model.end
        if self.call is not None:
            self.run_job()
        self.manager.background.on_added = None
        self.do(lambda: self.manager.close(self.now_ms))
        self.durable_end = end
        self.start_after_kill = self.start_after_power_loss = self.model.start
        largest = max(limits.max_relative_offset, self.limits.max_relative_offset)
        self.limits = with_offsets(limits, largest)
        self.disk.crash_after = None
        self.disk = self.disk.after_kill()

    def start_after_stop(self) -> None:
        self.start_process(self.disk)
        self.settle(None, is_power_loss=False)

    # Checks

    def check_views(self, max_bytes: int = 300) -> None:
        partition, model = self.partition, self.model
        for isolation in Isolation:
            is_committed_only = isolation is Isolation.READ_COMMITTED
            upper = partition.last_stable_offset if is_committed_only else partition.high_watermark
            expected = model.visible(upper, is_committed_only=is_committed_only)
            found = read_rows(partition, model.start, isolation, max_bytes)
            if not self.is_compacted:
                assert found == expected
                continue
            assert [row for row in found if row.offset >= self.may_be_compacted] == [
                row for row in expected if row.offset >= self.may_be_compacted
            ]
            assert set(found) <= set(expected)
            if is_committed_only:
                self.check_newest(found, expected)
        self.seen_end = max(self.seen_end, partition.high_watermark)

    def check_newest(self, found: list[Row], expected: list[Row]) -> None:
        assert newest(found) == newest(expected)
        latest = {row.key: row for row in expected}
        offsets = {row.offset for row in found}
        for row in latest.values():
            noted_ms = self.tombstones.get(row.offset, self.now_ms)
            if row.value is None and self.now_ms - noted_ms < TOMBSTONE_MS:
                assert row.offset in offsets, "a tombstone went before delete.retention.ms"

    def check_producers(self) -> None:
        for pid, expected in self.model.producers().items():
            entry = self.partition.producer(pid)
            if entry is None:
                assert not self.must_know(pid)
                continue
            assert entry.producer_epoch == expected.epoch
            self.check_open(pid, entry.current_txn_first_offset, expected.open_offset)
            batches = [(batch.last_sequence, batch.last_offset) for batch in entry.batches]
            remembered = expected.batches[-REMEMBERED:]
            assert batches == remembered[len(remembered) - len(batches) :]
            if self.must_know(pid):
                assert batches or not remembered

    def check_open(self, pid: int, found: int | None, expected: int | None) -> None:
        """Compare the start of a producer's open transaction with the expected one.

        If its first records were deleted, it may also begin at a later record.
        """
        if expected is None or found is None or expected >= self.model.start:
            assert found == expected
            return
        assert found == expected or found in {
            batch.base_offset
            for batch in self.model.batches
            if batch.pid == pid and batch.base_offset > expected
        }

    @rule(max_bytes=st.sampled_from((1, 150, 700)), offset=st.integers(0, 200))
    def read(self, max_bytes: int, offset: int) -> None:
        self.check_views(max_bytes)
        model, partition = self.model, self.partition
        offset = model.start + offset % max(partition.high_watermark - model.start, 1)
        found = read_rows(partition, offset, Isolation.READ_UNCOMMITTED, max_bytes)
        assert found == [
            row
            for row in read_rows(partition, model.start, Isolation.READ_UNCOMMITTED)
            if row.offset >= offset
        ]

    @rule(hours=st.integers(-25, 1), data=st.data())
    def look_up_a_time(self, hours: int, data: st.DataObject) -> None:
        """Look up the first record at or after a timestamp, and the record with the largest one. Compare them
        with the stored records.
        """
        stored = read_stored(self.partition)
        times = [(at, ms) for batch in stored for at, ms, _, _ in batch.records if at >= self.model.start]
        known = sorted({ms for _, ms in times if ms >= 0})
        wanted = data.draw(st.sampled_from(known)) if known and hours % 2 else self.now_ms + hours * HOUR_MS
        found = self.partition.offset_for_timestamp(wanted)
        expected = next(((at, ms) for at, ms in times if ms >= wanted), None)
        assert (found and (found.offset, found.timestamp_ms)) == expected
        self.check_largest(stored, times)

    def check_largest(self, stored: list[Stored], times: list[tuple[int, int]]) -> None:
        found = self.partition.max_timestamp_offset()
        largest = max([ms for _, ms in times if ms >= 0], default=None)
        headers = max([batch.header.max_timestamp_ms for batch in stored], default=-1)
        if largest is not None and headers == largest and self.model.start == self.first_base_offset():
            assert found is not None
            assert found.offset == next(at for at, ms in times if ms == largest)

    def first_base_offset(self) -> int:
        return self.partition.log.segments.first.base_offset

    @invariant()
    def offsets_agree(self) -> None:
        if not hasattr(self, "partition"):
            return
        partition, model = self.partition, self.model
        assert (partition.log_start_offset, partition.log_end_offset) == (model.start, model.end)
        high_watermark = partition.high_watermark
        assert partition.recovery_point <= high_watermark <= model.end
        if self.shows_durable_only:
            assert high_watermark <= max(self.durable_end, model.start)
        else:
            assert high_watermark == model.end
        stable_offset = model.stable_offset(high_watermark)
        assert stable_offset <= partition.last_stable_offset
        if min([*model.unstable_offsets(high_watermark), model.end]) >= model.start:
            # A transaction that began below the log start may begin at its first remaining record after a
            # restart.
            assert partition.last_stable_offset == stable_offset
        assert partition.open_transaction_count == len(model.open_offsets())

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            self.disk.release()


def with_offsets(limits: Limits, max_relative_offset: int) -> Limits:
    """Return the limits with this maximum of relative offsets. Callers never decrease it, because stored
    segments may already use it.
    """
    return replace(limits, max_relative_offset=max_relative_offset)
