"""Group commit: one sync of a partition for all appends that wait for it.

The server takes the partitions that need a flush, and runs one fdatasync for each in a thread. An append that
arrives during a flush waits for the next one. All responses that a flush covers are sent together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from oncelog.log.partition import Partition


@dataclass(frozen=True, slots=True)
class FlushWaiter:
    """A request for a flush of a partition up to and including `last_offset`.

    After the flush, `on_flushed` is called with None, or with the error if the flush failed.
    """

    last_offset: int
    on_flushed: Callable[[Exception | None], None]


class FlushQueue:
    """The partitions that need a flush, and the appends that wait for it.

    `on_visible` is called after a flush that made hidden records visible (flush.messages). Its arguments are
    the partition and the number of bytes that may now be visible.
    """

    def __init__(self, on_visible: Callable[[Partition, int], None]) -> None:
        self._on_visible = on_visible
        self._waiters: dict[Partition, deque[FlushWaiter]] = {}
        self._running: set[Partition] = set()
        self._hidden_bytes: dict[Partition, int] = {}

    def add(self, partition: Partition, waiter: FlushWaiter) -> None:
        """Request a flush of the partition up to and including `waiter.last_offset`."""
        self._waiters.setdefault(partition, deque()).append(waiter)

    def add_hidden(self, partition: Partition, size_bytes: int) -> None:
        """Request a flush of a partition that hides `size_bytes` from readers until the flush."""
        self._waiters.setdefault(partition, deque())
        self._hidden_bytes[partition] = self._hidden_bytes.get(partition, 0) + size_bytes

    @property
    def has_waiters(self) -> bool:
        """True if a partition needs a flush, or a flush is running."""
        return bool(self._waiters)

    def take_due(self) -> list[Partition]:
        """Return the partitions to flush now. The caller flushes each one, then calls `complete`."""
        due = [partition for partition in self._waiters if partition not in self._running]
        self._running.update(due)
        return due

    def complete(self, partition: Partition, error: Exception | None) -> None:
        """Call the waiters that an ended flush covers. If the flush failed, call all waiters of the partition
        with `error`.

        After a success, also call `on_visible` if the flush made hidden records visible.
        """
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
                # Records were appended during the flush and are still hidden. `_on_visible` has counted their
                # bytes already, so one byte is enough to make the next flush call `_on_visible` again.
                self.add_hidden(partition, 1)
