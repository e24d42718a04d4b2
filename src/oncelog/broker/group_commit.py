"""Group commit as data: appends that may be answered only when the disk has them.

The edge takes the partitions to flush, runs one fdatasync each in a thread while more appends
gather behind it, and reports back; everything that the flush covered is answered together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from oncelog.log.partition import Partition


@dataclass(frozen=True, slots=True)
class FlushWait:
    """`on_flushed(None)` once the partition is on disk past `last_offset`, else with what failed."""

    last_offset: int
    on_flushed: Callable[[Exception | None], None]


class Flushes:
    """The partitions to sync, and the appends and readers that wait for it.

    `on_visible` is called with a partition and the bytes that a sync may have shown to its readers.
    """

    def __init__(self, on_visible: Callable[[Partition, int], None]) -> None:
        self._on_visible = on_visible
        self._waits: dict[Partition, deque[FlushWait]] = {}
        self._running: set[Partition] = set()
        self._hidden_bytes: dict[Partition, int] = {}

    def add(self, partition: Partition, wait: FlushWait) -> None:
        """Ask for a flush of the partition that covers `wait.last_offset`."""
        self._waits.setdefault(partition, deque()).append(wait)

    def show(self, partition: Partition, size_bytes: int) -> None:
        """Ask for a flush because readers do not see `size_bytes` of the partition before it."""
        self._waits.setdefault(partition, deque())
        self._hidden_bytes[partition] = self._hidden_bytes.get(partition, 0) + size_bytes

    @property
    def is_any_waiting(self) -> bool:
        return bool(self._waits)

    def take(self) -> list[Partition]:
        """Partitions whose flush should start now; each must come back through `finished`."""
        due = [partition for partition in self._waits if partition not in self._running]
        self._running.update(due)
        return due

    def finished(self, partition: Partition, error: Exception | None) -> None:
        """A flush of `partition` ended. A failure fails every append that waits for this partition."""
        self._running.discard(partition)
        waits = self._waits.get(partition, deque())
        while waits and (error is not None or waits[0].last_offset < partition.recovery_point):
            waits.popleft().on_flushed(error)
        if not waits:
            self._waits.pop(partition, None)
        hidden_bytes = self._hidden_bytes.pop(partition, 0)
        if error is None and hidden_bytes:
            self._on_visible(partition, hidden_bytes)
            if partition.high_watermark < partition.log_end_offset:
                self.show(partition, 1)  # for the next flush; how much was shown was said already
