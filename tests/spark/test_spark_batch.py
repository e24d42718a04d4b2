"""`spark.read.format("oncelog")` on a real broker: columns, ranges, splitting, lost offsets."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from support.spark.topics import START_MS, create_topic, fill, read, records, store

import oncelog
from oncelog.client.admin.blocking import Admin
from oncelog.types import Compression, TopicPartition
from oncelog.wire.batch import build_batch

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P1")]


def test_the_source_needs_no_registration_and_has_the_columns_of_sparks_kafka_source(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    create_topic(shared_broker.bootstrap_servers, topic)
    fill(shared_broker.bootstrap_servers, topic, 0, 3)
    frame = read(spark, shared_broker.bootstrap_servers, subscribe=topic)
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int>"
    )
    row = frame.orderBy("offset").collect()[2]
    when = datetime.datetime.fromtimestamp(START_MS / 1000, datetime.UTC) + datetime.timedelta(milliseconds=2)
    assert row.timestamp.astimezone(datetime.UTC) == when
    assert row.asDict() | {"timestamp": None} == {
        "key": b"k2",
        "value": b"v2",
        "topic": topic,
        "partition": 0,
        "offset": 2,
        "timestamp": None,
        "timestampType": 0,
    }


def test_headers_nulls_and_all_codecs_are_read(spark: Any, shared_broker: oncelog.Broker, topic: str) -> None:
    create_topic(shared_broker.bootstrap_servers, topic)
    headers = (("trace", b"1"), ("trace", b"2"), ("empty", b""), ("null", None))
    batches = [build_batch(records(n, 1, headers=headers), compression=c) for n, c in enumerate(Compression)]
    null = records(9, 1)[0]._replace(key=None, value=None)
    store(shared_broker.bootstrap_servers, topic, [*batches, build_batch([null])])
    rows = read(spark, shared_broker.bootstrap_servers, subscribe=topic, includeHeaders="true").collect()
    rows.sort(key=lambda row: row.offset)
    assert [row.value for row in rows] == [b"v0", b"v1", b"v2", b"v3", b"v4", None]
    assert [[tuple(h) for h in row.headers] for row in rows[:5]] == [list(headers)] * 5
    assert rows[5].key is None and rows[5].headers is None


def test_topics_can_be_listed_matched_or_assigned_by_partition(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    for number, name in enumerate([f"{topic}.a", f"{topic}.b", f"{topic}.other"]):
        create_topic(bootstrap, name, partitions=2)
        for partition in range(2):
            fill(bootstrap, name, 0, number + partition + 1, partition)

    def counts(**options: object) -> dict[tuple[str, int], int]:
        rows = read(spark, bootstrap, **options).groupBy("topic", "partition").count().collect()
        return {(row["topic"].removeprefix(f"{topic}."), row["partition"]): row["count"] for row in rows}

    assert counts(subscribe=f"{topic}.a, {topic}.b") == {("a", 0): 1, ("a", 1): 2, ("b", 0): 2, ("b", 1): 3}
    assert counts(subscribePattern=rf"{topic}\.[ab]") == counts(subscribe=f"{topic}.a,{topic}.b")
    assert counts(assign=f'{{"{topic}.a": [1], "{topic}.other": [0]}}') == {("a", 1): 2, ("other", 0): 3}


def test_offsets_can_be_json_or_timestamps(spark: Any, shared_broker: oncelog.Broker, topic: str) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=2)
    for partition in range(2):
        fill(bootstrap, topic, 0, 30, partition)

    def span(**options: object) -> list[tuple[int, int, int]]:
        frame = read(spark, bootstrap, subscribe=topic, **options).groupBy("partition")
        found = frame.agg({"offset": "min", "topic": "count"}).orderBy("partition").collect()
        return [(row["partition"], row["min(offset)"], row["count(topic)"]) for row in found]

    both = {"startingOffsets": f'{{"{topic}": {{"0": 5, "1": -2}}}}'}
    assert span(**both) == [(0, 5, 25), (1, 0, 30)]
    both["endingOffsets"] = f'{{"{topic}": {{"0": 7, "1": -1}}}}'
    assert span(**both) == [(0, 5, 2), (1, 0, 30)]
    assert span(startingTimestamp=START_MS + 28, endingTimestamp=START_MS + 29) == [(0, 28, 1), (1, 28, 1)]


def test_split_partitions_read_the_same_as_unsplit(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=2)
    fill(bootstrap, topic, 0, 95, 0)
    fill(bootstrap, topic, 0, 7, 1)
    whole = read(spark, bootstrap, subscribe=topic)
    assert whole.rdd.getNumPartitions() == 2
    expected = sorted(map(tuple, whole.collect()))
    for options, parts in [({"minPartitions": 7}, 7), ({"maxRecordsPerPartition": 30}, 5)]:
        split = read(spark, bootstrap, subscribe=topic, **options)
        assert split.rdd.getNumPartitions() == parts
        assert sorted(map(tuple, split.collect())) == expected


def test_an_empty_topic_has_no_rows(spark: Any, shared_broker: oncelog.Broker, topic: str) -> None:
    create_topic(shared_broker.bootstrap_servers, topic, partitions=3)
    assert read(spark, shared_broker.bootstrap_servers, subscribe=topic).count() == 0


def test_lost_offsets_fail_by_name_or_are_skipped(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 50)
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.delete_records({TopicPartition(topic, 0): 20})
    options = {"subscribe": topic, "startingOffsets": f'{{"{topic}": {{"0": 3}}}}'}
    with pytest.raises(Exception, match="DataLossError") as raised:
        read(spark, bootstrap, **options).count()
    text = str(raised.value)
    assert f"{topic}-0 contains offsets 20 to 50 (exclusive), but startingOffsets starts at 3" in text
    assert "failOnDataLoss to false" in text
    assert read(spark, bootstrap, **options, failOnDataLoss="false").count() == 30


def test_offsets_removed_between_planning_and_reading_are_a_loss(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 50)
    strict = read(spark, bootstrap, subscribe=topic)
    lenient = read(spark, bootstrap, subscribe=topic, failOnDataLoss="false")
    assert strict.count() == lenient.count() == 50  # count() plans the read now; rows are collected below
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.delete_records({TopicPartition(topic, 0): 20})
    with pytest.raises(
        Exception, match="offsets 0 to 49 were requested, but the partition contains offsets 20"
    ):
        strict.collect()
    assert lenient.count() == 30


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subscribe": "t", "startingOfsets": "earliest"}, "did you mean startingOffsets"),
        ({"subscribe": "t", "kafka_isolation_levl": "x"}, "did you mean isolation.level"),
        ({"subscribe": "t", "assign": "{}"}, "exactly one of subscribe, subscribePattern and assign"),
    ],
)
def test_wrong_options_are_errors_at_load(
    spark: Any, shared_broker: oncelog.Broker, options: dict[str, object], said: str
) -> None:
    with pytest.raises(Exception, match=said):
        read(spark, shared_broker.bootstrap_servers, **options)


def test_a_topic_that_does_not_exist_is_named(spark: Any, shared_broker: oncelog.Broker) -> None:
    with pytest.raises(Exception, match="no-such-topic"):
        read(spark, shared_broker.bootstrap_servers, subscribe="no-such-topic").count()
