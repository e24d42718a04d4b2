"""The rows that Spark sends to a task, with a check that all of them have arrived.

If a step before the task fails in the middle of its rows, Spark closes the connection to the task's Python
worker. If the connection ends between two batches, pyarrow takes this for the end of the rows. A sink that
commits in its tasks would then commit only a part of the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oncelog.spark.sink.decisions import SinkError

if TYPE_CHECKING:
    import pyarrow as pa

_WORKER_FILE = "pyspark/worker.py"
_STREAM_NAMES = ("input_data_stream", "infile")
"""Names of the local variable of Spark's worker program that holds the connection: since Spark 4.3, and
before.
"""


class TaskInput:
    """The batches of a task's rows.

    If `is_checked` is True, `batches` raises SinkError when Spark has cut off the rows. `is_checked` is False
    if the worker's connection is not found: outside of a task, or in a version of Spark whose worker program
    is different.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._stream = _worker_stream()
        self.is_checked = self._stream is not None
        self.batches = self._complete(batches)

    def _complete(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        # After the last row, Spark sends a number that tells the worker to finish. Without it, the rows are
        # not complete.
        if self._stream is not None and not self._stream.peek(1):
            raise SinkError("Spark cut off the rows, because a step before the sink has failed")


def _worker_stream() -> Any:
    """Return the connection from which Spark's worker program reads the rows; None if it is not found.

    Spark has no public way to get the connection, so this looks for it in the local variables of the calling
    functions.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_filename.replace("\\", "/").endswith(_WORKER_FILE):
            for name in _STREAM_NAMES:
                stream = frame.f_locals.get(name)
                if hasattr(stream, "peek"):
                    return stream
    return None
