"""A consumer's metrics under Kafka's names (consumer-fetch-manager-metrics)."""

from __future__ import annotations

from oncelog.client.sampled_stat import SampledStat


class ConsumerMetrics:
    """Counters of fetches and records. All times are in milliseconds, by one clock.

    `poll` counts the bytes of the records' values, and `poll_arrow` counts all bytes of a RecordBatch.
    """

    def __init__(self) -> None:
        self._latency, self._fetched_bytes = SampledStat(), SampledStat()
        self._records, self._bytes = SampledStat(), SampledStat()
        self._totals = {"fetch-total": 0, "records-consumed-total": 0, "bytes-consumed-total": 0}

    def on_fetch(self, latency_ms: float, size_bytes: int, now_ms: float) -> None:
        """Count a fetch response, with its latency and its size in bytes."""
        self._latency.add(latency_ms, now_ms)
        self._fetched_bytes.add(size_bytes, now_ms)
        self._totals["fetch-total"] += 1

    def on_records(self, count: int, size_bytes: int, now_ms: float) -> None:
        """Count records that were decoded for delivery to the application."""
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


_BYTES_CONSUMED = (
    "Bytes returned to the application: of values by `poll`, of whole Arrow batches by `poll_arrow`."
)

METRICS = {
    "fetch-latency-avg": ("average", "ms", "Time from a Fetch request to its response."),
    "fetch-latency-max": ("maximum", "ms", "Time from a Fetch request to its response."),
    "fetch-rate": ("rate", "responses/s", "Fetch responses received."),
    "fetch-total": ("counter", "responses", "Fetch responses received."),
    "fetch-size-avg": ("average", "bytes", "Size of the record batches of a Fetch response."),
    "fetch-size-max": ("maximum", "bytes", "Size of the record batches of a Fetch response."),
    "records-consumed-rate": ("rate", "records/s", "Records returned to the application."),
    "records-consumed-total": ("counter", "records", "Records returned to the application."),
    "bytes-consumed-rate": ("rate", "bytes/s", _BYTES_CONSUMED),
    "bytes-consumed-total": ("counter", "bytes", _BYTES_CONSUMED),
    "records-lag-max": ("gauge", "records", "Largest lag of an assigned partition."),
}
"""Name -> kind, unit, meaning: what `Consumer.metrics()` returns, for docs/reference/metrics.md."""
