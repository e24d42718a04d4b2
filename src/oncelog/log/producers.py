"""The producers of a partition: their state, their open transactions, and the snapshots of both.

Appends and recovery change the state through the same two methods, `remember` and `complete`.
Source: Kafka's ProducerStateManager.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

import numpy as np

from oncelog.errors import CorruptMessage, InvalidRecord
from oncelog.log.background import BackgroundQueue, BackgroundTask, BlockingCall, run
from oncelog.log.index import AbortedTransaction
from oncelog.log.snapshot import Snapshot, Snapshots, around
from oncelog.rules.idempotence.append import (
    REMEMBERED_BATCHES,
    ProducedBatch,
    ProducerEntry,
    Store,
    Verification,
    decide_append,
)
from oncelog.rules.idempotence.last_stable_offset import stable_offset_after
from oncelog.rules.idempotence.markers import EndMarker, StoreMarker, decide_marker
from oncelog.rules.idempotence.producer_state import (
    ProducerImage,
    ProducerTable,
    append_time_ms,
    has_open_transaction,
    unpack_entry,
    with_older,
)
from oncelog.rules.storage.compaction import LastOfProducer
from oncelog.types import Origin
from oncelog.wire.batch import HEADER_BYTES, BatchHeader, read_header
from oncelog.wire.control import ControlType, decode_control

_MAX_UNSYNCED = 100
"""The number of complete transactions that are noted one by one until their markers are synced."""
_Request = tuple[int, ProducerImage, Callable[[], BackgroundTask]]


def produced_batch(header: BatchHeader) -> ProducedBatch:
    """Return the producer fields of a header. Raises InvalidRecord without a producer id or epoch."""
    _, _, _, _, _, attributes, delta, _, max_timestamp_ms, producer_id, epoch, sequence, _ = header
    if producer_id is None or epoch is None:
        raise InvalidRecord(f"producer id {producer_id} with epoch {epoch}")
    fields = (producer_id, epoch, sequence, delta, max_timestamp_ms, attributes & 0x10 != 0)
    return tuple.__new__(ProducedBatch, fields)


def end_marker(header: BatchHeader, batch: memoryview) -> EndMarker | None:
    """Return the COMMIT or ABORT in a control batch, None for other control records and an empty batch.

    Raises CorruptMessage or InvalidRecord if the batch cannot be decoded.
    """
    record = decode_control(batch, verify=False)
    if record is None or record.type not in (ControlType.COMMIT, ControlType.ABORT):
        return None
    if header.producer_id is None or header.producer_epoch is None or record.coordinator_epoch is None:
        raise CorruptMessage("a transaction marker without a producer id and epoch")
    return EndMarker(
        header.producer_id,
        header.producer_epoch,
        record.coordinator_epoch,
        record.type is ControlType.COMMIT,
        record.timestamp_ms,
    )


class PartitionProducers:
    """The producer table and the open transactions of a partition.

    `open_transactions` maps producer ids to first offsets, oldest first. `snapshot_offset` is that of the
    newest snapshot known to be on disk, None without one.
    """

    def __init__(self, snapshots: Snapshots, background: BackgroundQueue) -> None:
        limits = snapshots.limits
        self.table = ProducerTable(limits.max_producers_at_work, limits.producer_shard_entries)
        self._max_verifying = limits.max_verifying_producers
        self.open_transactions: OrderedDict[int, int] = OrderedDict()
        # Not a dict: finding its first entry skips the slots of all entries deleted before it. With 80,000
        # open transactions, the end of each would skip the others. See
        # test_many_open_transactions_end_in_turn.
        self.verifying: dict[int, Verification] = {}
        """By producer id; at most `limits.max_verifying_producers`, of which the oldest is dropped first."""
        self.snapshots = snapshots
        self.snapshot_offset: int | None = None
        self.is_snapshot_refused = False
        """True if the disk refused the last snapshot."""
        self._snapshot_offsets: set[int] = set()
        self._hidden: deque[tuple[int, int]] = deque()
        self._unsynced: deque[tuple[int, int]] = deque()
        self._background = background
        self._writing: BackgroundTask | None = None
        self._requested: _Request | None = None

    def load(self, snapshot: Snapshot, expired_before_ms: int) -> None:
        """Load a snapshot, without expired producers; ids already in the table get only the older batches."""
        entries = snapshot.producers
        if len(self.table):
            newer = {pid: entry for pid in entries if (entry := self.table.get(pid)) is not None}
            for producer_id, entry in newer.items():
                self.table.put(producer_id, with_older(entry, unpack_entry(entries[producer_id])))
            entries = {pid: packed for pid, packed in entries.items() if pid not in newer}
        entries = {
            producer_id: packed
            for producer_id, packed in entries.items()
            if append_time_ms(packed) > expired_before_ms or has_open_transaction(packed)
        }
        for producer_id, packed in entries.items():
            if has_open_transaction(packed):
                first_offset = unpack_entry(packed).current_txn_first_offset
                assert first_offset is not None
                self.open_transactions[producer_id] = first_offset
        oldest_first = sorted(self.open_transactions.items(), key=lambda item: item[1])
        self.open_transactions = OrderedDict(oldest_first)
        self.table.put_packed(entries)
        self._note_snapshot(snapshot.offset)

    def begin_verification(self, producer_id: int, epoch: int, sequence: int, *, raises_epoch: bool) -> None:
        """Note a batch about which the transaction coordinator is asked."""
        verification = self.verifying.get(producer_id)
        if verification is not None:
            self.verifying[producer_id] = verification.with_batch(epoch, sequence)
            return
        # Any client can name producer ids, so their number is bounded.
        if len(self.verifying) >= self._max_verifying:
            del self.verifying[next(iter(self.verifying))]
        self.verifying[producer_id] = Verification(epoch, sequence, raises_epoch)

    def end_verification(self, producer_id: int, marker_epoch: int | None = None) -> None:
        """Forget a verification after a transactional batch, or with `marker_epoch` after a marker."""
        verification = self.verifying.get(producer_id)
        if verification is None:
            return
        # With an epoch per transaction, the marker before a transaction has that transaction's epoch.
        if verification.raises_epoch and marker_epoch == verification.producer_epoch:
            return
        del self.verifying[producer_id]

    def remember(self, producer_id: int, entry: ProducerEntry) -> None:
        """Store the entry of a producer after its data batch was written."""
        self.table.put(producer_id, entry)
        first_offset = entry.current_txn_first_offset
        if first_offset is not None and producer_id not in self.open_transactions:
            self.open_transactions[producer_id] = first_offset

    def complete(
        self, producer_id: int, verdict: StoreMarker, synced_to: int = 0
    ) -> AbortedTransaction | None:
        """Complete a transaction after its marker was written.

        Return the entry for the transaction index, None unless data was aborted. `synced_to`: the recovery
        point, below which no power loss can take a marker.
        """
        self.table.put(producer_id, verdict.entry)
        self.open_transactions.pop(producer_id, None)
        done = verdict.completed
        if done is None:
            return None
        self._note_unsynced(done.first_offset, done.last_offset, synced_to)
        if not done.is_aborted:
            return None
        stable = stable_offset_after(done, self.open_first_offset)
        return AbortedTransaction(done.producer_id, done.first_offset, done.last_offset, stable)

    def _note_unsynced(self, first_offset: int, marker_offset: int, synced_to: int) -> None:
        """Note a completed transaction whose marker a power loss may take."""
        unsynced = self._unsynced
        while unsynced and unsynced[0][1] < synced_to:
            unsynced.popleft()
        # As in `hide`. Beyond the maximum, the last one also covers later ones, which begin after it.
        while unsynced and unsynced[-1][0] >= first_offset:
            unsynced.pop()
        if len(unsynced) >= _MAX_UNSYNCED:
            first_offset = unsynced.pop()[0]
        unsynced.append((first_offset, marker_offset))

    def unsynced_first_offset(self, synced_to: int) -> int | None:
        """Return the first offset of the oldest transaction that a power loss would reopen, if any."""
        return next((first for first, marker in self._unsynced if marker >= synced_to), None)

    def hide(self, first_offset: int, marker_offset: int) -> None:
        """Note a completed transaction whose marker is not visible to readers yet."""
        # An entry with an earlier begin and a later marker covers the ones before it, so the first is the
        # smallest.
        while self._hidden and self._hidden[-1][0] >= first_offset:
            self._hidden.pop()
        self._hidden.append((first_offset, marker_offset))

    def hidden_first_offset(self, high_watermark: int) -> int | None:
        """Return the first offset of the oldest transaction whose marker is not below the high watermark."""
        while self._hidden and self._hidden[0][1] < high_watermark:
            self._hidden.popleft()
        return self._hidden[0][0] if self._hidden else None

    def replay(self, header: BatchHeader, batch: memoryview, now_ms: int) -> AbortedTransaction | None:
        """Apply a stored batch as its append did; return as `complete` does."""
        if header.producer_id is None or header.producer_epoch is None:
            return None
        entry = self.table.get(header.producer_id)
        if header.is_control:
            marker = end_marker(header, batch)
            if marker is None:
                return None
            decided = decide_marker(entry, marker, Origin.REPLAY, offset=header.base_offset, now_ms=now_ms)
            assert isinstance(decided, StoreMarker)
            return self.complete(header.producer_id, decided)
        verdict = decide_append(
            entry, produced_batch(header), Origin.REPLAY, base_offset=header.base_offset, now_ms=now_ms
        )
        assert isinstance(verdict, Store)
        self.remember(header.producer_id, verdict.entry)
        return None

    def replay_plain(self, rows: np.ndarray, now_ms: int, is_whole: Callable[[int], bool]) -> None:
        """Apply stored batches without transactions, given as rows of `scan.HEADERS`.

        Only the newest five of each producer matter, because no more are remembered. `is_whole` returns True
        for the index of a row whose batch has a valid checksum.
        """
        numbered = np.flatnonzero((rows["producer_id"] >= 0) & (rows["producer_epoch"] >= 0))
        newest: dict[int, list[int]] = {}
        for index, producer_id in zip(numbered.tolist(), rows["producer_id"][numbered].tolist(), strict=True):
            indexes = newest.get(producer_id)
            if indexes is None:
                newest[producer_id] = [index]
            else:
                indexes.append(index)
        headers, empty = rows.tobytes(), memoryview(b"")
        for indexes in newest.values():
            whole = list(islice(filter(is_whole, reversed(indexes)), REMEMBERED_BATCHES))
            for index in reversed(whole):
                self.replay(read_header(headers, index * HEADER_BYTES), empty, now_ms)

    @property
    def open_first_offset(self) -> int | None:
        """The first offset of the oldest open transaction, None without one."""
        return next(iter(self.open_transactions.values()), None)

    def snapshot(self, offset: int, then: Callable[[], BackgroundTask]) -> None:
        """Write a snapshot of the current state, as of `offset`; run `then` once it is durable.

        While one is being written, a second one waits, and a third one replaces the second. Raises OSError if
        it is written at once and fails.
        """
        if self.snapshot_offset == offset:
            self._background.add(then())
            return
        self._requested = offset, self.table.image(), then
        if self._writing is None:
            self._writing = self._write_requested()
            self._background.add(self._writing)

    def _write_requested(self) -> BackgroundTask:
        try:
            while self._requested is not None:
                (offset, image, then), self._requested = self._requested, None
                try:
                    yield from self.snapshots.write(offset, image)
                except OSError:
                    self.is_snapshot_refused = True
                    raise
                self.is_snapshot_refused = False
                self._note_snapshot(offset)
                yield from then()
        finally:
            self._writing = self._requested = None

    def last_batch_of(self, producer_id: int) -> LastOfProducer | None:
        """Return what compaction must keep of a producer; None if nothing is remembered of it."""
        entry = self.table.get(producer_id)
        if entry is None or entry.producer_epoch is None:
            return None
        return LastOfProducer(entry.producer_epoch, entry.batches[-1].last_offset if entry.batches else None)

    def snapshot_now(self, offset: int) -> None:
        """Write a snapshot as of `offset` at once, for opening and closing. Raises OSError."""
        self.abandon()
        if self.snapshot_offset != offset:
            run(self.snapshots.write(offset, self.table.image()))
            self._note_snapshot(offset)

    def _note_snapshot(self, offset: int) -> None:
        self.snapshot_offset = offset
        self._snapshot_offsets.add(offset)

    def snapshot_from(self, offset: int) -> int | None:
        """Return the offset of the oldest snapshot on disk at or above an offset, None without one."""
        return min((other for other in self._snapshot_offsets if other >= offset), default=None)

    def snapshot_up_to(self, offset: int) -> int | None:
        """Return the offset of the newest snapshot on disk at or below an offset, None without one."""
        return max((other for other in self._snapshot_offsets if other <= offset), default=None)

    def keep_snapshots(self, offsets: Iterable[int], synced_to: int) -> BlockingCall:
        """Forget all snapshots but these and the two next to `synced_to`; return a call that removes them."""
        kept = {*offsets, *around(self._snapshot_offsets, synced_to)}
        self._snapshot_offsets &= kept
        return partial(self.snapshots.keep, kept, synced_to)

    def abandon(self) -> None:
        """Abandon the snapshot that is being written."""
        if self._writing is not None:
            self._writing.close()
            self._writing = self._requested = None
