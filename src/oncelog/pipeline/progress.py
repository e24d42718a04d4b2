"""What one micro-batch did, from Spark's StreamingQueryProgress and the sink's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oncelog.spark.sink.sink_metrics import SinkMetrics


def batch_summary(progress: Mapping[str, Any], sink: SinkMetrics | None) -> dict[str, Any]:
    """The fields of the log line and the status, without those that nobody knows.

    `lag`: offsets that the sources had and no batch has read yet, where sources tell both.
    """
    rows_out = progress["sink"].get("numOutputRows", -1)
    found = {
        "batch_id": progress["batchId"],
        "rows_in": progress["numInputRows"],
        "rows_out": sink.rows if sink else rows_out if rows_out >= 0 else None,
        "seconds": round(progress["batchDuration"] / 1000, 3),
        "lag": _lag(progress["sources"]),
    }
    if sink:
        found |= {
            "bytes_out": sink.size_bytes,
            "commit_seconds": sink.commit_seconds,
            "lanes": sink.lanes,
            "lanes_skipped": sink.lanes_skipped,
        }
    return {name: value for name, value in found.items() if value is not None}


def _lag(sources: list[Mapping[str, Any]]) -> int | None:
    lags = [_behind(each.get("endOffset"), each.get("latestOffset")) for each in sources]
    known = [lag for lag in lags if lag is not None]
    return sum(known) if known else None


def _behind(end: Any, latest: Any) -> int | None:
    """Both {topic: {partition: offset}}, as our source and Spark's Kafka source have them."""
    if not (isinstance(end, Mapping) and isinstance(latest, Mapping)):
        return None
    return sum(
        max(0, int(offset) - int(end.get(topic, {}).get(partition, 0)))
        for topic, partitions in latest.items()
        if not topic.startswith("@")
        for partition, offset in partitions.items()
    )
