"""A producer's metrics, under Kafka's names (producer-metrics)."""

from __future__ import annotations

from oncelog.client.producer.batch import ProducerBatch
from oncelog.client.sampled_stat import SampledStat
from oncelog.errors import (
    BrokerError,
    DuplicateSequenceNumber,
    InvalidProducerEpoch,
    OutOfOrderSequenceNumber,
    ProducerFenced,
)


class ProducerMetrics:
    """Counters since the creation of the producer, and samples of the last 30 s for rates and averages."""

    def __init__(self) -> None:
        self.records = SampledStat()
        self.bytes = SampledStat()
        self.batch_sizes = SampledStat()
        self.batch_records = SampledStat()
        self.requests = SampledStat()
        self.latency = SampledStat()
        self.sent = 0
        self.sent_bytes = 0
        self.delivered = 0
        self.retries = 0
        self.errors = 0
        self.epoch_bumps = 0
        self.by_error: dict[type[BrokerError], int] = {}

    def on_sent(self, batch: ProducerBatch, size_bytes: int, now_ms: float) -> None:
        """Count an attempt to send a batch. Repeated attempts count too."""
        self.sent += batch.record_count
        self.sent_bytes += size_bytes
        self.records.add(batch.record_count, now_ms)
        self.bytes.add(size_bytes, now_ms)
        self.batch_sizes.add(size_bytes, now_ms)
        self.batch_records.add(batch.record_count, now_ms)

    def on_error(self, error: BrokerError) -> None:
        """Count an error in a response."""
        self.by_error[type(error)] = self.by_error.get(type(error), 0) + 1

    def to_dict(self, now_ms: float, buffered_bytes: int, buffer_bytes: int) -> dict[str, float]:
        """Return all metrics by name. Rates are per second over the last 30 s, times in milliseconds."""
        fenced = self.by_error.get(InvalidProducerEpoch, 0) + self.by_error.get(ProducerFenced, 0)
        return {
            "record-send-rate": self.records.rate(now_ms),
            "record-send-total": self.sent,
            "byte-rate": self.bytes.rate(now_ms),
            "byte-total": self.sent_bytes,
            "record-delivered-total": self.delivered,
            "record-retry-total": self.retries,
            "record-error-total": self.errors,
            "produce-request-rate": self.requests.count_rate(now_ms),
            "request-latency-avg": self.latency.average(now_ms),
            "request-latency-max": self.latency.largest(now_ms),
            "batch-size-avg": self.batch_sizes.average(now_ms),
            "records-per-request-avg": self.batch_records.average(now_ms),
            "buffer-total-bytes": buffer_bytes,
            "buffer-available-bytes": buffer_bytes - buffered_bytes,
            "duplicate-sequence-total": self.by_error.get(DuplicateSequenceNumber, 0),
            "out-of-order-sequence-total": self.by_error.get(OutOfOrderSequenceNumber, 0),
            "producer-fenced-total": fenced,
            "epoch-bump-total": self.epoch_bumps,
        }


METRICS = {
    "record-send-rate": ("rate", "records/s", "Records sent, retries included."),
    "record-send-total": ("counter", "records", "Records sent, retries included."),
    "byte-rate": ("rate", "bytes/s", "Bytes of batches sent, after compression, retries included."),
    "byte-total": ("counter", "bytes", "Bytes of batches sent, after compression, retries included."),
    "record-delivered-total": ("counter", "records", "Records reported as delivered."),
    "record-retry-total": ("counter", "records", "Records of batches that were sent again."),
    "record-error-total": (
        "counter",
        "records",
        "Records that failed. Some of them may be stored (OutcomeUnknown).",
    ),
    "produce-request-rate": ("rate", "requests/s", "Produce requests sent."),
    "request-latency-avg": ("average", "ms", "Time from a Produce request to its response."),
    "request-latency-max": ("maximum", "ms", "Time from a Produce request to its response."),
    "batch-size-avg": ("average", "bytes", "Size of a batch after compression."),
    "records-per-request-avg": ("average", "records", "Number of records in a batch."),
    "buffer-total-bytes": ("gauge", "bytes", "The setting buffer.memory."),
    "buffer-available-bytes": ("gauge", "bytes", "Free bytes of buffer.memory."),
    "duplicate-sequence-total": ("counter", "responses", "Responses with DUPLICATE_SEQUENCE_NUMBER."),
    "out-of-order-sequence-total": ("counter", "responses", "Responses with OUT_OF_ORDER_SEQUENCE_NUMBER."),
    "producer-fenced-total": (
        "counter",
        "responses",
        "Responses with INVALID_PRODUCER_EPOCH or PRODUCER_FENCED.",
    ),
    "epoch-bump-total": (
        "counter",
        "epochs",
        "Times that the producer raised its epoch.",
    ),
}
"""Name -> kind, unit, meaning: what `to_dict` returns, for docs/reference/metrics.md."""
