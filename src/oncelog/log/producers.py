"""The producers of a partition: their state, their open transactions, and the snapshots of both.

Appends and recovery change the state through the same two methods: `remember` for data, `complete` for
markers. Source: Kafka's ProducerStateManager.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice

from oncelog.errors import CorruptMessage, InvalidRecord
from oncelog.log.background import BackgroundQueue, BackgroundTask, BlockingCall, run
from oncelog.log.index import AbortedTransaction
from oncelog.log.scan import NumberedBatch
from oncelog.log.snapshot import Snapshot, Snapshots
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
    joined,
    unpack_entry,
    with_older,
)
from oncelog.rules.storage.compaction import LastOfProducer
from oncelog.types import Origin
from oncelog.wire.batch import HEADER_BYTES, BatchHeader, read_header
from oncelog.wire.control import ControlType, decode_control

_MAX_UNSYNCED = 100
"""The number of completed transactions that are tracked individually until their markers are synced. If there
are more, one entry covers several transactions.
"""
_Request = tuple[int, ProducerImage, Callable[[], BackgroundTask]]


def produced_batch(header: BatchHeader) -> ProducedBatch:
    """Return the producer fields of a batch header. Raises InvalidRecord if the producer id or epoch is
    missing.
    """
    _, _, _, _, _, attributes, delta, _, max_timestamp_ms, producer_id, epoch, sequence, _ = header
    if producer_id is None or epoch is None:
        raise InvalidRecord(f"producer id {producer_id} with epoch {epoch}")
    fields = (producer_id, epoch, sequence, delta, max_timestamp_ms, attributes & 0x10 != 0)
    return tuple.__new__(ProducedBatch, fields)


def end_marker(header: BatchHeader, batch: memoryview) -> EndMarker | None:
    """Return the COMMIT or ABORT marker in a control batch; None if the batch has no records or another
    control record.

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

    - `open_transactions`: first offset of each open transaction by producer id, oldest first.
    - `snapshot_offset`: offset of the newest snapshot that was loaded or written; None if there is none.
    """

    def __init__(self, snapshots: Snapshots, background: BackgroundQueue) -> None:
        limits = snapshots.limits
        self.table = ProducerTable(limits.max_producers_at_work, limits.producer_shard_entries)
        self._max_verifying = limits.max_verifying_producers
        # An OrderedDict, because a dict skips the slots of deleted entries to find its first entry. If 80,000
        # open transactions ended one after another, each end would skip up to 80,000 slots. See
        # test_ending_one_of_many_open_transactions_examines_few_others.
        self.open_transactions: OrderedDict[int, int] = OrderedDict()
        self.verifying: dict[int, Verification] = {}
        """Pending verifications by producer id, at most `limits.max_verifying_producers`. The oldest is
        dropped first.
        """
        self.snapshots = snapshots
        self.snapshot_offset: int | None = None
        self.is_snapshot_refused = False
        """True if writing the last snapshot failed."""
        self._snapshot_offsets: set[int] = set()
        self._hidden: deque[tuple[int, int]] = deque()
        self._unsynced: deque[tuple[int, int]] = deque()
        self._background = background
        self._writing: BackgroundTask | None = None
        self._requested: _Request | None = None

    def load(self, snapshot: Snapshot, expired_before_ms: int) -> None:
        """Load a snapshot into the table.

        Producers whose last append was at or before `expired_before_ms` are skipped, unless they have an open
        transaction. For a producer that is already in the table, see `joined`.
        """
        entries = snapshot.producers
        if len(self.table):
            newer = {pid: entry for pid in entries if (entry := self.table.get(pid)) is not None}
            for producer_id, replayed in newer.items():
                entry = joined(replayed, unpack_entry(entries[producer_id]))
                self.table.put(producer_id, entry)
                if entry.current_txn_first_offset is not None:
                    self.open_transactions[producer_id] = entry.current_txn_first_offset
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
        if not snapshot.is_damaged:  # the next stop writes a damaged file again
            self._note_snapshot(snapshot.offset)

    def adopt(self, snapshot: Snapshot, expired_before_ms: int) -> None:
        """Replace the replayed state by the state of a snapshot, which includes batches that are no longer in
        the log.

        If the snapshot has only the last batches, each producer keeps its older replayed ones.
        `expired_before_ms`: see `load`.
        """
        replayed, limits = self.table, self.snapshots.limits
        self.table = ProducerTable(limits.max_producers_at_work, limits.producer_shard_entries)
        self.open_transactions.clear()
        self.load(snapshot, expired_before_ms)
        if snapshot.has_older_batches:
            return
        for producer_id, earlier in replayed.items():
            if (entry := self.table.get(producer_id)) is not None:
                self.table.put(producer_id, with_older(entry, earlier))

    def begin_verification(self, producer_id: int, epoch: int, sequence: int, *, raises_epoch: bool) -> None:
        """Record that the broker is about to ask the transaction coordinator whether a batch may be stored.
        `epoch` and `sequence` are those of the batch.
        """
        verification = self.verifying.get(producer_id)
        if verification is not None:
            self.verifying[producer_id] = verification.with_batch(epoch, sequence)
            return
        # Limit the number of entries: any client can send any number of producer ids.
        if len(self.verifying) >= self._max_verifying:
            del self.verifying[next(iter(self.verifying))]
        self.verifying[producer_id] = Verification(epoch, sequence, raises_epoch)

    def end_verification(self, producer_id: int, marker_epoch: int | None = None) -> None:
        """Remove the verification of a producer, after a transactional batch or a marker was stored.

        `marker_epoch` is the producer epoch of the marker, None for a batch.
        """
        verification = self.verifying.get(producer_id)
        if verification is None:
            return
        # With an epoch per transaction (KIP-890), a marker has the epoch of the next transaction. So a marker
        # with the epoch of the verified batch belongs to the transaction before that batch.
        if verification.raises_epoch and marker_epoch == verification.producer_epoch:
            return
        del self.verifying[producer_id]

    def remember(self, producer_id: int, entry: ProducerEntry) -> None:
        """Store a producer's entry after its data batch was written."""
        self.table.put(producer_id, entry)
        first_offset = entry.current_txn_first_offset
        if first_offset is not None and producer_id not in self.open_transactions:
            self.open_transactions[producer_id] = first_offset

    def complete(
        self, producer_id: int, verdict: StoreMarker, synced_to: int = 0
    ) -> AbortedTransaction | None:
        """Complete a transaction after its marker was written.

        Returns the entry for the transaction index if data was aborted, else None. `synced_to` is the
        recovery point: no power loss can remove a marker below it.
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
        """Remember a completed transaction until its marker is synced, for `unsynced_first_offset`."""
        unsynced = self._unsynced
        while unsynced and unsynced[0][1] < synced_to:
            unsynced.popleft()
        # Remove the entries that the new entry covers, as in `hide`. If there are _MAX_UNSYNCED entries, the
        # new entry replaces the last one and takes its first offset, so that it covers both transactions.
        while unsynced and unsynced[-1][0] >= first_offset:
            unsynced.pop()
        if len(unsynced) >= _MAX_UNSYNCED:
            first_offset = unsynced.pop()[0]
        unsynced.append((first_offset, marker_offset))

    def unsynced_first_offset(self, synced_to: int) -> int | None:
        """Return the first offset of the oldest transaction that a power loss would reopen, or None if there
        is none.

        `synced_to` is the recovery point: a power loss can remove every marker at or above it.
        """
        return next((first for first, marker in self._unsynced if marker >= synced_to), None)

    def hide(self, first_offset: int, marker_offset: int) -> None:
        """Remember a completed transaction whose marker is not below the high watermark yet, for
        `hidden_first_offset`.
        """
        # The new entry has a later marker than all others. It covers those whose first offset is not below
        # its own, so they are removed. Therefore the first entry always has the lowest first offset.
        while self._hidden and self._hidden[-1][0] >= first_offset:
            self._hidden.pop()
        self._hidden.append((first_offset, marker_offset))

    def hidden_first_offset(self, high_watermark: int) -> int | None:
        """Return the first offset of the oldest completed transaction whose marker is not below the high
        watermark, or None if there is none.
        """
        while self._hidden and self._hidden[0][1] < high_watermark:
            self._hidden.popleft()
        return self._hidden[0][0] if self._hidden else None

    def replay(self, header: BatchHeader, batch: memoryview, now_ms: int) -> AbortedTransaction | None:
        """Update the producers from a stored batch, as its append did. Returns the same as `complete`; None
        for a data batch.
        """
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

    def replay_plain(
        self,
        headers: bytes,
        batches: Mapping[int, Sequence[NumberedBatch]],
        now_ms: int,
        is_whole: Callable[[NumberedBatch], bool],
    ) -> None:
        """Update the producers from stored non-transactional batches, which are given for each producer id.

        `batches` refers to `headers`. Only the newest five batches of each producer are applied, because the
        table remembers no more. `is_whole` returns True if the checksum of a batch is valid.
        """
        empty = memoryview(b"")
        for numbered in batches.values():
            whole = list(islice(filter(is_whole, reversed(numbered)), REMEMBERED_BATCHES))
            for number, _ in reversed(whole):
                self.replay(read_header(headers, number * HEADER_BYTES), empty, now_ms)

    @property
    def open_first_offset(self) -> int | None:
        """The first offset of the oldest open transaction, or None if there is none."""
        return next(iter(self.open_transactions.values()), None)

    def snapshot(self, offset: int, then: Callable[[], BackgroundTask]) -> None:
        """Write a snapshot of the current state, which is the state at `offset`, and run `then` once it is
        durable.

        Only one snapshot is written at a time. A further request waits, and replaces a request that already
        waits. Without a background runner, the snapshot is written during the call, which may raise OSError.
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
        """Return the epoch and the last offset of a producer's last batch, which compaction must keep. Return
        None if the producer is unknown.
        """
        entry = self.table.get(producer_id)
        if entry is None or entry.producer_epoch is None:
            return None
        return LastOfProducer(entry.producer_epoch, entry.batches[-1].last_offset if entry.batches else None)

    @property
    def is_writing_snapshot(self) -> bool:
        """True while a snapshot is being written in the background."""
        return self._writing is not None

    def snapshot_now(self, offset: int) -> None:
        """Write a snapshot of the state at `offset` during the call. Used when a partition is opened or
        closed. Raises OSError.

        A snapshot that is being written in the background is abandoned.
        """
        self.abandon()
        if self.snapshot_offset != offset:
            run(self.snapshots.write(offset, self.table.image()))
            self._note_snapshot(offset)

    def replace_snapshots(self, offset: int) -> None:
        """Write a snapshot as of `offset` during opening, and remove all others. Raises OSError."""
        self.snapshot_offset = None
        self.snapshot_now(offset)
        self._snapshot_offsets = {offset}
        self.snapshots.keep(lambda other: other == offset)

    def _note_snapshot(self, offset: int) -> None:
        self.snapshot_offset = offset
        self._snapshot_offsets.add(offset)

    def snapshot_from(self, offset: int) -> int | None:
        """Return the lowest snapshot offset that is at or above `offset`, or None if there is none."""
        return min((other for other in self._snapshot_offsets if other >= offset), default=None)

    def snapshot_up_to(self, offset: int) -> int | None:
        """Return the highest snapshot offset that is at or below `offset`, or None if there is none."""
        return max((other for other in self._snapshot_offsets if other <= offset), default=None)

    def keep_snapshots(self, offsets: Iterable[int], covered_to: int | None) -> BlockingCall:
        """Forget the snapshots below `covered_to`, except those at `offsets`. With None, forget none.

        Returns a blocking call that deletes the files of the forgotten snapshots.
        """
        kept, lowest = set(offsets), 0 if covered_to is None else covered_to

        def is_kept(offset: int) -> bool:
            return offset >= lowest or offset in kept

        self._snapshot_offsets = set(filter(is_kept, self._snapshot_offsets))
        return partial(self.snapshots.keep, is_kept)

    def abandon(self) -> None:
        """Stop writing the snapshot that is in progress, if any."""
        if self._writing is not None:
            self._background.discard(self._writing)
            self._writing = self._requested = None
