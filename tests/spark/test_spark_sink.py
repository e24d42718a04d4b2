"""`df.write` and `df.writeStream.format("oncelog")` with real Spark: each row once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_spark import create_topic, fill, read, read_stream

import oncelog
from oncelog.dev.apache_kafka import ApacheKafka
from oncelog.rules.lane import Finished
from oncelog.spark import write_atomic

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def write(frame: Any, bootstrap: str, **options: object) -> None:
    writer = frame.write.format("oncelog").mode("append").option("kafka.bootstrap.servers", bootstrap)
    for name, value in options.items():
        writer = writer.option(name.replace("_", "."), str(value))
    writer.save()


def write_stream(frame: Any, bootstrap: str, checkpoint: str, **options: object) -> None:
    writer = frame.writeStream.format("oncelog").option("kafka.bootstrap.servers", bootstrap)
    for name, value in options.items():
        writer = writer.option(name.replace("_", "."), str(value))
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()


def numbers(spark: Any, count: int, partitions: int = 2) -> Any:
    frame = spark.range(0, count, 1, partitions)
    return frame.selectExpr("CONCAT('k', id) AS key", "CONCAT('v', id) AS value")


def pairs(spark: Any, bootstrap: str, topic: str, **options: object) -> list[tuple[bytes, bytes]]:
    """Keys and values, sorted by number; read_committed unless an option says otherwise."""
    rows = read(spark, bootstrap, subscribe=topic, **options).select("key", "value").collect()
    return sorted((tuple(row) for row in rows), key=lambda row: int(row[0][1:]))


def expected(*ranges: range) -> list[tuple[bytes, bytes]]:
    return sorted(
        ((b"k%d" % n, b"v%d" % n) for each in ranges for n in each), key=lambda row: int(row[0][1:])
    )


def take_back(checkpoint: str, *logs: str) -> None:
    """The checkpoint forgets the newest entry of these logs (offsets, commits)."""
    for log in logs:
        newest = max((each for each in Path(checkpoint, log).iterdir() if each.name.isdigit()), key=entry)
        newest.unlink()
        (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)


def noted(bootstrap: str, checkpoint: str, topic: str) -> Finished:
    """The sink's note of the last batch it finished."""
    query_id = json.loads(Path(checkpoint, "metadata").read_text())["id"]
    with oncelog.Admin({"bootstrap.servers": bootstrap}) as admin:
        kept = admin.group_offsets(f"oncelog-{query_id}")
    found = Finished.decode(query_id, kept[oncelog.TopicPartition(topic, 0)])
    assert found is not None
    return found


def entry(path: Path) -> int:
    return int(path.name)


def test_a_batch_write_and_one_that_is_repeated(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=3)
    write(numbers(spark, 1000), bootstrap, topic=topic)
    for _ in range(2):
        write(numbers(spark, 10), bootstrap, topic=topic, writeId=f"{topic}-w")
    assert pairs(spark, bootstrap, topic) == expected(range(1000), range(10))
    with pytest.raises(
        Exception, match=r"SinkRefused: lane \d of batch 0, topic.*committed with 5 rows in this"
    ):
        write(numbers(spark, 12), bootstrap, topic=topic, writeId=f"{topic}-w")
    assert len(pairs(spark, bootstrap, topic)) == 1010


def test_a_half_finished_write_is_completed_by_its_id(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    halves = numbers(spark, 10).selectExpr(
        "key", "IF(key = 'k7', CAST(RAISE_ERROR('broken input') AS STRING), value) AS value"
    )
    with pytest.raises(Exception, match="broken input"):
        write(halves, bootstrap, topic=topic, writeId=f"{topic}-w")
    write(numbers(spark, 10), bootstrap, topic=topic, writeId=f"{topic}-w")
    assert pairs(spark, bootstrap, topic) == expected(range(10))


def test_what_is_wrong_is_told_on_the_driver(spark: Any, shared_broker: oncelog.Broker, topic: str) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    frame = numbers(spark, 4, 1)
    null_topic = frame.selectExpr("value", f"IF(key = 'k2', NULL, '{topic}') AS topic")
    with pytest.raises(Exception, match=r"RowRefused: lane 0 of batch 0.*row 2 has a null topic"):
        write(null_topic, bootstrap, markerTopic=topic)
    no_partition = frame.selectExpr("value", "CAST(1 AS INT) AS partition")
    with pytest.raises(Exception, match=rf"row 0 .*topic '{topic}' has partitions 0 to 0"):
        write(no_partition, bootstrap, topic=topic)
    for broken, options, said in (
        (frame.select("key"), {"topic": topic}, "a column named value is needed"),
        (frame, {}, "set the option markerTopic|no topic"),
        (frame, {"topic": topic, "writId": "w"}, "did you mean writeId"),
    ):
        with pytest.raises(Exception, match=said):
            write(broken, bootstrap, **options)
    assert pairs(spark, bootstrap, topic) == []


@pytest.mark.behaviour("T12")
def test_a_checkpoint_taken_back_reads_again_and_processes_once(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, f"{topic}.in")
    create_topic(bootstrap, topic)
    fill(bootstrap, f"{topic}.in", 0, 60)
    source = {"subscribe": f"{topic}.in", "startingOffsets": "earliest", "maxOffsetsPerTrigger": 20}
    frame = read_stream(spark, bootstrap, **source).select("key", "value")
    write_stream(frame, bootstrap, checkpoint, topic=topic)
    first = noted(bootstrap, checkpoint, topic)
    take_back(checkpoint, "commits")
    write_stream(frame, bootstrap, checkpoint, topic=topic)  # batch 2 is read again, and found written
    again = noted(bootstrap, checkpoint, topic)
    assert (first.batch_id, first.lanes) == (again.batch_id, again.lanes) == (2, 1)
    assert first.run_id and again.run_id and first.run_id != again.run_id
    assert pairs(spark, bootstrap, topic) == expected(range(60))
    take_back(checkpoint, "commits", "offsets")
    take_back(checkpoint, "commits")
    with pytest.raises(Exception, match="batch 1 was asked for, and batch 2 has been committed since"):
        write_stream(frame, bootstrap, checkpoint, topic=topic)
    assert pairs(spark, bootstrap, topic) == expected(range(60))
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    assert "### Reading again, and processing once" in page


@pytest.mark.behaviour("P3")
def test_apache_kafka(spark: Any, apache_kafka: ApacheKafka, topic: str, checkpoint: str) -> None:
    bootstrap = apache_kafka.bootstrap_servers
    create_topic(bootstrap, f"{topic}.in", partitions=2)
    create_topic(bootstrap, topic, partitions=3)
    for _ in range(2):
        write(numbers(spark, 100), bootstrap, topic=f"{topic}.in", writeId="flights")
    source = {"subscribe": f"{topic}.in", "startingOffsets": "earliest", "maxOffsetsPerTrigger": 60}
    frame = read_stream(spark, bootstrap, **source).select("key", "value")
    write_stream(frame, bootstrap, checkpoint, topic=topic)
    take_back(checkpoint, "commits")  # the last micro-batch is asked for again
    write_stream(frame, bootstrap, checkpoint, topic=topic)
    options = {"kafka.bootstrap.servers": bootstrap, "topic": topic}
    for _ in range(2):
        write_atomic(numbers(spark, 20), 0, options, name=topic)
    assert pairs(spark, bootstrap, topic) == expected(range(100), range(20))
