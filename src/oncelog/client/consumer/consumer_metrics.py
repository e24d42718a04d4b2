"""A consumer's metrics under Kafka's names (consumer-fetch-manager-metrics)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_MS = 30_000
"""The period in ms that rates, averages and maxima cover."""


_Second = list[float]
"""Second, number of samples, their sum, their maximum."""


class Window:
    """Samples of the last WINDOW_MS, summed per second so that memory stays bounded."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()
        self._started_ms: float | None = None

    def add(self, value: float, now_ms: float) -> None:
        """Add one sample."""
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
        """Return the sum of the samples per second."""
        return self._per_second(self._sum(now_ms, lambda row: row[2]), now_ms)

    def count_rate(self, now_ms: float) -> float:
        """Return the number of samples per second."""
        return self._per_second(self._sum(now_ms, lambda row: row[1]), now_ms)

    def _per_second(self, total: float, now_ms: float) -> float:
        elapsed_ms = min(now_ms - (self._started_ms or now_ms), WINDOW_MS)
        return total / (max(elapsed_ms, 1000) / 1000)

    def average(self, now_ms: float) -> float:
        """Return the mean of the samples; 0 without any."""
        count = self._sum(now_ms, lambda row: row[1])
        return self._sum(now_ms, lambda row: row[2]) / count if count else 0.0

    def largest(self, now_ms: float) -> float:
        """Return the largest sample; 0 without any."""
        self._expire(now_ms)
        return max((row[3] for row in self._seconds), default=0.0)


class ConsumerMetrics:
    """Counters of fetches and records. Times are milliseconds of one clock; record bytes are those of the
    values.
    """

    def __init__(self) -> None:
        self._latency, self._fetched_bytes = Window(), Window()
        self._records, self._bytes = Window(), Window()
        self._totals = {"fetch-total": 0, "records-consumed-total": 0, "bytes-consumed-total": 0}

    def on_fetch(self, latency_ms: float, size_bytes: int, now_ms: float) -> None:
        """Count a fetch that was answered."""
        self._latency.add(latency_ms, now_ms)
        self._fetched_bytes.add(size_bytes, now_ms)
        self._totals["fetch-total"] += 1

    def on_records(self, count: int, size_bytes: int, now_ms: float) -> None:
        """Count records that were delivered to the application."""
        if count:
            self._records.add(count, now_ms)
            self._bytes.add(size_bytes, now_ms)
            self._totals["records-consumed-total"] += count
            self._totals["bytes-consumed-total"] += size_bytes

    def values(self, now_ms: float) -> dict[str, float]:
        """Return all metrics. Rates and averages are over the last 30 s."""
        return {
            "fetch-latency-avg": self._latency.average(now_ms),
            "fetch-latency-max": self._latency.largest(now_ms),
            "fetch-rate": self._latency.count_rate(now_ms),
            "fetch-size-avg": self._fetched_bytes.average(now_ms),
            "fetch-size-max": self._fetched_bytes.largest(now_ms),
            "records-consumed-rate": self._records.rate(now_ms),
            "bytes-consumed-rate": self._bytes.rate(now_ms),
            **{name: float(value) for name, value in self._totals.items()},
        }


METRICS = {
    "fetch-latency-avg": ("average", "ms", "Time from a Fetch request to its response."),
    "fetch-latency-max": ("maximum", "ms", "Time from a Fetch request to its response."),
    "fetch-rate": ("rate", "responses/s", "Fetch responses."),
    "fetch-total": ("counter", "responses", "Fetch responses."),
    "fetch-size-avg": ("average", "bytes", "Size of the record batches of a Fetch response."),
    "fetch-size-max": ("maximum", "bytes", "Size of the record batches of a Fetch response."),
    "records-consumed-rate": ("rate", "records/s", "Records returned to the application."),
    "records-consumed-total": ("counter", "records", "Records returned to the application."),
    "bytes-consumed-rate": ("rate", "bytes/s", "Bytes of the values returned to the application."),
    "bytes-consumed-total": ("counter", "bytes", "Bytes of the values returned to the application."),
    "records-lag-max": ("gauge", "records", "Largest distance of a partition's position from its end."),
}
"""Name -> kind, unit, meaning: what `Consumer.metrics()` returns, for docs/reference/metrics.md."""
