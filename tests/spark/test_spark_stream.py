"""`spark.readStream.format("oncelog")` on a real broker: triggers, limits, restarts, lost offsets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.spark.topics import Collected, create_topic, fill, read_stream
from support.wait import attempts

import oncelog
from oncelog.client.admin.blocking import Admin
from oncelog.types import TopicPartition

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P1")]


def test_available_now_reads_in_limited_batches_and_continues_from_the_checkpoint(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=2)
    fill(bootstrap, topic, 0, 60, 0)
    fill(bootstrap, topic, 0, 30, 1)
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 40}
    first = Collected()
    query = first.run(read_stream(spark, bootstrap, **options), checkpoint)
    assert [len(batch) for batch in first.batches] == [40, 40, 10]
    assert first.offsets(0) == list(range(60)) and first.offsets(1) == list(range(30))
    source = json.loads(query.recentProgress[-1].json)["sources"][0]
    assert source["latestOffset"] == {topic: {"0": 60, "1": 30}}

    fill(bootstrap, topic, 60, 25, 0)
    second = Collected()
    second.run(read_stream(spark, bootstrap, **options), checkpoint)
    assert second.offsets(0) == list(range(60, 85)) and second.offsets(1) == []


def test_a_batch_that_failed_is_read_again_the_same(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 40)
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 15}

    class FailsOnce(Collected):
        def take(self, frame: Any, batch_id: int) -> None:
            if batch_id == 1:
                raise RuntimeError("the sink is down")
            super().take(frame, batch_id)

    before = FailsOnce()
    with pytest.raises(Exception, match="the sink is down"):
        before.run(read_stream(spark, bootstrap, **options), checkpoint)
    fill(bootstrap, topic, 40, 5)  # the new records must not enlarge the repeated batch
    after = Collected()
    after.run(read_stream(spark, bootstrap, **options), checkpoint)
    assert before.offsets() == list(range(15))
    assert [row.offset for row in after.batches[0]] == list(range(15, 30))
    assert after.offsets() == list(range(15, 45))


def test_from_latest_a_failed_batch_is_repeated_though_latest_has_moved_on(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 10)
    failed: list[int] = []
    has_failed = threading.Event()

    def fail(frame: Any, _batch_id: int) -> None:
        failed.extend(row.offset for row in frame.collect())
        if failed:  # the first batch is empty unless records arrived during planning
            has_failed.set()
            raise RuntimeError("the sink is down")

    stream = read_stream(spark, bootstrap, subscribe=topic)
    query = stream.writeStream.foreachBatch(fail).option("checkpointLocation", checkpoint).start()
    written = 10
    try:
        while not has_failed.is_set() and written < 500:
            fill(bootstrap, topic, written, 5)
            written += 5
            has_failed.wait(0.3)
        with pytest.raises(Exception, match="the sink is down"):
            query.awaitTermination()
    finally:
        query.stop()
    fill(bootstrap, topic, written, 5)
    again = Collected()
    again.run(read_stream(spark, bootstrap, subscribe=topic), checkpoint)
    assert [row.offset for row in again.batches[0]] == failed
    assert again.offsets() == list(range(failed[0], written + 5))


def test_partitions_added_while_the_query_was_down_begin_at_their_beginning(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 5)
    stream = read_stream(spark, bootstrap, subscribe=topic, startingOffsets="earliest")
    Collected().run(stream, checkpoint)
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_partitions({topic: 2})
    fill(bootstrap, topic, 0, 12, partition=1)
    after = Collected()
    after.run(stream, checkpoint)
    assert after.offsets(0) == [] and after.offsets(1) == list(range(12))


def test_records_removed_before_they_were_read_are_a_loss(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 10)
    options = {"subscribe": topic, "startingOffsets": "earliest"}
    Collected().run(read_stream(spark, bootstrap, **options), checkpoint)
    fill(bootstrap, topic, 10, 20)
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.delete_records({TopicPartition(topic, 0): 25})
    with pytest.raises(Exception, match="DataLossError") as raised:
        Collected().run(read_stream(spark, bootstrap, **options), checkpoint)
    assert (
        f"{topic}-0: offset 10 was requested, but the partition contains offsets 25 to 30 (exclusive)"
        in str(raised.value)
    )
    lenient = Collected()
    lenient.run(read_stream(spark, bootstrap, **options, failOnDataLoss="false"), checkpoint)
    assert lenient.offsets() == [25, 26, 27, 28, 29]


def test_a_topic_created_again_is_another_topic(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 10)
    options = {"subscribe": topic, "startingOffsets": "earliest"}
    Collected().run(read_stream(spark, bootstrap, **options), checkpoint)
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.delete_topics([topic])
    create_topic(bootstrap, topic)
    # As many records as before, so the offsets alone would not show that the topic is new.
    fill(bootstrap, topic, 0, 10)
    with pytest.raises(Exception, match="was deleted and re-created"):
        Collected().run(read_stream(spark, bootstrap, **options), checkpoint)
    lenient = Collected()
    lenient.run(read_stream(spark, bootstrap, **options, failOnDataLoss="false"), checkpoint)
    assert lenient.offsets() == list(range(10))


def test_ending_offsets_are_refused_in_a_stream(
    spark: Any, shared_broker: oncelog.Broker, checkpoint: str
) -> None:
    stream = read_stream(spark, shared_broker.bootstrap_servers, subscribe="t", endingOffsets="latest")
    with pytest.raises(Exception, match="endingOffsets has no meaning in a stream"):
        Collected().run(stream, checkpoint)


def test_a_running_query_survives_a_broker_restart(spark: Any, checkpoint: str, tmp_path: Path) -> None:
    broker = oncelog.Broker(tmp_path / "data").start()
    collected = Collected()
    try:
        create_topic(broker.bootstrap_servers, "t")
        fill(broker.bootstrap_servers, "t", 0, 10)
        stream = read_stream(spark, broker.bootstrap_servers, subscribe="t", startingOffsets="earliest")
        query = (
            stream.writeStream.foreachBatch(collected.take).option("checkpointLocation", checkpoint).start()
        )
        try:
            _until(query, lambda: len(collected.rows) >= 10)
            broker.stop()
            broker.start()
            fill(broker.bootstrap_servers, "t", 10, 15)
            _until(query, lambda: len(collected.rows) >= 25)
        finally:
            query.stop()
    finally:
        broker.stop()
    assert collected.offsets() == list(range(25))


def _until(query: Any, is_done: Callable[[], bool]) -> None:
    """Wait until the condition is true. If the query fails, raise its error."""
    for _ in attempts(lambda: "the stream did not get there", 200):
        if is_done():
            return
        query.awaitTermination(0.2)
