r"""Enrich and forward orders: join a topic with a table of customers, and write each order once.

    oncelog pipeline run enrich.py --set SOURCE=orders --set CUSTOMERS=customers.csv \
        --set TARGET=enriched --set CHECKPOINT=/var/lib/enrich

An order is a JSON object with id, customer and cents. Settings come from --set, then from the
environment. TRIGGER=availableNow reads the present records and ends. Without the supervisor:
SOURCE=orders ... spark-submit enrich.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

ORDER = "id string, customer string, cents bigint"
CUSTOMER = "customer string, name string, country string"


def enriched(spark: SparkSession, settings: Mapping[str, str]) -> DataFrame:
    orders = (
        spark.readStream.format("oncelog")
        .option("kafka.bootstrap.servers", settings.get("BOOTSTRAP_SERVERS", "127.0.0.1:9092"))
        .option("subscribe", settings["SOURCE"])
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", settings.get("MAX_OFFSETS", "100000"))
        .load()
        .select(f.from_json(f.col("value").cast("string"), ORDER).alias("order"))
        .select("order.*")
    )
    # Read the table once per start, so that a repeated micro-batch finds the same customers. For a new table,
    # restart the query while no batch is half done: a repeated batch whose rows differ is refused, never
    # doubled.
    customers = f.broadcast(spark.read.csv(settings["CUSTOMERS"], CUSTOMER, header=True))
    # A left join with a broadcast table keeps every order, and keeps it in its partition (the sink's task).
    return orders.join(customers, "customer", "left").select(
        f.col("id").alias("key"),
        f.to_json(f.struct("id", "customer", "cents", "name", "country")).alias("value"),
    )


def pipeline(spark: SparkSession, settings: Mapping[str, str]) -> StreamingQuery:
    trigger = settings.get("TRIGGER", "1 second")
    writer = (
        enriched(spark, settings)
        .writeStream.format("oncelog")
        .option("kafka.bootstrap.servers", settings.get("BOOTSTRAP_SERVERS", "127.0.0.1:9092"))
        .option("topic", settings["TARGET"])
        .option("checkpointLocation", settings["CHECKPOINT"])
    )
    if trigger == "availableNow":
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=trigger).start()


if __name__ == "__main__":
    pipeline(SparkSession.builder.getOrCreate(), os.environ).awaitTermination()
