"""Read orders, add the tax, write them on: each order once, whatever is killed and replayed meanwhile.

The file is the same on a laptop and on clusters; only where Spark and Kafka are is told differently.

oncelog serve &
python examples/spark_forward.py orders taxed checkpoint
python examples/spark_forward.py orders taxed checkpoint --master spark://HOST:7077 \
    --bootstrap-server KAFKA-1:9092,KAFKA-2:9092,KAFKA-3:9092 --follow
"""

from __future__ import annotations

import argparse
import os
import sys

# Spark's Python workers must be this interpreter; on other machines, one at the same path.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from oncelog.spark import write_atomic

TAX = "order.cents * 19 div 100"
TAXED = f"to_json(named_struct('id', order.id, 'cents', order.cents, 'tax', {TAX})) AS value"


def forward(spark: SparkSession, told: argparse.Namespace) -> StreamingQuery:
    orders = (
        spark.readStream.format("oncelog")
        .option("kafka.bootstrap.servers", told.bootstrap_server)
        .option("subscribe", told.source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 20_000)
        .load()
    )
    taxed = orders.selectExpr(
        "key", "from_json(CAST(value AS STRING), 'id BIGINT, cents BIGINT') AS order"
    ).selectExpr("key", TAXED)
    sink = {"kafka.bootstrap.servers": told.bootstrap_server, "topic": told.target}

    def write(batch: DataFrame, batch_id: int) -> None:
        write_atomic(batch, batch_id, sink)

    # One transaction per micro-batch, or one per task and micro-batch: docs/spark.md tells which to take.
    writer = taxed.writeStream.foreachBatch(write) if told.atomic else taxed.writeStream.format("oncelog")
    if not told.atomic:
        writer = writer.options(**sink)
    writer = writer.option("checkpointLocation", told.checkpoint)
    return (
        writer.trigger(processingTime="1 second") if told.follow else writer.trigger(availableNow=True)
    ).start()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help="topic with orders: {'id': 1, 'cents': 250}")
    parser.add_argument("target", help="topic for orders with their tax")
    parser.add_argument("checkpoint", help="directory, on several machines a shared one")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--bootstrap-server", default="127.0.0.1:9092")
    parser.add_argument("--atomic", action="store_true", help="a micro-batch is seen whole or not at all")
    parser.add_argument("--follow", action="store_true", help="go on until stopped")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    told = parse(sys.argv[1:])
    session = SparkSession.builder.master(told.master).appName("forward").getOrCreate()
    forward(session, told).awaitTermination()
