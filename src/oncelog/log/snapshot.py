"""Producer state on disk: Kafka's snapshot, and beside it the same state in full.

`%020d.snapshot`, named by the offset up to which (exclusive) it holds, is Kafka's format:
    version i16 = 1 | CRC-32C u32 of byte 6 to the end | count i32 | per producer: id i64, epoch i16,
    last sequence i32, last offset i64, offset delta i32, timestamp i64, coordinator epoch i32,
    first offset of the open transaction i64 (-1 none)
It keeps only the last batch. `%020d.producers` keeps all five and the time of the last append, so that a
retry which straddles a restart is recognised however old; Kafka's tools ignore it:
    version i16 = 1 | CRC-32C u32 of byte 6 to the end | the snapshot's CRC u32 | count i32
    | per producer: id i64, length u16, rules.producers.pack_entry
Source: Kafka's ProducerStateManager, ProducerSnapshot.json; rows I17, I20.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import crc32c

from oncelog.errors import StorageError
from oncelog.log.disk import Disk, remove_if_exists
from oncelog.log.segment import file_name
from oncelog.rules.append import ProducerEntry, RememberedBatch
from oncelog.rules.producers import pack_entry, unpack_entry

SNAPSHOT_SUFFIX, FULL_SUFFIX = ".snapshot", ".producers"
_HEAD = struct.Struct(">hI")
_COUNT = struct.Struct(">i")
_ENTRY = struct.Struct(">qhiqiqiq")
_FULL_HEAD = struct.Struct(">Ii")
_FULL_ENTRY = struct.Struct(">qH")
_VERSION = 1

Producers = list[tuple[int, ProducerEntry]]


class Snapshot(NamedTuple):
    """Producer state up to `offset`, exclusive."""

    offset: int
    producers: Producers


def encode_snapshot(producers: Iterable[tuple[int, ProducerEntry]]) -> bytes:
    """Kafka's file."""
    entries = [_encode_entry(producer_id, entry) for producer_id, entry in producers]
    return _seal(_COUNT.pack(len(entries)) + b"".join(entries))


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


def encode_full(producers: Iterable[tuple[int, ProducerEntry]], snapshot_crc: int) -> bytes:
    """Our file, bound to the Kafka file whose checksum is `snapshot_crc`."""
    parts = [b""]
    for producer_id, entry in producers:
        packed = pack_entry(entry)
        parts += [_FULL_ENTRY.pack(producer_id, len(packed)), packed]
    parts[0] = _FULL_HEAD.pack(snapshot_crc, len(parts) // 2)
    return _seal(b"".join(parts))


def decode_full(data: bytes, snapshot_crc: int) -> Producers:
    """Raises StorageError: unknown version, wrong checksum or length, or bound to another snapshot."""
    body = _open(data)
    if len(body) < _FULL_HEAD.size:
        raise StorageError("there is no count")
    bound_to, count = _FULL_HEAD.unpack_from(body)
    if bound_to != snapshot_crc:
        raise StorageError("it belongs to another snapshot")
    producers, position = [], _FULL_HEAD.size
    try:
        for _ in range(count):
            producer_id, size = _FULL_ENTRY.unpack_from(body, position)
            position += _FULL_ENTRY.size
            producers.append((producer_id, unpack_entry(body[position : position + size])))
            position += size
    except struct.error as error:
        raise StorageError(f"an entry is cut short: {error}") from error
    return producers


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

    def write(self, offset: int, producers: Producers, *, sync: bool = False) -> None:
        """Raises OSError; an earlier snapshot of the same offset may then be gone, others stand."""
        data = encode_snapshot(producers)
        # The full file first: without its Kafka file it is never looked at.
        self._disk.replace(self._path(offset, FULL_SUFFIX), encode_full(producers, crc_of(data)), sync=sync)
        self._disk.replace(self._path(offset, SNAPSHOT_SUFFIX), data, sync=sync)

    def load_newest(self, highest_offset: int, now_ms: int) -> Snapshot | None:
        """The newest readable one at or below an offset; unreadable ones are deleted. None: none is left."""
        for offset in reversed([found for found in self.offsets() if found <= highest_offset]):
            try:
                return Snapshot(offset, self._load(offset, now_ms))
            except StorageError:
                self.remove(offset)
        return None

    def _load(self, offset: int, now_ms: int) -> Producers:
        data = self._disk.read(self._path(offset, SNAPSHOT_SUFFIX))
        producers = decode_snapshot(data, now_ms)
        full = self._path(offset, FULL_SUFFIX)
        if not self._disk.exists(full):
            return producers  # written by Kafka
        return decode_full(self._disk.read(full), crc_of(data))

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
