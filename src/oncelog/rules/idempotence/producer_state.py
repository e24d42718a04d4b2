"""The producer table of one partition: the last batches of each producer id, small enough for a million ids.

Active producers are ProducerEntry values. Idle ones are packed into bytes, which take a fifth of the memory
and are invisible to the garbage collector. Idle entries are in shards of bounded size, so that expiry and
snapshots process a few thousand at a time. `image` returns a copy of the table that shares the shards. After
that, a shard is copied before its first change. Shards are split one by one (linear hashing), so that no
append has to rehash many ids. A producer id expires by the time of its last append, not by its records'
timestamps: otherwise a producer that loads old records would lose its de-duplication. See
test_an_id_expires_by_the_time_of_its_last_append.

Packed, little-endian:  flags u8 | epoch i16 | last_timestamp_ms i64 | last_append_ms i64
    | coordinator_epoch i32 if COORDINATOR | current_txn_first_offset i64 if TXN
    | if TIGHT: newest last_offset i64, then per batch, newest first: offset_delta i32,
      newest last_offset less its last_offset u32, its timestamp less last_timestamp_ms i32,
      last_sequence i32
    | else per batch: last_offset i64, offset_delta i32, timestamp_ms i64, last_sequence i32
The flags are NO_EPOCH, COORDINATOR, TXN and TIGHT. An entry with batches is TIGHT if the differences that
this layout stores fit into 32 bits. A last_sequence of -1 stands for None.
Source: behaviours I6, I19 and I20 (docs/behaviours.md); Kafka's ProducerStateManager.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from oncelog.limits import DEFAULT_LIMITS
from oncelog.rules.idempotence.append import REMEMBERED_BATCHES, ProducerEntry, RememberedBatch

_NO_EPOCH, _COORDINATOR, _TXN, _TIGHT = 1, 2, 4, 8
PLAIN = _TIGHT
"""First byte of a plain packed entry: it has an epoch, is TIGHT, and has neither a coordinator epoch nor an
open transaction.

The head, the newest offset and the newest batch are at fixed positions, so that a snapshot can read them at
once.
"""
_HEAD = struct.Struct("<Bhqq")
_APPEND_TIME = struct.Struct("<q")
_APPEND_TIME_POSITION = 11
_INT32, _INT64 = struct.Struct("<i"), struct.Struct("<q")
_TIGHT_BATCH = struct.Struct("<iIii")
_WIDE_BATCH = struct.Struct("<qiqi")
_UINT32_MAX, _INT32_MAX = 2**32 - 1, 2**31 - 1


def pack_entry(entry: ProducerEntry) -> bytes:
    """Return the entry as bytes, from which `unpack_entry` restores it exactly."""
    epoch, coordinator_epoch, last_ms, append_ms, txn_first_offset, batches = entry
    flags = _NO_EPOCH if epoch is None else 0
    tail = b""
    if coordinator_epoch is not None:
        flags |= _COORDINATOR
        tail += _INT32.pack(coordinator_epoch)
    if txn_first_offset is not None:
        flags |= _TXN
        tail += _INT64.pack(txn_first_offset)
    if _is_tight(entry):
        flags |= _TIGHT
        tail += _pack_tight(batches, last_ms)
    else:
        tail += b"".join([_WIDE_BATCH.pack(b[1], b[2], b[3], _sequence(b)) for b in reversed(batches)])
    return _HEAD.pack(flags, 0 if epoch is None else epoch, last_ms, append_ms) + tail


def _sequence(batch: RememberedBatch) -> int:
    return -1 if batch.last_sequence is None else batch.last_sequence


def _is_tight(entry: ProducerEntry) -> bool:
    batches = entry.batches
    if not batches:
        return False
    newest = batches[-1].last_offset
    return all(
        0 <= newest - batch.last_offset <= _UINT32_MAX
        and abs(batch.timestamp_ms - entry.last_timestamp_ms) <= _INT32_MAX
        for batch in batches
    )


def _pack_tight(batches: tuple[RememberedBatch, ...], last_ms: int) -> bytes:
    newest = batches[-1].last_offset
    packed = [_TIGHT_BATCH.pack(b[2], newest - b[1], b[3] - last_ms, _sequence(b)) for b in reversed(batches)]
    return _INT64.pack(newest) + b"".join(packed)


def unpack_entry(data: bytes) -> ProducerEntry:
    """Return the entry that `pack_entry` packed. Raises struct.error for malformed bytes."""
    flags, epoch, last_ms, append_ms = _HEAD.unpack_from(data)
    position = _HEAD.size
    coordinator_epoch = txn_first_offset = None
    if flags & _COORDINATOR:
        (coordinator_epoch,) = _INT32.unpack_from(data, position)
        position += 4
    if flags & _TXN:
        (txn_first_offset,) = _INT64.unpack_from(data, position)
        position += 8
    batches = []
    if flags & _TIGHT:
        (newest,) = _INT64.unpack_from(data, position)
        for delta, back, late_ms, sequence in _TIGHT_BATCH.iter_unpack(memoryview(data)[position + 8 :]):
            sequence = None if sequence < 0 else sequence
            batches.append(RememberedBatch(sequence, newest - back, delta, last_ms + late_ms))
    else:
        for offset, delta, timestamp_ms, sequence in _WIDE_BATCH.iter_unpack(memoryview(data)[position:]):
            sequence = None if sequence < 0 else sequence
            batches.append(RememberedBatch(sequence, offset, delta, timestamp_ms))
    batches.reverse()
    epoch = None if flags & _NO_EPOCH else epoch
    return ProducerEntry(epoch, coordinator_epoch, last_ms, append_ms, txn_first_offset, tuple(batches))


def is_entry_layout(first: bytes, size: int) -> bool:
    """Return True if `unpack_entry` can unpack an entry that has this first byte and this size."""
    if size < _HEAD.size or first[0] > _NO_EPOCH | _COORDINATOR | _TXN | _TIGHT:
        return False
    flags, batches_size = first[0], size - _HEAD.size
    if flags & _COORDINATOR:
        batches_size -= _INT32.size
    if flags & _TXN:
        batches_size -= _INT64.size
    if flags & _TIGHT:
        batches_size -= _INT64.size + _TIGHT_BATCH.size  # such an entry has a batch
    return batches_size >= 0 and batches_size % (_TIGHT_BATCH if flags & _TIGHT else _WIDE_BATCH).size == 0


def with_older(entry: ProducerEntry, earlier: ProducerEntry) -> ProducerEntry:
    """Return `entry` with those batches of `earlier` that are older. They were deleted from the start of the
    log.

    `earlier` is an older entry of the same producer id. If its epoch differs, `entry` is returned unchanged.
    """
    if earlier.producer_epoch != entry.producer_epoch:
        return entry
    first_offset = entry.batches[0].last_offset if entry.batches else None
    older = [batch for batch in earlier.batches if first_offset is None or batch.last_offset < first_offset]
    return entry._replace(batches=(*older, *entry.batches)[-REMEMBERED_BATCHES:])


def joined(replayed: ProducerEntry, stored: ProducerEntry) -> ProducerEntry:
    """Return the entry of a producer that the whole log and an older snapshot have.

    `stored` is the snapshot's entry. It may have batches and epochs that compaction removed from the log, and
    neither may be forgotten. But the log says which transaction is open: the snapshot may know of a marker
    that was lost. See test_a_start_that_trusts_no_file_lowers_no_epoch.
    """
    if stored.producer_epoch != replayed.producer_epoch:
        is_newer = _or_least(stored.producer_epoch) > _or_least(replayed.producer_epoch)
        is_newer = is_newer and replayed.current_txn_first_offset is None
        return stored if is_newer else replayed
    batches = {batch.last_offset: batch for batch in (*stored.batches, *replayed.batches)}
    newest = sorted(batches.values(), key=lambda batch: batch.last_offset)[-REMEMBERED_BATCHES:]
    coordinator_epoch = max((replayed.coordinator_epoch, stored.coordinator_epoch), key=_or_least)
    return replayed._replace(coordinator_epoch=coordinator_epoch, batches=tuple(newest))


def _or_least(epoch: int | None) -> int:
    return -1 if epoch is None else epoch


def has_open_transaction(packed: bytes) -> bool:
    """Return True if a packed entry has an open transaction, without unpacking it."""
    return bool(packed[0] & _TXN)


def append_time_ms(packed: bytes) -> int:
    """Return `last_append_ms` of a packed entry, without unpacking it."""
    return int(_APPEND_TIME.unpack_from(packed, _APPEND_TIME_POSITION)[0])


class ProducerImage(NamedTuple):
    """The content of a table at one moment. The table may change while the image is used."""

    entry_count: int
    active: dict[int, ProducerEntry]
    idle: list[dict[int, bytes]]

    def parts(self) -> Iterator[dict[int, bytes]]:
        """Yield all entries packed, a few thousand at a time. The caller must not change the dicts."""
        yield {producer_id: pack_entry(entry) for producer_id, entry in self.active.items()}
        yield from self.idle

    def drain(self) -> Iterator[dict[int, bytes]]:
        """Yield the entries as `parts` does, and remove each part from the image, so that the memory is not
        freed all in one step.
        """
        yield {producer_id: pack_entry(entry) for producer_id, entry in self.active.items()}
        self.idle.reverse()
        while self.idle:
            yield self.idle.pop()


class ProducerTable:
    """The entry of each producer id of one partition.

    At most `max_active` entries are kept as objects. If there are more, the entry that became active first is
    packed. `shard_entries` is the average number of packed entries in a shard. If all ids are even, some
    shards have twice as many. The default of `shard_entries` is chosen so that even the dict of such a shard
    needs no resize.
    """

    def __init__(
        self,
        max_active: int = DEFAULT_LIMITS.max_producers_at_work,
        shard_entries: int = DEFAULT_LIMITS.producer_shard_entries,
    ) -> None:
        self._max_active = max_active
        self._shard_entries = shard_entries
        self.active: dict[int, ProducerEntry] = {}
        self._idle: list[dict[int, bytes]] = [{}]
        # One byte for each shard: 1 if an image may share it.
        self._is_shared = bytearray(1)
        # The index of an id's shard consists of the id's bits under this mask and the next higher bit. If
        # there is no shard with this index yet, it consists of the bits under the mask alone.
        self._mask = 0
        self._idle_count = 0
        self._next_shard = 0

    def __len__(self) -> int:
        return len(self.active) + self._idle_count

    @property
    def largest_id(self) -> int:
        """The largest producer id in the table, -1 if it is empty. Reads the whole table."""
        return max(max(producer_ids, default=-1) for producer_ids in (self.active.keys(), *self._idle))

    def get(self, producer_id: int) -> ProducerEntry | None:
        """Return the entry of a producer id; None if it is unknown."""
        entry = self.active.get(producer_id)
        if entry is not None:
            return entry
        packed = self._idle[self._shard_of(producer_id)].get(producer_id)
        return None if packed is None else unpack_entry(packed)

    def put(self, producer_id: int, entry: ProducerEntry) -> None:
        """Store the entry of a producer id as active.

        If there are too many active entries, pack the one that became active first.
        """
        active = self.active
        if producer_id not in active:
            self._forget_idle(producer_id)
            if len(active) >= self._max_active:
                oldest = next(iter(active))
                self.put_packed({oldest: pack_entry(active.pop(oldest))})
        active[producer_id] = entry

    def put_packed(self, entries: Mapping[int, bytes]) -> None:
        """Store packed entries of producer ids that are not in the table."""
        while self._idle_count + len(entries) > self._shard_entries * len(self._idle):
            self._split()
        idle, short_mask = self._idle, self._mask
        count, mask = len(idle), 2 * short_mask + 1
        for producer_id, packed in entries.items():
            index = producer_id & mask
            if index >= count:
                index = producer_id & short_mask
            if self._is_shared[index]:
                self._own(index)
            idle[index][producer_id] = packed
        self._idle_count += len(entries)

    def image(self) -> ProducerImage:
        """Return an image of the table. Active entries are copied; shards are shared until they change."""
        self._is_shared = bytearray(b"\1") * len(self._idle)
        return ProducerImage(len(self), self.active.copy(), self._idle.copy())

    def items(self) -> Iterator[tuple[int, ProducerEntry]]:
        """Yield all entries, in arbitrary order. The table must not change during the iteration."""
        yield from self.active.items()
        for shard in self._idle:
            for producer_id, packed in shard.items():
                yield producer_id, unpack_entry(packed)

    def epochs_of(self, producer_ids: Container[int]) -> Iterator[tuple[int, int]]:
        """Yield (producer id, epoch) for those of `producer_ids` that have an epoch in the table.

        Reads the whole table.
        """
        for producer_id, entry in self.active.items():
            if entry.producer_epoch is not None and producer_id in producer_ids:
                yield producer_id, entry.producer_epoch
        for shard in self._idle:
            for producer_id, packed in shard.items():
                if producer_id in producer_ids and not packed[0] & _NO_EPOCH:
                    yield producer_id, _HEAD.unpack_from(packed)[1]

    def expire(self, now_ms: int, expiration_ms: int, max_examined: int | None = None) -> int:
        """Remove ids without an open transaction whose last append is at least `expiration_ms` ago.

        This examines whole shards in turn until about `max_examined` packed entries were examined (None: all
        shards). Return the number of removed ids.
        """
        oldest_ms = now_ms - expiration_ms
        before = len(self)
        active = self.active
        for producer_id in [pid for pid, entry in active.items() if _is_expired(entry, oldest_ms)]:
            del active[producer_id]
        examined = 0
        for _ in range(len(self._idle)):
            if max_examined is not None and examined >= max_examined:
                break
            examined += len(self._idle[self._next_shard])
            self._expire_shard(self._next_shard, oldest_ms)
            self._next_shard = (self._next_shard + 1) % len(self._idle)
        return before - len(self)

    def _expire_shard(self, index: int, oldest_ms: int) -> None:
        read = _APPEND_TIME.unpack_from
        expired = [
            producer_id
            for producer_id, packed in self._idle[index].items()
            if read(packed, _APPEND_TIME_POSITION)[0] <= oldest_ms and not packed[0] & _TXN
        ]
        if not expired:
            return
        shard = self._own(index)
        for producer_id in expired:
            del shard[producer_id]
        self._idle_count -= len(expired)
        if len(expired) > len(shard):
            # Copy the dict, because a dict never shrinks.
            self._idle[index] = dict(shard)

    def _shard_of(self, producer_id: int) -> int:
        index = producer_id & (2 * self._mask + 1)
        return index if index < len(self._idle) else producer_id & self._mask

    def _own(self, index: int) -> dict[int, bytes]:
        """Return a shard that may be changed. If an image shares the shard, copy it first."""
        if self._is_shared[index]:
            self._idle[index] = self._idle[index].copy()
            self._is_shared[index] = 0
        return self._idle[index]

    def _forget_idle(self, producer_id: int) -> None:
        index = self._shard_of(producer_id)
        if producer_id in self._idle[index]:
            del self._own(index)[producer_id]
            self._idle_count -= 1

    def _split(self) -> None:
        """Add a shard. It takes ids from the shard whose index has the same bits under the mask."""
        added = len(self._idle)
        if added > 2 * self._mask + 1:
            self._mask = 2 * self._mask + 1
        parent = self._idle[added & self._mask]
        bits = 2 * self._mask + 1
        self._idle[added & self._mask] = {pid: data for pid, data in parent.items() if pid & bits != added}
        self._idle.append({pid: data for pid, data in parent.items() if pid & bits == added})
        self._is_shared[added & self._mask] = 0
        self._is_shared.append(0)


def _is_expired(entry: ProducerEntry, oldest_ms: int) -> bool:
    return entry.last_append_ms <= oldest_ms and entry.current_txn_first_offset is None
