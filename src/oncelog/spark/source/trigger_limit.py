"""Decide if a micro-batch begins or waits for more offsets (minOffsetsPerTrigger, maxTriggerDelay)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TriggerLimit:
    """The limits of one run of a query. Spark calls `may_begin` at every trigger.

    The first micro-batch of a run does not wait, as in Spark's own Kafka source. Unlike Spark's
    maxTriggerDelay, `max_delay_ms` counts from the trigger that first finds waiting offsets. If `min_offsets`
    is None, micro-batches never wait.
    """

    min_offsets: int | None
    max_delay_ms: int
    _waiting_since_ms: int | None = None
    _is_first: bool = True

    def may_begin(self, waiting: int, now_ms: int) -> bool:
        """Return True if a micro-batch must begin now, when `waiting` offsets can be read.

        `now_ms` is the time of a monotonic clock in milliseconds.
        """
        if self._waiting_since_ms is None and waiting:
            self._waiting_since_ms = now_ms
        since = now_ms if self._waiting_since_ms is None else self._waiting_since_ms
        is_due = (
            self.min_offsets is None or waiting >= self.min_offsets or now_ms - since >= self.max_delay_ms
        )
        if not (is_due or self._is_first):
            return False
        self._waiting_since_ms = None
        self._is_first = self._is_first and not waiting
        return True
