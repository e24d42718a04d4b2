"""`df.write` and `df.writeStream.format("oncelog")` on a real broker: each row once."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_spark import create_topic, fill, read, read_stream

import oncelog

pytestmark = [pytest.mark.spark]


def write(frame: Any, bootstrap: str, **options: object) -> None:
    writer = frame.write.format("oncelog").mode("append").option("kafka.bootstrap.servers", bootstrap)
    for name, value in options.items():
        writer = writer.option(name.replace("_", "."), str(value))
    writer.save()


def write_stream(frame: Any, bootstrap: str, checkpoint: str, **options: object) -> Any:
    writer = frame.writeStream.format("oncelog").option("kafka.bootstrap.servers", bootstrap)
    for name, value in options.items():
        writer = writer.option(name.replace("_", "."), str(value))
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def numbers(spark: Any, count: int, partitions: int = 2) -> Any:
    frame = spark.range(0, count, 1, partitions)
    return frame.selectExpr("CAST(id AS STRING) AS key", "CONCAT('v', id) AS value")


def values(spark: Any, bootstrap: str, topic: str) -> list[str]:
    rows = read(spark, bootstrap, subscribe=topic).select("value").collect()
    return sorted(row.value.decode() for row in rows)


def test_batch_write(spark: Any, shared_broker: oncelog.Broker, topic: str) -> None:
    create_topic(shared_broker.bootstrap_servers, topic, partitions=3)
    write(numbers(spark, 1000), shared_broker.bootstrap_servers, topic=topic)
    assert values(spark, shared_broker.bootstrap_servers, topic) == sorted(f"v{n}" for n in range(1000))


def test_stream_write(spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, f"{topic}.in", partitions=2)
    create_topic(bootstrap, topic, partitions=3)
    fill(bootstrap, f"{topic}.in", 0, 300, 0)
    fill(bootstrap, f"{topic}.in", 300, 300, 1)
    stream = read_stream(
        spark, bootstrap, subscribe=f"{topic}.in", startingOffsets="earliest", maxOffsetsPerTrigger=200
    )
    write_stream(stream.select("key", "value"), bootstrap, checkpoint, topic=topic)
    assert values(spark, bootstrap, topic) == sorted(f"v{n}" for n in range(600))
