"""Producer state on disk: Kafka's snapshot, and beside it the same state in full.

`%020d.snapshot`, named by the offset up to which (exclusive) it holds, is Kafka's format:
    version i16 = 1 | CRC-32C u32 of byte 6 to the end | count i32 | per producer: id i64, epoch i16,
    last sequence i32, last offset i64, offset delta i32, timestamp i64, coordinator epoch i32,
    first offset of the open transaction i64 (-1 none)
It keeps only the last batch. `%020d.producers` keeps all five and the time of the last append, so that a
retry which straddles a restart is recognised however old; Kafka's tools ignore it:
    version i16 = 1 | CRC-32C u32 of byte 6 to the end | the snapshot's CRC u32 | count i32
    | the ids i64 each | the lengths u16 each | the entries as rules.producers.pack_entry gives them
Source: Kafka's ProducerStateManager, ProducerSnapshot.json; rows I17, I20.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import crc32c
import numpy as np

from oncelog.errors import StorageError
from oncelog.log.disk import Disk, remove_if_exists
from oncelog.log.segment import file_name
from oncelog.rules.append import ProducerEntry, RememberedBatch
from oncelog.rules.producers import PLAIN, PLAIN_BYTES, ProducerTable, pack_entry, unpack_entry

SNAPSHOT_SUFFIX, FULL_SUFFIX = ".snapshot", ".producers"
_HEAD = struct.Struct(">hI")
_COUNT = struct.Struct(">i")
_ENTRY = struct.Struct(">qhiqiqiq")
_FULL_HEAD = struct.Struct(">Ii")
_VERSION = 1

# A million entries one by one would hold up appends for seconds, so the usual kind is converted as columns.
_PLAIN_ROW = np.dtype(
    [
        ("flags", "u1"),
        ("epoch", "<i2"),
        ("last_timestamp_ms", "<i8"),
        ("last_append_ms", "<i8"),
        ("last_offset", "<i8"),
        ("offset_delta", "<u4"),
        ("back", "<u4"),
        ("late", "<i4"),
        ("last_sequence", "<i4"),
    ]
)
_SNAPSHOT_ROW = np.dtype(
    [
        ("producer_id", ">i8"),
        ("epoch", ">i2"),
        ("last_sequence", ">i4"),
        ("last_offset", ">i8"),
        ("offset_delta", ">i4"),
        ("last_timestamp_ms", ">i8"),
        ("coordinator_epoch", ">i4"),
        ("txn_first_offset", ">i8"),
    ]
)
# Fewer entries are quicker one by one.
_COLUMNS_FROM = 16
_SHARED_FIELDS = ("epoch", "last_sequence", "last_offset", "offset_delta", "last_timestamp_ms")

Producers = list[tuple[int, ProducerEntry]]
PackedProducers = list[tuple[int, bytes]]


class Snapshot(NamedTuple):
    """Producer state up to `offset`, exclusive."""

    offset: int
    producers: PackedProducers


def encode_snapshot(parts: Iterable[Mapping[int, bytes]]) -> bytes:
    """Kafka's file from packed entries."""
    entries = b"".join([_encode_part(part) for part in parts])
    return _seal(_COUNT.pack(len(entries) // _ENTRY.size) + entries)


def _encode_part(part: Mapping[int, bytes]) -> bytes:
    if len(part) < _COLUMNS_FROM:
        return b"".join([_encode_entry(pid, unpack_entry(packed)) for pid, packed in part.items()])
    plain = {producer_id: packed for producer_id, packed in part.items() if packed[0] == PLAIN}
    rows = np.frombuffer(b"".join([packed[:PLAIN_BYTES] for packed in plain.values()]), _PLAIN_ROW)
    encoded = np.empty(len(plain), _SNAPSHOT_ROW)
    encoded["producer_id"] = np.fromiter(plain, np.int64, len(plain))
    encoded["coordinator_epoch"] = encoded["txn_first_offset"] = -1
    for name in _SHARED_FIELDS:
        encoded[name] = rows[name]
    others = [
        _encode_entry(producer_id, unpack_entry(packed))
        for producer_id, packed in part.items()
        if packed[0] != PLAIN
    ]
    return b"".join([encoded.tobytes(), *others])


def _seal(body: bytes) -> bytes:
    return _HEAD.pack(_VERSION, crc32c.crc32c(body)) + body


def _encode_entry(producer_id: int, entry: ProducerEntry) -> bytes:
    last = entry.batches[-1] if entry.batches else RememberedBatch(None, -1, 0, -1)
    return _ENTRY.pack(
        producer_id,
        _or_sentinel(entry.producer_epoch),
        _or_sentinel(last.last_sequence),
        last.last_offset,
        last.offset_delta,
        entry.last_timestamp_ms,
        _or_sentinel(entry.coordinator_epoch),
        _or_sentinel(entry.current_txn_first_offset),
    )


def _or_sentinel(value: int | None) -> int:
    return -1 if value is None else value


def _or_none(value: int) -> int | None:
    return None if value < 0 else value


def decode_snapshot(data: bytes, last_append_ms: int = 0) -> Producers:
    """Kafka's file; the time of the last append, which it lacks, is `last_append_ms`.

    Raises StorageError: unknown version, wrong checksum or length.
    """
    body = _open(data)
    if len(body) < _COUNT.size:
        raise StorageError("the snapshot has no count")
    (count,) = _COUNT.unpack_from(body)
    if count < 0 or len(body) != _COUNT.size + count * _ENTRY.size:
        raise StorageError(f"the snapshot claims {count} producers in {len(body)} bytes")
    return [_decode_entry(fields, last_append_ms) for fields in _ENTRY.iter_unpack(body[_COUNT.size :])]


def _decode_entry(fields: tuple[int, ...], last_append_ms: int) -> tuple[int, ProducerEntry]:
    producer_id, epoch, sequence, offset, delta, timestamp_ms, coordinator_epoch, txn_first_offset = fields
    known = (RememberedBatch(_or_none(sequence), offset, delta, timestamp_ms),) if offset >= 0 else ()
    return producer_id, ProducerEntry(
        _or_none(epoch),
        _or_none(coordinator_epoch),
        timestamp_ms,
        last_append_ms,
        _or_none(txn_first_offset),
        known,
    )


def _open(data: bytes) -> bytes:
    if len(data) < _HEAD.size:
        raise StorageError(f"{len(data)} bytes are too few")
    version, expected = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if version != _VERSION:
        raise StorageError(f"version {version} is unknown")
    if crc32c.crc32c(body) != expected:
        raise StorageError("the checksum is wrong")
    return body


def encode_full(parts: Iterable[Mapping[int, bytes]], snapshot_crc: int) -> bytes:
    """Our file from packed entries, bound to the Kafka file whose checksum is `snapshot_crc`."""
    ids: list[bytes] = []
    lengths: list[bytes] = []
    packed: list[bytes] = []
    count = 0
    for part in parts:
        count += len(part)
        ids.append(np.fromiter(part, ">i8", len(part)).tobytes())
        lengths.append(np.fromiter(map(len, part.values()), ">u2", len(part)).tobytes())
        packed.extend(part.values())
    return _seal(b"".join([_FULL_HEAD.pack(snapshot_crc, count), *ids, *lengths, *packed]))


def decode_full(data: bytes, snapshot_crc: int) -> PackedProducers:
    """Raises StorageError: unknown version, wrong checksum or length, or bound to another snapshot."""
    body = _open(data)
    if len(body) < _FULL_HEAD.size:
        raise StorageError("there is no count")
    bound_to, count = _FULL_HEAD.unpack_from(body)
    if bound_to != snapshot_crc:
        raise StorageError("it belongs to another snapshot")
    start = _FULL_HEAD.size + 10 * count
    if count < 0 or len(body) < start:
        raise StorageError(f"it claims {count} producers in {len(body)} bytes")
    ids = np.frombuffer(body, ">i8", count, _FULL_HEAD.size).tolist()
    lengths = np.frombuffer(body, ">u2", count, _FULL_HEAD.size + 8 * count).astype(np.int64)
    ends = (start + np.cumsum(lengths)).tolist()
    if (ends[-1] if ends else start) != len(body):
        raise StorageError("its entries do not fill it")
    return [(pid, body[first:end]) for pid, first, end in zip(ids, [start, *ends], ends, strict=False)]


def crc_of(data: bytes) -> int:
    """The checksum that a snapshot file carries."""
    return int(_HEAD.unpack_from(data)[1])


class Snapshots:
    """The snapshot files of one partition directory."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory

    def offsets(self) -> list[int]:
        """Ascending."""
        names = self._disk.list(self._directory)
        stems = [name.removesuffix(SNAPSHOT_SUFFIX) for name in names if name.endswith(SNAPSHOT_SUFFIX)]
        return sorted(int(stem) for stem in stems if len(stem) == 20 and stem.isdigit())

    def write(self, offset: int, table: ProducerTable, *, sync: bool = False) -> None:
        """Raises OSError; an earlier snapshot of the same offset may then be gone, others stand."""
        parts = list(table.packed_parts())
        data = encode_snapshot(parts)
        # The full file first: without its Kafka file it is never looked at.
        self._disk.replace(self._path(offset, FULL_SUFFIX), encode_full(parts, crc_of(data)), sync=sync)
        self._disk.replace(self._path(offset, SNAPSHOT_SUFFIX), data, sync=sync)

    def load_newest(self, highest_offset: int, now_ms: int) -> Snapshot | None:
        """The newest readable one at or below an offset; unreadable ones are deleted. None: none is left."""
        for offset in reversed([found for found in self.offsets() if found <= highest_offset]):
            try:
                return Snapshot(offset, self._load(offset, now_ms))
            except StorageError:
                self.remove(offset)
        return None

    def _load(self, offset: int, now_ms: int) -> PackedProducers:
        data = self._disk.read(self._path(offset, SNAPSHOT_SUFFIX))
        full = self._path(offset, FULL_SUFFIX)
        if not self._disk.exists(full):
            # Written by Kafka.
            return [(pid, pack_entry(entry)) for pid, entry in decode_snapshot(data, now_ms)]
        _open(data)
        return decode_full(self._disk.read(full), crc_of(data))

    def sync(self, offset: int) -> bool:
        """Make an existing snapshot survive a power loss; False when there is none. Raises OSError."""
        paths = [self._path(offset, FULL_SUFFIX), self._path(offset, SNAPSHOT_SUFFIX)]
        if not self._disk.exists(paths[-1]):
            return False
        for path in paths:
            if self._disk.exists(path):
                file = self._disk.open(path)
                try:
                    file.sync()
                finally:
                    file.close()
        self._disk.sync_directory(self._directory)
        return True

    def remove(self, offset: int) -> None:
        remove_if_exists(self._disk, self._path(offset, SNAPSHOT_SUFFIX))
        remove_if_exists(self._disk, self._path(offset, FULL_SUFFIX))

    def keep(self, offsets: Iterable[int]) -> None:
        """Remove all others, and full files whose snapshot is gone."""
        kept = set(offsets)
        for offset in self.offsets():
            if offset not in kept:
                self.remove(offset)
        kept_names = {file_name(offset, FULL_SUFFIX) for offset in self.offsets()}
        for name in self._disk.list(self._directory):
            if name.endswith(FULL_SUFFIX) and name not in kept_names:
                remove_if_exists(self._disk, f"{self._directory}/{name}")

    def _path(self, offset: int, suffix: str) -> str:
        return f"{self._directory}/{file_name(offset, suffix)}"
