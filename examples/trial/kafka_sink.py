r"""Copy a topic to another one with Spark's own Kafka source and sink. The sink is at least once.

    oncelog trial examples/trial/kafka_sink.py \
        --conf spark.jars.packages=org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery


def pipeline(spark: SparkSession, settings: Mapping[str, str]) -> StreamingQuery:
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings["BOOTSTRAP_SERVERS"])
        .option("subscribe", settings["SOURCE"])
        .option("startingOffsets", "earliest")
        .load()
        .select("key", "value")
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", settings["BOOTSTRAP_SERVERS"])
        .option("topic", settings["TARGET"])
        .option("checkpointLocation", settings["CHECKPOINT"])
        .trigger(processingTime=settings.get("TRIGGER", "1 second"))
        .start()
    )
