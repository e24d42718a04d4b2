"""A ledger of every produced batch that the broker stored, and of what power losses did to each of them.

A batch survives a power loss if it was ever synced, or if the next start finds it in the log. A producer's
newest surviving batch must then be recognised whenever it is sent again, even if compaction or DeleteRecords
has removed its records. No surviving batch may be stored again. The ledger uses the broker's verdicts and the
logs, never the producer state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from oncelog.broker.append_events import AppendEvent
from oncelog.log.partition import Partition
from oncelog.types import TopicPartition
from oncelog_simulator.checks import batches_of, remembered_producers
from oncelog_simulator.world import World

Logs = Mapping[TopicPartition, Partition]


class Fate(Enum):
    """The fate of a batch. The values are texts for the timeline."""

    STORED = "stored"
    GONE = "gone"
    """A power loss took the batch, so the broker cannot know it."""
    UNKNOWN = "unknown"
    """The broker may or may not know the batch.

    Its records were deleted before they were synced, or the snapshot that had it was damaged.
    """


class BatchKey(NamedTuple):
    """The identity of a batch, which all of its attempts have."""

    tp: TopicPartition
    producer_id: int
    epoch: int
    sequence: int


@dataclass
class Entry:
    """A batch in the ledger. `offsets` has all base offsets that it ever had; the last one is its current."""

    last_sequence: int
    offsets: list[int]
    fate: Fate = Fate.STORED
    is_synced: bool = False


@dataclass
class PartitionNotes:
    """The batches of one partition, and the open transactions that its next start must find.

    `keys` has the keys of `batches` by producer id. `open_since` has the first offset of each open
    transaction by producer id. `is_damaged` is True if a file of the partition was damaged since the last
    start. `recovery_point` is the one up to which the batches were last noted as synced.
    """

    batches: dict[BatchKey, Entry] = field(default_factory=dict)
    keys: defaultdict[int, list[BatchKey]] = field(default_factory=lambda: defaultdict(list))
    open_since: dict[int, int] = field(default_factory=dict)
    is_damaged: bool = False
    recovery_point: int = 0


class Ledger:
    """The ledger of one topic. `logs` returns the open partitions of the running broker."""

    def __init__(self, world: World, logs: Callable[[], Logs], partitions: list[TopicPartition]) -> None:
        self.world, self.logs = world, logs
        self.partitions = {tp: PartitionNotes() for tp in partitions}
        self.idempotent: set[int] = set()
        """The ids of producers without transactions."""
        self._lost_power = False

    def entry(self, key: BatchKey) -> Entry | None:
        """Return the entry of a batch; None if it was never stored."""
        return self.partitions[key.tp].batches.get(key)

    def must_be_known(self, key: BatchKey) -> bool:
        """Return True if the broker must recognise the batch when it is sent again.

        This is so for the newest surviving batch of a producer without transactions. A restart may forget the
        older ones in a compacted topic.
        """
        if key.producer_id not in self.idempotent:
            return False
        return self._newest(key.tp, key.producer_id) == key

    def _newest(self, tp: TopicPartition, producer_id: int) -> BatchKey | None:
        """Return a producer's newest surviving batch; None if that is not certain."""
        notes = self.partitions[tp]
        batches, keys = notes.batches, notes.keys.get(producer_id, [])
        for key in sorted(keys, key=lambda key: (key.epoch, key.sequence), reverse=True):
            if batches[key].fate is not Fate.GONE:
                return key if batches[key].fate is Fate.STORED else None
        return None

    # Notes

    def stored(self, event: AppendEvent) -> None:
        """Note the broker's verdict on a batch of a Produce request, and check it."""
        tp = TopicPartition(event.topic, event.partition)
        if tp not in self.partitions or event.verdict == "refused":
            return
        assert event.producer_id is not None and event.producer_epoch is not None
        assert event.base_sequence is not None and event.last_sequence is not None
        assert event.base_offset is not None
        key = BatchKey(tp, event.producer_id, event.producer_epoch, event.base_sequence)
        self.accepted(key, event.last_sequence, event.base_offset, is_duplicate=event.verdict == "duplicate")

    def accepted(self, key: BatchKey, last_sequence: int, offset: int, *, is_duplicate: bool) -> None:
        """Note that a batch was stored or recognised, and check that this is right."""
        notes, entry = self.partitions[key.tp], self.entry(key)
        self._note_synced(notes, self.logs()[key.tp])
        if is_duplicate:
            self._check_duplicate(key, entry, offset)
        elif entry is None:
            self._check_order(key)
            notes.batches[key] = Entry(last_sequence, [offset])
            notes.keys[key.producer_id].append(key)
        else:
            if entry.fate is Fate.STORED:
                self.world.violate("a batch is stored twice", f"{key} {entry}, again at {offset}")
            self._check_order(key)
            entry.offsets.append(offset)
            entry.fate, entry.is_synced = Fate.STORED, False

    def _check_duplicate(self, key: BatchKey, entry: Entry | None, offset: int) -> None:
        if entry is None or entry.fate is Fate.GONE or entry.offsets[-1] != offset:
            self.world.violate("a new batch counts as a duplicate", f"{key} at {offset}: {entry}")

    def _check_order(self, key: BatchKey) -> None:
        """Check that a stored batch follows the newest surviving batch of its producer."""
        newest = self._newest(key.tp, key.producer_id)
        if newest is None or newest.epoch < key.epoch:
            return
        entry = self.partitions[key.tp].batches[newest]
        if newest.epoch > key.epoch or entry.last_sequence + 1 != key.sequence:
            self.world.violate("a batch is stored out of order", f"{key} after {newest} {entry}")

    def damaged(self, tp: TopicPartition) -> None:
        """Note that a snapshot of the partition is damaged or lost."""
        self.partitions[tp].is_damaged = True

    def ending(self) -> None:
        """Note what is synced when the broker is about to end."""
        logs = self.logs()
        for tp, notes in self.partitions.items():
            partition = logs.get(tp)
            if partition is None:
                continue
            self._note_synced(notes, partition)
            notes.open_since = {
                producer_id: summary.txn_first_offset
                for producer_id, summary in remembered_producers(partition).items()
                if summary.txn_first_offset is not None
            }

    def _note_synced(self, notes: PartitionNotes, partition: Partition) -> None:
        """Note which batches are synced.

        A batch below the log start may have been deleted before it was synced, although the recovery point is
        above it.
        """
        start, point = partition.log_start_offset, partition.recovery_point
        if point == notes.recovery_point:
            return
        notes.recovery_point = point
        for entry in notes.batches.values():
            if start <= entry.offsets[-1] < point and entry.fate is not Fate.GONE:
                entry.is_synced = True

    def ended(self, *, lose_power: bool) -> None:
        """Note how the broker ended. The end of a start that crashes is noted, too."""
        self._lost_power |= lose_power
        for notes in self.partitions.values() if lose_power else ():
            synced = {entry.offsets[-1] for entry in notes.batches.values() if entry.is_synced}
            notes.open_since = {
                producer_id: first_offset
                for producer_id, first_offset in notes.open_since.items()
                if first_offset in synced
            }

    def recovered(self, logs: Logs) -> None:
        """Note what the power losses since the last start took, and check that they took nothing else."""
        for tp, notes in self.partitions.items():
            partition = logs.get(tp)
            if partition is None:
                if notes.batches:
                    self.world.violate("a partition is lost", str(tp))
                continue
            there = dict(keys_of(tp, partition))
            for key, entry in notes.batches.items():
                if entry.fate is not Fate.GONE and there.get(key) != entry.offsets[-1]:
                    self._judge(key, entry, partition.log_end_offset, is_damaged=notes.is_damaged)
            if not notes.is_damaged:
                self._check_open(tp, partition, notes.open_since)
            notes.open_since, notes.is_damaged, notes.recovery_point = {}, False, 0
        self._lost_power = False

    def _judge(self, key: BatchKey, entry: Entry, end_offset: int, *, is_damaged: bool) -> None:
        """Decide the fate of a batch that is not in the log any more."""
        if entry.offsets[-1] >= end_offset:
            if entry.is_synced or not self._lost_power:
                self.world.violate("what was synced is lost", f"{key} {entry}, the end is {end_offset}")
            entry.fate = Fate.GONE
        elif is_damaged or (self._lost_power and not entry.is_synced):
            entry.fate = Fate.UNKNOWN

    def _check_open(self, tp: TopicPartition, partition: Partition, open_since: dict[int, int]) -> None:
        """Check that each transaction that was open is open, or has ended in the log."""
        producers = remembered_producers(partition)
        for producer_id, first_offset in open_since.items():
            summary = producers.get(producer_id)
            is_open = summary is not None and summary.txn_first_offset == first_offset
            is_over = any(
                header.is_control and header.producer_id == producer_id
                for header, _ in batches_of(partition)
                if header.base_offset > first_offset
            )
            if not is_open and not is_over:
                text = f"{tp} id {producer_id}, open since {first_offset}: {summary}"
                self.world.violate("an open transaction is forgotten", text)


def keys_of(tp: TopicPartition, partition: Partition) -> Iterator[tuple[BatchKey, int]]:
    """Yield the key and the base offset of each batch in the log."""
    for header, _ in batches_of(partition):
        if not header.is_control and header.producer_id is not None and header.producer_epoch is not None:
            assert header.base_sequence is not None
            key = BatchKey(tp, header.producer_id, header.producer_epoch, header.base_sequence)
            yield key, header.base_offset
