"""A streaming query into the sink that meets its faults, as a program of its own so that it can be killed.

python helpers_spark_sink.py '{"master": ..., "bootstrap": ..., "source": ..., "topic": ...,
"checkpoint": ..., "faults": DIR, "plan": {"0/1": "raise"}, "kill_after_commit": 3}'

A fault happens once, in the middle of the batch/lane named: raise, worker, executor or driver (killed).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark

from oncelog.spark.sink import OncelogFormat, StreamWriter


def run_query(**told: Any) -> int:
    """Run the program to its end; its exit code, -SIGKILL when it was killed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "PYSPARK_PYTHON": sys.executable,
    }
    program = [sys.executable, __file__, json.dumps(told)]
    try:
        with open(Path(told["faults"]) / "log", "ab") as log:
            return subprocess.run(
                program, env=environment, stdout=log, stderr=log, timeout=280, check=False
            ).returncode
    finally:  # local-cluster's workers write into Spark's own directory, and cannot be told otherwise
        shutil.rmtree(Path(pyspark.__file__).parent / "work", ignore_errors=True)


class Faults:
    """What is to happen, and files that tell what has."""

    def __init__(self, told: dict[str, Any], driver: tuple[int, ...]) -> None:
        self.told, self.driver = told, driver

    def once(self, name: str) -> bool:
        """Whether this is the first time."""
        try:
            os.close(os.open(Path(self.told["faults"]) / name.replace("/", "-"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def happen(self, at: str) -> None:
        kind = self.told["plan"].get(at)
        if kind is None or not self.once(f"{kind}-{at}"):
            return
        time.sleep(0.5)  # for what was handed over to reach the broker
        if kind == "raise":
            raise RuntimeError("the task fails")
        if kind == "driver":
            self.kill_driver(at)
        daemon = os.getppid()
        os.kill(parent_of(daemon) if kind == "executor" else os.getpid(), signal.SIGKILL)

    def kill_driver(self, at: str) -> None:
        other = at.replace("/1", "/0")
        while not (Path(self.told["faults"]) / f"done-{other.replace('/', '-')}").exists():
            time.sleep(0.05)  # one lane is committed, this one is not
        for pid in self.driver:
            os.kill(pid, signal.SIGKILL)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class FaultyWriter(StreamWriter):
    def __init__(self, writer: StreamWriter, faults: Faults) -> None:
        self.__dict__.update(writer.__dict__)
        self._faults = faults

    def write(self, iterator: Iterator[Any]) -> Any:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        at = f"{task.getLocalProperty('streaming.sql.batchId')}/{task.partitionId()}"

        def with_faults() -> Iterator[Any]:
            for number, batch in enumerate(iterator):
                if number == 2:
                    self._faults.happen(at)
                yield batch

        message = StreamWriter.write(self, with_faults())
        self._faults.once(f"done-{at}")
        return message

    def commit(self, messages: Any, batchId: int) -> None:
        StreamWriter.commit(self, messages, batchId)
        if batchId == self._faults.told.get("kill_after_commit") and self._faults.once(f"commit-{batchId}"):
            for pid in self._faults.driver:
                os.kill(pid, signal.SIGKILL)
            time.sleep(30)


def main(told: dict[str, Any]) -> None:
    from helpers_spark import read_stream
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(told["master"])
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.executor.memory", "512m")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "20")
        .getOrCreate()
    )
    java = spark._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr]
    faults = Faults(told, (os.getpid(), int(java)))

    class Faulty(OncelogFormat):
        @classmethod
        def name(cls) -> str:
            return "oncelog-faulty"

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            writer = OncelogFormat.streamWriter(self, schema, overwrite)
            assert isinstance(writer, StreamWriter)
            return FaultyWriter(writer, faults)

    spark.dataSource.register(Faulty)
    stream = read_stream(spark, told["bootstrap"], subscribe=told["source"], **told["source_options"])
    query = (
        stream.select("key", "value")
        .writeStream.format("oncelog-faulty")
        .option("kafka.bootstrap.servers", told["bootstrap"])
        .option("topic", told["topic"])
        .option("checkpointLocation", told["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
