"""Which leader epoch began at which offset (OffsetForLeaderEpoch, leader-epoch-checkpoint).

Source: Kafka's LeaderEpochFileCache.
"""

from __future__ import annotations

from bisect import bisect_right

from oncelog.log.checkpoint import read_epochs, write_epochs
from oncelog.log.disk import Disk


class LeaderEpochs:
    """(epoch, start offset), both growing; every change is written down at once."""

    def __init__(self, disk: Disk, directory: str, entries: list[tuple[int, int]]) -> None:
        self._disk = disk
        self._directory = directory
        self._entries = entries

    @classmethod
    def open(cls, disk: Disk, directory: str) -> LeaderEpochs | None:
        """None when the file is missing or unreadable; `empty` and `assign` make it again."""
        entries = read_epochs(disk, directory)
        return None if entries is None else cls(disk, directory, entries)

    @classmethod
    def empty(cls, disk: Disk, directory: str) -> LeaderEpochs:
        return cls(disk, directory, [])

    @property
    def latest(self) -> int | None:
        return self._entries[-1][0] if self._entries else None

    def assign(self, epoch: int, start_offset: int) -> None:
        """A batch or a leadership of `epoch` begins at an offset; nothing happens when it is known."""
        if self._entries and self._entries[-1][0] >= epoch:
            return
        kept = [(known, start) for known, start in self._entries if start < start_offset]
        self._save([*kept, (epoch, start_offset)])

    def cut_end(self, end_offset: int) -> None:
        """The log now ends at an offset."""
        kept = [(epoch, start) for epoch, start in self._entries if start < end_offset]
        if kept != self._entries:
            self._save(kept)

    def cut_start(self, log_start_offset: int) -> None:
        """The log now starts at an offset: the epoch that covers it starts there."""
        after = bisect_right([start for _, start in self._entries], log_start_offset)
        if after > 1 or (after == 1 and self._entries[0][1] != log_start_offset):
            self._save([(self._entries[after - 1][0], log_start_offset), *self._entries[after:]])

    def end_offset(self, epoch: int, log_end_offset: int) -> tuple[int | None, int | None]:
        """(largest known epoch not above `epoch`, where it ends); (None, None) for an unknown later one."""
        if not self._entries or epoch > self._entries[-1][0]:
            return None, None
        after = bisect_right([known for known, _ in self._entries], epoch)
        if after == len(self._entries):
            return self._entries[-1][0], log_end_offset
        known = self._entries[after - 1][0] if after else epoch
        return known, self._entries[after][1]

    def _save(self, entries: list[tuple[int, int]]) -> None:
        write_epochs(self._disk, self._directory, entries)
        self._entries = entries
