"""`df.write` and `df.writeStream.format("oncelog")` with real Spark: each row once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from pyspark import TaskContext
from pyspark.sql.functions import expr
from support.spark.topics import create_topic, fill, read, read_stream, take_back

import oncelog
from oncelog.spark import write_atomic
from oncelog.spark.sink.decisions import BatchCommit
from oncelog.spark.sink.sink_options import parse_sink_options
from oncelog.spark.sink.task import Sink

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
    """Return the keys and values in a topic, sorted by the number in the key.

    They are read with read_committed, unless an option overrides that.
    """
    rows = read(spark, bootstrap, subscribe=topic, **options).select("key", "value").collect()
    return sorted((tuple(row) for row in rows), key=lambda row: int(row[0][1:]))


def expected(*ranges: range) -> list[tuple[bytes, bytes]]:
    return sorted(
        ((b"k%d" % n, b"v%d" % n) for each in ranges for n in each), key=lambda row: int(row[0][1:])
    )


def noted(bootstrap: str, checkpoint: str, topic: str) -> BatchCommit:
    """Return the BatchCommit that the sink stored for the last batch that it finished."""
    query_id = json.loads(Path(checkpoint, "metadata").read_text())["id"]
    sink = Sink(
        query_id, parse_sink_options({"kafka.bootstrap.servers": bootstrap, "topic": topic}, "stream")
    )
    with oncelog.Admin({"bootstrap.servers": bootstrap}) as admin:
        found = sink.finished(admin)
    assert found is not None
    return found


@pytest.mark.behaviour("P2")
def test_rows_that_a_failed_step_cut_off_are_not_committed(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    """R1160: a Python step failed in the middle of a task's rows, and the sink committed the rows before the
    failure.
    """
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, 2)
    # Spark's buffers are too small for these rows, so it sends some of them to the sink before the step
    # fails.
    rows = spark.range(0, 100, 1, 1).selectExpr("CONCAT('k', id) AS key", "repeat('v', 30000) AS value")

    def cut_off(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if number == 4:
                raise RuntimeError("this step fails")
            yield batch

    def unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    name, size = "spark.sql.execution.arrow.maxRecordsPerBatch", "10"
    spark.conf.set(name, size)
    try:
        for write_id in ({}, {"writeId": "w"}):
            with pytest.raises(Exception, match="this step fails"):
                write(rows.mapInArrow(cut_off, rows.schema), bootstrap, topic=topic, **write_id)
            assert pairs(spark, bootstrap, topic) == []
        write(rows.mapInArrow(unchanged, rows.schema), bootstrap, topic=topic, writeId="w")
        assert len(pairs(spark, bootstrap, topic)) == 100
    finally:
        spark.conf.unset(name)


def test_a_batch_write_with_an_id_stores_its_rows_once_when_repeated(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=3)
    write(numbers(spark, 1000), bootstrap, topic=topic)
    for _ in range(2):
        write(numbers(spark, 10), bootstrap, topic=topic, writeId=f"{topic}-w")
    assert pairs(spark, bootstrap, topic) == expected(range(1000), range(10))
    with pytest.raises(
        Exception, match=r"SinkRefused: batch 0, topic.*committed with 10 rows in all, and now there are 12"
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


def test_wrong_options_and_rows_are_errors_on_the_driver(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    frame = numbers(spark, 4, 1)
    null_topic = frame.selectExpr("value", f"IF(key = 'k2', NULL, '{topic}') AS topic")
    with pytest.raises(Exception, match=r"RowRefused: task 0 of batch 0.*row 2 has a null topic"):
        write(null_topic, bootstrap, markerTopic=topic)
    no_partition = frame.selectExpr("value", "CAST(1 AS INT) AS partition")
    with pytest.raises(Exception, match=rf"row 0 .*topic '{topic}' has partitions 0 to 0"):
        write(no_partition, bootstrap, topic=topic)
    for broken, options, said in (
        (frame.select("key"), {"topic": topic}, "the column value is missing"),
        (frame, {}, "set markerTopic|no topic"),
        (frame, {"topic": topic, "writId": "w"}, "did you mean writeId"),
    ):
        with pytest.raises(Exception, match=said):
            write(broken, bootstrap, **options)
    assert pairs(spark, bootstrap, topic) == []


@pytest.mark.behaviour("T12")
def test_a_restored_checkpoint_reads_again_and_stores_rows_once(
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
    # Batch 2 is repeated, and the sink finds that it has already committed it.
    write_stream(frame, bootstrap, checkpoint, topic=topic)
    again = noted(bootstrap, checkpoint, topic)
    assert first == again and (again.batch_id, again.lanes) == (2, 1)
    assert pairs(spark, bootstrap, topic) == expected(range(60))
    take_back(checkpoint, "commits", "offsets")
    take_back(checkpoint, "commits")
    with pytest.raises(Exception, match="batch 1 was requested, but batch 2 has been committed since"):
        write_stream(frame, bootstrap, checkpoint, topic=topic)
    assert pairs(spark, bootstrap, topic) == expected(range(60))
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    assert "### Reading again, and processing once" in page


def dies_in_lane_1(
    bootstrap: str, name: str
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for mapInArrow. In it, task 1 fails once task 0 has committed its rows."""

    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            task = TaskContext.get()
            if task is None or task.partitionId() != 1:
                continue
            query_id = task.getLocalProperty("sql.streaming.queryId") or name
            with oncelog.Admin({"bootstrap.servers": bootstrap}) as admin:
                while not admin.group_offsets(f"oncelog-{query_id}/0"):
                    pass  # the loop has no limit, because pytest's time limit ends it
            raise RuntimeError("the task dies")

    return work


@pytest.mark.behaviour("P6")
@pytest.mark.parametrize("first", ["key", "rand()"])
def test_a_half_written_micro_batch_is_completed_or_refused_under_another_plan(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str, first: str
) -> None:
    """P2: rows were stored twice, and then neither plan was accepted."""
    bootstrap, topic = shared_broker.bootstrap_servers, topic.translate(str.maketrans("()", "--"))
    create_topic(bootstrap, f"{topic}.in")
    create_topic(bootstrap, topic)
    fill(bootstrap, f"{topic}.in", 0, 60)
    source = {"subscribe": f"{topic}.in", "startingOffsets": "earliest"}
    stream = read_stream(spark, bootstrap, **source).select("key", "value")
    placed = stream.repartition(2, expr(first))
    dying = placed.mapInArrow(dies_in_lane_1(bootstrap, topic), "key binary, value binary")
    with pytest.raises(Exception, match="the task dies"):
        write_stream(dying, bootstrap, checkpoint, topic=topic)
    half = pairs(spark, bootstrap, topic)
    assert 0 < len(half) < 60
    for other in (stream.repartition(6, expr(first)), stream.repartition(1)):
        with pytest.raises(Exception, match=r"SinkRefused: task 0 of batch 0.*rows in this task, and now"):
            write_stream(other, bootstrap, checkpoint, topic=topic)
        assert pairs(spark, bootstrap, topic) == half
    if first == "key":
        write_stream(placed, bootstrap, checkpoint, topic=topic)
        assert pairs(spark, bootstrap, topic) == expected(range(60))
    else:
        with pytest.raises(Exception, match="write_atomic"):
            write_stream(placed, bootstrap, checkpoint, topic=topic)
        assert pairs(spark, bootstrap, topic) == half


def test_modes_that_spark_refuses_are_documented(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    """G4, G10, P5: Spark's Python API refuses these modes without a call to the sink, so the guide explains
    them.
    """
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    batch = numbers(spark, 1).write.format("oncelog").option("kafka.bootstrap.servers", bootstrap)
    with pytest.raises(Exception, match="ErrorIfExists"):
        batch.option("topic", topic).save()
    stream = read_stream(spark, bootstrap, subscribe=topic).groupBy("value").count()
    writer = stream.selectExpr("value").writeStream.format("oncelog").outputMode("update")
    writer = writer.option("kafka.bootstrap.servers", bootstrap).option("topic", topic)
    with pytest.raises(Exception, match="does not support Update mode"):
        writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
    failures = []

    def save() -> None:
        try:
            write(numbers(spark, 1), bootstrap, topic=topic)
        except Exception as error:
            failures.append(str(error))

    thread = Thread(target=save)
    thread.start()
    thread.join()
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    assert ["DATA_SOURCE_NOT_FOUND" in failure for failure in failures] == [True]
    for words in (
        '`mode("append")`',
        '`outputMode("update")`',
        "`DATA_SOURCE_NOT_FOUND: oncelog` has three causes",
    ):
        assert words in page


@pytest.mark.behaviour("P3")
def test_repeated_writes_are_stored_once_on_apache_kafka(
    spark: Any, apache_kafka: ApacheKafka, topic: str, checkpoint: str
) -> None:
    bootstrap = apache_kafka.bootstrap_servers
    create_topic(bootstrap, f"{topic}.in", partitions=2)
    create_topic(bootstrap, topic, partitions=3)
    for _ in range(2):
        write(numbers(spark, 100), bootstrap, topic=f"{topic}.in", writeId="flights")
    source = {"subscribe": f"{topic}.in", "startingOffsets": "earliest", "maxOffsetsPerTrigger": 60}
    frame = read_stream(spark, bootstrap, **source).select("key", "value")
    write_stream(frame, bootstrap, checkpoint, topic=topic)
    take_back(checkpoint, "commits")  # without the entry, Spark repeats the last micro-batch
    write_stream(frame, bootstrap, checkpoint, topic=topic)
    options = {"kafka.bootstrap.servers": bootstrap, "topic": topic}
    for _ in range(2):
        write_atomic(numbers(spark, 20), 0, options, name=topic)
    assert pairs(spark, bootstrap, topic) == expected(range(100), range(20))
