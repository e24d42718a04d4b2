"""Streaming queries from a topic into tables, one after another in a Spark session of this process.

`python -m oncelog_bench.pipeline_worker JSON` reads a WorkerSpec, measures, and prints a Sample as JSON on a
line of its own after each measured query. For Spark's own source and sinks, it also runs in an environment
with an older Spark than Oncelog's source needs.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oncelog.client.producer.blocking import Producer
from oncelog.errors import OncelogError
from oncelog.local_audit import audit_table
from oncelog.spark.session import local_session
from oncelog_bench.framework import OURS, interleaved
from oncelog_bench.process import tree_cpu_seconds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TO_DELTA, TO_ICEBERG = "to_delta.py", "to_iceberg.py"
"""Pipelines of this project, by the names of their files."""

DELTA, MIXED, ICEBERG, PARQUET = (
    "delta sink",
    "delta sink with oncelog source",
    "iceberg sink",
    "parquet sink",
)
"""Queries from Spark's own Kafka source, or Oncelog's source, into a sink of the format itself."""

_COLUMNS = {
    "topic": "STRING",
    "partition": "INT",
    "offset": "BIGINT",
    "timestamp": "TIMESTAMP",
    "key": "BINARY",
    "value": "BINARY",
}
_PATIENCE_S = 300.0
_POLL_S = 0.02


class Kind(NamedTuple):
    """The table format of a pipeline, and its source format, which is empty for a pipeline in a file."""

    table: str
    source: str = ""


KINDS = {
    TO_DELTA: Kind("delta"),
    TO_ICEBERG: Kind("iceberg"),
    DELTA: Kind("delta", "kafka"),
    MIXED: Kind("delta", OURS),
    ICEBERG: Kind("iceberg", "kafka"),
    PARQUET: Kind("parquet", "kafka"),
}


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The queries to measure.

    Each of `pipelines` (keys of KINDS) runs `warm_ups` times unmeasured, and then `repeats` times in turns.
    `examples` is the directory of this project's pipelines. The topic has `records` at the start, and
    `singles` more after each query. `conf` and `environment` are settings of Spark and of the process. Tables
    and checkpoints are made in `directory`, and removed after each query.
    """

    pipelines: list[str]
    examples: str
    master: str
    conf: dict[str, str]
    environment: dict[str, str]
    bootstrap_servers: str
    topic: str
    records: int
    partitions: int
    record_bytes: int
    max_offsets: int
    singles: int
    warm_ups: int
    repeats: int
    directory: str


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one query.

    `seconds` is the time from the start of the first micro-batch until the commit of `rows` in the table.
    `cpu_seconds` is the processor time of this process, its JVM and its Python workers, from the start of the
    query until then. `latencies_ms` has one time for each single record: from the acknowledgement of its send
    until the commit of its row. `write_ms` has the sink's part of it (Spark's `addBatch`).

    A commit in the table is the end of Spark's phase `addBatch`. It is the start of the micro-batch, plus
    `triggerExecution`, less `commitOffsets`: Spark writes the checkpoint's commit log after the table.
    """

    repeat: int
    pipeline: str
    spark: str
    rows: int
    seconds: float
    cpu_seconds: float
    batches: int
    latencies_ms: list[float]
    write_ms: list[float]


def run(spec: WorkerSpec) -> Iterator[Sample]:
    """Warm up, then yield the measured samples.

    Raises OncelogError if a query fails or stops, or if a table does not have each record once.
    """
    # pyiceberg reads its settings when it is imported.
    os.environ.update(spec.environment)
    records = spec.records
    with (
        local_session("oncelog bench", spec.master, spec.conf) as spark,
        Producer({"bootstrap.servers": spec.bootstrap_servers, "linger.ms": 0}) as producer,
    ):
        for _, _, pipeline in interleaved([None], spec.pipelines, spec.warm_ups):
            _take(spark, producer, spec, pipeline, records, 0)
            records += spec.singles
        for repeat, _, pipeline in interleaved([None], spec.pipelines, spec.repeats):
            yield _take(spark, producer, spec, pipeline, records, repeat)
            records += spec.singles


def _take(
    spark: SparkSession, producer: Producer, spec: WorkerSpec, pipeline: str, records: int, repeat: int
) -> Sample:
    name = f"rows_{records}"
    cpu_began = tree_cpu_seconds(os.getpid())
    query = _start(spark, spec, pipeline, name)
    batches = _batches(query, records)
    cpu_seconds = tree_cpu_seconds(os.getpid()) - cpu_began
    singles = _send_singles(query, batches[-1], producer, spec)
    _stop(spark, query)
    _check(spec, pipeline, name, records + spec.singles)
    return Sample(
        repeat,
        pipeline,
        spark.version,
        records,
        _committed(batches[-1]) - _began(batches[0]),
        cpu_seconds,
        len(batches),
        [(_committed(progress) - acknowledged) * 1000 for acknowledged, progress in singles],
        [float(progress["durationMs"]["addBatch"]) for _, progress in singles],
    )


def _start(spark: SparkSession, spec: WorkerSpec, pipeline: str, name: str) -> Any:
    """Start the query into a new table of that name."""
    kind, path = KINDS[pipeline], f"{spec.directory}/{name}"
    checkpoint = f"{spec.directory}/checkpoint-{name}"
    if not kind.source:
        settings = {
            "BOOTSTRAP_SERVERS": spec.bootstrap_servers,
            "SOURCE": spec.topic,
            "TABLE": f"bench.{name}" if pipeline == TO_ICEBERG else path,
            "CHECKPOINT": checkpoint,
            "MAX_OFFSETS": str(spec.max_offsets),
            "TRIGGER": "0 seconds",
        }
        return runpy.run_path(f"{spec.examples}/{pipeline}")["pipeline"](spark, settings)
    rows = (
        spark.readStream.format(kind.source)
        .option("kafka.bootstrap.servers", spec.bootstrap_servers)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", spec.topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", spec.max_offsets)
        .load()
        .select(*_COLUMNS)
    )
    writer = rows.writeStream.format(kind.table).option("checkpointLocation", checkpoint)
    writer = writer.trigger(processingTime="0 seconds")
    if pipeline != ICEBERG:
        return writer.start(path)
    columns = ", ".join(f"{column} {type_}" for column, type_ in _COLUMNS.items())
    spark.sql(f"CREATE TABLE lake.bench.{name} ({columns}) USING iceberg")
    return writer.toTable(f"lake.bench.{name}")


def _batches(query: Any, records: int) -> list[Mapping[str, Any]]:
    """Wait until micro-batches with this number of records are finished, and return their progress.

    Spark publishes the progress of the last one after `processAllAvailable` has returned.
    """
    query.processAllAvailable()
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
        if sum(progress["numInputRows"] for progress in batches) >= records:
            return batches
        time.sleep(_POLL_S)
    raise OncelogError(f"the query reports fewer than {records} rows")


def _send_singles(
    query: Any, progress: Mapping[str, Any], producer: Producer, spec: WorkerSpec
) -> list[tuple[float, Mapping[str, Any]]]:
    """Send records one after another. Each waits for the micro-batch of the one before.

    `progress` is that of the newest micro-batch. Return the time of each acknowledgement (seconds since the
    epoch), and the progress of its micro-batch.
    """
    random_bytes = random.Random(spec.singles).randbytes
    done = []
    for index in range(spec.singles):
        value = random_bytes(spec.record_bytes // 2).hex().encode()
        producer.send(spec.topic, value, partition=index % spec.partitions).result()
        acknowledged = time.time()
        progress = _next_batch(query, progress["batchId"])
        done.append((acknowledged, progress))
    return done


def _next_batch(query: Any, after: int) -> Mapping[str, Any]:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        last: Mapping[str, Any] | None = query.lastProgress
        if last is not None and last["numInputRows"] and last["batchId"] > after:
            return last
        if (error := query.exception()) is not None:
            raise OncelogError(f"the query failed: {error}")
        time.sleep(_POLL_S)
    raise OncelogError(f"no micro-batch after {after} within {_PATIENCE_S:g} s")


def _began(progress: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(progress["timestamp"]).timestamp()


def _committed(progress: Mapping[str, Any]) -> float:
    durations: Mapping[str, float] = progress["durationMs"]
    return _began(progress) + (durations["triggerExecution"] - durations["commitOffsets"]) / 1000


def _stop(spark: SparkSession, query: Any) -> None:
    """Stop the query, perhaps during a micro-batch. Suppress the errors that Spark logs about that."""
    spark.sparkContext.setLogLevel("OFF")
    query.stop()
    spark.sparkContext.setLogLevel("ERROR")


def _check(spec: WorkerSpec, pipeline: str, name: str, records: int) -> None:
    """Raise OncelogError unless each record of the topic has one row in the table. Then remove the table."""
    result = audit_table(spec.bootstrap_servers, spec.topic, _location(spec, pipeline, name))
    if result.verdict != "clean" or not records == result.totals.records == result.totals.rows:
        raise OncelogError(f"{pipeline}: {result.verdict} after {records} records: {result.totals}")
    for path in (name, f"bench/{name}", f"checkpoint-{name}"):
        shutil.rmtree(Path(spec.directory, path), ignore_errors=True)


def _location(spec: WorkerSpec, pipeline: str, name: str) -> str:
    """Return the address of a table for `audit_table`."""
    if pipeline == ICEBERG:
        return f"iceberg:{spec.directory}/bench/{name}"
    if pipeline != TO_ICEBERG:
        return f"{KINDS[pipeline].table}:{spec.directory}/{name}"
    with closing(sqlite3.connect(f"{spec.directory}/catalog.db")) as catalog:
        query = "SELECT metadata_location FROM iceberg_tables WHERE table_name = ?"
        ((location,),) = catalog.execute(query, (name,)).fetchall()
    return f"iceberg:{location}"


if __name__ == "__main__":
    for sample in run(WorkerSpec(**json.loads(sys.argv[1]))):
        print(json.dumps(asdict(sample)), flush=True)
