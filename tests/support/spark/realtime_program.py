"""A query in Spark's real-time mode that copies a topic with Spark's own source and sink, and provenance.

    python -m support.spark.realtime_program '{"bootstrap": HOST:PORT, "source": TOPIC, "target": TOPIC,
    "checkpoint": DIR, "jars": [JAR, ...]}'

It runs in its own process so that it can be killed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import SparkSession

from oncelog.spark import provenance_headers


def main(options: dict[str, Any]) -> None:
    conf = {
        "spark.master": "local[3]",  # the tasks of all partitions run at the same time
        "spark.jars": ",".join(options["jars"]),
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.ui.enabled": "false",
    }
    builder = SparkSession.builder
    for name, value in conf.items():
        builder = builder.config(name, value)
    kafka = {"kafka.bootstrap.servers": options["bootstrap"]}
    rows = (
        builder.getOrCreate()
        .readStream.format("kafka")
        .options(**kafka, subscribe=options["source"], startingOffsets="earliest")
        .load()
        .select("key", "value", provenance_headers().alias("headers"))
    )
    # In real-time mode, a batch stores its offsets only at its end. This batch is killed before that, so all
    # its rows are written again.
    writer = rows.writeStream.format("kafka").options(**kafka, topic=options["target"])
    writer = writer.option("checkpointLocation", options["checkpoint"]).outputMode("update")
    writer.trigger(realTime="10 minutes").start().awaitTermination()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
