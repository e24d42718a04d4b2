"""One partition: append, read, forget. Everything that is stored passes through `append`.

A batch is judged first (header, checksum, `rules.idempotence.append`), then written, and only when its bytes
are written is producer state changed; a refusal or a failing disk leaves the partition as it was. Source:
Kafka's UnifiedLog.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple, assert_never, cast

from oncelog.errors import (
    CorruptMessage,
    InvalidRecord,
    KafkaStorageError,
    OffsetOutOfRange,
    StorageError,
)
from oncelog.log.compacted import CompactedStore
from oncelog.log.config import LogConfig
from oncelog.log.producers import end_marker, produced_batch
from oncelog.log.reader import (
    FoundTime,
    LogSlice,
    Place,
    Search,
    StepCost,
    find_place,
    read_at,
    search_max_timestamp,
    search_timestamp,
)
from oncelog.log.validation import check_batch, needs_preparing, prepare_batch
from oncelog.rules.idempotence.append import Duplicate, ProducerEntry, Refuse, Store, decide_append
from oncelog.rules.idempotence.markers import StoreMarker, decide_marker
from oncelog.rules.idempotence.producer_state import unpack_entry
from oncelog.rules.idempotence.sequencer import Identity
from oncelog.types import Origin, TimestampType
from oncelog.wire.batch import BatchHeader, read_header

__all__ = ["Appended", "LogConfig", "LogSlice", "Partition", "ProducerState"]

_CONTROL_BIT = 0x20
_CLIENT, _LOG_APPEND_TIME = Origin.CLIENT, TimestampType.LOG_APPEND_TIME


class Appended(NamedTuple):
    """A batch that stands in the log.

    `log_append_time_ms` is the broker's time on LogAppendTime topics, for a duplicate what was
    remembered of it, else None.
    """

    base_offset: int
    last_offset: int
    log_append_time_ms: int | None
    log_start_offset: int
    is_duplicate: bool


class ProducerState(NamedTuple):
    """One producer id as DescribeProducers shows it."""

    producer_id: int
    entry: ProducerEntry


class Partition(CompactedStore):
    """The log of one topic partition on this node, which leads it and is its only replica."""

    def append(
        self,
        records: memoryview,
        *,
        origin: Origin,
        now_ms: int,
        header: BatchHeader | None = None,
        begins_epoch: bool = False,
    ) -> Appended:
        """Store the one batch in `records`, stamped in place if writable; what follows it is ignored.

        `header`: as read from these records, if the caller has done so. `begins_epoch`: see the append rule.
        A repetition of a remembered batch is not stored again. Raises a BrokerError and stores nothing: what
        `check_batch` and the append rule refuse, KafkaStorageError when the disk fails.
        """
        if header is None:
            header = read_header(records)
        size = header.batch_length + 12
        if size > len(records):
            raise CorruptMessage(f"the batch claims {size} bytes, {len(records)} were sent")
        if records.readonly or size != len(records):
            records = memoryview(bytearray(records[:size]))
        config = self.config
        if origin is _CLIENT:
            check_batch(records, header, config, now_ms)
            if needs_preparing(header, config):
                records = prepare_batch(records, header, config, self._count_opened)
                header = read_header(records)
        elif header.attributes & _CONTROL_BIT:
            return self._append_control(records, header, origin, now_ms)
        producer_id = header.producer_id
        if producer_id is None:
            base_offset = self._write(records, header, now_ms)
        else:
            verdict = self._judge(header, origin, now_ms, begins_epoch)
            if isinstance(verdict, Duplicate):
                return Appended(*verdict, self._log_start_offset, True)
            base_offset = self._write(records, header, now_ms)
            self._producers.remember(producer_id, verdict.entry)
            if self._producers.verifying and header.is_transactional:
                self._producers.end_verification(producer_id)
        append_time_ms = now_ms if config.timestamp_type is _LOG_APPEND_TIME else None
        last_offset = base_offset + header.last_offset_delta
        appended = (base_offset, last_offset, append_time_ms, self._log_start_offset, False)
        return tuple.__new__(Appended, appended)

    def _count_opened(self, cost: int) -> None:
        self.opened_cost += cost

    def _judge(
        self, header: BatchHeader, origin: Origin, now_ms: int, begins_epoch: bool
    ) -> Store | Duplicate:
        batch = produced_batch(header)
        if self.config.timestamp_type is _LOG_APPEND_TIME:
            batch = batch._replace(max_timestamp_ms=now_ms)
        entry, verifying = self._producers.table.get(batch.producer_id), self._producers.verifying
        verification = verifying.get(batch.producer_id) if verifying else None
        verdict = decide_append(
            entry,
            batch,
            origin,
            base_offset=self._log_end_offset,
            now_ms=now_ms,
            # As in Kafka, the kind of request that asked first counts until its batch is stored.
            begins_epoch=begins_epoch and (verification is None or verification.raises_epoch),
            verification=verification,
        )
        if isinstance(verdict, Refuse):
            raise verdict.error(f"{self.topic_partition}: {verdict.reason}")
        return verdict

    def _append_control(
        self, records: memoryview, header: BatchHeader, origin: Origin, now_ms: int
    ) -> Appended:
        marker = end_marker(header, records)
        if marker is None:
            raise InvalidRecord("a control batch that is no transaction marker")
        offset = self._log_end_offset
        entry = self._producers.table.get(marker.producer_id)
        verdict = decide_marker(entry, marker, origin, offset=offset, now_ms=now_ms)
        match verdict:
            case StoreMarker():
                if verdict.completed is not None and verdict.completed.is_aborted:
                    self._make_room_for_abort(header, now_ms)
                # Until its index entry is there, no flush may vouch for the marker.
                self._marker_offset = offset
                try:
                    self._write(records, header, now_ms)
                    if verdict.completed is not None and offset >= self.high_watermark:
                        self._producers.hide(verdict.completed.first_offset, offset)
                    aborted = self._producers.complete(marker.producer_id, verdict, self._recovery_point)
                    self._producers.end_verification(marker.producer_id, marker.producer_epoch)
                    if aborted is not None:
                        self._segments.active.transactions.append(aborted)
                finally:
                    self._marker_offset = None
                return Appended(offset, offset, None, self._log_start_offset, False)
            case Refuse(error, reason):
                raise error(f"{self.topic_partition}: {reason}")
            case _:
                assert_never(verdict)

    def _make_room_for_abort(self, header: BatchHeader, now_ms: int) -> None:
        """Make room for an index entry in the segment that gets the marker. Raises KafkaStorageError."""
        self._check_online()
        segment, last_offset = self._segments.active, self._log_end_offset + header.last_offset_delta
        times = header.max_timestamp_ms, self.config, now_ms
        try:
            if segment.is_full(header.size_bytes, last_offset, *times):
                segment = self._roll(now_ms)
            segment.transactions.make_room()
        except OSError as error:
            raise KafkaStorageError(f"{self.topic_partition}, offset {last_offset}: {error}") from error

    def read(
        self, offset: int, max_bytes: int, *, upper_offset: int | None = None, at_least_one: bool = True
    ) -> LogSlice:
        """Whole stored batches, unchanged, from the one that holds `offset` to below `upper_offset`.

        At most `max_bytes`, but with `at_least_one` the first batch even if it is larger. `upper_offset`
        None is the log end, which readers may not see yet. Empty at the end. Raises OffsetOutOfRange,
        KafkaStorageError, and CorruptMessage where the files are damaged.
        """
        end = self._log_end_offset if upper_offset is None else min(upper_offset, self._log_end_offset)
        if not self._log_start_offset <= offset <= self._log_end_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: offset {offset} is not within"
                f" {self._log_start_offset}..{self._log_end_offset}"
            )
        if offset >= end:
            return LogSlice(b"", offset)
        try:
            place = self._places.pop(offset, None)
            if place is None or place.position >= place.segment.size_bytes:
                # Unknown, or the segment was closed there and the batch is in the next one.
                place = find_place(self._segments, offset)
            found = read_at(place, end, max_bytes, at_least_one) if place is not None else None
        except OSError as error:
            raise KafkaStorageError(f"{self.topic_partition}: reading failed: {error}") from error
        if place is None or found is None:
            return LogSlice(b"", offset)
        if found.next_offset <= offset:
            raise CorruptMessage(
                f"{self.topic_partition}: what is stored at offset {offset} claims to be before"
            )
        self._remember_place(place, found)
        return found

    def _remember_place(self, place: Place, found: LogSlice) -> None:
        # The next fetch of each reader begins there.
        if len(self._places) >= self.config.limits.max_read_cursors:
            del self._places[next(iter(self._places))]
        self._places[found.next_offset] = Place(place.segment, place.position + len(found.records))

    def search_timestamp(self, timestamp_ms: int | None, cost: StepCost) -> Search:
        """Find the first record at or after a time, or with the largest time (None), in bounded steps.

        Raises KafkaStorageError when the partition is closed meanwhile, or cannot be read.
        """
        segments, start_offset = self._segments, self._log_start_offset
        if timestamp_ms is None:
            search = search_max_timestamp(segments, start_offset, cost)
        else:
            search = search_timestamp(segments, timestamp_ms, start_offset, cost)
        while True:
            try:
                call = next(search)
            except StopIteration as done:
                return cast(FoundTime | None, done.value)
            except OSError as error:
                raise KafkaStorageError(f"{self.topic_partition}: reading failed: {error}") from error
            yield call
            if self._is_closed:
                raise KafkaStorageError(f"{self.topic_partition} was closed meanwhile")

    def offset_for_timestamp(self, timestamp_ms: int) -> FoundTime | None:
        """The first record at or after a time: (timestamp_ms, offset), however long that takes."""
        return _finish(self.search_timestamp(timestamp_ms, StepCost()))

    def max_timestamp_offset(self) -> FoundTime | None:
        """The record with the largest timestamp; None when there is none."""
        return _finish(self.search_timestamp(None, StepCost()))

    def end_offset_for_epoch(self, epoch: int) -> tuple[int | None, int | None]:
        """(largest leader epoch not above `epoch`, where it ends); (None, None) when it is unknown."""
        return self._epochs.end_offset(epoch, self._log_end_offset)

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether this epoch of the producer has a transaction open here."""
        if producer_id not in self._producers.open_transactions:
            return False
        entry = self._producers.table.get(producer_id)
        return entry is not None and entry.producer_epoch == producer_epoch

    def open_transaction(self, producer_id: int) -> Identity | None:
        """Return whose transaction is open here, for a producer id; None: none."""
        if producer_id not in self._producers.open_transactions:
            return None
        entry = self._producers.table.get(producer_id)
        epoch = None if entry is None else entry.producer_epoch
        return None if epoch is None else Identity(producer_id, epoch)

    def open_transactions(self) -> list[Identity]:
        """Return whose transactions are open here."""
        found = [self.open_transaction(producer_id) for producer_id in self._producers.open_transactions]
        return [who for who in found if who is not None]

    def begin_verification(self, producer_id: int, epoch: int, sequence: int, *, raises_epoch: bool) -> None:
        """Note a batch for which the transaction coordinator is asked: none may overtake it."""
        self._producers.begin_verification(producer_id, epoch, sequence, raises_epoch=raises_epoch)

    def producer(self, producer_id: int) -> ProducerEntry | None:
        """Return what is remembered of a producer id."""
        return self._producers.table.get(producer_id)

    def epochs_of(self, producer_ids: Container[int]) -> Iterator[tuple[int, int]]:
        """Return (producer id, epoch) of those of these ids that are remembered. Looks at every id."""
        return self._producers.table.epochs_of(producer_ids)

    def describe_producers(self) -> list[ProducerState]:
        """What is remembered of every producer id, by id."""
        return sorted(
            ProducerState(producer_id, entry) for producer_id, entry in self._producers.table.items()
        )

    def producers_in_parts(self) -> Iterator[list[ProducerState]]:
        """What is remembered now of every producer id, at most a few thousand at a time, by id within a part.

        A million at once would hold others up for seconds: test_producers_are_described_in_bounded_parts.
        """
        for part in self._producers.table.image().parts():
            yield [ProducerState(pid, unpack_entry(packed)) for pid, packed in sorted(part.items())]

    def expire_producers(self, now_ms: int) -> Iterator[int]:
        """Forget the idle producers, a slice of the table a step; yields how many each."""
        table, most = self._producers.table, self.config.limits.expire_step_producers
        for _ in range(1 + len(table) // most):
            yield table.expire(now_ms, self.config.producer_expiration_ms, most)

    def delete_records(self, before_offset: int | None, now_ms: int) -> int:
        """Forget records below an offset (None: all that readers see); the new log start.

        Raises OffsetOutOfRange above the high watermark.
        """
        high_watermark = self.high_watermark
        target = high_watermark if before_offset is None else before_offset
        if not 0 <= target <= high_watermark:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: cannot delete up to {target},"
                f" the high watermark is {high_watermark}"
            )
        self._advance_log_start(target, now_ms)
        return self._log_start_offset

    def confirm_times(self, now_ms: int) -> Iterator[None]:
        """Make sure of the times by which `enforce_retention` would delete now, in bounded steps.

        Raises KafkaStorageError.
        """
        if not self.config.is_deleted or self.config.retention_ms is None or self._is_swapping:
            return
        oldest_ms = now_ms - self.config.retention_ms
        for segment in self._segments:
            try:
                if segment.largest_timestamp_ms < oldest_ms:
                    for _ in segment.confirm_times():
                        yield None
                        if self._is_closed:
                            return
                if segment.largest_timestamp_ms >= oldest_ms:
                    return
            except (OSError, StorageError) as error:
                if not self.holds([segment]):
                    return  # deleted or compacted meanwhile; the next round meets what there is then
                raise KafkaStorageError(f"{self.topic_partition}: retention failed: {error}") from error

    def enforce_retention(self, now_ms: int) -> int:
        """Delete segments that are too old or too many, oldest first; how many.

        Open transactions do not hold them. An offline partition keeps all, and one in which compaction is
        replacing segments. Raises KafkaStorageError.
        """
        if self.is_offline or self._is_swapping:
            return 0
        before = len(self._segments)
        for _ in self.confirm_times(now_ms):
            pass  # mostly done before, in steps
        if self.config.is_deleted:
            self._advance_log_start(self._retained_from(now_ms), now_ms)
        else:
            self._advance_log_start(self._log_start_offset, now_ms)
        return max(before - len(self._segments), 0)

    def _retained_from(self, now_ms: int) -> int:
        """Offset below which segments are too old or too many."""
        config, offset, high_watermark = self.config, self._log_start_offset, self.high_watermark
        excess = None if config.retention_bytes is None else self.size_bytes - config.retention_bytes
        for segment in self._segments:
            oldest_ms = None if config.retention_ms is None else now_ms - config.retention_ms
            is_old = oldest_ms is not None and segment.largest_timestamp_ms < oldest_ms
            is_excess = excess is not None and excess >= segment.size_bytes
            # A closed segment is empty where compaction left nothing: it must not keep what follows it.
            is_needed = segment is self._segments.active and segment.size_bytes == 0
            if is_needed or not (is_old or is_excess) or segment.end_offset > high_watermark:
                break
            excess = None if excess is None else excess - segment.size_bytes
            offset = segment.end_offset
        return offset


def _finish(search: Search) -> FoundTime | None:
    while True:
        try:
            call = next(search)
        except StopIteration as done:
            return cast(FoundTime | None, done.value)
        if call is not None:
            call()
