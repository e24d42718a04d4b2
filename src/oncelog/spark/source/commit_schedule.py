"""Decide which offsets a stream commits to the group that commitOffsetsToGroup names, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oncelog.spark.source.offset_ranges import Offsets, Position
from oncelog.types import TopicPartition

REFRESH_MS = 600_000
"""Time after which all offsets are committed again, even unchanged ones. Otherwise a broker would let the
offsets of an idle query expire.
"""
RETRY_MS = 60_000
"""Pause after a failed commit. It is long because each commit can delay the query by up to MAX_COMMIT_MS."""


@dataclass(slots=True)
class CommitSchedule:
    """The commits of one run of a query. Times are those of a monotonic clock in milliseconds.

    `failures` counts the failed commits since the run began, and `failures_in_row` the failed commits since
    the last successful one.
    """

    failures: int = 0
    failures_in_row: int = 0
    _committed: Offsets = field(default_factory=dict)
    _refresh_at_ms: int = 0
    _retry_at_ms: int = 0

    def due(self, finished: Position, now_ms: int) -> Offsets:
        """Return the offsets to commit now, for a query whose last finished micro-batch ended at `finished`.

        Before the first micro-batch has finished, the result is empty: the initial position is not progress.
        """
        if finished.is_initial or now_ms < self._retry_at_ms:
            return {}
        if now_ms >= self._refresh_at_ms:
            return dict(finished.offsets)
        # Compare with `!=`: a re-created topic begins at 0 again, so an offset may be lower than the
        # committed one.
        return {tp: offset for tp, offset in finished.offsets.items() if self._committed.get(tp) != offset}

    def succeed(self, offsets: Mapping[TopicPartition, int], now_ms: int) -> None:
        """Record that `offsets` were committed."""
        if now_ms >= self._refresh_at_ms:
            self._committed.clear()
            self._refresh_at_ms = now_ms + REFRESH_MS
        self._committed.update(offsets)
        self.failures_in_row = 0

    def fail(self, now_ms: int) -> None:
        """Record that a commit failed. The next one is due after RETRY_MS."""
        self.failures += 1
        self.failures_in_row += 1
        self._retry_at_ms = now_ms + RETRY_MS
