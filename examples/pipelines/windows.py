"""Aggregate sales by country and minute, and write each minute once into another topic.

    oncelog pipeline run windows.py --set SOURCE=enriched --set TARGET=sales --set CHECKPOINT=/var/lib/sales

A sale is a JSON object with at (ISO 8601), country and cents. A minute is written when the watermark has
passed it: after a sale that is LATENESS younger. Sales that arrive even later are left out. Settings come
from --set, then from the environment. Without the supervisor:
SOURCE=enriched ... spark-submit windows.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

SALE = "at timestamp, country string, cents bigint"


def pipeline(spark: SparkSession, settings: Mapping[str, str]) -> StreamingQuery:
    servers = settings.get("BOOTSTRAP_SERVERS", "127.0.0.1:9092")
    sales = (
        spark.readStream.format("oncelog")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", settings["SOURCE"])
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", settings.get("MAX_OFFSETS", "100000"))
        .load()
        .select(f.from_json(f.col("value").cast("string"), SALE).alias("sale"))
        .select("sale.*")
    )
    # Whole numbers: a sum of doubles depends on their order, and a repeated batch must be the same.
    minutes = (
        sales.withWatermark("at", settings.get("LATENESS", "10 minutes"))
        .groupBy(f.window("at", "1 minute"), "country")
        .agg(f.count(f.lit(1)).alias("sales"), f.sum("cents").alias("cents"))
        .select("country", f.col("window.start").alias("minute"), "sales", "cents")
    )
    return (
        minutes.select(
            f.col("country").alias("key"),
            f.to_json(f.struct("country", "minute", "sales", "cents")).alias("value"),
        )
        .writeStream.format("oncelog")
        .option("kafka.bootstrap.servers", servers)
        .option("topic", settings["TARGET"])
        .option("checkpointLocation", settings["CHECKPOINT"])
        .outputMode("append")
        .trigger(processingTime=settings.get("TRIGGER", "1 second"))
        .start()
    )


if __name__ == "__main__":
    pipeline(SparkSession.builder.getOrCreate(), os.environ).awaitTermination()
