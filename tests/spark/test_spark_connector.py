"""Comparison with Spark's own Kafka connector: the same rows and columns, and its checkpoint continued."""

from __future__ import annotations

from typing import Any

import pytest
from oncelog_devtools.spark_connector import add_connector
from support.spark.topics import START_MS, Collected, create_topic, fill, records, store
from support.spark.transactions import wait_for_stable_end, write_transactions

from oncelog.types import Compression
from oncelog.wire.batch import build_batch

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P1"), pytest.mark.timeout(600)]


@pytest.fixture(params=["shared_broker", "apache_kafka"], ids=["ours", "apache"])
def bootstrap(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).bootstrap_servers)


@pytest.fixture(scope="module")
def spark_connector(spark: Any, connector_jar_files: list[str]) -> Any:
    """Return the session with Spark's own connector, so that it has both `format("kafka")` and
    `format("oncelog")`.
    """
    assert connector_jar_files  # requesting the jars skips the test if they are missing
    add_connector(spark)
    return spark


def load(reader: Any, name: str, bootstrap: str, options: dict[str, object]) -> Any:
    given = {"kafka.bootstrap.servers": bootstrap, "kafka.isolation.level": "read_committed", **options}
    return reader.format(name).options(**given).load()


def test_the_source_gives_the_rows_and_columns_of_sparks_connector(
    spark_connector: Any, bootstrap: str, topic: str
) -> None:
    create_topic(bootstrap, topic, partitions=3)
    headers = (("trace", b"1"), ("trace", b"2"), ("empty", b""), ("null", None))
    batches = [build_batch(records(n, 1, headers=headers), compression=c) for n, c in enumerate(Compression)]
    store(bootstrap, topic, [*batches, build_batch([records(9, 1)[0]._replace(key=None, value=None)])], 1)
    fill(bootstrap, topic, 0, 40, 2)
    write_transactions(bootstrap, topic, "cacao")
    wait_for_stable_end(bootstrap, topic, 44)
    edges = {
        "startingOffsets": f'{{"{topic}": {{"0": 5, "1": -2, "2": 7}}}}',
        "endingOffsets": f'{{"{topic}": {{"0": 30, "1": -1, "2": 11}}}}',
    }
    times = {"startingTimestamp": START_MS + 3, "endingTimestamp": START_MS + 31}
    never_ms = 2**42
    by_times = {
        "startingOffsetsByTimestamp": f'{{"{topic}": {{"0": {START_MS + 22}, "1": 0, "2": {never_ms}}}}}',
        "startingOffsetsByTimestampStrategy": "latest",
    }
    several: list[dict[str, object]] = [
        {"subscribe": topic, "includeHeaders": "true", "minPartitions": 7},
        {"subscribePattern": f".*{topic[10:]}", **edges},
        {"assign": f'{{"{topic}": [0, 2]}}', **times},
        {"subscribe": topic, **by_times},
    ]
    for options in several:
        theirs, ours = (load(spark_connector.read, name, bootstrap, options) for name in ("kafka", "oncelog"))
        assert ours.schema.simpleString() == theirs.schema.simpleString()
        expected, found = (
            sorted(map(tuple, frame.collect()), key=lambda row: row[2:5]) for frame in (theirs, ours)
        )
        assert found == expected and found, options


def test_a_checkpoint_of_sparks_connector_is_continued(
    spark_connector: Any, bootstrap: str, topic: str, checkpoint: str
) -> None:
    create_topic(bootstrap, topic, partitions=2)
    for partition in range(2):
        fill(bootstrap, topic, 0, 20, partition)
    options: dict[str, object] = {
        "subscribe": topic,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": 15,
    }
    theirs, ours = Collected(), Collected()
    theirs.run(load(spark_connector.readStream, "kafka", bootstrap, options), checkpoint)
    assert theirs.offsets(0) == theirs.offsets(1) == list(range(20))
    for partition in range(2):
        fill(bootstrap, topic, 20, 5, partition)
    ours.run(load(spark_connector.readStream, "oncelog", bootstrap, options), checkpoint)
    assert ours.offsets(0) == ours.offsets(1) == list(range(20, 25))
