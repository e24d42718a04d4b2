"""A segment's three indexes, in Kafka's file formats. All may be rebuilt from the log.

    .index      i32 offset - base | i32 position           one entry every index.interval.bytes
    .timeindex  i64 timestamp_ms | i32 offset - base       the largest timestamp so far, and its batch's end
    .txnindex   i16 0 | i64 producer id | i64 first | i64 last | i64 last stable    aborted transactions

Entries live in memory and are written in runs: an index that lags behind its log is a sparser index,
never a wrong one. Every write goes to the position its entries belong at, so that repeating one after a
failure is harmless.
Source: Kafka's OffsetIndex, TimeIndex, TransactionIndex, AbortedTxn.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from oncelog.errors import StorageError
from oncelog.limits import DEFAULT_LIMITS
from oncelog.log.disk import Disk

_OFFSET_ENTRY = struct.Struct(">II")
_TIME_ENTRY = struct.Struct(">qI")
_TXN_ENTRY = struct.Struct(">hqqqq")
TXN_ENTRY_BYTES = _TXN_ENTRY.size


class AbortedTransaction(NamedTuple):
    """An aborted transaction's span; `last_offset` is its marker's."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class _IndexFile(ABC):
    """How many of the entries in memory are in the file."""

    entry_bytes: int

    def __init__(self, disk: Disk, path: str, run_entries: int = DEFAULT_LIMITS.index_run_entries) -> None:
        self._disk = disk
        self._path = path
        self._run_entries = run_entries
        self._written = 0
        self.holds_back = False
        """While true nothing is written before `write_pending` is called."""

    @property
    def path(self) -> str:
        return self._path

    @abstractmethod
    def __len__(self) -> int:
        """Entries in memory."""

    @abstractmethod
    def _pack(self, start: int, stop: int) -> bytes:
        """The file's bytes of some of them."""

    def write_pending(self, *, sync: bool = False) -> None:
        """Bring the file up to the entries in memory. Raises OSError; a later call tries again."""
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

    def write_runs(self) -> None:
        """Write when enough has gathered; a failure leaves the entries for the next call."""
        if len(self) - self._written >= self._run_entries and not self.holds_back:
            try:
                self.write_pending()
            except OSError:
                pass  # the log is what counts; flush, roll and close insist

    def write_again(self) -> None:
        """Make the next write bring every entry: a sync of what is in the file may have failed once."""
        self._written = 0

    def _loaded(self, file_size: int) -> None:
        """All entries in memory came from the file; preallocated or torn bytes after them are cut off."""
        self._written = len(self)
        if file_size != self._written * self.entry_bytes:
            self.cut_file()

    def cut_file(self) -> None:
        """Make the file end where the entries in memory that are written end."""
        self._written = min(self._written, len(self))
        if self._disk.exists(self._path):
            file = self._disk.open(self._path)
            try:
                file.truncate(self._written * self.entry_bytes)
            finally:
                file.close()


class OffsetIndex(_IndexFile):
    """Where batches stand in the file: (last offset of a batch, its position), both growing."""

    entry_bytes = _OFFSET_ENTRY.size

    def __init__(self, disk: Disk, path: str, run_entries: int = DEFAULT_LIMITS.index_run_entries) -> None:
        super().__init__(disk, path, run_entries)
        self._offsets = array("I")
        self._positions = array("I")

    @classmethod
    def load(
        cls, disk: Disk, path: str, log_size: int, run_entries: int = DEFAULT_LIMITS.index_run_entries
    ) -> OffsetIndex:
        """Raises StorageError when the file is missing or cannot be an index of such a log."""
        index = cls(disk, path, run_entries)
        data = _read(disk, path)
        for offset, position in _OFFSET_ENTRY.iter_unpack(data[: len(data) - len(data) % 8]):
            if position == 0:
                break  # Kafka preallocates zeros, and the first batch never has an entry
            if position >= log_size or (index._offsets and offset <= index._offsets[-1]):
                raise StorageError(f"{disk.describe(path)}: entry {len(index)} does not fit the log")
            index._offsets.append(offset)
            index._positions.append(position)
        index._loaded(len(data))
        return index

    @staticmethod
    def read_position(disk: Disk, path: str, relative_offset: int) -> int:
        """Return what `position_for` does, without keeping the entries; 0 for an unreadable file."""
        data = disk.read(path) if disk.exists(path) else b""
        entries = np.frombuffer(data, ">u4", len(data) // _OFFSET_ENTRY.size * 2).reshape(-1, 2)
        offsets, positions = entries[entries[:, 1] > 0].T
        if (np.diff(offsets.astype(np.int64)) <= 0).any():
            return 0
        found = int(np.searchsorted(offsets, relative_offset, "right")) - 1
        return int(positions[found]) if found >= 0 else 0

    def __len__(self) -> int:
        return len(self._positions)

    def append(self, relative_offset: int, position: int) -> None:
        self._offsets.append(relative_offset)
        self._positions.append(position)
        self.write_runs()

    def position_for(self, relative_offset: int) -> int:
        """Where to start looking for the batch that holds the offset."""
        found = bisect_right(self._offsets, relative_offset) - 1
        return self._positions[found] if found >= 0 else 0

    def position_before(self, position: int) -> int:
        """The last batch start known at or before a position; 0 when none is."""
        found = bisect_right(self._positions, position) - 1
        return self._positions[found] if found >= 0 else 0

    def last(self) -> tuple[int, int] | None:
        """(relative offset, position), None when empty."""
        return (self._offsets[-1], self._positions[-1]) if self._offsets else None

    def cut(self, count: int) -> None:
        """Keep the first `count` entries."""
        del self._offsets[count:], self._positions[count:]
        self.cut_file()

    def count_below(self, relative_offset: int) -> int:
        """How many entries stand for batches wholly below an offset."""
        return bisect_right(self._offsets, relative_offset - 1) if relative_offset > 0 else 0

    def _pack(self, start: int, stop: int) -> bytes:
        pairs = zip(self._offsets[start:stop], self._positions[start:stop], strict=True)
        return b"".join([_OFFSET_ENTRY.pack(offset, position) for offset, position in pairs])


class TimeIndex(_IndexFile):
    """(largest timestamp so far, last offset of the batch that has it), both growing."""

    entry_bytes = _TIME_ENTRY.size

    def __init__(self, disk: Disk, path: str, run_entries: int = DEFAULT_LIMITS.index_run_entries) -> None:
        super().__init__(disk, path, run_entries)
        self._timestamps = array("q")
        self._offsets = array("I")

    @classmethod
    def load(cls, disk: Disk, path: str, run_entries: int = DEFAULT_LIMITS.index_run_entries) -> TimeIndex:
        """Raises StorageError when the file is missing or its entries do not grow."""
        index = cls(disk, path, run_entries)
        data = _read(disk, path)
        for timestamp_ms, offset in _TIME_ENTRY.iter_unpack(data[: len(data) - len(data) % 12]):
            if timestamp_ms == 0 and offset == 0:
                break  # Kafka's preallocated zeros
            if index._offsets and (timestamp_ms <= index._timestamps[-1] or offset <= index._offsets[-1]):
                raise StorageError(f"{disk.describe(path)}: entry {len(index)} does not grow")
            index._timestamps.append(timestamp_ms)
            index._offsets.append(offset)
        index._loaded(len(data))
        return index

    @staticmethod
    def read_last(disk: Disk, path: str) -> tuple[int, int] | None:
        """The last entry of a finished file, nothing else read; None when the file is empty.

        Raises StorageError when it is missing or ends within an entry.
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
        """Take the entry if its timestamp grew."""
        if not self._timestamps or timestamp_ms > self._timestamps[-1]:
            self._timestamps.append(timestamp_ms)
            self._offsets.append(relative_offset)
            self.write_runs()

    def offset_before(self, timestamp_ms: int) -> int:
        """Relative offset up to which every timestamp is below `timestamp_ms`; 0 when unknown."""
        found = bisect_right(self._timestamps, timestamp_ms - 1) - 1
        return self._offsets[found] if found >= 0 else 0

    def last(self) -> tuple[int, int] | None:
        """(timestamp_ms, relative offset), None when empty."""
        return (self._timestamps[-1], self._offsets[-1]) if self._offsets else None

    def cut_below(self, relative_offset: int) -> None:
        """Keep the entries whose offset is below."""
        count = bisect_right(self._offsets, relative_offset - 1) if relative_offset > 0 else 0
        del self._timestamps[count:], self._offsets[count:]
        self.cut_file()

    def last_below(self, relative_offset: int) -> int | None:
        """The offset of the last entry below one; None without an entry."""
        found = bisect_right(self._offsets, relative_offset - 1) - 1 if relative_offset > 0 else -1
        return self._offsets[found] if found >= 0 else None

    def _pack(self, start: int, stop: int) -> bytes:
        pairs = zip(self._timestamps[start:stop], self._offsets[start:stop], strict=True)
        return b"".join([_TIME_ENTRY.pack(timestamp_ms, offset) for timestamp_ms, offset in pairs])


def decode_aborted(data: bytes, base_offset: int, path: str) -> list[AbortedTransaction]:
    """The entries of a `.txnindex` file of a segment; a torn one at the end is left out.

    Raises StorageError naming `path` when an entry cannot be right.
    """
    entries: list[AbortedTransaction] = []
    previous = base_offset - 1
    for fields in _TXN_ENTRY.iter_unpack(data[: len(data) - len(data) % TXN_ENTRY_BYTES]):
        if not any(fields):
            break  # after a power loss the length may be there without the bytes
        entry = AbortedTransaction(*fields[1:])
        if fields[0] != 0 or entry.last_offset <= previous or entry.first_offset >= entry.last_offset:
            raise StorageError(f"{path}: entry {len(entries)} is {fields}")
        entries.append(entry)
        previous = entry.last_offset
    return entries


class TransactionIndex(_IndexFile):
    """Aborted transactions whose marker stands in the segment.

    Apache Kafka and Oncelog up to 0.5.0 make the file with the first entry, we do with the segment.
    """

    entry_bytes = TXN_ENTRY_BYTES

    def __init__(self, disk: Disk, path: str, run_entries: int = DEFAULT_LIMITS.index_run_entries) -> None:
        super().__init__(disk, path, run_entries)
        self._entries: list[AbortedTransaction] = []
        self._placed = 0  # entries that the file has bytes for, written or not
        self._extent = 0  # entries that the file may have some bytes for
        self.is_unsynced = False

    @classmethod
    def load(
        cls, disk: Disk, path: str, base_offset: int, run_entries: int = DEFAULT_LIMITS.index_run_entries
    ) -> TransactionIndex:
        """A missing file is an empty index. Raises StorageError when an entry cannot be right."""
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
        """The entries whose marker is at an offset or later; those before it are not looked at."""
        first = bisect_left(self._entries, offset, key=attrgetter("last_offset"))
        for index in range(first, len(self._entries)):
            yield self._entries[index]

    def make_room(self) -> None:
        """Give the file bytes for a run of further entries, zeros until they are written. Raises OSError.

        Called before the marker of an aborted transaction is stored, so that a flush writes in place. Else
        no flush would succeed on a full disk, and what waits for one could not be deleted:
        test_a_full_disk_with_unflushed_aborts_gets_room. A reader ends at the zeros.
        """
        count = len(self)
        if count < self._placed:
            return
        file = self._disk.open(self._path, create=True)
        # Before the write, of which a full disk takes a part: test_a_clean_stop_leaves_no_zeros.
        self._extent = count + self._run_entries
        try:
            file.pwrite(bytes(self._run_entries * self.entry_bytes), count * self.entry_bytes)
        finally:
            file.close()
        self._placed = self._extent

    def give_room_back(self) -> None:
        """Make the file of a closed segment end with its last entry."""
        if self._extent > len(self):
            self.cut_file()

    def cut_file(self) -> None:
        super().cut_file()
        self._placed = self._extent = self._written

    def append(self, entry: AbortedTransaction) -> None:
        self._entries.append(entry)
        self.is_unsynced = True

    def add_missing(self, entries: Iterable[AbortedTransaction]) -> None:
        """Put entries among those that are there, and replace the file.

        Raises OSError; the entries are in memory then, and any later write brings all.
        """
        self._entries = sorted([*self._entries, *entries], key=lambda entry: entry.last_offset)
        self.replace()

    def replace(self) -> None:
        """Write every entry to a file that takes the old one's place whole. Raises OSError."""
        self._written = 0
        self._disk.replace(self._path, self._pack(0, len(self)))
        self._written, self.is_unsynced = len(self), False
        self._placed = self._extent = len(self)

    def store(self) -> None:
        """Make the file hold these entries; a crash leaves those that were there or all. Raises OSError.

        A start takes the file of a synced segment as it is, so a part of it would show aborted records:
        test_a_crash_while_an_index_of_aborted_transactions_is_made_again_loses_no_entry.
        """
        stored = self._disk.read(self._path) if self._disk.exists(self._path) else None
        if stored is None or not self._pack(0, len(self)).startswith(stored):
            self.replace()
            return
        # In place, for which a full disk mostly has room; all of it, for an earlier sync may have failed.
        self._written = 0
        self.sync()

    def sync(self) -> None:
        """Make every entry survive a power loss; the file may be new in its directory. Raises OSError."""
        # Before the write: an entry that comes meanwhile makes it unsynced again.
        self.is_unsynced = False
        try:
            self.write_pending(sync=True)
        except OSError:
            self.is_unsynced = True
            raise

    def cut_below(self, offset: int) -> None:
        """Keep the entries whose marker is below an offset; the file stays as it is until `store`."""
        kept = [entry for entry in self._entries if entry.last_offset < offset]
        # A power loss could bring back what is cut off here, under a recovery point that has passed it.
        self.is_unsynced |= len(kept) < len(self._entries)
        self._entries = kept
        self._written = min(self._written, len(kept))

    def _pack(self, start: int, stop: int) -> bytes:
        return b"".join([_TXN_ENTRY.pack(0, *entry) for entry in self._entries[start:stop]])


def _read(disk: Disk, path: str) -> bytes:
    try:
        return disk.read(path)
    except FileNotFoundError:
        raise StorageError(f"{disk.describe(path)} is missing") from None
