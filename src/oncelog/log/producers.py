"""The producers of a partition: who they are, whose transaction is open, and what is snapshotted when.

Appending, recovery and the simulator change producer state through the same two functions, `remember`
and `complete`.
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
"""Complete transactions that are noted one by one until their markers are synced."""
_Wanted = tuple[int, ProducerImage, Callable[[], BackgroundTask]]


def produced_batch(header: BatchHeader) -> ProducedBatch:
    """What the append rule asks of a header. Raises InvalidRecord without a producer id and epoch."""
    _, _, _, _, _, attributes, delta, _, max_timestamp_ms, producer_id, epoch, sequence, _ = header
    if producer_id is None or epoch is None:
        raise InvalidRecord(f"producer id {producer_id} with epoch {epoch}")
    fields = (producer_id, epoch, sequence, delta, max_timestamp_ms, attributes & 0x10 != 0)
    return tuple.__new__(ProducedBatch, fields)


def end_marker(header: BatchHeader, batch: memoryview) -> EndMarker | None:
    """The COMMIT or ABORT in a control batch; None for other control records and for an empty batch.

    Raises CorruptMessage or InvalidRecord when the batch does not parse.
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
    """The producer table and the open transactions (producer id -> first offset, oldest first).

    `snapshot_offset`: where the newest snapshot known to be on disk stands, None without one.
    """

    def __init__(self, snapshots: Snapshots, background: BackgroundQueue) -> None:
        limits = snapshots.limits
        self.table = ProducerTable(limits.max_producers_at_work, limits.producer_shard_entries)
        self._max_verifying = limits.max_verifying_producers
        self.open_transactions: OrderedDict[int, int] = OrderedDict()
        # A dict's first entry is found behind the places of all that were deleted before it: each of 80,000
        # transactions that end in turn would look at the others. See test_many_open_transactions_end_in_turn.
        self.verifying: dict[int, Verification] = {}
        """By producer id; at most `limits.max_verifying_producers`, of which the oldest go first."""
        self.snapshots = snapshots
        self.snapshot_offset: int | None = None
        self.is_snapshot_refused = False
        """True if the disk did not take the last snapshot."""
        self._snapshot_offsets: set[int] = set()
        self._hidden: deque[tuple[int, int]] = deque()
        self._unsynced: deque[tuple[int, int]] = deque()
        self._background = background
        self._writing: BackgroundTask | None = None
        self._wanted: _Wanted | None = None

    def load(self, snapshot: Snapshot, expired_before_ms: int) -> None:
        """Take over a snapshot, less what expired meanwhile; of who is known already, what came before."""
        entries = snapshot.producers
        if len(self.table):
            known = {pid: entry for pid in entries if (entry := self.table.get(pid)) is not None}
            for producer_id, entry in known.items():
                self.table.put(producer_id, with_older(entry, unpack_entry(entries[producer_id])))
            entries = {pid: packed for pid, packed in entries.items() if pid not in known}
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
        """Note a batch for which the transaction coordinator is asked."""
        known = self.verifying.get(producer_id)
        if known is not None:
            self.verifying[producer_id] = known.with_batch(epoch, sequence)
            return
        # Anybody can name producer ids, so their number is bounded.
        if len(self.verifying) >= self._max_verifying:
            del self.verifying[next(iter(self.verifying))]
        self.verifying[producer_id] = Verification(epoch, sequence, raises_epoch)

    def end_verification(self, producer_id: int, marker_epoch: int | None = None) -> None:
        """A transactional batch was stored, or with `marker_epoch` a marker."""
        known = self.verifying.get(producer_id)
        if known is None:
            return
        # With an epoch per transaction the marker before a transaction carries that transaction's epoch.
        if known.raises_epoch and marker_epoch == known.producer_epoch:
            return
        del self.verifying[producer_id]

    def remember(self, producer_id: int, entry: ProducerEntry) -> None:
        """A data batch was written."""
        self.table.put(producer_id, entry)
        first_offset = entry.current_txn_first_offset
        if first_offset is not None and producer_id not in self.open_transactions:
            self.open_transactions[producer_id] = first_offset

    def complete(
        self, producer_id: int, verdict: StoreMarker, synced_to: int = 0
    ) -> AbortedTransaction | None:
        """A marker was written; what the transaction index must note, None unless data was aborted.

        `synced_to`: of older markers those below are forgotten as ones that a power loss may take.
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
        """Note a transaction that is complete, by a marker that a power loss may take."""
        unsynced = self._unsynced
        while unsynced and unsynced[0][1] < synced_to:
            unsynced.popleft()
        # As in `hide`. Of very many the last one stands for those behind it, which begin later.
        while unsynced and unsynced[-1][0] >= first_offset:
            unsynced.pop()
        if len(unsynced) >= _MAX_UNSYNCED:
            first_offset = unsynced.pop()[0]
        unsynced.append((first_offset, marker_offset))

    def unsynced_first_offset(self, synced_to: int) -> int | None:
        """Return where the oldest transaction begins that a power loss would open again."""
        return next((first for first, marker in self._unsynced if marker >= synced_to), None)

    def hide(self, first_offset: int, marker_offset: int) -> None:
        """Note a transaction that is complete, but whose marker readers do not see yet."""
        # One with an earlier begin and a later marker stands for those before it: the first one is the least.
        while self._hidden and self._hidden[-1][0] >= first_offset:
            self._hidden.pop()
        self._hidden.append((first_offset, marker_offset))

    def hidden_first_offset(self, high_watermark: int) -> int | None:
        """Return where the oldest transaction begins whose marker is not below the high watermark."""
        while self._hidden and self._hidden[0][1] < high_watermark:
            self._hidden.popleft()
        return self._hidden[0][0] if self._hidden else None

    def replay(self, header: BatchHeader, batch: memoryview, now_ms: int) -> AbortedTransaction | None:
        """Take a stored batch into account, as appending it did; returns as `complete`."""
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
        """Take stored batches without transactions into account, given as rows of scan.HEADERS.

        Of each producer the newest five say all: what came before them is not remembered. `is_whole` tells
        by the number of a row whether its batch may be believed.
        """
        numbered = np.flatnonzero((rows["producer_id"] >= 0) & (rows["producer_epoch"] >= 0))
        newest: dict[int, list[int]] = {}
        for index, producer_id in zip(numbered.tolist(), rows["producer_id"][numbered].tolist(), strict=True):
            known = newest.get(producer_id)
            if known is None:
                newest[producer_id] = [index]
            else:
                known.append(index)
        headers, empty = rows.tobytes(), memoryview(b"")
        for indexes in newest.values():
            believed = list(islice(filter(is_whole, reversed(indexes)), REMEMBERED_BATCHES))
            for index in reversed(believed):
                self.replay(read_header(headers, index * HEADER_BYTES), empty, now_ms)

    @property
    def open_first_offset(self) -> int | None:
        """First offset of the oldest open transaction."""
        return next(iter(self.open_transactions.values()), None)

    def snapshot(self, offset: int, then: Callable[[], BackgroundTask]) -> None:
        """Write the state down as of now, which is `offset`; goes on with `then` once that is durable.

        While one is being written a second waits for it, and a third takes the place of the second.
        Raises OSError when it is done at once and fails.
        """
        if self.snapshot_offset == offset:
            self._background.add(then())
            return
        self._wanted = offset, self.table.image(), then
        if self._writing is None:
            self._writing = self._write_wanted()
            self._background.add(self._writing)

    def _write_wanted(self) -> BackgroundTask:
        try:
            while self._wanted is not None:
                (offset, image, then), self._wanted = self._wanted, None
                try:
                    yield from self.snapshots.write(offset, image)
                except OSError:
                    self.is_snapshot_refused = True
                    raise
                self.is_snapshot_refused = False
                self._note_snapshot(offset)
                yield from then()
        finally:
            self._writing = self._wanted = None

    def last_batch_of(self, producer_id: int) -> LastOfProducer | None:
        """Return what compaction must keep of a producer; None if nothing is remembered of it."""
        entry = self.table.get(producer_id)
        if entry is None or entry.producer_epoch is None:
            return None
        return LastOfProducer(entry.producer_epoch, entry.batches[-1].last_offset if entry.batches else None)

    def snapshot_now(self, offset: int) -> None:
        """Write the state down as of `offset` in one go, for opening and closing. Raises OSError."""
        self.abandon()
        if self.snapshot_offset != offset:
            run(self.snapshots.write(offset, self.table.image()))
            self._note_snapshot(offset)

    def _note_snapshot(self, offset: int) -> None:
        self.snapshot_offset = offset
        self._snapshot_offsets.add(offset)

    def snapshot_from(self, offset: int) -> int | None:
        """Return where the oldest snapshot known to be on disk stands, of those at or above an offset."""
        return min((known for known in self._snapshot_offsets if known >= offset), default=None)

    def snapshot_up_to(self, offset: int) -> int | None:
        """Return where the newest snapshot known to be on disk stands, of those at or below an offset."""
        return max((known for known in self._snapshot_offsets if known <= offset), default=None)

    def keep_snapshots(self, offsets: Iterable[int], synced_to: int) -> BlockingCall:
        """Forget other snapshots than these and the two next to `synced_to`; return what removes them."""
        kept = {*offsets, *around(self._snapshot_offsets, synced_to)}
        self._snapshot_offsets &= kept
        return partial(self.snapshots.keep, kept, synced_to)

    def abandon(self) -> None:
        """Give up a snapshot that is being written."""
        if self._writing is not None:
            self._writing.close()
            self._writing = self._wanted = None
