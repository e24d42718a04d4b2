"""The first offset of each leader epoch (OffsetForLeaderEpoch, leader-epoch-checkpoint).

Source: Kafka's LeaderEpochFileCache.
"""

from __future__ import annotations

from bisect import bisect_right

from oncelog.log.checkpoint import read_epochs, write_epochs
from oncelog.log.disk import Disk

Epochs = list[tuple[int, int]]


class LeaderEpochs:
    """Pairs of epoch and start offset, both growing. Every change is written to the checkpoint at once."""

    def __init__(self, disk: Disk, directory: str, entries: Epochs) -> None:
        self._disk = disk
        self._directory = directory
        self._entries = entries

    @classmethod
    def settle(
        cls,
        disk: Disk,
        directory: str,
        *,
        found: Epochs,
        log_start_offset: int,
        log_end_offset: int,
        leader_epoch: int,
    ) -> LeaderEpochs:
        """Return the epochs of the checkpoint file, corrected by the log, and store them if they changed.

        `found` are the (epoch, first offset) pairs of the batches that recovery has read. A missing or
        unreadable file is written again. It is not synced: the partition's first flush does that.
        """
        stored = read_epochs(disk, directory)
        entries = stored or []
        for epoch, start_offset in found:
            entries = _assigned(entries, epoch, start_offset)
        entries = [(epoch, start) for epoch, start in entries if start < log_end_offset]
        entries = _assigned(_cut_start(entries, log_start_offset), leader_epoch, log_end_offset)
        if entries != stored:
            write_epochs(disk, directory, entries, sync=False)
        return cls(disk, directory, entries)

    @property
    def latest(self) -> int | None:
        return self._entries[-1][0] if self._entries else None

    def cut_start(self, log_start_offset: int) -> None:
        """Drop the epochs below a new log start; the epoch that covers it starts there."""
        entries = _cut_start(self._entries, log_start_offset)
        if entries != self._entries:
            write_epochs(self._disk, self._directory, entries)
            self._entries = entries

    def end_offset(self, epoch: int, log_end_offset: int) -> tuple[int | None, int | None]:
        """Return the largest epoch not above `epoch` and its end offset; (None, None) for a later epoch."""
        if not self._entries or epoch > self._entries[-1][0]:
            return None, None
        after = bisect_right([entry_epoch for entry_epoch, _ in self._entries], epoch)
        if after == len(self._entries):
            return self._entries[-1][0], log_end_offset
        largest = self._entries[after - 1][0] if after else epoch
        return largest, self._entries[after][1]


def _assigned(entries: Epochs, epoch: int, start_offset: int) -> Epochs:
    """Add an epoch that begins at an offset, unless it is in the list already."""
    if entries and entries[-1][0] >= epoch:
        return entries
    return [*(entry for entry in entries if entry[1] < start_offset), (epoch, start_offset)]


def _cut_start(entries: Epochs, log_start_offset: int) -> Epochs:
    after = bisect_right([start for _, start in entries], log_start_offset)
    return [(entries[after - 1][0], log_start_offset), *entries[after:]] if after else entries
