"""The child process that runs the streaming query. Its supervisor survives any failure of the child.

The first line of standard input is the job, as JSON. Any further line is a request to stop. The end of the
input means that the supervisor has ended, and ends the child too. The child writes its events to a pipe, as
one line of JSON each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oncelog.errors import ConfigError
from oncelog.pipeline.progress import batch_summary
from oncelog.pipeline.restart_policy import ExitKind, classify_exit, headline
from oncelog.spark.session import check_spark, local_session
from oncelog.spark.sink.sink_metrics import FILE_VARIABLE, SinkMetrics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery, StreamingQueryListener

_PY4J_ERRORS = {"Py4JError", "Py4JNetworkError", "ConnectionRefusedError", "ConnectionResetError"}
"""Errors of calls into Spark after its JVM has died. Spark itself wraps network errors in its own classes."""
_POLL_S, _QUICK_POLL_S = 0.2, 0.02
SendEvent = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Job:
    """The job of a child: the file with the query, and Spark's master and configuration.

    `query_id`: the query's id in an earlier run, which must not change. `report_fd`: the file descriptor of
    the pipe for events.
    """

    file: str
    master: str
    conf: dict[str, str]
    report_fd: int
    query_id: str | None = None


def main() -> None:
    """Run the job. Errors of the job are not raised, but sent to the supervisor as events."""
    lines = _lines(0)
    job = Job(**json.loads(next(lines)))
    reports = os.fdopen(job.report_fd, "w")
    # Use a lock, because Spark calls its listener in another thread, which also sends events.
    lock = threading.Lock()

    def send_event(event: str, **fields: Any) -> None:
        with lock:
            print(json.dumps({"event": event, **fields}), file=reports, flush=True)

    stop = threading.Event()
    threading.Thread(target=_watch_stdin, args=(lines, stop), daemon=True).start()
    started = threading.Event()
    try:
        make = _load(Path(job.file))
        with _sink_metrics() as metrics, local_session(Path(job.file).stem, job.master, job.conf) as spark:
            try:
                _run(spark, make, job, stop, started, send_event, metrics)
            except BaseException as error:
                # Send the event before the session is stopped: without its JVM, the session may take long to
                # stop.
                send_event("ended", **_exit_fields(error, started.is_set()))
            else:
                send_event("ended", ending=ExitKind.DONE.value)
    except BaseException as error:
        send_event("ended", **_exit_fields(error, started.is_set()))


def _lines(fd: int) -> Iterator[str]:
    """Yield the lines of a file descriptor.

    sys.stdin is not used: a thread that is blocked in it would delay the exit of the process.
    """
    partial = b""
    while data := os.read(fd, 1 << 16):
        *lines, partial = (partial + data).split(b"\n")
        yield from (line.decode() for line in lines)


def _watch_stdin(lines: Iterator[str], stop: threading.Event) -> None:
    for _ in lines:
        stop.set()
    # The supervisor has ended, so kill this process and its JVM. A new supervisor may already be starting the
    # same query, which must not run twice. See test_a_supervisor_that_is_killed_takes_its_query_along.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _exit_fields(error: BaseException, is_started: bool) -> dict[str, str]:
    types = [base.__name__ for base in type(error).__mro__]
    kind = classify_exit(types, str(error), is_started=is_started)
    # Print the error only before the query has started. Afterwards Spark itself writes it to standard error.
    if not is_started:
        traceback.print_exception(error)
    message = headline(f"{types[0]}: {error}")
    if is_started and types[0] in _PY4J_ERRORS:
        message = f"Spark's JVM has died ({message})"
    return {"ending": kind.value, "error": message}


def _load(path: Path) -> Callable[[SparkSession, Mapping[str, str]], StreamingQuery]:
    """Import a file and return its function `pipeline`. Exceptions of the file's code are passed on.

    Raises MissingDependency if Spark is missing, and ConfigError if the file has no such function.
    """
    check_spark()
    from pyspark import cloudpickle

    # Add a prefix to the module's name, because the file may have the name of an installed package.
    name = f"pipeline_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    # Pickle the file's functions by value: Spark's executors cannot import the file, so references by name
    # would fail.
    cloudpickle.register_pickle_by_value(module)
    spec.loader.exec_module(module)
    pipeline = getattr(module, "pipeline", None)
    if not callable(pipeline):
        raise ConfigError(f"{path} defines no function pipeline(spark, settings)")
    return pipeline  # type: ignore[no-any-return]


def _run(
    spark: SparkSession,
    make: Callable[[SparkSession, Mapping[str, str]], StreamingQuery],
    job: Job,
    stop: threading.Event,
    started: threading.Event,
    send_event: SendEvent,
    metrics: _MetricsPipe | None,
) -> None:
    batch_ended = threading.Event()
    spark.streams.addListener(_listener(send_event, metrics, batch_ended))
    query = make(spark, os.environ)
    if not hasattr(query, "awaitTermination"):
        raise ConfigError(f"pipeline() of {job.file} returned {query!r}, but must return the started query")
    started.set()
    if job.query_id is not None and str(query.id) != job.query_id:
        query.stop()
        raise ConfigError(
            f"the query has another id ({query.id}) than in the run before ({job.query_id}): its checkpoint "
            "was not kept, so it would write everything again. Set checkpointLocation to a fixed place"
        )
    send_event("started", query_id=str(query.id), name=query.name)
    while not query.awaitTermination(_POLL_S):
        if stop.is_set():
            _stop_between_batches(query, batch_ended)
            break


def _stop_between_batches(query: StreamingQuery, batch_ended: threading.Event) -> None:
    """Wait for the end of the running micro-batch, if any, and stop the query.

    Raises the query's exception if the query fails first. Spark itself cannot stop a query between batches.
    If a batch begins just before the stop, Spark interrupts this batch, and the next run repeats it.
    """
    batch_ended.clear()
    while query.isActive and query.status["isTriggerActive"] and not batch_ended.is_set():
        time.sleep(_QUICK_POLL_S)
    if not query.isActive and (error := query.exception()) is not None:
        raise error
    query.stop()


def _listener(
    send_event: SendEvent, metrics: _MetricsPipe | None, batch_ended: threading.Event
) -> StreamingQueryListener:
    from pyspark.sql.streaming import StreamingQueryListener

    class Listener(StreamingQueryListener):  # type: ignore[misc]
        def onQueryStarted(self, event: Any) -> None: ...
        def onQueryIdle(self, event: Any) -> None: ...
        def onQueryTerminated(self, event: Any) -> None: ...

        def onQueryProgress(self, event: Any) -> None:
            batch_ended.set()
            progress = json.loads(event.progress.json)
            sink_metrics = metrics.of(progress["id"], progress["batchId"]) if metrics else None
            send_event("batch", **batch_summary(progress, sink_metrics))

    return Listener()


class _MetricsPipe:
    """The named pipe to which the sink writes its metrics. Spark runs the sink in a separate process."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._newest: dict[tuple[str, int], SinkMetrics] = {}
        # Open the pipe also for writing. Otherwise reading would end when the sink closes the pipe.
        self._lines = os.fdopen(os.open(path, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)

    def of(self, query_id: str, batch_id: int) -> SinkMetrics | None:
        """Return the sink's metrics of a batch. Return None if there are none, because the sink is not
        Oncelog's.
        """
        for line in (self._lines.read(1 << 20) or b"").decode().splitlines():
            metrics = SinkMetrics.decode(line)
            self._newest[metrics.name, metrics.batch_id] = metrics
        result = self._newest.pop((query_id, batch_id), None)
        # Drop entries up to this batch id. They belong to batches that failed after their sink had finished.
        self._newest = {key: metrics for key, metrics in self._newest.items() if metrics.batch_id > batch_id}
        return result


@contextmanager
def _sink_metrics() -> Iterator[_MetricsPipe | None]:
    """Yield the pipe for the sink's metrics.

    Yield None if the user has set a file for the metrics (FILE_VARIABLE).
    """
    if FILE_VARIABLE in os.environ:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="oncelog-pipeline-") as directory:
        path = Path(directory) / "sink-metrics"
        pipe = _MetricsPipe(path)
        os.environ[FILE_VARIABLE] = str(path)
        yield pipe


if __name__ == "__main__":
    main()
