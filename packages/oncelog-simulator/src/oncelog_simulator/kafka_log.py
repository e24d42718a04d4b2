"""A partition's files as Apache Kafka writes them, without any code of the product's log.

The format is deliberately implemented a second time: a writer and a reader with the same code would share
their mistakes.

Source: Kafka's DefaultRecordBatch, LogSegment, ProducerStateManager, TransactionIndex, Cleaner.
"""

from __future__ import annotations

import struct
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from crc32c import crc32c

TRANSACTIONAL, CONTROL = 0x10, 0x20
ABORT, COMMIT = 0, 1
NO_SEQUENCE = -1
CLEANED, SWAP, DELETED = ".cleaned", ".swap", ".deleted"
"""Suffixes of a segment's files while a compacted segment replaces others."""
SUFFIXES = ".log", ".index", ".timeindex", ".txnindex"
"""Suffixes of a segment's files, in the order in which Kafka renames them."""
PREALLOCATED_ENTRIES = 5
"""Entries of zeros at the end of an active segment's indexes. Kafka cuts them off when it closes the
indexes.
"""


@dataclass(frozen=True, slots=True)
class KafkaRecord:
    offset: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class KafkaBatch:
    """A batch of records. `producer_id` is -1 for none.

    Compaction removes records and keeps `base_offset` and `last_offset`.
    """

    base_offset: int
    last_offset: int
    records: tuple[KafkaRecord, ...]
    time_ms: int
    leader_epoch: int
    producer_id: int = -1
    producer_epoch: int = -1
    sequence: int = NO_SEQUENCE
    attributes: int = 0

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def is_commit(self) -> bool:
        """True for a commit marker."""
        return self.is_control and self.records[0].key == struct.pack(">hh", 0, COMMIT)

    @property
    def last_sequence(self) -> int:
        """The last sequence of a batch that has a sequence."""
        return (self.sequence + self.last_offset - self.base_offset) & 0x7FFFFFFF

    def encode(self) -> bytes:
        """Return the bytes in record format version 2."""
        body = b"".join(self._record(record) for record in self.records)
        covered = (
            struct.pack(
                ">hiqqqhii",
                self.attributes,
                self.last_offset - self.base_offset,
                self.time_ms,
                self.time_ms,
                self.producer_id,
                self.producer_epoch,
                self.sequence,
                len(self.records),
            )
            + body
        )
        head = struct.pack(">qiib", self.base_offset, len(covered) + 9, self.leader_epoch, 2)
        return head + struct.pack(">I", crc32c(covered)) + covered

    def _record(self, record: KafkaRecord) -> bytes:
        content = b"\0" + _varint(0) + _varint(record.offset - self.base_offset)
        for part in (record.key, record.value):
            content += _varint(-1) if part is None else _varint(len(part)) + part
        content += _varint(0)
        return _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Return a number as a zigzag varint."""
    rest, encoded = (value << 1) ^ (value >> 63), bytearray()
    while rest > 127:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


@dataclass(slots=True)
class KafkaProducer:
    """The state that a partition keeps of a producer. Kafka's snapshots have only the newest batch."""

    epoch: int
    last_sequence: int = NO_SEQUENCE
    last_offset: int = -1
    offset_delta: int = 0
    time_ms: int = 0
    coordinator_epoch: int = -1
    first_offset: int = -1
    """First offset of the open transaction; -1 if none is open."""


@dataclass(slots=True)
class _Segment:
    base_offset: int
    batches: list[KafkaBatch] = field(default_factory=list)
    aborted: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Producer id, first offset, last offset and last stable offset of each aborted transaction."""
    size_bytes: int = 0

    def files(self, interval_bytes: int, *, is_preallocated: bool) -> Iterator[tuple[str, bytes]]:
        """Yield the names and contents of the log and its indexes."""
        log, index, times = bytearray(), bytearray(), bytearray()
        since_bytes, newest, stored = 0, (-1, self.base_offset), -1
        for batch in self.batches:
            data = batch.encode()
            if batch.time_ms > newest[0]:
                newest = batch.time_ms, batch.last_offset
            if since_bytes > interval_bytes:
                index += struct.pack(">ii", batch.last_offset - self.base_offset, len(log))
                if newest[0] > stored:
                    times += struct.pack(">qi", newest[0], newest[1] - self.base_offset)
                    stored = newest[0]
                since_bytes = 0
            since_bytes += len(data)
            log += data
        if not is_preallocated and newest[0] > stored:
            times += struct.pack(">qi", newest[0], newest[1] - self.base_offset)
        zeros = PREALLOCATED_ENTRIES if is_preallocated else 0
        name = f"{self.base_offset:020}"
        yield f"{name}.log", bytes(log)
        yield f"{name}.index", bytes(index) + bytes(8 * zeros)
        yield f"{name}.timeindex", bytes(times) + bytes(12 * zeros)
        if self.aborted:
            entries = (struct.pack(">hqqqq", 0, *entry) for entry in self.aborted)
            yield f"{name}.txnindex", b"".join(entries)


class Swap(NamedTuple):
    """The files that an interrupted compaction left.

    `replaced` has the names of all files of the old and the new segments. `files` has the files on the disk.
    `other` has the batches that a start may find instead, if only some of the new files were renamed to
    `.swap`.
    """

    replaced: frozenset[str]
    files: dict[str, bytes]
    other: list[KafkaBatch] | None = None


class KafkaLog:
    """One partition's log as Kafka has written it so far.

    `segment_bytes` is the size at which a new segment begins.
    """

    def __init__(self, topic: str, number: int, segment_bytes: int, interval_bytes: int) -> None:
        self.topic, self.number = topic, number
        self.segment_bytes, self.interval_bytes = segment_bytes, interval_bytes
        self.topic_id = bytes(16)
        self.is_compacted = False
        self.start_offset = self.end_offset = self.cleaned_offset = 0
        self.leader_epoch = 0
        self.epochs: list[tuple[int, int]] = []
        """Leader epochs with their first offsets."""
        self.producers: dict[int, KafkaProducer] = {}
        self.segments = [_Segment(0)]
        self.snapshots: dict[int, bytes] = {}
        self.swap: Swap | None = None

    @property
    def directory(self) -> str:
        return f"{self.topic}-{self.number}"

    @property
    def batches(self) -> list[KafkaBatch]:
        """All stored batches."""
        return [batch for segment in self.segments for batch in segment.batches]

    @property
    def first_unstable_offset(self) -> int:
        """The first offset of the oldest open transaction, or the log end offset if none is open."""
        opened = [producer.first_offset for producer in self.producers.values() if producer.first_offset >= 0]
        return min(opened, default=self.end_offset)

    def append(
        self,
        contents: Iterable[tuple[bytes | None, bytes | None]],
        time_ms: int,
        producer: tuple[int, int, int] = (-1, -1, NO_SEQUENCE),
        attributes: int = 0,
    ) -> KafkaBatch:
        """Append keys and values as one batch. `producer` is its id, epoch and first sequence."""
        records = tuple(
            KafkaRecord(self.end_offset + number, key, value) for number, (key, value) in enumerate(contents)
        )
        producer_id, epoch, sequence = producer
        batch = KafkaBatch(
            self.end_offset,
            records[-1].offset,
            records,
            time_ms,
            self.leader_epoch,
            producer_id,
            epoch,
            sequence,
            attributes,
        )
        size_bytes = len(batch.encode())
        if self.segments[-1].batches and self.segments[-1].size_bytes + size_bytes > self.segment_bytes:
            self.roll()
        if not self.epochs or self.epochs[-1][0] != self.leader_epoch:
            self.epochs.append((self.leader_epoch, batch.base_offset))
        self.segments[-1].batches.append(batch)
        self.segments[-1].size_bytes += size_bytes
        self.end_offset = batch.last_offset + 1
        if producer_id >= 0 and not batch.is_control:
            self._produced(batch)
        return batch

    def append_marker(self, producer_id: int, epoch: int, time_ms: int, *, is_commit: bool) -> None:
        """Append a transaction marker. The partition may have no records of the transaction."""
        value = struct.pack(">hi", 0, 0)
        key = struct.pack(">hh", 0, COMMIT if is_commit else ABORT)
        marker = self.append([(key, value)], time_ms, (producer_id, epoch, -1), TRANSACTIONAL | CONTROL)
        state = self.producers.setdefault(producer_id, KafkaProducer(epoch))
        first = state.first_offset
        if epoch != state.epoch:
            self.producers[producer_id] = state = KafkaProducer(epoch)
        state.first_offset, state.coordinator_epoch, state.time_ms = -1, 0, time_ms
        if first >= 0 and not is_commit:
            stable = min(self.first_unstable_offset, marker.last_offset + 1)
            self.segments[-1].aborted.append((producer_id, first, marker.last_offset, stable))

    def _produced(self, batch: KafkaBatch) -> None:
        state = self.producers.get(batch.producer_id)
        if state is None or state.epoch != batch.producer_epoch:
            state = KafkaProducer(batch.producer_epoch)
            self.producers[batch.producer_id] = state
        state.last_offset, state.offset_delta = batch.last_offset, batch.last_offset - batch.base_offset
        state.time_ms = batch.time_ms
        if batch.sequence != NO_SEQUENCE:
            state.last_sequence = batch.last_sequence
        if batch.attributes & TRANSACTIONAL and state.first_offset < 0:
            state.first_offset = batch.base_offset

    def roll(self) -> None:
        """Begin a new segment, with a snapshot of the producers at its base offset."""
        if self.segments[-1].batches:
            self.segments.append(_Segment(self.end_offset))
            self.take_snapshot()

    def take_snapshot(self) -> None:
        """Store a snapshot of the producers at the log end."""
        entries = b"".join(
            struct.pack(
                ">qhiqiqiq",
                producer_id,
                state.epoch,
                state.last_sequence,
                state.last_offset,
                state.offset_delta,
                state.time_ms,
                state.coordinator_epoch,
                state.first_offset,
            )
            for producer_id, state in self.producers.items()
        )
        body = struct.pack(">i", len(self.producers)) + entries
        self.snapshots[self.end_offset] = struct.pack(">hI", 1, crc32c(body)) + body

    def delete_records(self, before_offset: int) -> None:
        """Move the log start up, as DeleteRecords does, and remove the segments below it."""
        self.start_offset = max(self.start_offset, before_offset)
        while len(self.segments) > 1 and self.segments[1].base_offset <= self.start_offset:
            self.snapshots.pop(self.segments.pop(0).base_offset, None)
        covering = [epoch for epoch in self.epochs if epoch[1] <= self.start_offset]
        if covering:
            later = [epoch for epoch in self.epochs if epoch[1] > self.start_offset]
            self.epochs = [(covering[-1][0], self.start_offset), *later]

    def compact(self) -> None:
        """Replace all closed segments by one segment without records that have a newer record of
        their key.
        """
        result = self._compacted()
        if result is not None:
            self._replace(*result)

    def interrupt_compaction(self, rng: Random) -> None:
        """Compact, and stop before one of the steps, so that the files have the names that a crash leaves.

        Kafka writes the new segment to files with the suffix `.cleaned`, and renames them to `.swap`. It
        renames the files of the replaced segments to `.deleted`. Then it removes the suffix `.swap` from one
        file after the other.

        Source: Cleaner.cleanSegments, UnifiedLog.replaceSegments, LogSegment.changeFileSuffixes.
        """
        result = self._compacted()
        if result is None:
            return
        closed, compacted = result
        old = [name for segment in closed for name in self._names(segment)]
        files = {name: data for segment in closed for name, data in self._files_of(segment)}
        made = dict(self._files_of(compacted))
        new = self._names(compacted)
        renames = [(name + CLEANED, name + SWAP) for name in new]
        whole_count = len(renames)
        renames += [(name, name + DELETED) for name in old] + [(name + SWAP, name) for name in new]
        count = rng.randint(-1, len(renames))
        # A negative count: Kafka stopped while it wrote the new log file. The indexes, which Kafka
        # preallocates, have their full size already.
        if count < 0:
            cut = rng.randrange(len(made[new[0]]) + 1)
            content = {name: bytes(12 * PREALLOCATED_ENTRIES) for name in new} | {new[0]: made[new[0]][:cut]}
        else:
            content = made
        files |= {name + CLEANED: content[name] for name in new}
        for before, after in renames[: max(count, 0)]:
            files[after] = files.pop(before)
        before_batches = self.batches
        kept = frozenset(old) | frozenset(new)
        if count < 1:
            self.swap = Swap(kept, files)
            return
        snapshots = dict(self.snapshots)
        self._replace(closed, compacted)
        # At this stop the snapshots of replaced segments still exist and the cleaner's checkpoint is old,
        # because Kafka removes and writes them last.
        self.snapshots, self.cleaned_offset = snapshots, 0
        self.swap = Swap(kept, files, before_batches if count < whole_count else None)

    def _names(self, segment: _Segment) -> list[str]:
        return sorted(
            (name for name, _ in self._files_of(segment)), key=lambda name: SUFFIXES.index(name[20:])
        )

    def _files_of(self, segment: _Segment) -> Iterator[tuple[str, bytes]]:
        return segment.files(self.interval_bytes, is_preallocated=False)

    def _compacted(self) -> tuple[list[_Segment], _Segment] | None:
        """Return the segments to compact, and the segment that replaces them.

        Segments that reach above the first open transaction are not compacted. In the others, markers, the
        newest batch of each producer, and the last batch stay.
        """
        bound = self.first_unstable_offset
        closed = [
            segment
            for segment, following in zip(self.segments, self.segments[1:], strict=False)
            if following.base_offset <= bound
        ]
        if not closed:
            return None
        batches = [batch for segment in closed for batch in segment.batches]
        # Search all segments: the marker of an abort may be in a segment that is not compacted.
        aborted = [entry for segment in self.segments for entry in segment.aborted]
        visible = [batch for batch in batches if not batch.is_control and not _is_aborted(batch, aborted)]
        newest = {record.key: record.offset for batch in visible for record in batch.records}
        living = {state.last_offset for state in self.producers.values()}
        kept: list[KafkaBatch] = []
        for batch in batches:
            if batch.is_control:
                kept.append(batch)
                continue
            is_visible = not _is_aborted(batch, aborted)
            records = tuple(
                record for record in batch.records if is_visible and newest[record.key] == record.offset
            )
            if records or batch.last_offset in living or batch is batches[-1]:
                kept.append(replace(batch, records=records))
        indexed = [entry for segment in closed for entry in segment.aborted]
        size_bytes = sum(len(batch.encode()) for batch in kept)
        return closed, _Segment(closed[0].base_offset, kept, indexed, size_bytes)

    def _replace(self, closed: list[_Segment], compacted: _Segment) -> None:
        self.segments = [compacted, *self.segments[len(closed) :]]
        for segment in closed[1:]:
            self.snapshots.pop(segment.base_offset, None)
        self.cleaned_offset = self.segments[1].base_offset

    def files(self, *, is_clean: bool) -> Iterator[tuple[str, bytes]]:
        """Yield the files of the directory. `is_clean` is True if Kafka closed the log."""
        if is_clean:
            self.take_snapshot()
        replaced = self.swap.replaced if self.swap else frozenset()
        for segment in self.segments:
            is_active = segment is self.segments[-1]
            for name, data in segment.files(self.interval_bytes, is_preallocated=is_active and not is_clean):
                if name not in replaced:
                    yield name, data
        if self.swap:
            yield from self.swap.files.items()
        for offset, snapshot in self.snapshots.items():
            yield f"{offset:020}.snapshot", snapshot
        lines = "".join(f"{epoch} {start}\n" for epoch, start in self.epochs)
        yield "leader-epoch-checkpoint", f"0\n{len(self.epochs)}\n{lines}".encode()
        topic_id = urlsafe_b64encode(self.topic_id).rstrip(b"=")
        yield "partition.metadata", b"version: 0\ntopic_id: " + topic_id


def _is_aborted(batch: KafkaBatch, aborted: Iterable[tuple[int, int, int, int]]) -> bool:
    return bool(batch.attributes & TRANSACTIONAL) and any(
        producer_id == batch.producer_id and first <= batch.base_offset < last
        for producer_id, first, last, _ in aborted
    )
