"""Whether a micro-batch begins now or waits for more offsets: minOffsetsPerTrigger and maxTriggerDelay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Admission:
    """Asked at every trigger of one run of a query. `least` None: nothing ever waits.

    As in Spark's own Kafka source the first micro-batch of a run does not wait; unlike there the delay counts
    from the first offset that waits, so that none waits longer.
    """

    least: int | None
    max_delay_ms: int
    _waiting_since_ms: int | None = None
    _is_first: bool = True

    def lets_begin(self, waiting: int, now_ms: int) -> bool:
        """Whether a micro-batch of `waiting` offsets begins; `now_ms` is any clock that does not go back."""
        if self._waiting_since_ms is None and waiting:
            self._waiting_since_ms = now_ms
        since = now_ms if self._waiting_since_ms is None else self._waiting_since_ms
        is_due = self.least is None or waiting >= self.least or now_ms - since >= self.max_delay_ms
        if not (is_due or self._is_first):
            return False
        self._waiting_since_ms = None
        self._is_first = self._is_first and not waiting
        return True
