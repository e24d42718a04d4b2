"""Compare a partition with plain lists while records are appended, retried and deleted, transactions end, and
the log restarts.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.log.partitions import NOW_MS, batch, config, marker, open_partition, put, put_marker

from oncelog.errors import InvalidProducerEpoch, OutOfOrderSequenceNumber
from oncelog.limits import Limits
from oncelog.log.background import BackgroundQueue
from oncelog.log.partition import Partition
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.wire.batch import iter_batches

SMALL = config(segment_bytes=500, index_interval_bytes=80)
# With these limits, three producer ids make a table of several parts.
PARTED = config(
    segment_bytes=500,
    index_interval_bytes=80,
    limits=Limits(max_producers_at_work=1, producer_shard_entries=1),
)
PIDS = st.integers(1, 3)


class Stored(NamedTuple):
    pid: int
    epoch: int
    sequence: int
    count: int
    offset: int


class PartitionMachine(RuleBasedStateMachine):
    """A random history of one partition. `stored` has every acknowledged data batch, in order."""

    log_config = SMALL

    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk()
        self.background = BackgroundQueue()
        self.partition = self.opened()
        self.stored: list[Stored] = []
        self.open: dict[int, int] = {}
        self.aborted: set[tuple[int, int, int]] = set()
        self.end_offset = self.start_offset = 0
        self.flushed_offset = 0

    def opened(self, **how: Any) -> Partition:
        """Open the partition as a new process does: with an empty queue of background tasks."""
        self.background = BackgroundQueue()
        self.drive()
        return open_partition(self.disk, self.log_config, background=self.background, **how)

    def drive(self) -> None:
        """Do nothing: the background tasks of this machine run as soon as they are added."""

    def _of(self, pid: int) -> list[Stored]:
        return [item for item in self.stored if item.pid == pid]

    def _next(self, pid: int) -> tuple[int, int]:
        mine = self._of(pid)
        return (mine[-1].epoch, mine[-1].sequence + mine[-1].count) if mine else (0, 0)

    @rule(pid=PIDS, count=st.integers(1, 3), bump=st.booleans())
    def append(self, pid: int, count: int, bump: bool) -> None:
        epoch, sequence = self._next(pid)
        if bump and pid not in self.open:
            epoch, sequence = epoch + 1, 0
        data = batch(sequence, count, pid=pid, epoch=epoch, is_transactional=pid in self.open)
        appended = put(self.partition, data)
        assert (appended.base_offset, appended.is_duplicate) == (self.end_offset, False)
        self._note(Stored(pid, epoch, sequence, count, self.end_offset))

    def _note(self, item: Stored) -> None:
        self.stored.append(item)
        self.end_offset += item.count

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(self.stored[-20:]))
        mine = self._of(old.pid)
        current = [item for item in mine if item.epoch == mine[-1].epoch]
        again = batch(old.sequence, old.count, pid=old.pid, epoch=old.epoch)
        if old in current[-5:]:
            appended = put(self.partition, again)
            assert (appended.base_offset, appended.is_duplicate) == (old.offset, True)
            return
        with pytest.raises(InvalidProducerEpoch if old.epoch < mine[-1].epoch else OutOfOrderSequenceNumber):
            put(self.partition, again)

    @rule(pid=PIDS, gap=st.integers(1, 3))
    def leave_a_gap(self, pid: int, gap: int) -> None:
        epoch, sequence = self._next(pid)
        if self._of(pid):
            with pytest.raises(OutOfOrderSequenceNumber):
                put(self.partition, batch(sequence + gap, pid=pid, epoch=epoch))

    @rule(pid=PIDS)
    def begin(self, pid: int) -> None:
        if pid not in self.open:
            epoch, sequence = self._next(pid)
            put(self.partition, batch(sequence, pid=pid, epoch=epoch, is_transactional=True))
            self.open[pid] = self.end_offset
            self._note(Stored(pid, epoch, sequence, 1, self.end_offset))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), commit=st.booleans())
    def end(self, data: st.DataObject, commit: bool) -> None:
        pid = data.draw(st.sampled_from(sorted(self.open)))
        put_marker(self.partition, marker(pid, commit=commit, epoch=self._next(pid)[0]))
        first_offset = self.open.pop(pid)
        if not commit:
            self.aborted.add((pid, first_offset, self.end_offset))
        self.end_offset += 1

    @rule()
    def flush(self) -> None:
        self.partition.flush()
        self.flushed_offset = self.partition.recovery_point
        assert self.flushed_offset == self.end_offset

    @rule(back=st.integers(0, 10))
    def delete_records(self, back: int) -> None:
        self.start_offset = max(self.start_offset, self.end_offset - back)
        assert self.partition.delete_records(self.start_offset, NOW_MS) == self.start_offset

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        if clean:
            self.partition.close(NOW_MS)
            self.flushed_offset = self.end_offset
        self.disk = self.disk.after_kill()
        self.partition = self.opened(
            clean_shutdown=clean, recovery_point=self.flushed_offset, log_start_offset=self.start_offset
        )
        self.flushed_offset = self.partition.recovery_point
        assert self.partition.recovery_warnings == []

    @rule(seed=st.integers(0, 99))
    def lose_power_when_all_is_synced(self, seed: int) -> None:
        self.flush()
        self.disk = self.disk.after_power_loss(Random(seed))
        self.partition = self.opened(recovery_point=self.flushed_offset, log_start_offset=self.start_offset)
        self.flushed_offset = self.partition.recovery_point

    @invariant()
    def offsets_agree(self) -> None:
        partition = self.partition
        assert (partition.log_start_offset, partition.log_end_offset) == (self.start_offset, self.end_offset)
        stable = min([*self.open.values(), self.end_offset])
        assert partition.last_stable_offset == max(stable, self.start_offset)

    @invariant()
    def batches_agree(self) -> None:
        found, offset = [], self.start_offset
        while offset < self.end_offset:
            data = self.partition.read(offset, 300)
            found += [header for _, header in iter_batches(data.records)]
            offset = data.next_offset
        data_batches = [
            Stored(h.producer_id, h.producer_epoch, h.base_sequence, h.records_count, h.base_offset)
            for h in found
            if not h.is_control
        ]
        assert data_batches == [item for item in self.stored if item.offset + item.count > self.start_offset]

    @invariant()
    def aborted_agree(self) -> None:
        found = {
            tuple(e[:3]) for e in self.partition.aborted_transactions(self.start_offset, self.end_offset)
        }
        assert found == {item for item in self.aborted if item[2] >= self.start_offset}


TestPartitionMachine = PartitionMachine.TestCase
TestPartitionMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPartitionMachine = pytest.mark.behaviour("I6", "I7", "I8", "I14", "I17")(TestPartitionMachine)


class DrivenMachine(PartitionMachine):
    """A PartitionMachine whose snapshots and deletions run step by step. A restart ends unfinished ones."""

    log_config = PARTED

    def drive(self) -> None:
        self.background.on_added = lambda: None

    @rule(count=st.integers(1, 30))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.background:
                call = self.background.step()
                if call is not None:
                    call()


TestDrivenMachine = DrivenMachine.TestCase
TestDrivenMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestDrivenMachine = pytest.mark.behaviour("I6", "I17", "I20")(TestDrivenMachine)
