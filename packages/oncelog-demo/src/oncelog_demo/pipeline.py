"""The Spark work of the demonstration: the streaming aggregation and the count of every key."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from oncelog_demo.flights import RESULT_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_OFFSETS_PER_BATCH = 120_000
"""Maximum number of records per micro-batch.

The topic has more records, so the query has several micro-batches and carries state from one to the next.
"""

VALUE_SCHEMA = (
    "carrier string, flight int, origin string, dest string, hour int, dep_delay bigint, arr_delay bigint"
)


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The result of the aggregation.

    `table` is read from the Parquet files and sorted by carrier and hour. `batches` is the number of
    micro-batches.
    """

    table: pa.Table
    batches: int
    rows_read: int


def run_delay_pipeline(
    spark: SparkSession,
    bootstrap_servers: str,
    topic: str,
    work_dir: Path,
    *,
    on_progress: Callable[[int], None],
) -> PipelineResult:
    """Aggregate the whole topic into delays by carrier and hour, stored as Parquet under `work_dir`.

    The query runs in complete mode and overwrites the files in every micro-batch. So a batch that Spark
    replays writes the same files again. `on_progress` receives the number of rows read so far.
    """
    from pyspark.sql import functions as f

    target = work_dir / "delays.parquet"
    flights = (
        _stream(spark, bootstrap_servers, topic)
        .select(f.from_json(f.col("value").cast("string"), VALUE_SCHEMA).alias("flight"))
        .select("flight.*")
    )
    delays = flights.groupBy("carrier", "hour").agg(
        f.count(f.lit(1)).alias("flights"),
        f.count("dep_delay").alias("departed"),
        f.sum("dep_delay").alias("dep_delay_min"),
        f.sum("arr_delay").alias("arr_delay_min"),
    )

    def keep(result: DataFrame, _batch_id: int) -> None:
        result.coalesce(1).write.mode("overwrite").parquet(str(target))

    query = (
        delays.writeStream.outputMode("complete")
        .foreachBatch(keep)
        .option("checkpointLocation", str(work_dir / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    while not query.awaitTermination(1):
        on_progress(_rows_of(query))
    table = pq.read_table(target).select(RESULT_COLUMNS)
    table = table.sort_by([("carrier", "ascending"), ("hour", "ascending")])
    return PipelineResult(table, len(query.recentProgress), _rows_of(query))


def _stream(spark: SparkSession, bootstrap_servers: str, topic: str) -> DataFrame:
    return (
        spark.readStream.format("oncelog")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", str(MAX_OFFSETS_PER_BATCH))
        .load()
    )


def _rows_of(query: Any) -> int:
    return sum(int(json.loads(p.json)["numInputRows"]) for p in query.recentProgress)


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """A comparison of a topic with the source, by business key.

    `lost` counts flights without a record, and `doubled` counts records after the first one of a flight.
    `foreign` counts records without a matching flight, and `wrong` counts flights with an unexpected value.
    """

    records: int
    lost: int
    doubled: int
    foreign: int
    wrong: int = 0

    @property
    def is_exactly_once(self) -> bool:
        return self.lost == self.doubled == self.foreign == self.wrong == 0

    def __str__(self) -> str:
        return (
            f"{self.lost} flights lost, {self.doubled} doubled, {self.wrong} with a wrong value, "
            f"{self.foreign} foreign records"
        )


def count_keys(spark: SparkSession, bootstrap_servers: str, topic: str, source: pa.Table) -> KeyCounts:
    """Count each flight's records in the topic and compare them with the source.

    `source` has a column `key`. Its other columns, if any, are the expected JSON fields of the value,
    in the same order.
    """
    from pyspark.sql import functions as f

    names = [name for name in source.column_names if name != "key"]
    hashed = f.xxhash64(f.to_json(f.struct(*names)).cast("binary")) if names else f.lit(None)
    flights = spark.createDataFrame(source).select("key", hashed.alias("expected_value"))
    stored = (
        spark.read.format("oncelog")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", topic)
        .load()
        .groupBy(f.col("key").cast("string").alias("stored_key"))
        .agg(f.count(f.lit(1)).alias("times"), f.max(f.xxhash64("value")).alias("stored_value"))
    )
    row = (
        flights.join(stored, flights.key == stored.stored_key, "full_outer")
        .agg(
            f.coalesce(f.sum("times"), f.lit(0)).alias("records"),
            f.count_if(f.col("times").isNull()).alias("lost"),
            f.coalesce(f.sum(f.when(f.col("key").isNotNull(), f.col("times") - 1)), f.lit(0)).alias(
                "doubled"
            ),
            f.coalesce(f.sum(f.when(f.col("key").isNull(), f.col("times"))), f.lit(0)).alias("foreign"),
            f.count_if(f.col("stored_value") != f.col("expected_value")).alias("wrong"),
        )
        .first()
    )
    assert row is not None
    return KeyCounts(row["records"], row["lost"], row["doubled"], row["foreign"], row["wrong"])


def same_result(reached: pa.Table, truth: pa.Table) -> bool:
    """Return True if two results contain the same rows in the same order. Integer widths may differ."""
    return bool(reached.to_pylist() == truth.to_pylist())
