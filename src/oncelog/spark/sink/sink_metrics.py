"""What the sink did in each micro-batch: rows, bytes, lanes that were there already, time of the commit.

Spark has no place for a Python sink's own figures in StreamingQueryProgress. So the driver writes them as a
line of JSON to the file that the environment variable ONCELOG_SINK_METRICS names: a file grows, a named pipe
is written to while somebody reads it. Set it before Spark starts. The logger `oncelog.spark` has them too.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Self

from oncelog.spark.sink.task import LaneReport

FILE_VARIABLE = "ONCELOG_SINK_METRICS"
_log = logging.getLogger("oncelog.spark")


@dataclass(frozen=True, slots=True)
class SinkMetrics:
    """One micro-batch (or batch write), whose sink is called `name`: the query's id, or the writeId.

    `rows`, `size_bytes` (of keys and values): what the batch holds; `lanes_skipped` of `lanes` had been
    written by an earlier attempt. `commit_seconds`: the slowest lane's, flush included. `write_atomic` is one
    lane, which is not read again, so of unknown size (0), if it is skipped.
    """

    name: str
    batch_id: int
    rows: int
    size_bytes: int
    lanes: int
    lanes_skipped: int
    commit_seconds: float

    @classmethod
    def of(cls, name: str, batch_id: int, reports: Iterable[LaneReport]) -> Self:
        """Summed over the lanes."""
        lanes = list(reports)
        return cls(
            name,
            batch_id,
            rows=sum(lane.sum.rows for lane in lanes),
            size_bytes=sum(lane.size_bytes for lane in lanes),
            lanes=len(lanes),
            lanes_skipped=sum(lane.was_there for lane in lanes),
            commit_seconds=round(max((lane.commit_seconds for lane in lanes), default=0.0), 3),
        )

    @classmethod
    def decode(cls, line: str) -> Self:
        """From a line of the file."""
        return cls(**json.loads(line))


def publish(metrics: SinkMetrics) -> None:
    """Write the line. That nobody reads it, or that it cannot be written, must not fail the batch."""
    _log.info("%s", metrics)
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return
    line = json.dumps(asdict(metrics)).encode() + b"\n"
    try:
        # Without waiting: a named pipe that nobody reads, or that is full, takes nothing.
        at = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            os.write(at, line)
        finally:
            os.close(at)
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
"""Field -> unit, meaning: what one line of the file holds, for docs/reference/metrics.md."""
