"""Topics into tables with Spark: this project's pipelines beside the tables' own Spark sinks."""

from __future__ import annotations

import importlib.metadata
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from oncelog_devtools import spark_connector
from oncelog_devtools.apache_kafka import MissingDependency
from oncelog_devtools.svg_charts import BLUE, WARN, bar_chart

from oncelog.client.producer.blocking import Producer
from oncelog.errors import ConfigError, OncelogError
from oncelog_bench.brokers import Side, running
from oncelog_bench.framework import OURS, Metric, OnSample, Result, compare, figure, result_of
from oncelog_bench.page import markdown_table, number
from oncelog_bench.pipeline_worker import (
    DELTA,
    ICEBERG,
    KINDS,
    MIXED,
    PARQUET,
    TO_DELTA,
    TO_ICEBERG,
    Sample,
    WorkerSpec,
)
from oncelog_bench.spark_engine import MASTER

NAME = "pipelines"
SUMMARY = (
    "Topics into Delta and Iceberg tables with Spark: Oncelog's pipelines and the tables' own Spark sinks."
)
BY = {"spark": "Spark"}
METRICS = (
    Metric("rows_per_s", "rows/s", True),
    Metric("cpu_s_per_gb", "Spark's CPU s/GB"),
    Metric("p50_ms", "p50 ms"),
    Metric("p99_ms", "p99 ms"),
    Metric("write_ms", "of p50 in the sink ms"),
)
RATIOS = (f"{TO_DELTA} / {DELTA}", f"{MIXED} / {DELTA}")
"""The ratios besides those to PARQUET, the control."""

_FILLED_AT_ONCE = 1_000


class Environment(NamedTuple):
    """A Python interpreter, the version of PySpark that it imports, and the pipelines to run with it."""

    python: str
    spark: str
    pipelines: list[str]


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    The topic has `records` values of `record_bytes`, and a micro-batch has up to `max_offsets`. Choose
    them so that the last micro-batch is neither full nor tiny, because each query adds a few records.
    `singles` more are sent one after another to each query, for the latency. `iceberg_python` is the
    interpreter of an environment with a version of Spark for which Iceberg's sink is built. An empty one
    means that of this process.
    """

    pipelines: tuple[str, ...] = tuple(KINDS)
    broker: str = OURS
    records: int = 350_000
    record_bytes: int = 1_000
    max_offsets: int = 100_000
    singles: int = 40
    partitions: int = 4
    repeats: int = 5
    warm_ups: int = 1
    warm_up_seconds: float = 1.0
    iceberg_python: str = ""

    @property
    def samples_count(self) -> int:
        is_control_twice = {ICEBERG, PARQUET} <= {*self.pipelines} and bool(self.iceberg_python)
        return self.repeats * (len(self.pipelines) + is_control_twice)


QUICK = Plan((TO_DELTA, TO_ICEBERG), records=2_000, max_offsets=1_000, singles=2, repeats=1, warm_ups=0,
             warm_up_seconds=0.1)  # fmt: skip


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    environments, left_out = _environments(plan)
    with running((plan.broker,), warm_up_seconds=plan.warm_up_seconds) as brokers:
        for environment in environments if brokers.names else ():
            for sample in _samples(plan, brokers[plan.broker], environment):
                samples.append(_figures(plan, sample))
                on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="pipeline", base=PARQUET, metrics=METRICS)
    rows += [
        row
        for row in compare(samples, by=list(BY), side="pipeline", base=DELTA, metrics=METRICS)
        if row["pipeline"] in RATIOS
    ]
    versions = {name: importlib.metadata.version(name) for name in ("deltalake", "pyiceberg")}
    versions |= {"delta": spark_connector.DELTA_VERSION, "iceberg": spark_connector.ICEBERG_VERSION}
    left_out = {**brokers.left_out, **left_out}
    return result_of(NAME, plan, samples, rows, settings={"versions": versions}, left_out=left_out)


def _environments(plan: Plan) -> tuple[list[Environment], dict[str, str]]:
    """Return the interpreters with their pipelines, and the reason for each pipeline that has none."""
    own = Environment(sys.executable, importlib.metadata.version("pyspark"), [])
    other = own
    if ICEBERG in plan.pipelines and plan.iceberg_python:
        other = Environment(plan.iceberg_python, _spark_version(plan.iceberg_python), [])
    built_for = {
        DELTA: spark_connector.DELTA_SPARK,
        MIXED: spark_connector.DELTA_SPARK,
        ICEBERG: spark_connector.ICEBERG_SPARK,
    }
    left_out = {}
    for pipeline in plan.pipelines:
        environment = other if pipeline == ICEBERG else own
        wanted = built_for.get(pipeline)
        if wanted and not environment.spark.startswith(f"{wanted}."):
            where = "run this with" if pipeline != ICEBERG else "name by -X iceberg_python=PYTHON"
            left_out[pipeline] = (
                f"the newest one is built for Spark {wanted}, not {environment.spark}: {where} an "
                f"environment that has pyspark=={wanted}.*"
            )
            continue
        try:
            _jars(pipeline)
        except MissingDependency as error:
            left_out[pipeline] = str(error)
            continue
        environment.pipelines.append(pipeline)
    if other is not own and other.pipelines and PARQUET in own.pipelines:
        other.pipelines.append(PARQUET)
    environments = [own] if other is own else [own, other]
    return [environment for environment in environments if environment.pipelines], left_out


def _spark_version(python: str) -> str:
    command = [python, "-c", "import pyspark; print(pyspark.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{python} cannot import pyspark: {error}") from None
    return done.stdout.strip()


def _jars(pipeline: str) -> list[Path]:
    """Return the jars that a pipeline of Spark's own needs. Raises MissingDependency."""
    if not KINDS[pipeline].source:
        return []
    if pipeline == ICEBERG:
        connector = spark_connector.connector_jars(spark_connector.ICEBERG_CONNECTOR)
        return connector + spark_connector.iceberg_jars()
    return spark_connector.connector_jars() + (
        spark_connector.delta_jars() if KINDS[pipeline].table == "delta" else []
    )


def _samples(plan: Plan, broker: Side, environment: Environment) -> Iterator[Sample]:
    """Run the environment's pipelines in a process of its own. Raises OncelogError if that fails."""
    with (
        broker.topic(plan.partitions) as topic,
        tempfile.TemporaryDirectory(prefix="oncelog-bench-") as directory,
        tempfile.TemporaryFile("w+") as errors,
    ):
        _fill(plan, broker, topic)
        spec = _spec(plan, broker, environment, topic, Path(directory))
        command = [environment.python, "-m", "oncelog_bench.pipeline_worker", json.dumps(asdict(spec))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as worker:
            assert worker.stdout is not None
            try:
                for line in worker.stdout:
                    yield Sample(**json.loads(line))
            except BaseException:  # Ctrl-C, or an error of the caller
                worker.kill()
                raise
        if worker.returncode:
            errors.seek(0)
            raise OncelogError(f"oncelog_bench.pipeline_worker failed:\n{errors.read()[-2000:]}")


def _fill(plan: Plan, broker: Side, topic: str) -> None:
    """Write values of random hexadecimal digits evenly to the partitions, in batches of 16 KiB."""
    random_bytes = random.Random(plan.records).randbytes
    with Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 5}) as producer:
        for index, first in enumerate(range(0, plan.records, _FILLED_AT_ONCE)):
            count = min(_FILLED_AT_ONCE, plan.records - first)
            values = [random_bytes(plan.record_bytes // 2).hex().encode() for _ in range(count)]
            producer.send_many(topic, values, partition=index % plan.partitions)


def _spec(plan: Plan, broker: Side, environment: Environment, topic: str, directory: Path) -> WorkerSpec:
    pipelines = environment.pipelines
    # On a busy machine, a Python worker may need more than the default of 15 s to start.
    conf = {
        "spark.sql.streaming.numRecentProgressUpdates": "10000",
        "spark.python.authenticate.socketTimeout": "5m",
    }
    jars: list[Path] = []
    if ICEBERG in pipelines:
        jars = _jars(ICEBERG)
        conf["spark.sql.catalog.lake"] = "org.apache.iceberg.spark.SparkCatalog"
        conf |= {"spark.sql.catalog.lake.type": "hadoop", "spark.sql.catalog.lake.warehouse": str(directory)}
    elif DELTA in pipelines or MIXED in pipelines:
        jars = _jars(DELTA)
        conf["spark.sql.extensions"] = "io.delta.sql.DeltaSparkSessionExtension"
        conf["spark.sql.catalog.spark_catalog"] = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        # Delta reads a table's log in 50 tasks by default, which is meant for clusters.
        conf["spark.databricks.delta.snapshotPartitions"] = "2"
    elif PARQUET in pipelines:
        jars = _jars(PARQUET)
    if jars:
        conf["spark.jars"] = ",".join(map(str, jars))
    catalog = {
        "PYICEBERG_CATALOG__DEFAULT__URI": f"sqlite:///{directory}/catalog.db",
        "PYICEBERG_CATALOG__DEFAULT__WAREHOUSE": directory.as_uri(),
    }
    return WorkerSpec(
        pipelines, str(_examples()), MASTER, conf, catalog, broker.bootstrap_servers, topic, plan.records,
        plan.partitions, plan.record_bytes, plan.max_offsets, plan.singles, plan.warm_ups, plan.repeats,
        str(directory),
    )  # fmt: skip


def _examples() -> Path:
    """Return the directory of the pipelines. Raises ConfigError outside a checkout of the project."""
    directory = Path(__file__).parents[4] / "examples" / "pipelines"
    if not directory.is_dir():
        raise ConfigError(f"the pipelines are in the project's repository, and {directory} does not exist")
    return directory


def _figures(plan: Plan, sample: Sample) -> dict[str, Any]:
    return {
        "repeat": sample.repeat,
        "spark": sample.spark,
        "pipeline": sample.pipeline,
        "rows_per_s": sample.rows / sample.seconds,
        "cpu_s_per_gb": sample.cpu_seconds / (sample.rows * plan.record_bytes / 1e9),
        "p50_ms": statistics.median(sample.latencies_ms),
        "p99_ms": _quantile(sample.latencies_ms, 0.99),
        "write_ms": statistics.median(sample.write_ms),
        "batches": sample.batches,
        "latencies_ms": [round(latency, 1) for latency in sample.latencies_ms],
    }


def _quantile(values: list[float], fraction: float) -> float:
    """Return the quantile by the nearest rank. Of fewer than 100 values, 0.99 is the largest."""
    return sorted(values)[math.ceil(fraction * len(values)) - 1]


def section(result: Result) -> str:
    """Return, as Markdown, the section on pipelines and sinks by version of Spark."""
    plan = result["plan"]
    p99 = "the slowest of a sample" if plan["singles"] < 100 else "of a sample"
    return f"""\
## Topics into tables

A streaming query of `{MASTER}` appends a topic of our broker to a new table: {plan["records"]:,} records of
{plan["record_bytes"]:,} random hexadecimal digits in {plan["partitions"]} partitions, at most
{plan["max_offsets"]:,} in a micro-batch.

{_legend(result)}

Rows per second count from the start of the first micro-batch to the last one's commit in the table. The
processor time is that of the driver, the JVM and Python workers. The latency of {plan["singles"]} single
records, one after another, is the time from the acknowledgement of a record to the commit of its row; p99 is
{p99}. "In the sink" is Spark's phase `addBatch`. `oncelog audit` found one row for each record in each
table. Medians of {plan["repeats"]} interleaved queries after {plan["warm_ups"]} unmeasured. Other work ran
on the two cores meanwhile, so only ratios count.

{markdown_table(result["medians"], by=BY, side="pipeline", metrics=METRICS)}

**What this shows.** {_sentences(result)}
"""


def _legend(result: Result) -> str:
    """Return a list of what the measured pipelines are, with their versions."""
    versions = result["settings"]["versions"]
    ours = "[this project's pipeline](pipelines.md#a-topic-into-a-table)"
    texts = {
        TO_DELTA: f"{ours}, with deltalake {versions['deltalake']}",
        TO_ICEBERG: f"{ours}, with pyiceberg {versions['pyiceberg']}",
        DELTA: f"that of Delta {versions['delta']} for Spark, after Spark's own Kafka source. It reads a\n"
        "  table's log in 2 tasks instead of 50 (`spark.databricks.delta.snapshotPartitions`)",
        MIXED: "the same sink after this project's source",
        ICEBERG: f"that of Iceberg {versions['iceberg']} for Spark, after Spark's own Kafka source",
        PARQUET: "Spark's file sink, after Spark's own Kafka source: the control for each version of Spark",
    }
    measured = {row["pipeline"] for row in result["samples"]}
    return "\n".join(f"- `{name}`: {text}." for name, text in texts.items() if name in measured)


def _sentences(result: Result) -> str:
    sentences = []
    for ratio in (RATIOS[0], *(f"{name} / {PARQUET}" for name in (TO_ICEBERG, ICEBERG))):
        rows, cpu, latency = (
            figure(result, metric, pipeline=ratio) for metric in ("rows_per_s", "cpu_s_per_gb", "p50_ms")
        )
        if rows is not None:
            ours, _, other = ratio.partition(" / ")
            sentences.append(
                f"{ours} comes to {number(rows)} times the rows per second of the {other}, with "
                f"{number(cpu)} times its processor time and {number(latency)} times its median latency."
            )
    return " ".join(sentences) or f"No ratio: {DELTA} and {PARQUET} were not measured."


def picture(result: Result) -> str:
    """Return an SVG with rows per second as a bar per pipeline and version of Spark."""
    bars = [
        (
            f"{row['pipeline']}, Spark {row['spark']}",
            row["rows_per_s"],
            f"{number(row['rows_per_s'])} rows/s",
            BLUE if row["pipeline"] in (TO_DELTA, TO_ICEBERG) else WARN,
        )
        for row in result["medians"]
        if " / " not in row["pipeline"]
    ]
    return bar_chart("Topics into tables", bars)
