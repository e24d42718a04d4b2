"""The counters and gauges of the broker (behaviour I22), with their Prometheus names."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from oncelog.rules.limits.connections import CloseReason
from oncelog.rules.limits.quotas import QUOTAS

LATENCY_BUCKETS_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


APPEND_ERRORS = (
    "CORRUPT_MESSAGE",
    "INVALID_PRODUCER_EPOCH",
    "INVALID_RECORD",
    "KAFKA_STORAGE_ERROR",
    "MESSAGE_TOO_LARGE",
    "OUT_OF_ORDER_SEQUENCE_NUMBER",
)
"""Errors of appends whose counters exist from the start. Prometheus sees no increase of a counter between its
absence and its first value, so the alert on KAFKA_STORAGE_ERROR would miss the first errors. See
test_each_metric_of_the_alerts_and_of_the_dashboard_is_scraped.
"""


@dataclass(slots=True)
class Histogram:
    """The durations in seconds of one API's requests, in buckets.

    A duration begins when the server starts to handle the request and those received with it. It ends when
    the response is encoded.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_SECONDS) + 1))
    sum_seconds: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class Metrics:
    """Counters since the start of the broker. Gauges are computed when the metrics are read."""

    duplicates_acknowledged: int = 0
    out_of_order_refused: int = 0
    fenced_refused: int = 0
    batches_stored: int = 0
    records_stored: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    connections_opened: int = 0
    connections_closed_for_cause: int = 0
    authentications_failed: int = 0
    producer_ids_given: int = 0
    producers_expired: int = 0
    transactions_timed_out: int = 0
    append_errors: defaultdict[str, int] = field(
        default_factory=lambda: defaultdict(int, dict.fromkeys(APPEND_ERRORS, 0))
    )
    connections_ended: dict[CloseReason, int] = field(default_factory=lambda: dict.fromkeys(CloseReason, 0))
    throttled: dict[str, int] = field(default_factory=lambda: dict.fromkeys(QUOTAS, 0))
    latencies: dict[str, Histogram] = field(default_factory=dict)

    def observe(self, api_name: str, seconds: float) -> None:
        """Count one request of an API, with its duration in seconds."""
        histogram = self.latencies.get(api_name)
        if histogram is None:
            histogram = self.latencies[api_name] = Histogram()
        histogram.counts[bisect_left(LATENCY_BUCKETS_SECONDS, seconds)] += 1
        histogram.sum_seconds += seconds


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family of Prometheus. Each sample is (suffix, labels, value)."""

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, tuple[tuple[str, str], ...], float], ...]


_COUNTERS = (
    ("duplicates_acknowledged", "Duplicate batches, acknowledged again without storing."),
    ("out_of_order_refused", "Batches refused with OUT_OF_ORDER_SEQUENCE_NUMBER."),
    ("fenced_refused", "Batches refused because their producer epoch was older than the newest one."),
    ("batches_stored", "Batches appended."),
    ("records_stored", "Records appended."),
    ("bytes_received", "Bytes read from connections."),
    ("bytes_sent", "Bytes written to connections."),
    ("connections_opened", "Connections accepted."),
    (
        "connections_closed_for_cause",
        "Connections closed by the broker: bad bytes, too large, idle, failed acks=0.",
    ),
    ("authentications_failed", "SASL authentications refused."),
    ("producer_ids_given", "Producer ids handed out by InitProducerId."),
    ("producers_expired", "Producer states expired after producer.id.expiration.ms."),
    ("transactions_timed_out", "Transactions the coordinator aborted after their timeout."),
)


def families(metrics: Metrics, gauges: dict[str, float]) -> Iterator[Family]:
    """Yield all metric families, counters first. `gauges` is the result of `BrokerState.gauges`."""
    for attribute, text in _COUNTERS:
        yield Family(f"oncelog_{attribute}_total", "counter", text, (("", (), getattr(metrics, attribute)),))
    errors = tuple(("", (("error", name),), n) for name, n in sorted(metrics.append_errors.items()))
    yield Family("oncelog_append_errors_total", "counter", "Batches refused, by error code name.", errors)
    ended = tuple(("", (("bound", name.value),), n) for name, n in metrics.connections_ended.items())
    text = "Connections refused or closed, by the limit that they reached (docs/security.md)."
    yield Family("oncelog_connections_ended_total", "counter", text, ended)
    throttled = tuple(("", (("quota", key),), n) for key, n in metrics.throttled.items())
    yield Family("oncelog_throttled_total", "counter", "Responses throttled, by quota.", throttled)
    for name, value in gauges.items():
        yield Family(f"oncelog_{name}", "gauge", GAUGES[name], (("", (), value),))
    samples = [
        sample for api, h in sorted(metrics.latencies.items()) for sample in _histogram_samples(api, h)
    ]
    yield Family(
        "oncelog_request_duration_seconds", "histogram", "Requests answered, by API.", tuple(samples)
    )


GAUGES = {
    "producer_ids_active": "Producer states, summed over partitions.",
    "partitions": "Partitions on this node.",
    "partitions_offline": "Offline partitions, which refuse appends until a restart because a sync failed.",
    "disk_free_bytes": "Free bytes on the disk of the data directory.",
    "connections": "Open connections.",
    "request_bytes_held": "Bytes of requests that are queued on connections.",
    "response_bytes_held": "Bytes of responses that clients have not yet received, of all connections.",
    "fetches_waiting": "Long-poll fetches waiting for data.",
    "transactions_open": "Ongoing transactions.",
    "records_held_back": "Offsets from the last stable offset to the high watermark, of all partitions.",
    "partitions_held_back": "Partitions whose last stable offset is below the high watermark.",
}

MAX_NAMED_PARTITIONS = 5_000
"""Maximum number of partitions that have metrics of their own."""


class PartitionOffsets(NamedTuple):
    """The offsets of a partition, and the size of its log in bytes, for the metrics by partition."""

    topic: str
    partition: int
    start: int
    stable: int
    end: int
    size_bytes: int


_BY_PARTITION = (
    ("start_offset", "First offset of the log."),
    ("stable_offset", "Last stable offset: read_committed readers see what is below it."),
    ("end_offset", "High watermark: readers see what is below it."),
    ("size_bytes", "Size of the log's segments."),
)


def partition_families(partitions: Iterable[PartitionOffsets]) -> Iterator[Family]:
    """Yield the metric families with a sample for each partition, which the setting oncelog.metrics.names
    enables.
    """
    rows = list(partitions)
    for index, (name, text) in enumerate(_BY_PARTITION, 2):
        samples = tuple(
            ("", (("topic", row.topic), ("partition", str(row.partition))), float(row[index])) for row in rows
        )
        yield Family(f"oncelog_partition_{name}", "gauge", text, samples)


def _histogram_samples(
    api: str, histogram: Histogram
) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
    running = 0
    bounds = (*map(str, LATENCY_BUCKETS_SECONDS), "+Inf")
    for bound, count in zip(bounds, histogram.counts, strict=True):
        running += count
        yield "_bucket", (("api", api), ("le", bound)), running
    yield "_sum", (("api", api),), histogram.sum_seconds
    yield "_count", (("api", api),), running


def prometheus_lines(all_families: Iterable[Family]) -> Iterator[str]:
    """Yield the lines of metric families in Prometheus' text exposition format, version 0.0.4."""
    for family in all_families:
        yield f"# HELP {family.name} {family.help}\n"
        yield f"# TYPE {family.name} {family.kind}\n"
        for suffix, labels, value in family.samples:
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            labels_text = f"{{{shown}}}" if shown else ""
            yield f"{family.name}{suffix}{labels_text} {_number_text(value)}\n"


def _escaped(text: str) -> str:
    """Escape a label's value for the text format."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number_text(value: float) -> str:
    """Return a number with all its digits. If counters were rounded, Prometheus' rate() would show zeros and
    spikes.
    """
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def to_dict(metrics: Metrics, gauges: dict[str, float]) -> dict[str, float]:
    """Return the metrics as a flat dict, for `Broker.metrics()`.

    Requests by API are `requests.<Api>` and `request_seconds.<Api>`.
    """
    flat: dict[str, float] = {attribute: float(getattr(metrics, attribute)) for attribute, _ in _COUNTERS}
    flat.update({f"append_errors.{name}": float(n) for name, n in metrics.append_errors.items()})
    flat.update(
        {f"connections_ended.{name.value}": float(n) for name, n in metrics.connections_ended.items()}
    )
    flat.update({f"throttled.{key}": float(n) for key, n in metrics.throttled.items()})
    flat.update(gauges)
    for api, histogram in metrics.latencies.items():
        flat[f"requests.{api}"] = float(histogram.count)
        flat[f"request_seconds.{api}"] = histogram.sum_seconds
    return flat


UNITS = {
    "duplicates_acknowledged_total": "batches",
    "out_of_order_refused_total": "batches",
    "fenced_refused_total": "batches",
    "batches_stored_total": "batches",
    "records_stored_total": "records",
    "bytes_received_total": "bytes",
    "bytes_sent_total": "bytes",
    "connections_opened_total": "connections",
    "connections_closed_for_cause_total": "connections",
    "authentications_failed_total": "authentications",
    "producer_ids_given_total": "producer ids",
    "producers_expired_total": "producer states",
    "transactions_timed_out_total": "transactions",
    "append_errors_total": "batches",
    "connections_ended_total": "connections",
    "throttled_total": "responses",
    "producer_ids_active": "producer states",
    "partitions": "partitions",
    "partitions_offline": "partitions",
    "disk_free_bytes": "bytes",
    "connections": "connections",
    "request_bytes_held": "bytes",
    "response_bytes_held": "bytes",
    "fetches_waiting": "requests",
    "transactions_open": "transactions",
    "records_held_back": "offsets",
    "partitions_held_back": "partitions",
    "partition_start_offset": "offset",
    "partition_stable_offset": "offset",
    "partition_end_offset": "offset",
    "partition_size_bytes": "bytes",
    "request_duration_seconds": "seconds",
}
"""The unit of each metric family, by its name without `oncelog_`. Used in docs/reference/metrics.md."""

LABELS = {
    "api": "the Kafka API, for example Produce",
    "bound": "the limit that the connection met; see docs/security.md",
    "error": "Kafka's name of the error code",
    "le": "upper bound of the bucket in seconds",
    "partition": "number of the partition",
    "quota": "the client quota, for example producer_byte_rate",
    "topic": "name of the topic",
}
"""The meaning of each label's values."""
