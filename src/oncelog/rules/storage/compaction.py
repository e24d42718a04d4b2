"""What a compacted log may forget: all but the newest record of a key, and what only said that one is gone.

The range cleaned first ends below the last stable offset, the active segment, what is not durable yet, and
the first segment younger than min.compaction.lag.ms; records in it are known by key (`LatestOffsets`). Then
everything from the log start to there is judged, batch by batch:

    data of an aborted transaction                      dropped
    a record with a newer one of its key in the range   dropped
    a tombstone, past the batch's delete horizon        dropped
    a COMMIT or ABORT whose data is all gone,           dropped
        past the batch's delete horizon
    the rest                                            kept

The delete horizon is given to a batch by the first cleaning that finds a tombstone or a marker without data
in it, delete.retention.ms ahead, so that whoever reads from the start meets those for so long. A batch
that lost all its records goes, unless it is the last that a living producer wrote (it tells sequence and
epoch) or the last of the range (it tells where the log ends): then its header stays.
Source: disk, section 5; Kafka's LogCleaner, CleanedTransactionMetadata, KIP-534.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

_DIGEST_BYTES = 16


class Span(NamedTuple):
    """A closed segment. `first_timestamp_ms`: of its first batch, None without one or while it is unknown."""

    base_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp_ms: int
    first_timestamp_ms: int | None = None


class DirtyRange(NamedTuple):
    """What is to be cleaned, from the first offset to below the end; bytes are of whole segments.

    `oldest_ms`: the least timestamp of the first batches of its segments that are dirty.
    """

    first_offset: int
    end_offset: int
    clean_bytes: int
    dirty_bytes: int
    oldest_ms: int

    def is_due(self, min_dirty_ratio: float, max_lag_ms: int, now_ms: int) -> bool:
        """min.cleanable.dirty.ratio is reached, or max.compaction.lag.ms gone by."""
        if self.oldest_ms <= now_ms - max_lag_ms:
            return True
        return self.dirty_bytes / (self.clean_bytes + self.dirty_bytes) >= min_dirty_ratio


def find_dirty(
    closed: Sequence[Span], *, cleaned_to: int, stable_offset: int, min_lag_ms: int, now_ms: int
) -> DirtyRange | None:
    """What of the closed segments may be cleaned now; None when there is nothing.

    `cleaned_to`: below it every key was there once. `stable_offset`: from it on nothing may be touched.
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
        # The largest timestamp may lie in the future, and the record that must go in time beside it:
        # test_a_record_of_the_future_does_not_put_compaction_off.
        first_ms = span.first_timestamp_ms
        times.append(span.max_timestamp_ms if first_ms is None else first_ms)
        dirty_bytes += span.size_bytes
        end_offset = span.end_offset
    if not dirty_bytes:
        return None
    return DirtyRange(cleaned_to, end_offset, clean_bytes, dirty_bytes, min(times))


class LatestOffsets:
    """The newest offset of each key, of at most about `capacity` keys; long keys by their digest."""

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
        """Whether a newer record has the key."""
        return self._offsets.get(_short(key), -1) > offset


def _short(key: bytes) -> bytes:
    return key if len(key) <= _DIGEST_BYTES else blake2b(key, digest_size=_DIGEST_BYTES).digest()


class Aborted(NamedTuple):
    """An aborted transaction as the index of transactions has it; `last_offset` is its marker's."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class SeenTransactions:
    """Which transactions still have data, as a walk from the log start meets batches and markers."""

    def __init__(self, aborted: Iterable[tuple[int, int, int, int]]) -> None:
        self._coming = [(entry[1], Aborted(*entry)) for entry in aborted]
        heapq.heapify(self._coming)
        self._aborting: dict[int, Aborted] = {}
        self._with_data: set[int] = set()

    def is_aborted(self, producer_id: int, last_offset: int) -> bool:
        """Whether a transactional data batch was aborted; to be called once for each."""
        self._begin_to(last_offset)
        self._with_data.add(producer_id)
        aborted = self._aborting.get(producer_id)
        return aborted is not None and last_offset < aborted.last_offset

    def end(self, producer_id: int, last_offset: int) -> tuple[bool, Aborted | None]:
        """A marker was met: (is there still data of its transaction, the index entry if it was aborted)."""
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
    """Aborted transactions that still have data, but no index entry, as a walk from the log start finds them.

    Oncelog up to 0.4.1 lost such entries when a round of compaction ended before the marker.
    """

    def __init__(self, indexed_markers: Container[int]) -> None:
        self._indexed_markers = indexed_markers
        self._first_offsets: dict[int, int] = {}

    def data(self, producer_id: int, base_offset: int) -> None:
        """Take a transactional data batch into account."""
        self._first_offsets.setdefault(producer_id, base_offset)

    def gap(self) -> None:
        """Forget the open transactions: a part of the log that cannot be read may hold their markers."""
        self._first_offsets.clear()

    def marker(self, producer_id: int, offset: int, *, is_abort: bool) -> Aborted | None:
        """Take a marker into account; return the index entry that it lacks."""
        first_offset = self._first_offsets.pop(producer_id, None)
        if first_offset is None or not is_abort or offset in self._indexed_markers:
            return None
        # The last stable offset of then is unknown. It only ends a search early, so a lower bound is right.
        return Aborted(producer_id, first_offset, offset, 0)


class LastOfProducer(NamedTuple):
    """What must stay of a living producer; `last_data_offset` None: only markers came, of this epoch."""

    producer_epoch: int
    last_data_offset: int | None


class BatchFacts(NamedTuple):
    """What a batch header says; `delete_horizon_ms` None until one is given."""

    last_offset: int
    producer_id: int | None
    producer_epoch: int | None
    is_transactional: bool
    is_control: bool
    delete_horizon_ms: int | None


class Retention(NamedTuple):
    """`drops_all`: every record goes. `keeps_header`: the batch stays even if empty.

    `is_empty_end`: a marker that may go once its horizon has passed. `noted`: to stay in the index.
    """

    drops_all: bool
    keeps_header: bool
    is_empty_end: bool
    noted: Aborted | None


class Cleaner:
    """One walk over a log. `last_batch_of`: what a living producer wrote last. `end_offset`: where the range
    ends; nothing from there on is given.
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
        """What becomes of a batch; to be called for each, in order."""
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
        """Whether a data record stays, of a batch that was not dropped."""
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
