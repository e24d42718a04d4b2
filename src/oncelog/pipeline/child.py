"""The process that runs the query, so that whatever dies in it, the supervisor lives.

Standard input brings the job and then the word to stop, and its end means that the supervisor is gone; one
line of JSON per event goes back through a pipe.
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
from oncelog.pipeline.restart_policy import Ending, decide_ending, headline
from oncelog.spark.session import check_spark, local_session
from oncelog.spark.sink.sink_metrics import FILE_VARIABLE, SinkMetrics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery, StreamingQueryListener

_OF_PY4J = {"Py4JError", "Py4JNetworkError", "ConnectionRefusedError", "ConnectionResetError"}
"""What calls into Spark raise when its JVM is gone; errors of the network elsewhere come as Spark's own."""
_POLL_S, _QUICK_POLL_S = 0.2, 0.02
Tell = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Job:
    """What the child is to do. `query_id`: the query's in an earlier run; `report_fd`: where events go."""

    file: str
    master: str
    conf: dict[str, str]
    report_fd: int
    query_id: str | None = None


def main() -> None:
    """The child's whole life. It never raises: what went wrong is an event."""
    lines = _lines(0)
    job = Job(**json.loads(next(lines)))
    reports = os.fdopen(job.report_fd, "w")
    lock = threading.Lock()  # Spark's listener has a thread of its own

    def tell(event: str, **fields: Any) -> None:
        with lock:
            print(json.dumps({"event": event, **fields}), file=reports, flush=True)

    stop = threading.Event()
    threading.Thread(target=_obey, args=(lines, stop), daemon=True).start()
    started = threading.Event()
    try:
        make = _load(Path(job.file))
        with _sink_metrics() as metrics, local_session(Path(job.file).stem, job.master, job.conf) as spark:
            try:
                _run(spark, make, job, stop, started, tell, metrics)
            except BaseException as error:
                # Told before the session is stopped: without its JVM that may take long.
                tell("ended", **_told(error, started.is_set()))
            else:
                tell("ended", ending=Ending.DONE.value)
    except BaseException as error:
        tell("ended", **_told(error, started.is_set()))


def _lines(fd: int) -> Iterator[str]:
    """Not by sys.stdin: a thread that waits in it would be in the way when the process ends."""
    held = b""
    while data := os.read(fd, 1 << 16):
        *whole, held = (held + data).split(b"\n")
        yield from (line.decode() for line in whole)


def _obey(lines: Iterator[str], stop: threading.Event) -> None:
    for _ in lines:
        stop.set()
    # The supervisor is gone, and perhaps another one starts: its query must not meet this one's JVM.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _told(error: BaseException, is_started: bool) -> dict[str, str]:
    types = [kind.__name__ for kind in type(error).__mro__]
    ending = decide_ending(types, str(error), is_started=is_started)
    if not is_started:  # what ends a query, Spark has written to standard error already
        traceback.print_exception(error)
    said = headline(f"{types[0]}: {error}")
    if is_started and types[0] in _OF_PY4J:
        said = f"Spark's JVM has died ({said})"
    return {"ending": ending.value, "error": said}


def _load(path: Path) -> Callable[[SparkSession, Mapping[str, str]], StreamingQuery]:
    """The function `pipeline` of a file. Raises ConfigError, and what the file raises."""
    check_spark()
    from pyspark import cloudpickle

    name = f"pipeline_{path.stem}"  # not the file's own: it may be that of a package
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    cloudpickle.register_pickle_by_value(module)  # executors have no such file
    spec.loader.exec_module(module)
    made = getattr(module, "pipeline", None)
    if not callable(made):
        raise ConfigError(f"{path} defines no function pipeline(spark, settings)")
    return made  # type: ignore[no-any-return]


def _run(
    spark: SparkSession,
    make: Callable[[SparkSession, Mapping[str, str]], StreamingQuery],
    job: Job,
    stop: threading.Event,
    started: threading.Event,
    tell: Tell,
    metrics: _MetricsPipe | None,
) -> None:
    ends = threading.Event()  # a batch has ended
    spark.streams.addListener(_listener(tell, metrics, ends))
    query = make(spark, os.environ)
    if not hasattr(query, "awaitTermination"):
        raise ConfigError(f"pipeline() of {job.file} returned {query!r}, and must return the started query")
    started.set()
    if job.query_id is not None and str(query.id) != job.query_id:
        query.stop()
        raise ConfigError(
            f"the query has another id ({query.id}) than in the run before ({job.query_id}): its checkpoint "
            "was not kept, so it would write everything again. Set checkpointLocation to a fixed place"
        )
    tell("started", query_id=str(query.id), name=query.name)
    while not query.awaitTermination(_POLL_S):
        if stop.is_set():
            _stop_between_batches(query, ends)
            break


def _stop_between_batches(query: StreamingQuery, ends: threading.Event) -> None:
    """Wait for the end of the batch that runs. Raises what ended the query meanwhile.

    Spark has no such stop: what begins in the same moment is broken off, and comes again in the next run.
    """
    ends.clear()
    while query.isActive and query.status["isTriggerActive"] and not ends.is_set():
        time.sleep(_QUICK_POLL_S)
    if not query.isActive and (error := query.exception()) is not None:
        raise error
    query.stop()


def _listener(tell: Tell, metrics: _MetricsPipe | None, ends: threading.Event) -> StreamingQueryListener:
    from pyspark.sql.streaming import StreamingQueryListener

    class Listener(StreamingQueryListener):  # type: ignore[misc]
        def onQueryStarted(self, event: Any) -> None: ...
        def onQueryIdle(self, event: Any) -> None: ...
        def onQueryTerminated(self, event: Any) -> None: ...

        def onQueryProgress(self, event: Any) -> None:
            ends.set()
            progress = json.loads(event.progress.json)
            of_sink = metrics.of(progress["id"], progress["batchId"]) if metrics else None
            tell("batch", **batch_summary(progress, of_sink))

    return Listener()


class _MetricsPipe:
    """Where the sink, in a process of its own, writes its metrics."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._newest: dict[tuple[str, int], SinkMetrics] = {}
        # Open for writing too, so that it never ends.
        self._lines = os.fdopen(os.open(path, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)

    def of(self, query_id: str, batch_id: int) -> SinkMetrics | None:
        """The batch's, if its sink is ours."""
        for line in (self._lines.read(1 << 20) or b"").decode().splitlines():
            found = SinkMetrics.decode(line)
            self._newest[found.name, found.batch_id] = found
        wanted = self._newest.pop((query_id, batch_id), None)
        # What is older was of a batch that failed after its sink had finished.
        self._newest = {key: each for key, each in self._newest.items() if each.batch_id > batch_id}
        return wanted


@contextmanager
def _sink_metrics() -> Iterator[_MetricsPipe | None]:
    """None when the user wants the metrics in a file."""
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
