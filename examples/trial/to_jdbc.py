r"""Append a topic to a PostgreSQL table with foreachBatch and Spark's JDBC writer. This is at least once.

    oncelog trial examples/trial/to_jdbc.py --target postgresql \
        --database jdbc:postgresql://127.0.0.1:5432/test \
        --conf spark.jars.packages=org.postgresql:postgresql:42.7.14

examples/pipelines/to_postgresql.py does the same exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery


def pipeline(spark: SparkSession, settings: Mapping[str, str]) -> StreamingQuery:
    url, table = settings["TARGET"], settings["TABLE"]

    def append(batch: DataFrame, _batch_id: int) -> None:
        batch.write.jdbc(url, table, mode="append", properties={"driver": "org.postgresql.Driver"})

    return (
        spark.readStream.format("oncelog")
        .option("kafka.bootstrap.servers", settings["BOOTSTRAP_SERVERS"])
        .option("subscribe", settings["SOURCE"])
        .option("startingOffsets", "earliest")
        .load()
        .selectExpr("CAST(key AS STRING) AS id", "CAST(value AS STRING) AS value")
        .writeStream.foreachBatch(append)
        .option("checkpointLocation", settings["CHECKPOINT"])
        .trigger(processingTime=settings.get("TRIGGER", "1 second"))
        .start()
    )
