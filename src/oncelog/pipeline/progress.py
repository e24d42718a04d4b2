"""The summary of one micro-batch, from Spark's StreamingQueryProgress and the sink's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oncelog.spark.sink.sink_metrics import SinkMetrics


def batch_summary(progress: Mapping[str, Any], sink: SinkMetrics | None) -> dict[str, Any]:
    """Return the fields of a batch for the log line and the status file, without fields of unknown value.

    `lag` is the number of offsets in the sources that no batch has read yet. Sources that do not report their
    offsets are not counted.
    """
    rows_out = progress["sink"].get("numOutputRows", -1)
    fields = {
        "batch_id": progress["batchId"],
        "rows_in": progress["numInputRows"],
        "rows_out": sink.rows if sink else rows_out if rows_out >= 0 else None,
        "seconds": round(progress["batchDuration"] / 1000, 3),
        "lag": _lag(progress["sources"]),
    }
    if sink:
        fields |= {
            "bytes_out": sink.size_bytes,
            "commit_seconds": sink.commit_seconds,
            "lanes": sink.lanes,
            "lanes_skipped": sink.lanes_skipped,
        }
    return {name: value for name, value in fields.items() if value is not None}


def _lag(sources: list[Mapping[str, Any]]) -> int | None:
    lags = [_source_lag(source.get("endOffset"), source.get("latestOffset")) for source in sources]
    known_lags = [lag for lag in lags if lag is not None]
    return sum(known_lags) if known_lags else None


def _source_lag(end: Any, latest: Any) -> int | None:
    """Return the lag of one source in offsets, or None if it is unknown.

    `end`, the end of the batch, and `latest`, the end of the source, are {topic: {partition: offset}}, as in
    Kafka sources.
    """
    if not (isinstance(end, Mapping) and isinstance(latest, Mapping)):
        return None
    try:
        return sum(
            max(0, int(offset) - int(end.get(topic, {}).get(partition, 0)))
            for topic, partitions in latest.items()
            if not topic.startswith("@")
            for partition, offset in partitions.items()
        )
    except (AttributeError, TypeError, ValueError):
        # Another kind of source: its offsets are any JSON. See
        # test_a_source_with_offsets_of_another_form_has_no_lag.
        return None
