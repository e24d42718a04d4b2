"""Producer state on disk: Kafka's snapshot, and beside it a file with the full state.

A snapshot contains the state of all producers as of an offset, which is in the file names. Batches below the
offset are included. `%020d.snapshot` has Kafka's format:
    version i16 = 1 | CRC-32C u32 of byte 6 to the end | count i32 | per producer: id i64, epoch i16,
    last sequence i32, last offset i64, offset delta i32, timestamp i64, coordinator epoch i32,
    first offset of the open transaction i64 (-1 none)
Kafka's file has only the last batch of a producer. `%020d.producers` also has the four batches before it and
the time of the last append. So even an old retry is recognised after a restart. Kafka's tools ignore this
file. See test_our_file_keeps_everything_and_is_bound_to_its_snapshot. Its format:
    version i16 = 1 | CRC-32C u32 of byte 6 to the end | the snapshot's CRC u32 | count i32
    | the ids, i64 each | the lengths, u16 each | the entries as `producer_state.pack_entry` returns them

Both files are written from an image of the producer table, a part at a time, so that a million producers
delay no request. They are renamed to their final names when they are complete and synced. Segments are
deleted only after that, because until then recovery may need them. See
test_a_crash_at_every_step_of_a_snapshot and test_deleting_waits_until_the_producers_are_safe. Source: Kafka's
ProducerStateManager and ProducerSnapshot.json; behaviours I17 and I20 (docs/behaviours.md).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import crc32c

from oncelog.errors import StorageError
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.log.background import BackgroundTask
from oncelog.log.big_endian import swap_big_endian
from oncelog.log.disk import Disk, remove_if_exists
from oncelog.log.segment import file_name, is_stem
from oncelog.rules.idempotence.append import ProducerEntry, RememberedBatch
from oncelog.rules.idempotence.producer_state import (
    PLAIN,
    ProducerImage,
    is_entry_layout,
    pack_entry,
    unpack_entry,
)

SNAPSHOT_SUFFIX, FULL_SUFFIX = ".snapshot", ".producers"
_HEAD = struct.Struct(">hI")
_COUNT = struct.Struct(">i")
_ENTRY = struct.Struct(">qhiqiqiq")
_FULL_HEAD = struct.Struct(">Ii")
_VERSION = 1
# The suffix of a file that is being written. Recovery removes files with this suffix.
_UNFINISHED = ".tmp"

# The fields of a packed entry whose first byte is PLAIN: epoch, last_timestamp_ms, last_offset, offset_delta
# and last_sequence. They are converted without a ProducerEntry, in a tenth of the time.
_PLAIN_ENTRY = struct.Struct("<xhq8xqi8xi")

Producers = list[tuple[int, ProducerEntry]]
PackedProducers = dict[int, bytes]


class Snapshot(NamedTuple):
    """The packed state of all producers as of `offset`: the batches below it are included.

    `has_older_batches` is False for a snapshot of Apache Kafka, which has only the last batch of a producer.
    It is also False if the `.producers` file is damaged; `is_damaged` is True then.
    """

    offset: int
    producers: PackedProducers
    has_older_batches: bool = True
    is_damaged: bool = False


def _encode_part(part: Mapping[int, bytes]) -> bytes:
    encoded, unpack, pack = [], _PLAIN_ENTRY.unpack_from, _ENTRY.pack
    for producer_id, packed in part.items():
        if packed[0] == PLAIN:
            epoch, timestamp_ms, offset, delta, sequence = unpack(packed)
            encoded.append(pack(producer_id, epoch, sequence, offset, delta, timestamp_ms, -1, -1))
        else:
            encoded.append(_encode_entry(producer_id, unpack_entry(packed)))
    return b"".join(encoded)


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
    """Decode a `.snapshot` file, and return (producer id, entry) pairs.

    The file does not have the producers' last append times, so all entries get `last_append_ms`. Raises
    StorageError for an unknown version, a wrong checksum or a wrong length.
    """
    body = _open(data)
    if len(body) < _COUNT.size:
        raise StorageError("the producer count is missing")
    (count,) = _COUNT.unpack_from(body)
    if count < 0 or len(body) != _COUNT.size + count * _ENTRY.size:
        raise StorageError(f"the snapshot says {count} producers but has {len(body)} bytes")
    return [_decode_entry(fields, last_append_ms) for fields in _ENTRY.iter_unpack(body[_COUNT.size :])]


def _decode_entry(fields: tuple[int, ...], last_append_ms: int) -> tuple[int, ProducerEntry]:
    producer_id, epoch, sequence, offset, delta, timestamp_ms, coordinator_epoch, txn_first_offset = fields
    batches = (RememberedBatch(_or_none(sequence), offset, delta, timestamp_ms),) if offset >= 0 else ()
    return producer_id, ProducerEntry(
        _or_none(epoch),
        _or_none(coordinator_epoch),
        timestamp_ms,
        last_append_ms,
        _or_none(txn_first_offset),
        batches,
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


def decode_full(data: bytes, snapshot_crc: int) -> PackedProducers:
    """Decode a `.producers` file, and return a mapping from producer id to packed entry.

    `snapshot_crc` is the checksum of the `.snapshot` file to which it must belong. Raises StorageError if the
    file is invalid or belongs to another snapshot.
    """
    body = _open(data)
    if len(body) < _FULL_HEAD.size:
        raise StorageError("the producer count is missing")
    bound_to, count = _FULL_HEAD.unpack_from(body)
    if bound_to != snapshot_crc:
        raise StorageError("the file belongs to another snapshot")
    start = _FULL_HEAD.size + 10 * count
    if count < 0 or len(body) < start:
        raise StorageError(f"the file says {count} producers but has {len(body)} bytes")
    lengths_position = _FULL_HEAD.size + 8 * count
    ids = swap_big_endian(array("q", body[_FULL_HEAD.size : lengths_position]))
    ends = list(accumulate(swap_big_endian(array("H", body[lengths_position:start])), initial=start))
    if ends[-1] != len(body):
        raise StorageError("the entries do not fill the file")
    entries = [body[first:end] for first, end in pairwise(ends)]
    # Few entries differ in both, so this costs little. A malformed entry must not fail a later append or
    # snapshot. See test_no_sealed_file_of_producers_stops_the_start_or_the_next_snapshot.
    layouts = {(entry[:1], len(entry)) for entry in entries}
    if not all(is_entry_layout(first, size) for first, size in layouts):
        raise StorageError("an entry has an unknown layout")
    return dict(zip(ids, entries, strict=True))


def crc_of(data: bytes) -> int:
    """Return the checksum in the header of a `.snapshot` file."""
    return int(_HEAD.unpack_from(data)[1])


class _SealedFile:
    """A snapshot file that is being written. Its header has a version and the checksum of the content."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._file = disk.open(path, create=True)
        self._file.truncate(0)
        self._position = _HEAD.size
        self.crc = 0

    def write(self, data: bytes) -> None:
        self._file.pwrite(data, self._position)
        self._position += len(data)
        self.crc = crc32c.crc32c(data, self.crc)

    def seal(self) -> None:
        """Write the header. Call this last, because the header has the checksum of the complete content."""
        self._file.pwrite(_HEAD.pack(_VERSION, self.crc), 0)

    def finish(self) -> None:
        """Sync and close the file, so that the caller can rename it. May run in another thread."""
        self._file.sync()
        self._file.close()

    def discard(self) -> None:
        """Close and remove the file unless it was renamed. If removing fails, recovery removes the file.

        Errors are ignored, because this also runs when a partition is closed, and closing must not fail. See
        test_a_partition_is_closed_though_an_unfinished_snapshot_cannot_be_removed.
        """
        with suppress(OSError):
            self._file.close()
            remove_if_exists(self._disk, self._path)


def _write_files(
    full: _SealedFile, snapshot: _SealedFile, image: ProducerImage, limits: Limits
) -> BackgroundTask:
    ids: list[bytes] = []
    lengths: list[bytes] = []
    snapshot.write(_COUNT.pack(image.entry_count))
    for part in image.parts():
        snapshot.write(_encode_part(part))
        ids.append(swap_big_endian(array("q", list(part))).tobytes())
        lengths.append(swap_big_endian(array("H", [len(packed) for packed in part.values()])).tobytes())
        yield None
    full.write(_FULL_HEAD.pack(snapshot.crc, image.entry_count))
    for columns in (ids, lengths):
        for start in range(0, len(columns), limits.snapshot_step_shards):
            full.write(b"".join(columns[start : start + limits.snapshot_step_shards]))
            yield None
    for part in image.drain():
        full.write(b"".join(part.values()))
        yield None


def _offsets_in(names: list[str]) -> list[int]:
    stems = [name.removesuffix(SNAPSHOT_SUFFIX) for name in names if name.endswith(SNAPSHOT_SUFFIX)]
    return [int(stem) for stem in stems if is_stem(stem)]


class Snapshots:
    """The snapshot files of one partition directory."""

    def __init__(self, disk: Disk, directory: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.warnings: list[str] = []
        """Texts about unreadable snapshots that `load_newest` deleted."""
        self._disk = disk
        self._directory = directory

    def offsets(self) -> list[int]:
        """Return the offsets of all snapshots, ascending."""
        return sorted(_offsets_in(self._disk.list(self._directory)))

    def write(self, offset: int, image: ProducerImage) -> BackgroundTask:
        """Write both files of a snapshot as a background task. The parts of `image` are released as they are
        written.

        Raises OSError. An earlier snapshot of the same offset may then be gone; other snapshots stay.
        """
        # Rename the `.producers` file first: it is never read without its `.snapshot` file.
        paths = self._path(offset, FULL_SUFFIX), self._path(offset, SNAPSHOT_SUFFIX)
        files: list[_SealedFile] = []
        try:
            for path in paths:
                files.append(_SealedFile(self._disk, path + _UNFINISHED))
            yield from _write_files(files[0], files[1], image, self.limits)
            for file in files:
                # Run `seal` in this thread, unlike `finish`. `discard` may close the file during a call in
                # another thread, and `seal` could then write to a different file that got the same
                # descriptor.
                file.seal()
                yield file.finish
            # Sync the directory after each rename. Otherwise a power loss may keep the second new name and
            # lose the first one. A `.snapshot` file without its `.producers` file would look like one of
            # Apache Kafka's, and recovery would forget all batches but the last. See
            # test_a_power_loss_between_the_names_of_a_snapshot_forgets_no_batch.
            for path in paths:
                self._disk.rename(path + _UNFINISHED, path)
                yield partial(self._disk.sync_directory, self._directory)
        finally:
            for file in files:
                file.discard()

    def load_newest(
        self, highest_offset: int, now_ms: int, *, accepts_damaged: bool = True
    ) -> Snapshot | None:
        """Return the newest readable snapshot at or below `highest_offset`, or None if there is none.

        Unreadable snapshots are deleted. Unless `accepts_damaged`, those with a damaged `.producers` file are
        passed over. In a snapshot that Apache Kafka wrote, every producer gets `now_ms` as the time of its
        last append.
        """
        for offset in reversed([offset for offset in self.offsets() if offset <= highest_offset]):
            try:
                snapshot = self._load(offset, now_ms)
            except StorageError as error:
                path = self._disk.describe(self._path(offset, SNAPSHOT_SUFFIX))
                self.warnings.append(f"{path} was unreadable ({error}) and is deleted")
                self.remove(offset)
                continue
            if accepts_damaged or not snapshot.is_damaged:
                return snapshot
        return None

    def _load(self, offset: int, now_ms: int) -> Snapshot:
        data = self._disk.read(self._path(offset, SNAPSHOT_SUFFIX))
        full = self._path(offset, FULL_SUFFIX)
        # A snapshot without a `.producers` file was written by Apache Kafka.
        is_damaged = self._disk.exists(full)
        if is_damaged:
            _open(data)
            with suppress(StorageError):
                return Snapshot(offset, decode_full(self._disk.read(full), crc_of(data)))
        # Without the other file, the last batch of each producer is still known. See
        # test_a_damaged_file_of_producers_leaves_their_last_batches_known.
        packed = {pid: pack_entry(entry) for pid, entry in decode_snapshot(data, now_ms)}
        return Snapshot(offset, packed, has_older_batches=False, is_damaged=is_damaged)

    def remove(self, *offsets: int) -> None:
        """Remove the snapshots at these offsets. May run in another thread. Raises OSError.

        The directory is synced between the two kinds of files. Otherwise a power loss could bring a
        `.snapshot` file back without its `.producers` file, which would look like one of Apache Kafka's.
        Recovery would then forget all batches but the last. See
        test_a_removed_snapshot_comes_back_whole_or_not_at_all.
        """
        for offset in offsets:
            remove_if_exists(self._disk, self._path(offset, SNAPSHOT_SUFFIX))
        if offsets:
            self._disk.sync_directory(self._directory)
        for offset in offsets:
            remove_if_exists(self._disk, self._path(offset, FULL_SUFFIX))

    def keep(self, is_kept: Callable[[int], bool]) -> None:
        """Remove the snapshots at the offsets for which `is_kept` is false. Also remove `.producers` files
        without a snapshot. May run in another thread. Raises OSError.
        """
        names = self._disk.list(self._directory)
        existing = _offsets_in(names)
        kept = set(filter(is_kept, existing))
        self.remove(*sorted(set(existing) - kept))
        needed = {file_name(offset, FULL_SUFFIX) for offset in kept}
        for name in names:
            if name.endswith(FULL_SUFFIX) and name not in needed:
                remove_if_exists(self._disk, f"{self._directory}/{name}")

    def _path(self, offset: int, suffix: str) -> str:
        return f"{self._directory}/{file_name(offset, suffix)}"
