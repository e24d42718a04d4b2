"""Copy a topic to another one with this project's source and sink.

oncelog trial examples/trial/to_topic.py
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
        .select("key", "value")
        .writeStream.format("oncelog")
        .option("kafka.bootstrap.servers", settings["BOOTSTRAP_SERVERS"])
        .option("topic", settings["TARGET"])
        .option("checkpointLocation", settings["CHECKPOINT"])
        .trigger(processingTime=settings.get("TRIGGER", "1 second"))
        .start()
    )
