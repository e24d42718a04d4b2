"""Follow a topic and keep its records as Parquet; a restart misses and doubles nothing.

oncelog serve &
python examples/spark_stream.py 127.0.0.1:9092 flights out/
"""

from __future__ import annotations

import os
import sys

# Spark's Python workers must be this interpreter.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery


def keep_as_parquet(
    spark: SparkSession, bootstrap_servers: str, topic: str, directory: str
) -> StreamingQuery:
    records = (
        spark.readStream.format("oncelog")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 100_000)
        .load()
    )
    return (
        records.selectExpr(
            "CAST(key AS STRING) key", "CAST(value AS STRING) value", "partition", "offset", "timestamp"
        )
        .writeStream.format("parquet")
        .option("path", f"{directory}/records")
        .option("checkpointLocation", f"{directory}/checkpoint")
        # Read the present records in several micro-batches, then stop. processingTime="1 second" never stops.
        .trigger(availableNow=True)
        .start()
    )


if __name__ == "__main__":
    query = keep_as_parquet(SparkSession.builder.getOrCreate(), *sys.argv[1:4])
    query.awaitTermination()
