"""Running queries of the source: partitions and topics added or recreated, and the wait for more records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.spark.topics import START_MS, Collected, create_topic, fill, read, read_stream, store
from support.spark.transactions import wait_for_stable_end, write_transactions
from support.wait import attempts

import oncelog
from oncelog.client.admin.blocking import Admin
from oncelog.errors import OncelogError
from oncelog.spark.source import reader as source_reader
from oncelog.spark.source.offset_ranges import DataLossError, OffsetRange
from oncelog.spark.source.offset_resolver import OffsetResolver
from oncelog.spark.source.source import BatchReader, StreamReader
from oncelog.spark.source.source_options import parse_options
from oncelog.testing.proxy import Proxy
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P1")]
CREATED_AGAIN = "the topic was deleted and re-created since they were planned"


@contextmanager
def running(frame: Any, checkpoint: str) -> Iterator[tuple[Collected, Callable[[Callable[[], bool]], None]]]:
    """Start a query.

    Yield the collected rows, and a function that waits for a condition and raises the query's exception.
    """
    collected = Collected()
    query = frame.writeStream.foreachBatch(collected.take).option("checkpointLocation", checkpoint).start()

    def until(is_done: Callable[[], bool]) -> None:
        for _ in attempts(lambda: "the query did not get there", 200):
            if is_done():
                return
            query.awaitTermination(0.1)

    try:
        yield collected, until
    finally:
        query.stop()


def test_partitions_and_topics_added_during_a_query_are_read(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, f"{topic}.a")
    fill(bootstrap, f"{topic}.a", 0, 3)
    stream = read_stream(spark, bootstrap, subscribePattern=rf"{topic}\..", startingOffsets="earliest")
    with running(stream, checkpoint) as (collected, until):
        until(lambda: len(collected.rows) == 3)
        with Admin({"bootstrap.servers": bootstrap}) as admin:
            admin.create_partitions({f"{topic}.a": 2})
        fill(bootstrap, f"{topic}.a", 0, 4, partition=1)
        create_topic(bootstrap, f"{topic}.b")
        fill(bootstrap, f"{topic}.b", 0, 5)
        create_topic(bootstrap, f"{topic}-other")
        fill(bootstrap, f"{topic}-other", 0, 6)
        fill(bootstrap, f"{topic}.a", 3, 1)
        until(lambda: len(collected.rows) == 13)
    assert collected.offsets(1) == [0, 1, 2, 3]
    assert sorted(row.topic[-1] for row in collected.rows if row.partition == 0) == [*"aaaabbbbb"]


def test_a_micro_batch_waits_for_more_records_up_to_its_maximum_delay(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 5)
    options = {"subscribe": topic, "startingOffsets": "earliest", "minOffsetsPerTrigger": 20}
    patient = read_stream(spark, bootstrap, **options, maxOffsetsPerTrigger=25, maxTriggerDelay="1h")
    with running(patient, checkpoint) as (collected, until):
        until(lambda: len(collected.rows) == 5)
        for first in range(5, 35, 10):
            fill(bootstrap, topic, first, 10)
        until(lambda: len(collected.rows) >= 25)
    assert [len(batch) for batch in collected.batches] in ([5, 20], [5, 25])

    # Do not check the sizes of batches: the first one depends on whether the previous run recorded its last
    # batch as done.
    hasty = read_stream(spark, bootstrap, **options, maxTriggerDelay="200ms")
    with running(hasty, checkpoint) as (collected, until):
        until(lambda: 34 in collected.offsets())
        fill(bootstrap, topic, 35, 2)
        until(lambda: 36 in collected.offsets())

    # The minimum number of records is never reached. With the trigger AvailableNow, the query reads the
    # available ones and stops.
    fill(bootstrap, topic, 37, 1)
    rest = Collected()
    rest.run(read_stream(spark, bootstrap, **options, maxTriggerDelay="1h"), checkpoint)
    assert rest.offsets()[-1] == 37


def test_a_topic_recreated_between_planning_and_reading_is_an_error(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 10)
    strict = read(spark, bootstrap, subscribe=topic)
    lenient = read(spark, bootstrap, subscribe=topic, failOnDataLoss="false")
    assert strict.count() == lenient.count() == 10  # count() plans the read now; rows are collected below
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.delete_topics([topic])
        with pytest.raises(Exception, match="offsets 0 to 9 were requested, but the topic does not exist"):
            strict.collect()
        assert lenient.count() == 0
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 10)
    with pytest.raises(Exception, match=CREATED_AGAIN):
        strict.collect()
    assert lenient.count() == 0


def test_rows_of_two_topics_are_never_one_range(
    shared_broker: oncelog.Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with failOnDataLoss=false, a range continued in the re-created topic, so two micro-batches
    read its rows.
    """
    monkeypatch.setattr(source_reader, "SMALL_BATCH_BYTES", 1)
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 200, size_bytes=5000)
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        planned = admin.describe_topics([topic])[topic].topic_id
    wanted = OffsetRange(TopicPartition(topic, 0), 0, 200)
    client = {"bootstrap.servers": bootstrap, "max.partition.fetch.bytes": 50_000}
    lenient = {"topic_id": planned, "include_headers": False, "fail_on_data_loss": False}
    rows = source_reader.read_range(client, wanted, **lenient)
    next(rows)
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.delete_topics([topic])
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 1000, 200, size_bytes=5000)
    with pytest.raises(DataLossError, match="while they were read: rows of both topics may have been read"):
        list(rows)
    assert list(source_reader.read_range(client, wanted, **lenient)) == []


def test_a_micro_batch_is_not_repeated_from_another_topic(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 10)
    stream = read_stream(spark, bootstrap, subscribe=topic, startingOffsets="earliest")

    class Fails(Collected):
        def take(self, frame: Any, batch_id: int) -> None:
            raise RuntimeError("the sink is down")

    with pytest.raises(Exception, match="the sink is down"):
        Fails().run(stream, checkpoint)
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.delete_topics([topic])
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 10)
    with pytest.raises(Exception, match=CREATED_AGAIN):
        Collected().run(stream, checkpoint)


def test_an_unreachable_broker_is_not_taken_for_a_deleted_topic(tmp_path: Path) -> None:
    with oncelog.Broker(tmp_path / "data") as broker:
        create_topic(broker.bootstrap_servers, "t")
        given = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": "t"}
        lookup = OffsetResolver(parse_options({**given, "kafka.request.timeout.ms": "700"}, "stream"))
        with lookup:
            assert lookup.available(may_miss=True).latest == {TopicPartition("t", 0): 0}
            broker.stop()
            with pytest.raises(OncelogError):
                lookup.available(may_miss=True)


def test_partitions_of_the_checkpoint_are_waited_for(
    shared_broker: oncelog.Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker with old metadata knows fewer partitions than the checkpoint.

    Without a wait, the first trigger would report the missing ones as lost.
    """
    create_topic(shared_broker.bootstrap_servers, topic)
    given = {"kafka.bootstrap.servers": shared_broker.bootstrap_servers, "subscribe": topic}
    first = TopicPartition(topic, 0)
    with OffsetResolver(parse_options(given, "stream")) as lookup:
        describe = lookup._admin.describe_topics
        asked: list[int] = []

        def describe_late(names: Any, *, raise_errors: bool = True) -> Any:
            asked.append(1)
            found = describe(names, raise_errors=raise_errors)
            return found if len(asked) > 1 else {name: replace(t, partitions=()) for name, t in found.items()}

        monkeypatch.setattr(lookup._admin, "describe_topics", describe_late)
        known = [first, TopicPartition("of another subscription", 0)]
        assert lookup.available(may_miss=True, expected=known).latest == {first: 0}
    assert len(asked) == 2


def test_planning_a_micro_batch_reads_no_record(shared_broker: oncelog.Broker, topic: str) -> None:
    create_topic(shared_broker.bootstrap_servers, topic)
    write_transactions(shared_broker.bootstrap_servers, topic, "cao")
    wait_for_stable_end(shared_broker.bootstrap_servers, topic, 22)
    with Proxy(shared_broker.bootstrap_servers) as proxy:
        given = {"kafka.bootstrap.servers": proxy.bootstrap_servers, "subscribe": topic}
        reader = StreamReader(parse_options({**given, "startingOffsets": "earliest"}, "stream"))
        start = reader.initialOffset()
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert [part.value[1:] for part in reader.partitions(start, end)] == [(0, 22)]
        reader.stop()
        assert {event.api for event in proxy.events} <= {"ApiVersions", "Metadata", "ListOffsets"}


@pytest.mark.parametrize("which", ["startingTimestamp", "startingOffsetsByTimestamp"])
def test_a_starting_timestamp_may_lie_behind_an_open_transaction(
    shared_broker: oncelog.Broker, topic: str, which: str
) -> None:
    """R811: the source began at the first offset of the open transaction, and later returned records older
    than the timestamp.
    """
    create_topic(shared_broker.bootstrap_servers, topic)
    (still_open,) = write_transactions(shared_broker.bootstrap_servers, topic, "oc")
    time_ms = START_MS + 15
    value = str(time_ms) if which == "startingTimestamp" else f'{{"{topic}": {{"0": {time_ms}}}}}'
    given = {"kafka.bootstrap.servers": shared_broker.bootstrap_servers, "subscribe": topic, which: value}
    assert BatchReader(parse_options(given, "batch")).partitions() == []
    reader = StreamReader(parse_options(given, "stream"))
    start = reader.initialOffset()
    first = reader.latestOffset(start, reader.getDefaultReadLimit())
    still_open.commit_transaction(60)
    wait_for_stable_end(shared_broker.bootstrap_servers, topic, 22)
    end = reader.latestOffset(first, reader.getDefaultReadLimit())
    reader.stop()
    pairs = [(start, first), (first, end)]
    assert [part.value[1:] for pair in pairs for part in reader.partitions(*pair)] == [(15, 22)]


TIMES = [
    "0001-01-01 00:00:00",
    "0001-01-01 23:59:59",
    "1969-12-31 23:59:59.999",
    "1970-01-01 00:00:00",
    "2023-11-14 22:13:20.003",
    "9999-12-31 23:59:59.999999",
    "+294247-01-01 00:00:00",
]


def test_conditions_with_extreme_timestamps_give_the_right_rows(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    """Spark's timestamps go beyond the last year of Python's datetimes, and records may have no timestamp
    (-1).
    """
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    times = [-1, 0, 1, START_MS + 3, START_MS, -1]
    store(bootstrap, topic, [build_batch([NewRecord(time, None, b"v")]) for time in times])
    frame = read(spark, bootstrap, subscribe=topic)
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        for zone in ("UTC", "Pacific/Kiritimati", "America/Los_Angeles"):
            spark.conf.set("spark.sql.session.timeZone", zone)
            # Time zones matter only on the first and the last day of Python's datetimes, where they cross the
            # limits. So other zones test only these.
            chosen = TIMES if zone == "UTC" else [TIMES[0], TIMES[1], TIMES[-2]]
            conditions = [f"timestamp {sign} TIMESTAMP '{time}'" for time in chosen for sign in (">=", "=")]
            conditions.append("timestamp < TIMESTAMP '0001-01-01 00:00:00'")
            counts = frame.selectExpr(*[f"count_if({text})" for text in conditions]).first()
            assert max(counts) == len(times)
            spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
            pushed = [frame.where(text).count() for text in conditions]
            spark.conf.unset("spark.sql.python.filterPushdown.enabled")
            assert pushed == list(counts), zone
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
        spark.conf.set("spark.sql.session.timeZone", before)


def test_conditions_of_a_query_reduce_the_offsets_that_are_read(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=2)
    for partition in range(2):
        fill(bootstrap, topic, 0, 50, partition)
    frame = read(spark, bootstrap, subscribe=topic, maxRecordsPerPartition=10)
    conditions = {
        "offset >= 35 AND offset < 45": 2,
        "partition = 1 AND offset IN (3, 12)": 1,
        "timestamp >= timestamp_millis(1700000000000 + 30)": 4,
        "timestamp < timestamp_millis(1700000000000 + 5) AND partition = 0": 5,
        f"topic = '{topic}' AND key = 'k7'": 10,
        "topic = 'another'": 1,  # Spark runs a task even without offsets to read
    }
    plain = {text: sorted(map(tuple, frame.where(text).collect())) for text in conditions}
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        pushed = {text: frame.where(text) for text in conditions}
        assert {text: sorted(map(tuple, f.collect())) for text, f in pushed.items()} == plain
        assert {text: f.rdd.getNumPartitions() for text, f in pushed.items()} == conditions
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    assert [len(rows) for rows in plain.values()] == [20, 2, 40, 5, 2, 0]
