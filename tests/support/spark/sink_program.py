"""A streaming query with faults, which writes into a sink. It has its own process, so that it can be killed.

    python -m support.spark.sink_program '{"sink": "lane", "plan": {"2": "driver in write"}, "faults": DIR,
    ...}'

`plan` has, by number of a micro-batch, the fault that the batch meets once. Files in DIR report events.
Sinks: `lane` (the streaming sink), `batch` (write_atomic), and `kafka` (Spark's own, in foreachBatch so that
the driver can be killed between its steps). `support.spark.faults` runs the program and describes the faults.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pyspark import TaskContext

from oncelog import Consumer, TopicPartition
from oncelog.spark import write_atomic
from oncelog.spark.sink import atomic, atomic_task
from oncelog.spark.sink.sink import OncelogFormat, StreamWriter

PATIENCE_S = 240.0
_FAILURES = 9
"""Maximum number of times that the program starts a failed query again, as a supervisor would."""
SELDOM_S = 0.02


class Faults:
    """The planned faults, and files that report them. `driver` has the ids of the driver's processes."""

    def __init__(self, options: dict[str, Any], driver: tuple[int, ...]) -> None:
        self.options, self.driver = options, driver

    def of(self, batch_id: object) -> str | None:
        fault: str | None = self.options["plan"].get(str(batch_id))
        return fault

    def tell(self, name: str, text: str = "") -> bool:
        """Create a file that reports an event. Return False if it exists."""
        try:
            with open(Path(self.options["faults"]) / name, "x") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True

    def wait_for(self, pattern: str) -> None:
        wait(lambda: any(Path(self.options["faults"]).glob(pattern)), pattern)

    # Faults in tasks

    def around(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a task, with the task's fault among them.

        The fault comes before the task's first row, or after some rows are stored.
        """
        batch_id, first = here().getLocalProperty("streaming.sql.batchId"), None
        fault = self.of(batch_id)
        for number, batch in enumerate(batches):
            if number == 0:
                first = batch.column("value")[0].as_py()
                if fault == "driver before write" and self.tell(f"happened-{batch_id}"):
                    self.kill_driver()
            if number == 2 and fault in self._AMID and self.tell(f"struck-{batch_id}"):
                wait(partial(self._is_stored, first), "rows to reach the broker")
                self.tell(f"happened-{batch_id}")
                self._AMID[fault](self, f"{batch_id}-{here().partitionId()}", f"{batch_id}")
            yield batch

    def ended(self, error: BaseException | None = None) -> None:
        """Report that an attempt of a task has ended. Other attempts and the test wait for that report."""
        task, batch_id = here(), here().getLocalProperty("streaming.sql.batchId")
        outcome = "failed" if error else "done"
        self.tell(f"{outcome}-{batch_id}-{task.partitionId()}-{task.attemptNumber()}", str(error or ""))

    def _is_stored(self, value: bytes) -> bool:
        settings = {
            "bootstrap.servers": self.options["bootstrap"],
            "isolation.level": "read_uncommitted",
        }
        with Consumer(settings) as consumer:
            parts = consumer.partitions_for(self.options["topic"])
            ends = consumer.end_offsets([TopicPartition(self.options["topic"], p.partition) for p in parts])
            pieces = (piece for at, end in ends.items() for piece in consumer.fetch_range(at, 0, end))
            return any(value in piece.column("value").to_pylist() for piece in pieces)

    def _fail(self, _task: str, _batch: str) -> None:
        raise RuntimeError("the task fails")

    def _kill_worker(self, _task: str, _batch: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_executor(self, _task: str, _batch: str) -> None:
        os.kill(parent_of(os.getppid()), signal.SIGKILL)
        time.sleep(PATIENCE_S)

    def _kill_driver_in_write(self, _task: str, batch: str) -> None:
        if self.options["sink"] != "batch":  # `write_atomic` may have only one task
            self.wait_for(f"done-{batch}-*")  # the kill comes after another task has committed
        self.kill_driver()

    def _be_overtaken(self, task: str, _batch: str) -> None:
        self.wait_for(f"*-{task}-*")  # continue to write only after the speculative copy has ended

    def _be_killed(self, _task: str, _batch: str) -> None:
        time.sleep(PATIENCE_S)

    def _be_answered(self, _task: str, batch: str) -> None:
        self.wait_for(f"answered-{batch}")  # the test creates the file once the broker's fault is over

    _AMID: dict[str, Callable[[Faults, str, str], None]] = {
        "task raises": _fail,
        "worker": _kill_worker,
        "executor": _kill_executor,
        "driver in write": _kill_driver_in_write,
        "speculation": _be_overtaken,
        "query stopped": _be_killed,
        "broker": _be_answered,
        "answers lost": _be_answered,
    }

    # Faults in the driver

    def in_driver(self, fault: str, batch_id: int) -> None:
        if self.of(batch_id) == fault and self.tell(f"happened-{batch_id}"):
            self.kill_driver()

    def kill_driver(self) -> None:
        """Kill the driver and this process, which may be one of its workers."""
        for pid in (*self.driver, os.getpid()):
            os.kill(pid, signal.SIGKILL)

    def watch(self, query: Any) -> bool:
        """Inject the faults that do not come from a task or a micro-batch.

        Return True if the query was stopped and must be started again.
        """
        for number, fault in self.options["plan"].items():
            if (
                fault == "driver after commit"
                and (Path(self.options["checkpoint"]) / "commits" / number).exists()
            ):
                self.in_driver(fault, int(number))
            happened = Path(self.options["faults"]) / f"happened-{number}"
            if fault == "query stopped" and happened.exists() and self.tell(f"stopped-{number}"):
                query.stop()
                return True
        return False


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:g} s for {what}")
        time.sleep(SELDOM_S)


def here() -> TaskContext:
    task = TaskContext.get()
    assert task is not None
    return task


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# The sinks


class FaultyWriter(StreamWriter):
    def __init__(self, writer: StreamWriter, faults: Faults) -> None:
        self.__dict__.update(writer.__dict__)
        self._faults = faults

    def write(self, iterator: Iterator[Any]) -> Any:
        try:
            message = StreamWriter.write(self, self._faults.around(iterator))
        except Exception as error:
            self._faults.ended(error)
            raise
        self._faults.ended()
        return message

    def commit(self, messages: Any, batchId: int) -> None:
        self._faults.in_driver("driver before commit", batchId)
        StreamWriter.commit(self, messages, batchId)
        self._faults.in_driver("driver in commit", batchId)


def faulty_format(faults: Faults) -> type[OncelogFormat]:
    class Faulty(OncelogFormat):
        @classmethod
        def name(cls) -> str:
            return "oncelog-faulty"

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            writer = OncelogFormat.streamWriter(self, schema, overwrite)
            assert isinstance(writer, StreamWriter)
            return FaultyWriter(writer, faults)

    return Faulty


def faulty_share(batches: Iterator[Any], *, faults: Faults, **rest: Any) -> Iterator[Any]:
    try:
        yield from atomic_task.write_share(faults.around(batches), **rest)
    except Exception as error:
        faults.ended(error)
        raise
    faults.ended()


def faulty_rows(batches: Iterator[Any], faults: Faults) -> Iterator[Any]:
    yield from faults.around(batches)
    faults.ended()


def write_atomically(frame: Any, batch_id: int, faults: Faults) -> None:
    def check_and_die(reports: Any) -> tuple[int, int]:
        sums = check_reports(reports)
        faults.in_driver("driver before commit", batch_id)
        return sums

    atomic.check_reports, check_reports = check_and_die, atomic.check_reports
    try:
        write_atomic(frame, batch_id, options_of(faults.options))
    finally:
        atomic.check_reports = check_reports
    faults.in_driver("driver in commit", batch_id)


def write_sparks_own(frame: Any, batch_id: int, faults: Faults) -> None:
    rows = frame.mapInArrow(partial(faulty_rows, faults=faults), frame.schema)
    rows.write.format("kafka").options(**options_of(faults.options)).save()
    faults.in_driver("driver before commit", batch_id)
    faults.in_driver("driver in commit", batch_id)


def options_of(options: dict[str, Any]) -> dict[str, str]:
    return {"kafka.bootstrap.servers": options["bootstrap"], "topic": options["topic"]}


def writer_of(frame: Any, sink: str, faults: Faults) -> Any:
    spark = frame.sparkSession
    match sink:
        case "lane":
            spark.dataSource.register(faulty_format(faults))
            return frame.writeStream.format("oncelog-faulty").options(**options_of(faults.options))
        case "batch":
            atomic.write_share = partial(faulty_share, faults=faults)
            return frame.writeStream.foreachBatch(partial(write_atomically, faults=faults))
        case _:
            from oncelog_devtools.spark_connector import add_connector

            add_connector(spark)
            return frame.writeStream.foreachBatch(partial(write_sparks_own, faults=faults))


def main(options: dict[str, Any]) -> None:
    from pyspark.errors import StreamingQueryException
    from pyspark.sql import SparkSession

    from support.spark.topics import read_stream

    os.environ["SPARK_AUTH_SOCKET_TIMEOUT"] = "120"  # Spark's default of 15 s is too short on a busy machine
    builder = SparkSession.builder.config("spark.python.authenticate.socketTimeout", "120s")
    for key, value in options["conf"].items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    java = spark._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr]
    faults = Faults(options, (int(java), os.getpid()))
    source = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": options["rows"]}
    stream = read_stream(spark, options["bootstrap"], subscribe=options["source"], **source)
    writer = writer_of(stream.select("key", "value"), options["sink"], faults)
    writer = writer.option("checkpointLocation", options["checkpoint"]).trigger(availableNow=True)
    for failure in range(_FAILURES + 1):
        query = writer.start()
        while query.isActive:
            if faults.watch(query):
                query = writer.start()
            time.sleep(SELDOM_S)
        try:
            query.awaitTermination()
            return
        except StreamingQueryException as error:
            if failure == _FAILURES or not faults.tell(f"failure-{os.getpid()}-{failure}", str(error)):
                raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
