"""Reads stored batches and records for the pages, each time with a limit on what is read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from oncelog.broker.coordinators.internal_topic import partition_for
from oncelog.broker.coordinators.transaction_log import decode_key, decode_value
from oncelog.client.admin.blocking import Admin
from oncelog.client.consumer.blocking import Consumer
from oncelog.client.consumer.fetch_messages import FetchedBatch, decode_batch, decode_parts
from oncelog.client.consumer.partition_ends import PartitionEnds
from oncelog.client.consumer.range_reader import RangeChunk
from oncelog.errors import MisuseError, OncelogError
from oncelog.rules.storage.read_committed import Verdict
from oncelog.rules.transactions.entry import TransactionEntry
from oncelog.types import Isolation, Record, TopicPartition
from oncelog.web.fates import Fate, StoredBatch, fates
from oncelog.wire.control import ControlType, decode_control

MAX_BYTES = 8_000_000
"""The maximum number of bytes that one page reads of a partition. The batch that exceeds it is still read."""
MAX_DECODED_BYTES = 64_000_000
"""The approximate maximum size of the records that one page decodes. The stored bytes may be compressed, and
records take more memory than their bytes. Guard: test_a_page_decodes_a_bounded_number_of_records.
"""
_RECORD_COST = 200
"""The approximate memory in bytes that a record takes in addition to its key, value and headers."""
WINDOWS = (1, 8, 50, 500, 5_000, 20_000)
"""Distances from the log end, in offsets, at which a read of the newest batches begins. The smallest is tried
first, because 50 batches may exceed MAX_BYTES. Guard:
test_the_newest_of_large_batches_are_read.
"""
TRANSACTION_TOPIC = "__transaction_state"


@dataclass(frozen=True, slots=True)
class Message:
    """A record, or a marker (`record` is None), with the batch that it is in."""

    tp: TopicPartition
    offset: int
    timestamp_ms: int
    record: Record | None
    batch: StoredBatch
    fate: Fate

    @property
    def sequence(self) -> int | None:
        """Return the record's sequence; None without idempotence and for a marker."""
        return None if self.record is None else self.batch.sequence_of(self.offset)


@dataclass(frozen=True, slots=True)
class Search:
    """A filter for the records that are read.

    A record matches if its key, its value and one of its headers (as `name=value`) contain the given bytes.
    `limit` is the maximum number of messages, including markers. Markers match only if no bytes are given.
    The search in one partition ends when it has decoded about `max_decoded_bytes`.
    """

    limit: int = 50
    max_decoded_bytes: int = MAX_DECODED_BYTES
    key: bytes = b""
    value: bytes = b""
    header: bytes = b""

    def matches(self, record: Record | None) -> bool:
        """Return True if the page shows a record, or a marker (None)."""
        if record is None:
            return not (self.key or self.value or self.header)
        if self.key and self.key not in (record.key or b""):
            return False
        if self.value and self.value not in (record.value or b""):
            return False
        texts = [name.encode(errors="replace") + b"=" + (data or b"") for name, data in record.headers]
        return not self.header or any(self.header in text for text in texts)


@dataclass(slots=True)
class Found:
    """The result of a search in one partition: the messages, and the offsets that were searched.

    `next_offset` is the first offset that was not searched. `damage` is the error of a batch that cannot be
    decoded and was skipped.
    """

    start: int
    next_offset: int
    messages: list[Message] = field(default_factory=list)
    damage: OncelogError | None = None


class LogReader:
    """A reader of logs with one consumer, which the first read creates. A lock lets only one call at a time
    use the consumer.
    """

    def __init__(self, admin: Admin, make_consumer: Callable[[], Consumer]) -> None:
        self._admin = admin
        self._make_consumer = make_consumer
        self._consumer: Consumer | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the consumer. A call that waits for a broker ends with MisuseError.

        This method does not take the lock, because the waiting call holds it.
        """
        self._is_closed = True
        if self._consumer is not None:
            self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def search(self, tp: TopicPartition, ends: PartitionEnds, start: int, search: Search) -> Found:
        """Return the matching messages from offset `start` on. The search ends at the limits of `search`, or
        after MAX_BYTES.
        """
        found = Found(start, start)
        if ends.start is None or ends.end is None or ends.stable_end is None:
            return found
        found.start = found.next_offset = start = min(max(start, ends.start), ends.end)
        with self._lock:
            read = list(self._read(tp, start, ends))
        decoded_bytes = 0
        for batch in _with_fates(tp, read):
            try:
                for messages, next_offset, size_bytes in batch.parts(start):
                    found.messages += [message for message in messages if search.matches(message.record)]
                    found.next_offset = next_offset
                    decoded_bytes += size_bytes
                    if len(found.messages) > search.limit:
                        del found.messages[search.limit :]
                        found.next_offset = found.messages[-1].offset + 1
                    if len(found.messages) >= search.limit or decoded_bytes > search.max_decoded_bytes:
                        return found
            except OncelogError as error:
                found.damage = found.damage or error
                found.next_offset = batch.stored.last_offset + 1
        return found

    def search_newest(self, tp: TopicPartition, ends: PartitionEnds, search: Search) -> Found:
        """Return the newest matching messages, up to the limit, in the batches that `tail` would return."""
        read = self._read_tail(tp, ends, MAX_BYTES)
        end, log_start = read[-1][0].last_offset + 1 if read else ends.end or 0, ends.start or 0
        found = Found(end, end)
        newest_first: list[Message] = []
        decoded_bytes = 0
        for batch in reversed(_with_fates(tp, read)):
            matching: deque[Message] = deque(maxlen=search.limit)
            try:
                for messages, _, size_bytes in batch.parts(log_start):
                    matching += [message for message in messages if search.matches(message.record)]
                    decoded_bytes += size_bytes
            except OncelogError as error:
                found.damage = found.damage or error
            newest_first += reversed(matching)
            found.start = max(batch.stored.base_offset, log_start)
            if len(newest_first) > search.limit:
                del newest_first[search.limit :]
                found.start = newest_first[-1].offset
            if len(newest_first) >= search.limit or decoded_bytes > search.max_decoded_bytes:
                break
        found.messages = newest_first[::-1]
        return found

    def tail(self, tp: TopicPartition, ends: PartitionEnds, max_bytes: int = MAX_BYTES) -> list[StoredBatch]:
        """Return the newest batches of a partition, oldest first: at most 20,000 offsets or `max_bytes`."""
        return [stored for stored, _, _ in self._read_tail(tp, ends, max_bytes)]

    def transaction_log(self, transactional_id: str) -> list[TransactionEntry]:
        """Return the newest entries of a transactional id, oldest first.

        Raises OncelogError if the client may not read `__transaction_state`.
        """
        described = self._admin.describe_topics([TRANSACTION_TOPIC])[TRANSACTION_TOPIC]
        if described.error is not None:
            raise described.error
        tp = TopicPartition(TRANSACTION_TOPIC, partition_for(transactional_id, len(described.partitions)))
        start = self._admin.list_offsets({tp: "earliest"})[tp].offset
        end = self._admin.list_offsets({tp: "latest"})[tp].offset
        entries: list[TransactionEntry] = []
        for stored, chunk, fetched in self._read_tail(tp, PartitionEnds(start, end, end, None), MAX_BYTES):
            if stored.marker is None:
                entries += _entries(decode_batch(tp, chunk.records, fetched, 0, check_crcs=True))
        return [entry for entry in entries if entry.transactional_id == transactional_id]

    def _read_tail(
        self, tp: TopicPartition, ends: PartitionEnds, max_bytes: int
    ) -> list[tuple[StoredBatch, RangeChunk, FetchedBatch]]:
        """Return the newest batches, from the largest window whose batches fit into `max_bytes`."""
        tail: list[tuple[StoredBatch, RangeChunk, FetchedBatch]] = []
        if ends.start is None or ends.end is None:
            return tail
        with self._lock:
            for window in WINDOWS:
                start = max(ends.start, ends.end - window)
                read = list(self._read(tp, start, ends, max_bytes))
                is_whole = not read or read[-1][0].last_offset >= ends.end - 1
                if is_whole or not tail:
                    tail = read
                if start == ends.start or not is_whole:
                    break
        return tail

    def _read(
        self, tp: TopicPartition, start: int, ends: PartitionEnds, max_bytes: int = MAX_BYTES
    ) -> Iterator[tuple[StoredBatch, RangeChunk, FetchedBatch]]:
        """Yield the batches from `start` on, up to `max_bytes`. Batches above the last stable offset have no
        verdict (`is_aborted` is None).
        """
        if self._is_closed:
            raise MisuseError("the pages are closed")
        if self._consumer is None:
            self._consumer = self._make_consumer()
        end, stable = ends.end or 0, ends.stable_end or 0
        read_bytes = 0
        parts = (
            (start, min(stable, end), Isolation.READ_COMMITTED),
            (max(start, stable), end, Isolation.READ_UNCOMMITTED),
        )
        for first, last, isolation in parts:
            if first >= last:
                continue
            for chunk in self._consumer.fetch_chunks(tp, first, last, isolation):
                for fetched in chunk.batches:
                    header = fetched.header
                    if header.last_offset < first or header.base_offset >= last:
                        continue
                    if read_bytes > max_bytes:
                        return
                    read_bytes += header.size_bytes
                    is_judged = isolation is Isolation.READ_COMMITTED
                    yield _stored(chunk, fetched, is_judged), chunk, fetched


def _stored(chunk: RangeChunk, fetched: FetchedBatch, is_judged: bool) -> StoredBatch:
    header = fetched.header
    batch = StoredBatch(
        header.base_offset,
        header.last_offset,
        header.max_timestamp_ms,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.records_count,
        header.size_bytes,
        header.is_transactional,
        None,
        fetched.verdict is Verdict.ABORTED if is_judged else None,
    )
    if not header.is_control:
        return batch
    return batch._replace(marker=_marker(chunk, fetched), is_aborted=None)


def _marker(chunk: RangeChunk, fetched: FetchedBatch) -> str:
    try:
        control = decode_control(chunk.records, fetched.position)
    except OncelogError:
        return "control"
    if control is None or control.type not in (ControlType.COMMIT, ControlType.ABORT):
        return "control"
    return control.type.name


@dataclass(frozen=True, slots=True)
class _ReadBatch:
    """A batch that was read, with its fate."""

    tp: TopicPartition
    stored: StoredBatch
    chunk: RangeChunk
    fetched: FetchedBatch
    fate: Fate

    def parts(self, start: int) -> Iterator[tuple[list[Message], int, int]]:
        """Yield the messages from offset `start` on, in parts: (messages, offset after them, size in bytes).

        Raises OncelogError for a batch that cannot be decoded.
        """
        tp, stored, fate = self.tp, self.stored, self.fate
        if stored.marker is not None:
            yield (
                [Message(tp, stored.base_offset, stored.timestamp_ms, None, stored, fate)],
                stored.last_offset + 1,
                0,
            )
            return
        for records, is_last in decode_parts(tp, self.chunk.records, self.fetched, start, check_crcs=True):
            next_offset = records[-1].offset + 1 if records else start
            yield (
                [Message(tp, record.offset, record.timestamp_ms, record, stored, fate) for record in records],
                stored.last_offset + 1 if is_last else next_offset,
                sum(map(_size_bytes, records)),
            )


def _with_fates(
    tp: TopicPartition, read: list[tuple[StoredBatch, RangeChunk, FetchedBatch]]
) -> list[_ReadBatch]:
    all_fates = fates([stored for stored, _, _ in read])
    return [_ReadBatch(tp, *batch, fate) for batch, fate in zip(read, all_fates, strict=True)]


def _size_bytes(record: Record) -> int:
    headers = sum(_RECORD_COST + len(name) + len(value or b"") for name, value in record.headers)
    return _RECORD_COST + len(record.key or b"") + len(record.value or b"") + headers


def _entries(records: list[Record]) -> list[TransactionEntry]:
    entries = []
    for record in records:
        if record.key is None or record.value is None:
            continue
        try:
            entries.append(decode_value(decode_key(record.key), record.value))
        except (OncelogError, ValueError):
            continue  # the record has a format version that this client does not know
    return entries
