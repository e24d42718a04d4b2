"""Stateful operators through the sink: queries that run at the same time, fail and are repeated add each row
once.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import TaskContext
from support.spark.topics import create_topic, read, read_stream, take_back

import oncelog

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

pytestmark = [
    pytest.mark.spark,
    pytest.mark.behaviour("P2"),
    pytest.mark.timeout(900),
    pytest.mark.full("runs several stateful queries three times"),
]
COUNT = 60
START_S = 1_700_000_000
FAILING_BATCH = 1
ROCKS_DB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
PROVIDER = "spark.sql.streaming.stateStore.providerClass"
CLOSING = json.dumps({"id": -1, "ts": START_S + 36_000})
"""A record that moves the watermark beyond all other records."""
HAS_PROTOBUF = (
    importlib.util.find_spec("google.protobuf") is not None if importlib.util.find_spec("google") else False
)


def event(number: int) -> str:
    return payment(number, START_S + number)


def payment(number: int, ts: int) -> str:
    return json.dumps({"id": number, "ts": ts})


def produce(bootstrap: str, topic: str, values: Iterable[str]) -> None:
    """Store the values in two partitions alternately, and a closing record at the end of each."""
    create_topic(bootstrap, topic, partitions=2)
    with oncelog.Producer({"bootstrap.servers": bootstrap}) as producer:
        for number, value in enumerate([*values, CLOSING, CLOSING]):
            producer.send(topic, value.encode(), partition=number % 2)


def events(spark: Any, bootstrap: str, topic: str) -> Any:
    source = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 25}
    parsed = "from_json(CAST(value AS STRING), 'id INT, ts LONG') AS e"
    rows = (
        read_stream(spark, bootstrap, **source)
        .selectExpr(parsed)
        .selectExpr("e.id", "timestamp_seconds(e.ts) AS ts")
    )
    return rows.withWatermark("ts", "10 seconds")


# The queries. Each function returns a frame with the columns key and value


def deduplicated(spark: Any, bootstrap: str) -> Any:
    rows = events(spark, bootstrap, "stateful.twice").dropDuplicates(["id", "ts"])
    return rows.selectExpr("CAST(id AS STRING) AS key", "CAST(unix_seconds(ts) AS STRING) AS value")


def windowed(spark: Any, bootstrap: str) -> Any:
    from pyspark.sql.functions import expr, window

    rows = events(spark, bootstrap, "stateful.events")
    counted = rows.groupBy(window("ts", "10 seconds"), expr("id % 2 AS odd")).agg(
        expr("count(*) AS n"), expr("sum(id) AS s")
    )
    return counted.selectExpr(
        "CONCAT(unix_seconds(window.start), '/', odd) AS key", "CONCAT(n, '/', s) AS value"
    )


def joined(spark: Any, bootstrap: str) -> Any:
    from pyspark.sql.functions import expr

    orders = events(spark, bootstrap, "stateful.events").selectExpr("id", "ts")
    payments = events(spark, bootstrap, "stateful.payments").selectExpr("id AS paid_id", "ts AS paid_at")
    both = expr("id = paid_id AND paid_at BETWEEN ts AND ts + INTERVAL 5 SECONDS")
    rows = orders.join(payments, both, "leftOuter")
    return rows.selectExpr("CAST(id AS STRING) AS key", "IF(paid_id IS NULL, 'unpaid', 'paid') AS value")


def with_state(spark: Any, bootstrap: str) -> Any:
    from pyspark.sql.streaming import StatefulProcessor

    class RunningCount(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self._count = handle.getValueState("count", "n INT")

        def handleInputRows(
            self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
        ) -> Iterator[pd.DataFrame]:
            import pandas as pd

            ids = [int(number) for frame in rows for number in frame["id"]]
            count = (self._count.get()[0] if self._count.exists() else 0) + len(ids)
            self._count.update((count,))
            yield pd.DataFrame({"key": [f"{key[0]}/{count}"], "value": [json.dumps(sorted(ids))]})

        def close(self) -> None:
            pass

    rows = events(spark, bootstrap, "stateful.events").where("id >= 0").selectExpr("id", "id % 4 AS bucket")
    return rows.groupBy("bucket").transformWithStateInPandas(
        RunningCount(), "key STRING, value STRING", "Append", "None"
    )


QUERIES: Mapping[str, Callable[[Any, str], Any]] = {
    "deduplicated": deduplicated,
    "windowed": windowed,
    "joined": joined,
    **({"with_state": with_state} if HAS_PROTOBUF else {}),
}


def fails_once(bootstrap: str, flag: Path) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for mapInArrow.

    In it, task 1 of one micro-batch fails once task 0 has committed its rows.
    """

    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        batch_id = int(task.getLocalProperty("streaming.sql.batchId") or -1)
        if (batch_id, task.partitionId()) == (FAILING_BATCH, 1) and not flag.exists():
            group = f"oncelog-{task.getLocalProperty('sql.streaming.queryId')}/0"
            with oncelog.Admin({"bootstrap.servers": bootstrap}) as admin:
                while not any(kept.offset >= batch_id for kept in admin.group_offsets(group).values()):
                    pass  # the loop has no limit, because pytest's time limit ends it
            flag.touch()
            raise RuntimeError("the task dies")
        yield from batches

    return work


@dataclass
class Runs:
    """The outcome of three runs of all queries, which run at the same time in one session.

    `rows` are those that are in the topics after the third run.
    """

    failures: dict[str, str]
    repeats: dict[str, int]
    rows: dict[str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def runs(spark: Any, shared_broker: oncelog.Broker, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    bootstrap, work = shared_broker.bootstrap_servers, tmp_path_factory.mktemp("stateful")
    produce(bootstrap, "stateful.events", map(event, range(COUNT)))
    twice = [event(past) for n in range(COUNT + 5) for past in (n, n - 5) if 0 <= past < COUNT]
    produce(bootstrap, "stateful.twice", twice)
    # Two of three payments match no event. They only make this topic as long as the other one. After a
    # restart, Spark holds back the watermark of a join until both sides have a record in the new run.
    payments = (payment(n if n % 3 == 0 else n + 1000, START_S + n + 2) for n in range(COUNT))
    produce(bootstrap, "stateful.payments", payments)

    def start(name: str) -> Any:
        spark.conf.set(PROVIDER, ROCKS_DB) if name == "with_state" else spark.conf.unset(PROVIDER)
        rows = QUERIES[name](spark, bootstrap).mapInArrow(
            fails_once(bootstrap, work / f"{name}.failed"), "key string, value string"
        )
        writer = rows.writeStream.format("oncelog").option("kafka.bootstrap.servers", bootstrap)
        writer = writer.option("topic", f"stateful.{name}").option("checkpointLocation", str(work / name))
        return writer.trigger(availableNow=True).start()

    def run_all() -> dict[str, str]:
        """Run all queries at the same time, and return the errors of those that failed."""
        errors = {}
        for name, query in {name: start(name) for name in QUERIES}.items():
            try:
                query.awaitTermination()
            except Exception as error:
                errors[name] = str(error)
        return errors

    for name in QUERIES:
        create_topic(bootstrap, f"stateful.{name}", partitions=3)
    try:
        failures = run_all()
        assert (errors := run_all()) == {}, "".join(errors.values())
        for name in QUERIES:
            take_back(str(work / name), "commits")
        assert (errors := run_all()) == {}, "".join(errors.values())
    finally:
        spark.conf.unset(PROVIDER)
    commits = {
        name: len([each for each in (work / name / "commits").iterdir() if each.name.isdigit()])
        for name in QUERIES
    }
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in QUERIES}
    for row in read(spark, bootstrap, subscribe=",".join(f"stateful.{name}" for name in QUERIES)).collect():
        found[row.topic.removeprefix("stateful.")].append((row.key.decode(), row.value.decode()))
    return Runs(failures, commits, found)


def test_every_query_was_half_written_and_repeated(runs: Runs) -> None:
    assert runs.failures.keys() == QUERIES.keys()
    assert all("the task dies" in text for text in runs.failures.values()), runs.failures
    assert min(runs.repeats.values()) > FAILING_BATCH + 1


def test_drop_duplicates_with_a_watermark(runs: Runs) -> None:
    numbers = [(str(n), str(START_S + n)) for n in range(COUNT)]
    assert sorted(runs.rows["deduplicated"]) == sorted([*numbers, ("-1", str(START_S + 36_000))])


def test_a_windowed_aggregation_with_a_watermark(runs: Runs) -> None:
    expected: dict[str, list[int]] = {}
    for number in range(COUNT):
        expected.setdefault(f"{(START_S + number) // 10 * 10}/{number % 2}", []).append(number)
    rows = [(key, f"{len(numbers)}/{sum(numbers)}") for key, numbers in expected.items()]
    assert sorted(runs.rows["windowed"]) == sorted(rows)


def test_an_outer_join_of_two_streams(runs: Runs) -> None:
    rows = [(str(n), "unpaid" if n % 3 else "paid") for n in range(COUNT)]
    closing = [("-1", "paid")] * 4  # each of the two topics has two closing records, which match each other
    assert sorted(runs.rows["joined"]) == sorted([*rows, *closing])


@pytest.mark.skipif(not HAS_PROTOBUF, reason="transformWithState needs the package protobuf")
def test_transform_with_state(runs: Runs) -> None:
    rows = runs.rows["with_state"]
    assert Counter(number for _, value in rows for number in json.loads(value)) == Counter(range(COUNT))
    counts = Counter(key for key, _ in rows)
    assert set(counts.values()) == {1} and {f"{bucket}/15" for bucket in range(4)} <= counts.keys()
