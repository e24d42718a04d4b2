"""Read a topic of JSON records into a table: carriers with their number of flights and mean delay.

oncelog serve &
python examples/spark_batch.py 127.0.0.1:9092 flights
"""

from __future__ import annotations

import os
import sys

# Spark's Python workers must be this interpreter.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f


def delays(spark: SparkSession, bootstrap_servers: str, topic: str) -> DataFrame:
    records = (
        spark.read.format("oncelog")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", topic)
        .option("minPartitions", 4)
        .load()
    )
    flights = records.select(
        f.from_json(f.col("value").cast("string"), "carrier string, dep_delay double").alias("x")
    )
    return (
        flights.groupBy("x.carrier")
        .agg(f.count(f.lit(1)).alias("flights"), f.round(f.avg("x.dep_delay"), 1).alias("mean_delay"))
        .orderBy("carrier")
    )


if __name__ == "__main__":
    delays(SparkSession.builder.getOrCreate(), *sys.argv[1:3]).show()
