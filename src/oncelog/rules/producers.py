"""The producer table of one partition: who appended what last, small enough for a million ids.

Producers at work are ProducerEntry values; idle ones are packed into bytes, which take a fifth of the
memory and are invisible to the garbage collector. Idle ones live in shards, so that expiry can look at a
slice of them at a time. An id expires by the time of its last append, not by its records' timestamps: a
back-fill of old records keeps its de-duplication.

Packed, little-endian:  flags u8 | epoch i16 | last_timestamp_ms i64 | last_append_ms i64
    | coordinator_epoch i32 if COORDINATOR | current_txn_first_offset i64 if TXN
    | if TIGHT: newest last_offset i64, then per batch, newest first: offset_delta u32,
      how far its last_offset is behind u32, its timestamp less last_timestamp_ms i32, last_sequence i32
    | else per batch: last_offset i64, offset_delta u32, timestamp_ms i64, last_sequence i32
A sequence of -1 stands for None.
Source: rows I6, I19, I20; Kafka's ProducerStateManager.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from oncelog.rules.append import ProducerEntry, RememberedBatch

SHARDS = 256
HOT_ENTRIES = 1024
"""Entries kept as objects in the younger half; as many again may wait in the older half."""

_NO_EPOCH, _COORDINATOR, _TXN, _TIGHT = 1, 2, 4, 8
PLAIN = _TIGHT
"""First byte of a packed entry with an epoch, a batch and no transaction: its first PLAIN_BYTES bytes are
head, newest offset and newest batch at fixed positions, for readers of many at once."""
PLAIN_BYTES = 43
_HEAD = struct.Struct("<Bhqq")
_APPEND_TIME = struct.Struct("<q")
_APPEND_TIME_POSITION = 11
_INT32, _INT64 = struct.Struct("<i"), struct.Struct("<q")
_TIGHT_BATCH = struct.Struct("<IIii")
_WIDE_BATCH = struct.Struct("<qIqi")
_UINT32_MAX, _INT32_MAX = 2**32 - 1, 2**31 - 1


def pack_entry(entry: ProducerEntry) -> bytes:
    """The entry as bytes; `unpack_entry` gives it back exactly."""
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
    """Inverse of `pack_entry`. Raises struct.error on bytes that it did not make."""
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


def has_open_transaction(packed: bytes) -> bool:
    """Whether the packed entry has one, without unpacking it."""
    return bool(packed[0] & _TXN)


def append_time_ms(packed: bytes) -> int:
    """`last_append_ms` of a packed entry, without unpacking it."""
    return int(_APPEND_TIME.unpack_from(packed, _APPEND_TIME_POSITION)[0])


class ProducerTable:
    """Producer id -> ProducerEntry for one partition."""

    def __init__(self) -> None:
        self._hot: dict[int, ProducerEntry] = {}
        self._warm: dict[int, ProducerEntry] = {}
        self._idle: list[dict[int, bytes]] = [{} for _ in range(SHARDS)]
        self._count = 0
        self._next_shard = 0

    def __len__(self) -> int:
        return self._count

    def get(self, producer_id: int) -> ProducerEntry | None:
        """What is remembered; None for an unknown id."""
        entry = self._hot.get(producer_id)
        if entry is not None:
            return entry
        entry = self._warm.get(producer_id)
        if entry is not None:
            return entry
        packed = self._idle[producer_id % SHARDS].get(producer_id)
        return None if packed is None else unpack_entry(packed)

    def put(self, producer_id: int, entry: ProducerEntry) -> None:
        """Remember; the id counts as at work from now on."""
        hot = self._hot
        if producer_id not in hot:
            known_warm = self._warm.pop(producer_id, None)
            known_idle = self._idle[producer_id % SHARDS].pop(producer_id, None)
            if known_warm is None and known_idle is None:
                self._count += 1
            if len(hot) >= HOT_ENTRIES:
                self._cool()
                hot = self._hot
        hot[producer_id] = entry

    def put_packed(self, producer_id: int, packed: bytes) -> None:
        """Remember an id that is not known yet, as `pack_entry` gave it: for loading many."""
        self._idle[producer_id % SHARDS][producer_id] = packed
        self._count += 1

    def packed_parts(self) -> Iterator[dict[int, bytes]]:
        """All entries packed, a part at a time, for writing many; not to be changed by the receiver."""
        yield {pid: pack_entry(entry) for table in (self._hot, self._warm) for pid, entry in table.items()}
        yield from (shard for shard in self._idle if shard)

    def items(self) -> Iterator[tuple[int, ProducerEntry]]:
        """All entries, in no order; the table must not change meanwhile."""
        yield from self._hot.items()
        yield from self._warm.items()
        for shard in self._idle:
            for producer_id, packed in shard.items():
                yield producer_id, unpack_entry(packed)

    def expire(self, now_ms: int, expiration_ms: int, max_examined: int | None = None) -> int:
        """Forget ids without an open transaction whose last append is `expiration_ms` or more ago.

        Examines whole shards, going round, until about `max_examined` entries were looked at (None: all
        of them). Returns how many were forgotten.
        """
        oldest_ms = now_ms - expiration_ms
        before = self._count
        for table in (self._hot, self._warm):
            for producer_id in [pid for pid, entry in table.items() if _is_expired(entry, oldest_ms)]:
                del table[producer_id]
                self._count -= 1
        examined = 0
        for _ in range(SHARDS):
            if max_examined is not None and examined >= max_examined:
                break
            examined += len(self._idle[self._next_shard])
            self._expire_shard(self._next_shard, oldest_ms)
            self._next_shard = (self._next_shard + 1) % SHARDS
        return before - self._count

    def _expire_shard(self, index: int, oldest_ms: int) -> None:
        shard = self._idle[index]
        read = _APPEND_TIME.unpack_from
        expired = [
            producer_id
            for producer_id, packed in shard.items()
            if read(packed, _APPEND_TIME_POSITION)[0] <= oldest_ms and not packed[0] & _TXN
        ]
        for producer_id in expired:
            del shard[producer_id]
        self._count -= len(expired)
        if len(expired) > len(shard):
            # A dict never shrinks by itself.
            self._idle[index] = dict(shard)

    def _cool(self) -> None:
        """Pack those that did nothing since the last time, and begin a new generation."""
        for producer_id, entry in self._warm.items():
            self._idle[producer_id % SHARDS][producer_id] = pack_entry(entry)
        self._warm, self._hot = self._hot, {}


def _is_expired(entry: ProducerEntry, oldest_ms: int) -> bool:
    return entry.last_append_ms <= oldest_ms and entry.current_txn_first_offset is None
