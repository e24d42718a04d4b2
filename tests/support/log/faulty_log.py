"""Random operations on a data directory while system calls fail, compared with a model.

Kills, clean stops and power losses come between the operations. The model is a table of acknowledged records
that shares no code with the log. `Mismatch` reports a lost, doubled, changed or wrongly visible record, or a
producer with a wrong sequence.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from oncelog.errors import KafkaStorageError, StorageError
from oncelog.limits import Limits
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.server.disk import RealDisk
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import iter_batches
from oncelog.wire.control import ControlType, decode_control
from oncelog.wire.records import decode_records
from support.log.partitions import NOW_MS, batch, config, marker
from support.os_faults import CALLS_THAT_FAIL, SYNCS, FaultyOs

DELETED, COMPACTED = TopicPartition("del", 0), TopicPartition("cmp", 0)
PARTITIONS = (DELETED, COMPACTED)
TOPIC_IDS = {DELETED: bytes(range(16)), COMPACTED: bytes(range(1, 17))}
LIMITS = Limits(
    index_run_entries=2,
    max_compaction_keys=6,
    compaction_step_items=4,
    max_drops_per_step=2,
    snapshot_every_bytes=600,
    max_producers_at_work=4,
)
_COMMON = {"segment_bytes": 500, "index_interval_bytes": 90}
CONFIGS = {
    DELETED: config(limits=LIMITS, retention_ms=5000, segment_index_bytes=64, **_COMMON),
    COMPACTED: config(
        limits=LIMITS,
        cleanup_policy="compact",
        delete_retention_ms=3000,
        min_cleanable_dirty_ratio=0.01,
        **_COMMON,
    ),
}
IDEMPOTENT, TRANSACTIONAL = (1, 2), (11, 12, 13)


class Mismatch(AssertionError):
    """The log differs from the model."""


class Record(NamedTuple):
    """An acknowledged record or marker. `is_commit` is None for a record, and True or False for a marker."""

    key: bytes | None
    value: bytes | None
    pid: int | None
    is_transactional: bool
    is_commit: bool | None = None
    sequence: int = -1


class Outcome(NamedTuple):
    """The offsets of records in aborted transactions, and for each producer id those in its open
    transaction.
    """

    aborted: set[int]
    open: dict[int, list[int]]

    @property
    def undecided(self) -> set[int]:
        return {offset for offsets in self.open.values() for offset in offsets}


@dataclass
class Model:
    """The acknowledged records of one partition.

    A power loss may take only records from the offset `durable` on.
    """

    records: dict[int, Record] = field(default_factory=dict)
    end_offset: int = 0
    durable: int = 0
    highest_start: int = 0
    sequences: dict[int, int] = field(default_factory=dict)

    def add(self, records: list[Record]) -> None:
        for record in records:
            self.records[self.end_offset] = record
            self.end_offset += 1
            if record.is_commit is None and record.pid is not None:
                self.sequences[record.pid] = record.sequence

    def outcome(self) -> Outcome:
        aborted: set[int] = set()
        undecided: dict[int, list[int]] = {}
        for offset, record in sorted(self.records.items()):
            if record.is_commit is not None:
                ended = undecided.pop(record.pid or 0, [])
                aborted.update([] if record.is_commit else ended)
            elif record.is_transactional:
                undecided.setdefault(record.pid or 0, []).append(offset)
        return Outcome(aborted, undecided)

    def newest(self, actual: dict[int, Record], outcome: Outcome) -> dict[bytes | None, bytes]:
        """Return each key's newest visible value. Keys whose newest record is a tombstone are left out."""
        hidden = outcome.aborted | outcome.undecided
        table: dict[bytes | None, bytes | None] = {}
        for offset, record in sorted(actual.items()):
            if record.is_commit is None and offset not in hidden:
                table[record.key] = record.value
        return {key: value for key, value in table.items() if value is not None}


class LogUnderFaults:
    """A data directory with two partitions: `DELETED` has retention, `COMPACTED` is compacted."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng = Random(seed)
        self.os = FaultyOs()
        self.root = root
        self.now_ms = NOW_MS
        self.models = {tp: Model() for tp in PARTITIONS}
        self.manager: LogManager
        self.events: list[str] = []
        self._written = self._uuids = 0

    @property
    def partitions(self) -> dict[TopicPartition, Partition]:
        return self.manager.partitions

    def start(self) -> None:
        """Open the data directory and both partitions. Raises StorageError if a system call fails."""
        manager = LogManager.open(
            RealDisk(self.root), node_id=1, new_uuid=self._new_uuid, now_ms=self.now_ms, limits=LIMITS
        )
        try:
            for tp in PARTITIONS:
                partition = manager.open_partition(tp, CONFIGS[tp], TOPIC_IDS[tp], self.now_ms)
                self.events += partition.recovery_warnings
            manager.disk.sync_directory()
            manager.forget_missing_partitions()
            manager.forget_last_stop()
        except BaseException:
            manager.release()
            raise
        manager.background.on_added = lambda: None
        manager.remove_deleted()
        self.manager = manager

    def _new_uuid(self) -> bytes:
        self._uuids += 1
        return self._uuids.to_bytes(16, "big")

    def arm(self, within: int, counts: list[int]) -> None:
        """Let some system calls fail with one random error. The first of them is among the next `within`
        calls.
        """
        error = self.rng.choice(list(CALLS_THAT_FAIL))
        names = CALLS_THAT_FAIL[error]
        if error == errno.EIO and self.rng.random() < 0.3:
            names = names | SYNCS
        first, count = self.rng.randrange(1, within), self.rng.choice(counts)
        self.os.arm(error, names, first, count, self.rng.random())

    def run_background(self, steps: int) -> None:
        background = self.manager.background
        for _ in range(steps):
            if not len(background):
                return
            with self._recording_errors():
                call = background.step()
                if call is None:
                    continue
                with suppress(Exception):  # the task raises this error in its next step
                    call()

    def _recording_errors(self) -> _ErrorRecorder:
        return _ErrorRecorder(self.events)

    def operate(self) -> None:
        """Run one random operation of a client or of the broker's timers, and some background work."""
        rng, tp = self.rng, self.rng.choice(PARTITIONS)
        choices: list[tuple[float, Callable[[TopicPartition], None]]] = [
            (0.55, self._produce),
            (0.15, self._end_transaction),
            (0.10, self._flush),
            (0.03, self._delete_records),
            (0.04, self._enforce_retention),
            (0.05, self._compact),
            (0.03, lambda _: self.manager.write_checkpoints()),
            (0.05, self._pass_time),
        ]
        (operation,) = rng.choices([call for _, call in choices], [weight for weight, _ in choices])
        with self._recording_errors():
            operation(tp)
        if rng.random() < 0.5:
            self.run_background(rng.choice([1, 2, 5, 50]))
        self._note_durable()

    def _note_durable(self) -> None:
        for tp in PARTITIONS:
            model, partition = self.models[tp], self.partitions[tp]
            model.durable = max(model.durable, partition.recovery_point)
            model.highest_start = max(model.highest_start, partition.log_start_offset)

    def _append(self, tp: TopicPartition, data: memoryview, origin: Origin, records: list[Record]) -> None:
        appended = self.partitions[tp].append(data, origin=origin, now_ms=self.now_ms)
        if appended.is_duplicate or appended.base_offset != self.models[tp].end_offset:
            raise Mismatch(f"{tp}: {appended}, the model ends at {self.models[tp].end_offset}")
        self.models[tp].add(records)

    def _produce(self, tp: TopicPartition) -> None:
        rng = self.rng
        self._written += 1
        pid = rng.choice([None, *IDEMPOTENT, *TRANSACTIONAL, *TRANSACTIONAL])
        count, key = rng.choice([1, 1, 1, 3]), b"k%d" % rng.randrange(8)
        value: bytes | None = b"v%d" % self._written + b"x" * rng.choice([0, 10, 60])
        if tp is COMPACTED and rng.random() < 0.25:
            value = None
        first = None if pid is None else self.models[tp].sequences.get(pid, -1) + 1
        is_transactional = pid in TRANSACTIONAL
        data = batch(
            first,
            count,
            pid=pid,
            key=key,
            value=value,  # type: ignore[arg-type]
            timestamp_ms=self.now_ms,
            is_transactional=is_transactional,
        )
        records = [
            Record(key, value, pid, is_transactional, None, -1 if first is None else first + index)
            for index in range(count)
        ]
        self._append(tp, data, Origin.CLIENT, records)

    def _end_transaction(self, tp: TopicPartition) -> None:
        undecided = self.models[tp].outcome().open
        if undecided:
            pid, commit = self.rng.choice(sorted(undecided)), self.rng.random() < 0.5
            record = Record(None, None, pid, False, commit)
            self._append(tp, marker(pid, commit=commit), Origin.COORDINATOR, [record])

    def _flush(self, tp: TopicPartition) -> None:
        self.partitions[tp].flush()

    def _delete_records(self, tp: TopicPartition) -> None:
        partition = self.partitions[tp]
        target = self.rng.randint(partition.log_start_offset, partition.high_watermark)
        if tp is DELETED:
            model = self.models[tp]
            model.highest_start = max(model.highest_start, target)
            partition.delete_records(target, self.now_ms)

    def _enforce_retention(self, tp: TopicPartition) -> None:
        self.partitions[tp].enforce_retention(self.now_ms)

    def _compact(self, tp: TopicPartition) -> None:
        with self._recording_errors():
            self.partitions[COMPACTED].flush()
        self.manager.compact(self.now_ms)

    def _pass_time(self, tp: TopicPartition) -> None:
        self.now_ms += self.rng.choice([10, 500, 2500])

    def check(self, lost_power: bool = False) -> None:
        """Compare both partitions with their models. Raises Mismatch."""
        for tp in PARTITIONS:
            _Comparison(self.partitions[tp], self.models[tp], tp is COMPACTED, lost_power).run(self.rng)

    def run(self, rounds: int = 3) -> None:
        """Start, and run some rounds of operations and restarts. Raises Mismatch."""
        with self.os.installed():
            self.start()
            for _ in range(rounds):
                self._run_round()
            self.manager.release()

    def _run_round(self) -> None:
        rng = self.rng
        self.os.failed.clear()
        self.arm(rng.choice([20, 100, 600]), [1, 1, 1, 2, 3, 8, 40])
        for _ in range(rng.choice([30, 60, 120])):
            self.operate()
        self.os.disarm()
        if any(partition.is_offline for partition in self.partitions.values()):
            if not any(name in SYNCS for name, _ in self.os.failed):
                raise Mismatch(f"offline, though no sync failed: {self.os.failed}")
        else:
            for _ in range(rng.choice([0, 10, 30])):
                self.operate()
            self.check()
        how = rng.choice(["kill", "power", "power", "stop"])
        if how == "stop":
            with self._recording_errors():
                self.manager.close(self.now_ms)
        else:
            self.manager.release()
        if how == "power":
            self.os.power_loss(self.root, rng)
        self.events.append(how)
        if rng.random() < 0.4:
            self.arm(60, [1, 1, 3])
        try:
            self.start()
        except (StorageError, OSError) as error:
            self.events.append(repr(error))
            self.os.disarm()
            self.start()
        self.os.disarm()
        self.check(how == "power")


class _ErrorRecorder:
    """A context manager that records storage errors as events, and lets all other exceptions pass."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, KafkaStorageError | OSError):
            self._events.append(repr(error))
            return True
        return False


class _Comparison:
    """One comparison of a partition with its model."""

    def __init__(self, partition: Partition, model: Model, is_compacted: bool, lost_power: bool) -> None:
        self._partition, self._model = partition, model
        self._is_compacted, self._lost_power = is_compacted, lost_power
        self._start, self._end = partition.log_start_offset, partition.log_end_offset

    def _expect(self, is_right: bool, text: str) -> None:
        if not is_right:
            raise Mismatch(f"{self._partition.topic_partition} {self._start}..{self._end}: {text}")

    def run(self, rng: Random) -> None:
        model = self._model
        self._compare_bounds()
        actual = self._read(rng)
        if self._lost_power and self._is_compacted:
            # On a compacted topic, a power loss may take records from the middle of the log.
            lost = [offset for offset in model.records if offset >= model.durable and offset not in actual]
            for offset in lost:
                del model.records[offset]
        elif self._lost_power and self._start == self._end:
            self._settle_lost_below_start()
        if self._is_compacted:
            # If a power loss has taken all records of the first segment, the log starts at the next record.
            first = min(actual, default=self._end)
            model.highest_start = max(model.highest_start, first if self._lost_power else 0)
        self._compare_records(actual)
        self._compare_visibility(actual, model.outcome())
        self._compare_producers()

    def _settle_lost_below_start(self) -> None:
        """Copy from the partition the state of transactions whose unsynced records were deleted.

        After a power loss, any part of that state may be lost, so the model cannot predict it.
        """
        records = self._model.records
        for offset in range(self._model.durable, self._start):
            record = records[offset]
            is_open = record.pid is not None and self._partition.has_open_transaction(record.pid, 0)
            if record.is_commit is None and not is_open:
                records[offset] = record._replace(is_transactional=False)
            elif record.is_commit is not None and is_open:
                records[offset] = Record(None, None, None, False)

    def _compare_bounds(self) -> None:
        model = self._model
        lowest = model.durable if self._lost_power else model.end_offset
        self._expect(lowest <= self._end <= model.end_offset, f"{lowest} to {model.end_offset} expected")
        if not self._is_compacted or not self._lost_power:
            self._expect(self._start <= model.highest_start, f"start beyond {model.highest_start}")
        for offset in range(self._end, model.end_offset):
            model.records.pop(offset, None)
        model.end_offset = self._end

    def _read(self, rng: Random) -> dict[int, Record]:
        actual: dict[int, Record] = {}
        offset = self._start
        while offset < self._end:
            piece = self._partition.read(offset, rng.choice([100, 1000, 1 << 20]))
            self._expect(piece.next_offset > offset, f"nothing can be read at {offset}")
            data, offset = memoryview(piece.records), piece.next_offset
            stop = 0
            for position, header in iter_batches(data):
                stop = position + header.size_bytes
                for record_offset, record in _records_of(data[position:stop], header.is_control):
                    self._expect(record_offset > max(actual, default=-1), f"offset {record_offset} again")
                    actual[record_offset] = record
            self._expect(stop == len(data), f"half a batch before {offset}")
        return actual

    def _compare_records(self, actual: dict[int, Record]) -> None:
        for offset, record in actual.items():
            stored = self._model.records.get(offset)
            if offset >= self._start:
                self._expect(stored is not None and _same(record, stored), f"{record} at {offset}: {stored}")
        if not self._is_compacted:
            missing = [offset for offset in range(self._start, self._end) if offset not in actual]
            self._expect(not missing, f"{missing} are missing")

    def _compare_visibility(self, actual: dict[int, Record], outcome: Outcome) -> None:
        aborted = self._partition.aborted_transactions(self._start, self._end)
        for offset, record in actual.items():
            if not record.is_transactional or offset in outcome.undecided or offset < self._start:
                continue
            is_hidden = any(
                entry.producer_id == record.pid and entry.first_offset <= offset < entry.last_offset
                for entry in aborted
            )
            self._expect(is_hidden == (offset in outcome.aborted), f"{offset} is hidden: {is_hidden}")
        stable = max(min([self._end, *outcome.undecided]), self._start)
        # After a power loss, a transaction whose first records were deleted may begin at its next record.
        readable = min([self._end, *(offset for offset in outcome.undecided if offset >= self._start)])
        self._expect(
            self._partition.last_stable_offset in (stable, readable),
            f"stable offset {self._partition.last_stable_offset}, not {stable}",
        )
        if self._is_compacted:
            newest = self._model.newest(self._model.records, outcome)
            self._expect(self._model.newest(actual, outcome) == newest, f"{newest} expected")
            lost = [offset for offset in outcome.undecided if offset not in actual]
            self._expect(not lost, f"undecided {lost} are gone")

    def _compare_producers(self) -> None:
        model = self._model
        for pid, expected in list(model.sequences.items()):
            entry = self._partition.producer(pid)
            last_stored = entry.batches[-1].last_sequence if entry is not None and entry.batches else -1
            if not self._lost_power:
                self._expect(
                    last_stored == expected, f"producer {pid} has sequence {last_stored}, not {expected}"
                )
                continue
            mine = {
                offset: record.sequence
                for offset, record in model.records.items()
                if record.pid == pid and record.is_commit is None
            }
            last = mine[max(mine)] if mine else last_stored
            if self._is_compacted or self._start == self._end > model.durable:
                # The producer state may cover some of the unsynced records, but no record that was not
                # stored.
                synced = [sequence for offset, sequence in mine.items() if offset < model.durable]
                last = min(max(last_stored, *synced, -1), last)
            self._expect(
                last_stored == last, f"producer {pid} has sequence {last_stored}, not {last}, of {mine}"
            )
            for offset in [offset for offset, sequence in mine.items() if sequence > last_stored]:
                model.records[offset] = model.records[offset]._replace(pid=None, is_transactional=False)
            if last_stored < 0:
                del model.sequences[pid]
            else:
                model.sequences[pid] = last_stored


def _records_of(data: memoryview, is_control: bool) -> list[tuple[int, Record]]:
    (_, header), *_ = iter_batches(data)
    pid = header.producer_id
    if not is_control:
        return [
            (record.offset, Record(record.key, record.value, pid, header.is_transactional))
            for record in decode_records(data)
        ]
    if not header.records_count:
        return []
    control = decode_control(data)
    assert control is not None
    return [(header.base_offset, Record(None, None, pid, False, control.type is ControlType.COMMIT))]


def _same(actual: Record, stored: Record) -> bool:
    return actual == stored._replace(sequence=-1)
