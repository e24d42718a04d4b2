"""The three index files of a segment, in Kafka's formats. All can be rebuilt from the log.

    .index      i32 offset - base | i32 position           one entry every index.interval.bytes
    .timeindex  i64 timestamp_ms | i32 offset - base       the largest timestamp so far, and the last offset
                                                           of its batch
    .txnindex   i16 0 | i64 producer id | i64 first | i64 last | i64 last stable    aborted transactions

Loaded and new entries are kept in memory; the entries of closed segments only until the next checkpoint. New
entries of `.index` and `.timeindex` are written in runs of `limits.index_run_entries`. If the last entries
are missing in such a file, look-ups scan more of the log, but stay correct. A missing entry of a `.txnindex`
would show aborted records to readers, so every sync of a segment also writes and syncs its `.txnindex`. An
entry is always written at the same position, so a repeated write after a failure is harmless. Source: Kafka's
OffsetIndex, TimeIndex, TransactionIndex, AbortedTxn.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import ClassVar, NamedTuple

from oncelog.errors import StorageError
from oncelog.limits import DEFAULT_LIMITS
from oncelog.log.big_endian import swap_big_endian
from oncelog.log.disk import Disk

try:
    import oncelog.log._index as _c
except ImportError:  # the C module was not compiled, or was compiled for another system
    _c = None  # type: ignore[assignment]

_OFFSET_ENTRY = struct.Struct(">II")
_TIME_ENTRY = struct.Struct(">qI")
_TXN_ENTRY = struct.Struct(">hqqqq")
_UINT32_MAX = 2**32 - 1
TXN_ENTRY_BYTES = _TXN_ENTRY.size


class AbortedTransaction(NamedTuple):
    """One entry of a transaction index: an aborted transaction.

    `first_offset` is the transaction's first offset, and `last_offset` is the offset of its ABORT marker.
    `last_stable_offset` is the partition's last stable offset after the marker.
    """

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class _IndexFile(ABC):
    """An index file and its entries in memory. The file contains the first `_written` of these entries."""

    entry_bytes: ClassVar[int]

    def __init__(self, disk: Disk, path: str, run_entries: int = DEFAULT_LIMITS.index_run_entries) -> None:
        self._disk = disk
        self._path = path
        self._run_entries = run_entries
        self._written = 0
        self.holds_back = False
        """While true, only `write_pending` writes to the file."""

    @property
    def path(self) -> str:
        return self._path

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of entries in memory."""

    @abstractmethod
    def _pack(self, start: int, stop: int) -> bytes:
        """Return the entries from `start` to below `stop` in the file's format."""

    def write_pending(self, *, sync: bool = False) -> None:
        """Write the entries that the file lacks, and sync the file if `sync`. Raises OSError; a later call
        retries.
        """
        count, written = len(self), self._written
        if count == written and not sync:
            return
        file = self._disk.open(self._path, create=True)
        try:
            file.pwrite(self._pack(written, count), written * self.entry_bytes)
            if sync:
                file.sync()
        finally:
            file.close()
        self._written = count

    @property
    def is_stored(self) -> bool:
        """True if the file has all entries, so that they can be loaded again."""
        return self._written == len(self) and not self.holds_back

    def write_runs(self) -> None:
        """Write the pending entries if there are enough for a run. After a failure, the next call retries."""
        if len(self) - self._written >= self._run_entries and not self.holds_back:
            try:
                self.write_pending()
            except OSError:
                pass  # an append needs only the log; a flush, roll or close tries again

    def rewrite_all(self) -> None:
        """Let the next `write_pending` write all entries again, because an earlier sync may have failed."""
        self._written = 0

    def _loaded(self, file_size: int) -> None:
        """Record that the file contains all entries, and cut off preallocated or torn bytes after them."""
        self._written = len(self)
        if file_size != self._written * self.entry_bytes:
            self.cut_file()

    def cut_file(self) -> None:
        """Truncate the file after the entries that are both written and still in memory."""
        self._written = min(self._written, len(self))
        if self._disk.exists(self._path):
            file = self._disk.open(self._path)
            try:
                file.truncate(self._written * self.entry_bytes)
            finally:
                file.close()


class OffsetIndex(_IndexFile):
    """Pairs of (relative last offset of a batch, position of the batch), both increasing."""

    entry_bytes: ClassVar[int] = _OFFSET_ENTRY.size

    def __init__(self, disk: Disk, path: str, run_entries: int = DEFAULT_LIMITS.index_run_entries) -> None:
        super().__init__(disk, path, run_entries)
        self._offsets = array("I")
        self._positions = array("I")

    @classmethod
    def load(
        cls, disk: Disk, path: str, log_size: int, run_entries: int = DEFAULT_LIMITS.index_run_entries
    ) -> OffsetIndex:
        """Load an index file. Raises StorageError if the file is missing or does not fit the log.

        `log_size` is the size of the log file in bytes.
        """
        index = cls(disk, path, run_entries)
        data = _read(disk, path)
        offsets, positions, wrong = _read_offset_entries(data, log_size)
        if wrong is not None:
            raise StorageError(f"{disk.describe(path)}: entry {wrong} does not fit the log")
        index._offsets, index._positions = offsets, positions
        index._loaded(len(data))
        return index

    @staticmethod
    def read_position(disk: Disk, path: str, relative_offset: int) -> int:
        """Return the result of `position_for` for an index file, without keeping its entries in memory.

        Returns 0 if the file is missing or its offsets do not increase.
        """
        data = disk.read(path) if disk.exists(path) else b""
        offsets, positions, wrong = _read_offset_entries(data, _UINT32_MAX + 1)
        entry = bisect_right(offsets, relative_offset) - 1
        return positions[entry] if entry >= 0 and wrong is None else 0

    def __len__(self) -> int:
        return len(self._positions)

    def append(self, relative_offset: int, position: int) -> None:
        self._offsets.append(relative_offset)
        self._positions.append(position)
        self.write_runs()

    def extend(self, relative_offsets: list[int], positions: list[int]) -> None:
        """Append several entries."""
        self._offsets.extend(relative_offsets)
        self._positions.extend(positions)
        self.write_runs()

    def position_for(self, relative_offset: int) -> int:
        """Return a position from which a scan of the log finds the batch that contains the offset."""
        entry = bisect_right(self._offsets, relative_offset) - 1
        return self._positions[entry] if entry >= 0 else 0

    def position_before(self, position: int) -> int:
        """Return the position of the last indexed batch at or before `position`, or 0 if there is none."""
        entry = bisect_right(self._positions, position) - 1
        return self._positions[entry] if entry >= 0 else 0

    def last(self) -> tuple[int, int] | None:
        """Return the last entry as (relative offset, position), None in an empty index."""
        return (self._offsets[-1], self._positions[-1]) if self._offsets else None

    def cut(self, count: int) -> None:
        """Keep only the first `count` entries."""
        del self._offsets[count:], self._positions[count:]
        self.cut_file()

    def count_below(self, relative_offset: int) -> int:
        """Return the number of entries at the start whose batch ends below `relative_offset`."""
        return bisect_right(self._offsets, relative_offset - 1) if relative_offset > 0 else 0

    def _pack(self, start: int, stop: int) -> bytes:
        pairs = zip(self._offsets[start:stop], self._positions[start:stop], strict=True)
        return b"".join([_OFFSET_ENTRY.pack(offset, position) for offset, position in pairs])


class TimeIndex(_IndexFile):
    """Pairs of (largest timestamp so far, last offset of its batch relative to the base offset), both
    increasing.
    """

    entry_bytes: ClassVar[int] = _TIME_ENTRY.size

    def __init__(self, disk: Disk, path: str, run_entries: int = DEFAULT_LIMITS.index_run_entries) -> None:
        super().__init__(disk, path, run_entries)
        self._timestamps = array("q")
        self._offsets = array("I")

    @classmethod
    def load(cls, disk: Disk, path: str, run_entries: int = DEFAULT_LIMITS.index_run_entries) -> TimeIndex:
        """Load a time index file. Raises StorageError if the file is missing or its entries are not in
        increasing order.
        """
        index = cls(disk, path, run_entries)
        data = _read(disk, path)
        times, offsets, wrong = (time_entries if _c is None else _c.time_entries)(data)
        if wrong is not None:
            raise StorageError(f"{disk.describe(path)}: entry {wrong} is not above the previous one")
        index._timestamps.frombytes(times)
        index._offsets.frombytes(offsets)
        index._loaded(len(data))
        return index

    @staticmethod
    def read_last(disk: Disk, path: str) -> tuple[int, int] | None:
        """Return the last entry of a closed segment's file as (timestamp_ms, relative offset).

        Only that entry is read. Returns None if the file is empty or the entry consists of zeros. Raises
        StorageError if the file is missing or ends within an entry.
        """
        try:
            file = disk.open(path)
        except FileNotFoundError:
            raise StorageError(f"{disk.describe(path)} is missing") from None
        try:
            size = file.size()
            if size % _TIME_ENTRY.size:
                raise StorageError(f"{disk.describe(path)} ends within an entry")
            data = file.pread(_TIME_ENTRY.size, size - _TIME_ENTRY.size) if size else b""
        finally:
            file.close()
        if not any(data):
            return None
        timestamp_ms, offset = _TIME_ENTRY.unpack(data)
        return timestamp_ms, offset

    def __len__(self) -> int:
        return len(self._offsets)

    def append(self, timestamp_ms: int, relative_offset: int) -> None:
        """Append an entry if `timestamp_ms` is larger than that of the last entry.

        An entry of zeros is skipped, because in the file it would look like preallocated space. See
        test_a_first_record_with_timestamp_0_hides_no_later_times.
        """
        if _is_later(timestamp_ms, relative_offset, self._timestamps[-1] if self._timestamps else None):
            self._timestamps.append(timestamp_ms)
            self._offsets.append(relative_offset)
            self.write_runs()

    def extend(self, timestamps_ms: list[int], relative_offsets: list[int]) -> None:
        """Append several entries. An entry whose timestamp is not above the previous one is skipped, as in
        `append`, and so is one of zeros.
        """
        last_ms = self._timestamps[-1] if self._timestamps else None
        for timestamp_ms, relative_offset in zip(timestamps_ms, relative_offsets, strict=True):
            if _is_later(timestamp_ms, relative_offset, last_ms):
                self._timestamps.append(timestamp_ms)
                self._offsets.append(relative_offset)
                last_ms = timestamp_ms
        self.write_runs()

    def offset_before(self, timestamp_ms: int) -> int:
        """Return a relative offset up to which all timestamps are below `timestamp_ms`. Return 0 if no entry
        has an earlier timestamp.
        """
        entry = bisect_right(self._timestamps, timestamp_ms - 1) - 1
        return self._offsets[entry] if entry >= 0 else 0

    def last(self) -> tuple[int, int] | None:
        """Return the last entry as (timestamp_ms, relative offset), None in an empty index."""
        return (self._timestamps[-1], self._offsets[-1]) if self._offsets else None

    def cut_below(self, relative_offset: int) -> None:
        """Keep only the entries below `relative_offset`, in memory and in the file."""
        count = bisect_right(self._offsets, relative_offset - 1) if relative_offset > 0 else 0
        del self._timestamps[count:], self._offsets[count:]
        self.cut_file()

    def last_below(self, relative_offset: int) -> int | None:
        """Return the relative offset of the last entry below `relative_offset`, or None if there is none."""
        entry = bisect_right(self._offsets, relative_offset - 1) - 1 if relative_offset > 0 else -1
        return self._offsets[entry] if entry >= 0 else None

    def _pack(self, start: int, stop: int) -> bytes:
        pairs = zip(self._timestamps[start:stop], self._offsets[start:stop], strict=True)
        return b"".join([_TIME_ENTRY.pack(timestamp_ms, offset) for timestamp_ms, offset in pairs])


def decode_aborted(data: bytes, base_offset: int, path: str) -> list[AbortedTransaction]:
    """Return the entries of a `.txnindex` file. A torn entry at the end is ignored.

    Raises StorageError, which names `path`, if an entry is invalid.
    """
    entries: list[AbortedTransaction] = []
    previous = base_offset - 1
    for fields in _TXN_ENTRY.iter_unpack(data[: len(data) - len(data) % TXN_ENTRY_BYTES]):
        if not any(fields):
            break  # zeros at the end are reserved space, or the result of a power loss
        entry = AbortedTransaction(*fields[1:])
        if fields[0] != 0 or entry.last_offset <= previous or entry.first_offset >= entry.last_offset:
            raise StorageError(f"{path}: entry {len(entries)} is {fields}")
        entries.append(entry)
        previous = entry.last_offset
    return entries


class TransactionIndex(_IndexFile):
    """The aborted transactions whose marker is in the segment, ordered by the marker's offset.

    Oncelog creates the file when it creates the segment. Apache Kafka, and Oncelog up to 0.5.0, create it
    with the first entry.
    """

    entry_bytes: ClassVar[int] = TXN_ENTRY_BYTES

    def __init__(self, disk: Disk, path: str, run_entries: int = DEFAULT_LIMITS.index_run_entries) -> None:
        super().__init__(disk, path, run_entries)
        self._entries: list[AbortedTransaction] = []
        # The number of entries for which the file has space: written entries and reserved zeros.
        self._placed = 0
        # The number of entries up to which the file may have reserved zeros, even from a failed reservation.
        # If it is not above len(self), the file has no such zeros.
        self._extent = 0
        self.is_unsynced = False

    @classmethod
    def load(
        cls, disk: Disk, path: str, base_offset: int, run_entries: int = DEFAULT_LIMITS.index_run_entries
    ) -> TransactionIndex:
        """Load a transaction index file; a missing file counts as empty. Raises StorageError for an invalid
        entry.
        """
        index = cls(disk, path, run_entries)
        data = disk.read(path) if disk.exists(path) else b""
        index._entries = decode_aborted(data, base_offset, disk.describe(path))
        index._loaded(len(data))
        return index

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Sequence[AbortedTransaction]:
        return self._entries

    def from_offset(self, offset: int) -> Iterator[AbortedTransaction]:
        """Yield the entries whose marker is at `offset` or later, without reading earlier entries."""
        first = bisect_left(self._entries, offset, key=attrgetter("last_offset"))
        for index in range(first, len(self._entries)):
            yield self._entries[index]

    def reserve_entries(self) -> None:
        """Reserve space in the file for the next run of entries, by writing zeros. Raises OSError.

        Called before the marker of an aborted transaction is stored, so that a flush needs no more room on
        the disk. Otherwise no flush would succeed on a full disk, and segments that may only be deleted after
        a flush would stay. See test_a_full_disk_with_unflushed_aborts_gets_room. `decode_aborted` stops at
        the zeros.
        """
        count = len(self)
        if count < self._placed:
            return
        file = self._disk.open(self._path, create=True)
        # Raise `_extent` before the write, because a full disk may store a part of the zeros. See
        # test_a_clean_stop_leaves_no_zeros.
        self._extent = count + self._run_entries
        try:
            file.pwrite(bytes(self._run_entries * self.entry_bytes), count * self.entry_bytes)
        finally:
            file.close()
        self._placed = self._extent

    def truncate_reserved(self) -> None:
        """Remove the zeros of `reserve_entries` from the file. Called when the segment is closed."""
        if self._extent > len(self):
            self.cut_file()

    def cut_file(self) -> None:
        super().cut_file()
        self._placed = self._extent = self._written

    def append(self, entry: AbortedTransaction) -> None:
        self._entries.append(entry)
        self.is_unsynced = True

    def add_missing(self, entries: Iterable[AbortedTransaction]) -> None:
        """Insert entries, sort all entries by marker, and replace the file.

        If this raises OSError, the new entries are in memory, and the next write stores all entries.
        """
        self._entries = sorted([*self._entries, *entries], key=lambda entry: entry.last_offset)
        self.replace()

    def replace(self) -> None:
        """Write all entries to a new file that replaces the old one atomically. Raises OSError."""
        self._written = 0
        self._disk.replace(self._path, self._pack(0, len(self)))
        self._written, self.is_unsynced = len(self), False
        self._placed = self._extent = len(self)

    def store(self) -> None:
        """Write all entries and sync the file. Raises OSError.

        A crash leaves the file with its previous entries or with all entries. Recovery trusts the file of a
        synced segment, so a partial file would show aborted records to readers. See
        test_a_crash_while_an_index_of_aborted_transactions_is_made_again_loses_no_entry.
        """
        stored = self._disk.read(self._path) if self._disk.exists(self._path) else None
        if stored is None or not self._pack(0, len(self)).startswith(stored):
            self.replace()
            return
        # The file is written in place, because that usually succeeds even on a full disk. All entries are
        # written again, because an earlier sync may have failed.
        self._written = 0
        self.sync()

    def sync(self) -> None:
        """Write the entries that the file lacks, and sync the file. Raises OSError.

        The file's name is durable only after a sync of the directory.
        """
        # Clear the flag before the write: during the write, another thread may append an entry and set the
        # flag again.
        self.is_unsynced = False
        try:
            self.write_pending(sync=True)
        except OSError:
            self.is_unsynced = True
            raise

    def cut_below(self, offset: int) -> None:
        """Keep only the entries whose marker is below `offset`. The file keeps the others until the next
        `store`.
        """
        kept = [entry for entry in self._entries if entry.last_offset < offset]
        # Entries were removed only in memory, so the next flush must write the file. Otherwise a restart
        # could load the removed entries again, once the recovery point is above them.
        self.is_unsynced |= len(kept) < len(self._entries)
        self._entries = kept
        self._written = min(self._written, len(kept))

    def _pack(self, start: int, stop: int) -> bytes:
        return b"".join([_TXN_ENTRY.pack(0, *entry) for entry in self._entries[start:stop]])


def _read_offset_entries(data: bytes, log_size: int) -> tuple[array[int], array[int], int | None]:
    offsets, positions, wrong = (offset_entries if _c is None else _c.offset_entries)(data, log_size)
    return array("I", offsets), array("I", positions), wrong


def offset_entries(data: bytes, log_size: int) -> tuple[bytes, bytes, int | None]:
    """Return the offsets and the positions in an offset index file, as bytes of unsigned 32-bit numbers in
    the machine's byte order.

    The third value is None, or the number of the first entry that does not fit the log. Only the entries
    before it are returned.
    """
    # No call and no object for each entry: an index of a million entries would delay other clients. See
    # test_loading_an_index_takes_no_step_for_each_entry.
    entries = swap_big_endian(array("I", data[: len(data) // _OFFSET_ENTRY.size * _OFFSET_ENTRY.size]))
    offsets, positions = entries[::2], entries[1::2]
    count, wrong, previous = len(offsets), None, -1
    for number, (offset, position) in enumerate(zip(offsets, positions, strict=True)):
        if position and position < log_size and offset > previous:
            previous = offset
            continue
        # Stop at position 0: Kafka preallocates zeros, and no entry has position 0, because the first batch
        # gets no entry.
        count, wrong = number, number if position else None
        break
    return offsets[:count].tobytes(), positions[:count].tobytes(), wrong


def _is_later(timestamp_ms: int, relative_offset: int, last_ms: int | None) -> bool:
    """Return True if a time index gets the entry after one with the timestamp `last_ms`, None without one."""
    if last_ms is None:
        return timestamp_ms != 0 or relative_offset != 0
    return timestamp_ms > last_ms


def time_entries(data: bytes) -> tuple[bytes, bytes, int | None]:
    """Return the timestamps and the offsets in a time index file, as bytes of signed 64-bit and unsigned
    32-bit numbers in the machine's byte order.

    The third value is None, or the number of the first entry that is not above the previous one. Only the
    entries before it are returned.
    """
    words = array("I", data[: len(data) // _TIME_ENTRY.size * _TIME_ENTRY.size])
    halves, offsets = words[::3] * 2, swap_big_endian(words[2::3])
    halves[::2], halves[1::2] = words[::3], words[1::3]
    timestamps = swap_big_endian(array("q", halves.tobytes()))
    count, wrong, previous_ms, previous = len(offsets), None, -1 << 63, -1
    for number, (timestamp_ms, offset) in enumerate(zip(timestamps, offsets, strict=True)):
        is_zero = timestamp_ms == 0 and offset == 0  # Kafka preallocates zeros
        if not is_zero and offset > previous and (timestamp_ms > previous_ms or number == 0):
            previous_ms, previous = timestamp_ms, offset
            continue
        # Zeros before another entry are not preallocated. Kafka, and Oncelog up to 0.9.1, stored them for a
        # first record with timestamp 0. The caller must make the index again.
        is_first = not number and any(data[_TIME_ENTRY.size : len(offsets[:2]) * _TIME_ENTRY.size])
        count, wrong = number, None if is_zero and not is_first else number
        break
    return timestamps[:count].tobytes(), offsets[:count].tobytes(), wrong


def _read(disk: Disk, path: str) -> bytes:
    try:
        return disk.read(path)
    except FileNotFoundError:
        raise StorageError(f"{disk.describe(path)} is missing") from None
