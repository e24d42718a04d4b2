"""The first offset of each leader epoch, for OffsetForLeaderEpoch; stored in leader-epoch-checkpoint.

Source: Kafka's LeaderEpochFileCache.
"""

from __future__ import annotations

from bisect import bisect_right

from oncelog.log.checkpoint import read_epochs, write_epochs
from oncelog.log.disk import Disk

Epochs = list[tuple[int, int]]


class LeaderEpochs:
    """The leader epochs of a partition as (epoch, start offset) pairs, both increasing."""

    def __init__(self, entries: Epochs) -> None:
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
        """Load the epochs of the checkpoint file, and correct them by the log. Write the file if it lacks
        epochs, or has epochs above the log end.

        `found` are the (epoch, first offset) pairs of the batches that recovery read. The pairs above the
        file's latest epoch are added. If the file is missing or unreadable, all pairs are added.
        The partition's current epoch is the latest of these and `leader_epoch`. If no batch has it yet, it
        begins at the log end. It must not fall: Java's clients ignore metadata with an epoch below one that
        they have seen. See test_a_takeover_keeps_the_latest_leader_epoch.

        A new file is not synced here: the partition's first flush syncs it. If the file has epochs, it is
        synced, because recovery would find only the epochs of the batches that it reads. See
        test_a_power_loss_after_a_takeover_keeps_the_leader_epochs.
        """
        stored = read_epochs(disk, directory)
        entries = stored or []
        for epoch, start_offset in found:
            entries = _assigned(entries, epoch, start_offset)
        latest = max([leader_epoch, *(epoch for epoch, _ in entries)])
        entries = [(epoch, start) for epoch, start in entries if start < log_end_offset]
        entries = _assigned(_cut_start(entries, log_start_offset), latest, log_end_offset)
        if stored is None or entries != _cut_start(stored, log_start_offset):
            write_epochs(disk, directory, entries, sync=bool(stored))
        return cls(entries)

    @property
    def latest(self) -> int | None:
        return self._entries[-1][0] if self._entries else None

    def cut_start(self, log_start_offset: int) -> None:
        """Drop the epochs that end at or below a new log start.

        The epoch that contains the new log start now begins there. The checkpoint file is not written,
        because `settle` cuts its epochs again, and so does Apache Kafka. Two syncs for each partition would
        block the broker's thread. See test_deleting_records_waits_for_no_sync.
        """
        self._entries = _cut_start(self._entries, log_start_offset)

    def end_offset(self, epoch: int, log_end_offset: int) -> tuple[int | None, int | None]:
        """Return the largest known epoch at or below `epoch`, and the offset after its last record.

        Returns (None, None) if `epoch` is above the latest epoch, or if no epoch is known. If `epoch` is
        below the first known epoch, returns `epoch` and the start offset of the first known epoch.
        """
        if not self._entries or epoch > self._entries[-1][0]:
            return None, None
        after = bisect_right([entry_epoch for entry_epoch, _ in self._entries], epoch)
        if after == len(self._entries):
            return self._entries[-1][0], log_end_offset
        largest = self._entries[after - 1][0] if after else epoch
        return largest, self._entries[after][1]


def _assigned(entries: Epochs, epoch: int, start_offset: int) -> Epochs:
    """Return the entries with an epoch added, without the entries that begin at or after `start_offset`.

    Return the entries unchanged if the last entry's epoch is `epoch` or higher.
    """
    if entries and entries[-1][0] >= epoch:
        return entries
    return [*(entry for entry in entries if entry[1] < start_offset), (epoch, start_offset)]


def _cut_start(entries: Epochs, log_start_offset: int) -> Epochs:
    after = bisect_right([start for _, start in entries], log_start_offset)
    return [(entries[after - 1][0], log_start_offset), *entries[after:]] if after else entries
