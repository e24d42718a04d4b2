"""A client of Spark Connect: `python -m support.spark.connect_program FUNCTION ARGUMENTS_AS_JSON`.

It prints the function's result as JSON. As with the package pyspark-client, it cannot import py4j after
PySpark was imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from oncelog.errors import ConfigError, OncelogError
from oncelog.load.loader import Load
from oncelog.load.on_spark import run_load_on_spark
from oncelog.load.parsing import Options
from oncelog.spark import provenance_headers, require_deterministic, write_atomic
from oncelog.spark.audit import audit_table, audit_topic


def session(url: str) -> SparkSession:
    spark = SparkSession.builder.remote(url).getOrCreate()
    for name in [name for name in sys.modules if name.split(".")[0] == "py4j"]:
        sys.modules[name] = None  # type: ignore[assignment]
    return spark


def read(spark: SparkSession, servers: str, topic: str, **options: str) -> DataFrame:
    reader = spark.read.format("oncelog").option("kafka.bootstrap.servers", servers)
    return reader.options(subscribe=topic, **options).load()


def write(rows: DataFrame, servers: str, topic: str, **options: str) -> None:
    writer = rows.write.format("oncelog").option("kafka.bootstrap.servers", servers)
    writer.options(topic=topic, **options).mode("append").save()


def batches(url: str, servers: str, source: str, target: str, table: str) -> dict[str, Any]:
    """Write rows twice under one writeId, read them, copy them with provenance, and audit all of it."""
    spark = session(url)
    rows = spark.range(100).selectExpr("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
    for _ in range(2):
        write(rows, servers, source, writeId="w1")
    back = read(spark, servers, source, includeHeaders="true")
    write(back.select("key", "value", provenance_headers().alias("headers")), servers, target)
    back.write.parquet(table)
    verdicts = {
        "keys": audit_topic(spark, servers, [source], key_check=True),
        "expression": audit_topic(spark, servers, [source], key_check="CAST(value AS STRING)"),
        "against": audit_topic(spark, servers, [target], against=[source]),
        "provenance": audit_topic(spark, servers, [target], distinct="provenance"),
    }
    write(rows.limit(3), servers, target)
    with_copies = audit_topic(spark, servers, [target], key_check=True)
    audited = audit_table(spark, servers, [source], spark.read.parquet(table))
    return {
        "rows": sorted(int(row.value) for row in back.select("value").collect()),
        "verdicts": {name: result.verdict for name, result in verdicts.items()},
        "repeated": [finding.kind for finding in with_copies.findings],
        "table": [audited.finding_count, sum(totals.rows for totals in audited.partitions.values())],
    }


def refusals(url: str, servers: str, topic: str, file: str) -> dict[str, str]:
    """Call what needs classic Spark, and an audit of a topic that does not exist. Return the errors."""
    spark = session(url)
    rows = spark.range(3).selectExpr("CAST(id AS STRING) AS value")
    options = {"kafka.bootstrap.servers": servers, "topic": topic}
    load = Load([Path(file)], topic, "load", Options())
    calls = {
        "write_atomic": lambda: write_atomic(rows, 0, options, name="n"),
        "require_deterministic": lambda: require_deterministic(rows),
        "load": lambda: run_load_on_spark(spark, load, {"bootstrap.servers": servers}),
        "audit": lambda: audit_topic(spark, servers, ["absent"]),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except (ConfigError, OncelogError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def in_foreach_batch(url: str, servers: str, source: str, target: str, checkpoint: str) -> str:
    """Run write_atomic in foreachBatch, which the server calls. Return the query's error."""
    options = {"kafka.bootstrap.servers": servers, "topic": target}
    stream = session(url).readStream.format("oncelog").option("kafka.bootstrap.servers", servers)
    rows = stream.options(subscribe=source, startingOffsets="earliest").load().select("value")
    query = rows.writeStream.foreachBatch(lambda df, batch_id: write_atomic(df, batch_id, options))
    started = query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    try:
        started.awaitTermination()
    except Exception as error:
        return str(error)
    return ""


def copy(url: str, servers: str, source: str, target: str, checkpoint: str) -> None:
    """Copy what a topic has now, as a stream of micro-batches of at most 40 records.

    Raises Spark's exception if the query fails.
    """
    stream = session(url).readStream.format("oncelog").option("kafka.bootstrap.servers", servers)
    stream = stream.options(subscribe=source, startingOffsets="earliest", maxOffsetsPerTrigger="40")
    writer = stream.load().select("key", "value").writeStream.format("oncelog")
    writer = writer.options(topic=target, checkpointLocation=checkpoint)
    query = writer.option("kafka.bootstrap.servers", servers).trigger(availableNow=True).start()
    query.awaitTermination()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
