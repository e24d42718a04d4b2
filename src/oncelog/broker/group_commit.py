"""Group commit: appends whose responses wait until the disk has them.

The server takes the partitions that need a flush and runs one fdatasync for each in a thread. Appends that
arrive meanwhile wait for the next flush. Everything that a flush covered is answered together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from oncelog.log.partition import Partition


@dataclass(frozen=True, slots=True)
class FlushWaiter:
    """Waits until a partition is on disk up to and including `last_offset`.

    Then `on_flushed` is called with None, or with the error if the flush failed.
    """

    last_offset: int
    on_flushed: Callable[[Exception | None], None]


class FlushQueue:
    """The partitions to flush, and the appends and readers that wait for that.

    `on_visible` is called with a partition and the number of bytes that a flush may have made visible to its
    readers.
    """

    def __init__(self, on_visible: Callable[[Partition, int], None]) -> None:
        self._on_visible = on_visible
        self._waiters: dict[Partition, deque[FlushWaiter]] = {}
        self._running: set[Partition] = set()
        self._hidden_bytes: dict[Partition, int] = {}

    def add(self, partition: Partition, waiter: FlushWaiter) -> None:
        """Request a flush of the partition that covers `waiter.last_offset`."""
        self._waiters.setdefault(partition, deque()).append(waiter)

    def add_hidden(self, partition: Partition, size_bytes: int) -> None:
        """Request a flush of the partition, because readers do not see `size_bytes` before it."""
        self._waiters.setdefault(partition, deque())
        self._hidden_bytes[partition] = self._hidden_bytes.get(partition, 0) + size_bytes

    @property
    def has_waiters(self) -> bool:
        """True if any partition needs a flush, or its flush is running."""
        return bool(self._waiters)

    def take_due(self) -> list[Partition]:
        """Return the partitions to flush now. The caller reports the end of each flush with `complete`."""
        due = [partition for partition in self._waiters if partition not in self._running]
        self._running.update(due)
        return due

    def complete(self, partition: Partition, error: Exception | None) -> None:
        """Report the end of a flush. An error fails every append that waits for this partition."""
        self._running.discard(partition)
        waiters = self._waiters.get(partition, deque())
        while waiters and (error is not None or waiters[0].last_offset < partition.recovery_point):
            waiters.popleft().on_flushed(error)
        if not waiters:
            self._waiters.pop(partition, None)
        hidden_bytes = self._hidden_bytes.pop(partition, 0)
        if error is None and hidden_bytes:
            self._on_visible(partition, hidden_bytes)
            if partition.high_watermark < partition.log_end_offset:
                # Appends came during the flush. Their bytes are reported already, so one byte is enough to
                # make the next flush call `on_visible`.
                self.add_hidden(partition, 1)
