"""Copy a topic into a directory of Parquet files with Spark's own file sink.

oncelog trial examples/trial/to_parquet.py --target parquet
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery


def pipeline(spark: SparkSession, settings: Mapping[str, str]) -> StreamingQuery:
    return (
        spark.readStream.format("oncelog")
        .option("kafka.bootstrap.servers", settings["BOOTSTRAP_SERVERS"])
        .option("subscribe", settings["SOURCE"])
        .option("startingOffsets", "earliest")
        .load()
        .selectExpr("CAST(key AS STRING) AS id", "CAST(value AS STRING) AS value")
        .writeStream.format("parquet")
        .option("path", settings["TARGET"])
        .option("checkpointLocation", settings["CHECKPOINT"])
        .trigger(processingTime=settings.get("TRIGGER", "1 second"))
        .start()
    )
