"""Metrics of the sink for each micro-batch: rows, bytes, skipped tasks, time of the commit.

StreamingQueryProgress has no place for metrics of a sink written in Python. So the driver appends a line of
JSON to the file or named pipe whose path is in the environment variable ONCELOG_SINK_METRICS, and logs the
same metrics to `oncelog.spark`. Set the variable before Spark starts.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Self

from oncelog.spark.sink.task import TaskReport

FILE_VARIABLE = "ONCELOG_SINK_METRICS"
_log = logging.getLogger("oncelog.spark")


@dataclass(frozen=True, slots=True)
class SinkMetrics:
    """Metrics of one micro-batch or batch write.

    `name` is the query's id, the writeId, or the name given to write_atomic. `rows` counts the rows of the
    batch, and `size_bytes` the bytes of their keys and values. `lanes` is the number of tasks.
    `lanes_skipped` is the number of tasks whose rows an earlier attempt had committed. `commit_seconds` is
    the time of the slowest task's commit, including its flush. A call of `write_atomic` counts as one task.
    If the call is skipped, the size is unknown (0).
    """

    name: str
    batch_id: int
    rows: int
    size_bytes: int
    lanes: int
    lanes_skipped: int
    commit_seconds: float

    @classmethod
    def of(cls, name: str, batch_id: int, reports: Iterable[TaskReport]) -> Self:
        """Return the metrics of the whole batch, from the tasks' reports."""
        reports = list(reports)
        return cls(
            name,
            batch_id,
            rows=sum(report.sum.rows for report in reports),
            size_bytes=sum(report.size_bytes for report in reports),
            lanes=len(reports),
            lanes_skipped=sum(report.already_committed for report in reports),
            commit_seconds=round(max((report.commit_seconds for report in reports), default=0.0), 3),
        )

    @classmethod
    def decode(cls, line: str) -> Self:
        """Return the metrics in a line of the metrics file."""
        return cls(**json.loads(line))


def publish(metrics: SinkMetrics) -> None:
    """Log the metrics, and append them to the file that the environment variable names, if it is set.

    If the file cannot be written, only log the error: the batch must not fail.
    """
    _log.info("%s", metrics)
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return
    line = json.dumps(asdict(metrics)).encode() + b"\n"
    try:
        # With O_NONBLOCK, a write to a named pipe that is full or has no reader fails instead of blocking the
        # driver.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.info("%s=%s: %s", FILE_VARIABLE, path, error)


METRICS = {
    "name": ("", "The query's id for a stream, the writeId for a batch, the name given to write_atomic."),
    "batch_id": ("", "Number of the micro-batch; 0 for a batch write."),
    "rows": ("rows", "Rows of the micro-batch."),
    "size_bytes": ("bytes", "Bytes of keys and values; 0 for a skipped write_atomic."),
    "lanes": ("tasks", "Write tasks of the micro-batch, each with its own transaction."),
    "lanes_skipped": ("tasks", "Tasks whose rows an earlier attempt had committed."),
    "commit_seconds": ("seconds", "Time of the slowest task's commit, its flush included."),
}
"""Each field's unit and meaning. tools/reference.py prints them in docs/reference/metrics.md."""
