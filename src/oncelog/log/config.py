"""The settings of a topic that its partitions use, as typed fields. Their table is in `oncelog/config.py`."""

from __future__ import annotations

from dataclasses import dataclass

from oncelog.config import INT64_MAX, TOPIC
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.settings import Settings
from oncelog.types import Compression, TimestampType

DAY_MS = 86_400_000
_MAX_INDEX_INTERVAL_BYTES = 1 << 16
"""The most bytes of log between two index entries, whatever index.interval.bytes is.

A fetch reads the headers between an entry and its offset, in the broker's thread. A gigabyte of small batches
without an entry takes half a minute. See test_a_fetch_reads_few_headers_whatever_the_index_interval_is.
"""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The settings of one topic, with Kafka's names. `oncelog.config.TOPIC` has their meanings and defaults.

    `compression` None keeps the producer's codec. `compression_level` None uses the codec's default; for lz4,
    that is the fast mode, as in Kafka. `retention_ms` and `retention_bytes` None mean unlimited. `limits` are
    internal limits of the broker, not settings of the topic.
    """

    segment_bytes: int
    segment_ms: int
    segment_index_bytes: int
    index_interval_bytes: int
    max_message_bytes: int
    compression: Compression | None
    compression_level: int | None
    timestamp_type: TimestampType
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int
    retention_ms: int | None
    retention_bytes: int | None
    is_compacted: bool
    is_deleted: bool
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int
    delete_retention_ms: int
    flush_messages: int
    producer_expiration_ms: int
    limits: Limits = DEFAULT_LIMITS

    @property
    def stores_as_sent(self) -> bool:
        """True if batches are stored as their producers sent them, and are visible without a flush."""
        return (
            self.compression is None
            and not self.is_compacted
            and self.timestamp_type is TimestampType.CREATE_TIME
            and self.flush_messages == INT64_MAX
        )

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        producer_expiration_ms: int = DAY_MS,
        limits: Limits = DEFAULT_LIMITS,
    ) -> LogConfig:
        """Return the configuration for parsed topic settings.

        `producer_expiration_ms` is the broker's producer.id.expiration.ms.
        """
        codec = settings["compression.type"]
        policies = settings["cleanup.policy"]
        is_append_time = settings["message.timestamp.type"] == "LogAppendTime"
        segment_ms = settings["segment.ms"]
        if "compact" in policies:
            # Only closed segments are compacted. So a segment must roll within the maximum compaction lag.
            segment_ms = min(segment_ms, settings["max.compaction.lag.ms"])
        return cls(
            segment_bytes=settings["internal.segment.bytes"] or settings["segment.bytes"],
            segment_ms=segment_ms,
            segment_index_bytes=settings["segment.index.bytes"],
            index_interval_bytes=min(settings["index.interval.bytes"], _MAX_INDEX_INTERVAL_BYTES),
            max_message_bytes=settings["max.message.bytes"],
            compression=None if codec == "producer" else _CODECS[codec],
            compression_level=_level(settings, codec),
            timestamp_type=TimestampType.LOG_APPEND_TIME if is_append_time else TimestampType.CREATE_TIME,
            timestamp_before_max_ms=settings["message.timestamp.before.max.ms"],
            timestamp_after_max_ms=settings["message.timestamp.after.max.ms"],
            retention_ms=_unless_negative(settings["retention.ms"]),
            retention_bytes=_unless_negative(settings["retention.bytes"]),
            is_compacted="compact" in policies,
            is_deleted="delete" in policies,
            min_cleanable_dirty_ratio=settings["min.cleanable.dirty.ratio"],
            min_compaction_lag_ms=settings["min.compaction.lag.ms"],
            max_compaction_lag_ms=settings["max.compaction.lag.ms"],
            delete_retention_ms=settings["delete.retention.ms"],
            flush_messages=settings["flush.messages"],
            producer_expiration_ms=producer_expiration_ms,
            limits=limits,
        )

    @classmethod
    def default(cls) -> LogConfig:
        """Return a configuration with every setting at its default."""
        return cls.from_settings(TOPIC.parse({}))


_CODECS = {
    "uncompressed": Compression.NONE,
    "gzip": Compression.GZIP,
    "snappy": Compression.SNAPPY,
    "lz4": Compression.LZ4,
    "zstd": Compression.ZSTD,
}


def _level(settings: Settings, codec: str) -> int | None:
    key = f"compression.{codec}.level"
    row = TOPIC.get(key)
    if row is None or settings[key] == row.default:
        return None
    level: int = settings[key]
    return level


def _unless_negative(value: int) -> int | None:
    return None if value < 0 else value
