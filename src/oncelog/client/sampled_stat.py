"""Rates, averages and maxima over the last 30 s, for the clients' metrics. Source: Kafka's SampledStat."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_MS = 30_000
"""The period in ms that rates, averages and maxima cover."""


_Second = list[float]
"""The sums of one second: the second's number, the number of samples, their sum, and the largest sample."""


class SampledStat:
    """The samples of the last WINDOW_MS. They are summed per second, so that memory stays bounded."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()
        self._started_ms: float | None = None

    def add(self, value: float, now_ms: float) -> None:
        """Add a sample that was measured at `now_ms`."""
        second = int(now_ms // 1000)
        if self._seconds and self._seconds[-1][0] == second:
            sums = self._seconds[-1]
            sums[1] += 1
            sums[2] += value
            if value > sums[3]:
                sums[3] = value
            return
        if self._started_ms is None:
            self._started_ms = now_ms
        self._seconds.append([second, 1, value, value])
        self._expire(now_ms)

    def _expire(self, now_ms: float) -> None:
        while self._seconds and self._seconds[0][0] * 1000 <= now_ms - WINDOW_MS - 1000:
            self._seconds.popleft()

    def _sum(self, now_ms: float, of: Callable[[_Second], float]) -> float:
        self._expire(now_ms)
        return sum(of(row) for row in self._seconds)

    def rate(self, now_ms: float) -> float:
        """Return the sum of the samples of the last WINDOW_MS, per second.

        The sum is divided by the seconds since the first sample, but by at least 1 and at most 30.
        """
        return self._per_second(self._sum(now_ms, lambda row: row[2]), now_ms)

    def count_rate(self, now_ms: float) -> float:
        """Return the number of samples in the last WINDOW_MS, per second. The divisor is that of `rate`."""
        return self._per_second(self._sum(now_ms, lambda row: row[1]), now_ms)

    def _per_second(self, total: float, now_ms: float) -> float:
        elapsed_ms = min(now_ms - (self._started_ms or now_ms), WINDOW_MS)
        return total / (max(elapsed_ms, 1000) / 1000)

    def average(self, now_ms: float) -> float:
        """Return the mean of the samples in the last WINDOW_MS; 0 if there are none."""
        count = self._sum(now_ms, lambda row: row[1])
        return self._sum(now_ms, lambda row: row[2]) / count if count else 0.0

    def largest(self, now_ms: float) -> float:
        """Return the largest sample of the last WINDOW_MS; 0 if there are none."""
        self._expire(now_ms)
        return max((row[3] for row in self._seconds), default=0.0)
