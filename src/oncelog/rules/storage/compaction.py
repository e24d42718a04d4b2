"""Decide what compaction removes: superseded records, old tombstones, and markers without data.

A round cleans the log up to the end of the dirty range. The dirty range is the part that no earlier round has
cleaned. It ends below the last stable offset, the active segment, the records that are not durable yet, and
the first segment younger than min.compaction.lag.ms. A round first collects the newest offset of each key in
the dirty range (`LatestOffsets`). Then it examines every batch from the log start to the end of the range:

    data of an aborted transaction                      dropped
    a record with a newer one of its key in the range   dropped
    a tombstone, past the batch's delete horizon        dropped
    a record without a key                              dropped
    a COMMIT or ABORT whose data is all gone,           dropped
        past the batch's delete horizon
    anything else                                       kept

The first round that finds a tombstone in a batch, or a marker without data, sets the batch's delete horizon:
delete.retention.ms after that round. Until then, a consumer that starts at the beginning can still see the
tombstone or marker. A batch that lost all its records is removed, except for two batches. An active
producer's last batch keeps its header, because the header has the producer's sequence and epoch. The last
batch of the range keeps its header, because the header has the range's last offset. Source: Kafka's
LogCleaner, Cleaner and CleanedTransactionMetadata; KIP-534.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

_DIGEST_BYTES = 16


class Span(NamedTuple):
    """The offsets, size and timestamps of a closed segment.

    `first_timestamp_ms` is the timestamp of the first batch; None if it is unknown or missing.
    """

    base_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp_ms: int
    first_timestamp_ms: int | None = None


class DirtyRange(NamedTuple):
    """The dirty range: offsets from `first_offset` to below `end_offset`.

    `clean_bytes` is the total size of the segments before the range, and `dirty_bytes` that of the segments
    in it. `oldest_ms` is the smallest first timestamp of the dirty segments. A segment whose first timestamp
    is unknown counts with its largest timestamp.
    """

    first_offset: int
    end_offset: int
    clean_bytes: int
    dirty_bytes: int
    oldest_ms: int

    def is_due(self, min_dirty_ratio: float, max_lag_ms: int, now_ms: int) -> bool:
        """Return True if min.cleanable.dirty.ratio is reached or max.compaction.lag.ms has passed."""
        if self.oldest_ms <= now_ms - max_lag_ms:
            return True
        return self.dirty_bytes / (self.clean_bytes + self.dirty_bytes) >= min_dirty_ratio


def find_dirty(
    closed: Sequence[Span], *, cleaned_to: int, stable_offset: int, min_lag_ms: int, now_ms: int
) -> DirtyRange | None:
    """Return the range of closed segments that may be cleaned now; None if there is none.

    Earlier rounds have cleaned the log below `cleaned_to`. Segments with records at or above `stable_offset`,
    or younger than `min_lag_ms`, are not in the range.
    """
    clean_bytes = dirty_bytes = 0
    end_offset, times = cleaned_to, list[int]()
    for span in closed:
        if span.end_offset <= cleaned_to:
            clean_bytes += span.size_bytes
            continue
        is_young = min_lag_ms > 0 and span.max_timestamp_ms > now_ms - min_lag_ms
        if is_young or span.end_offset > stable_offset:
            break
        # Use the first timestamp: the largest one may lie in the future and would delay the compaction of
        # older records. See test_a_record_of_the_future_does_not_put_compaction_off.
        first_ms = span.first_timestamp_ms
        times.append(span.max_timestamp_ms if first_ms is None else first_ms)
        dirty_bytes += span.size_bytes
        end_offset = span.end_offset
    if not dirty_bytes:
        return None
    return DirtyRange(cleaned_to, end_offset, clean_bytes, dirty_bytes, min(times))


class LatestOffsets:
    """The newest offset of each key, for about `capacity` keys. To save memory, a long key is stored as a
    digest.
    """

    def __init__(self, capacity: int) -> None:
        self._offsets: dict[bytes, int] = {}
        self._capacity = capacity

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def is_full(self) -> bool:
        return len(self._offsets) >= self._capacity

    def note(self, key: bytes, offset: int) -> None:
        self._offsets[_short(key)] = offset

    def is_superseded(self, key: bytes, offset: int) -> bool:
        """Return True if a record with this key and a larger offset was noted."""
        return self._offsets.get(_short(key), -1) > offset


def _short(key: bytes) -> bytes:
    return key if len(key) <= _DIGEST_BYTES else blake2b(key, digest_size=_DIGEST_BYTES).digest()


class Aborted(NamedTuple):
    """An aborted transaction as the transaction index has it. `last_offset` is the offset of its marker."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class SeenTransactions:
    """The transactions that still have data, determined by reading the log from its start.

    `aborted` are entries of the transaction index. Call `add` for further entries before any other method.
    """

    def __init__(self, aborted: Iterable[tuple[int, int, int, int]] = ()) -> None:
        self._coming: list[tuple[int, Aborted]] = []
        self._aborting: dict[int, Aborted] = {}
        self._with_data: set[int] = set()
        for entry in aborted:
            self.add(entry)

    def add(self, entry: tuple[int, int, int, int]) -> None:
        """Add an entry of the transaction index."""
        heapq.heappush(self._coming, (entry[1], Aborted(*entry)))

    def is_aborted(self, producer_id: int, last_offset: int) -> bool:
        """Return True if a data batch's transaction was aborted.

        Call it once for each transactional batch, in order.
        """
        self._begin_to(last_offset)
        self._with_data.add(producer_id)
        aborted = self._aborting.get(producer_id)
        return aborted is not None and last_offset < aborted.last_offset

    def end(self, producer_id: int, last_offset: int) -> tuple[bool, Aborted | None]:
        """Handle a marker. Return two values: True if its transaction still has data, and the index entry
        that must be kept.

        The entry is None for a commit, and for an abort without remaining data.
        """
        self._begin_to(last_offset)
        aborted = self._aborting.pop(producer_id, None)
        had_data = producer_id in self._with_data
        self._with_data.discard(producer_id)
        return had_data, aborted if had_data else None

    def _begin_to(self, offset: int) -> None:
        while self._coming and self._coming[0][0] <= offset:
            _, entry = heapq.heappop(self._coming)
            if entry.last_offset >= offset:
                self._aborting[entry.producer_id] = entry


class UnindexedAborts:
    """The aborted transactions that still have data but no entry in the transaction index.

    They are found by reading the log from its start. Oncelog up to 0.4.1 lost such entries when a round of
    compaction ended before the marker.
    """

    def __init__(self, indexed_markers: Container[int]) -> None:
        self._indexed_markers = indexed_markers
        self._first_offsets: dict[int, int] = {}

    def data(self, producer_id: int, base_offset: int) -> None:
        """Handle a transactional data batch. The producer's first data batch after a marker begins a
        transaction.
        """
        self._first_offsets.setdefault(producer_id, base_offset)

    def gap(self) -> None:
        """Forget the open transactions, because their markers may be in an unreadable part of the log."""
        self._first_offsets.clear()

    def marker(self, producer_id: int, offset: int, *, is_abort: bool) -> Aborted | None:
        """Handle a marker. Return the entry that the transaction index lacks for it; None if no entry is
        missing.
        """
        first_offset = self._first_offsets.pop(producer_id, None)
        if first_offset is None or not is_abort or offset in self._indexed_markers:
            return None
        # The last stable offset at the time of the marker is unknown. Searches use the field only to stop
        # early, so a lower bound is safe.
        return Aborted(producer_id, first_offset, offset, 0)


class LastOfProducer(NamedTuple):
    """The batch headers that compaction must keep for an active producer.

    `last_data_offset` is the last offset of the producer's last data batch, whose header stays. It is None if
    the producer has only markers in `producer_epoch`. In that case the headers of these markers stay.
    """

    producer_epoch: int
    last_data_offset: int | None


class BatchFacts(NamedTuple):
    """The fields of a batch header that compaction uses.

    `delete_horizon_ms` is None until a round sets it.
    """

    last_offset: int
    producer_id: int | None
    producer_epoch: int | None
    is_transactional: bool
    is_control: bool
    delete_horizon_ms: int | None


class Retention(NamedTuple):
    """The decision about a batch.

    If `drops_all`, all records are removed. If `keeps_header`, the header stays even without records.
    `is_empty_end` is true for a marker whose transaction no longer has data. `noted` is an entry that the
    transaction index must keep.
    """

    drops_all: bool
    keeps_header: bool
    is_empty_end: bool
    noted: Aborted | None


class Cleaner:
    """The decisions of one round, in the order of the log.

    `last_batch_of` returns the last batch of an active producer; None if the producer is not active.
    `end_offset` is the end of the range: no batch at or above this offset is examined.
    """

    def __init__(
        self,
        latest: LatestOffsets,
        transactions: SeenTransactions,
        last_batch_of: Callable[[int], LastOfProducer | None],
        *,
        end_offset: int,
        now_ms: int,
    ) -> None:
        self._latest = latest
        self._transactions = transactions
        self._last_batch_of = last_batch_of
        self._end_offset = end_offset
        self._now_ms = now_ms

    def retention(self, batch: BatchFacts) -> Retention:
        """Return the decision about a batch. Call this once for each batch, in order."""
        drops_all, is_empty_end, noted = False, False, None
        producer_id = batch.producer_id
        if batch.is_control:
            if producer_id is not None:
                had_data, noted = self._transactions.end(producer_id, batch.last_offset)
                is_empty_end = not had_data
            drops_all = is_empty_end and self._is_past(batch.delete_horizon_ms)
        elif batch.is_transactional and producer_id is not None:
            drops_all = self._transactions.is_aborted(producer_id, batch.last_offset)
        return Retention(drops_all, self._keeps_header(batch), is_empty_end, noted)

    def keeps(self, key: bytes | None, offset: int, has_value: bool, horizon_ms: int | None) -> bool:
        """Return True if a data record stays. Do not call it for a batch whose decision has `drops_all`.

        `horizon_ms` is the batch's delete horizon; None if the batch has no horizon.
        """
        if key is None or self._latest.is_superseded(key, offset):
            return False
        return has_value or not self._is_past(horizon_ms)

    def _is_past(self, horizon_ms: int | None) -> bool:
        return horizon_ms is not None and horizon_ms <= self._now_ms

    def _keeps_header(self, batch: BatchFacts) -> bool:
        if batch.last_offset + 1 >= self._end_offset:
            return True
        if batch.producer_id is None:
            return False
        last = self._last_batch_of(batch.producer_id)
        if last is None:
            return False
        if last.last_data_offset is None:
            return batch.is_control and batch.producer_epoch == last.producer_epoch
        return batch.last_offset == last.last_data_offset
