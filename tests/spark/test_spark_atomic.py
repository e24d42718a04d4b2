"""`write_atomic` writes each micro-batch in one transaction, completely or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.spark.topics import create_topic, fill, read, read_stream, take_back
from support.wait import wait_until

import oncelog
from oncelog.client.admin.blocking import Admin
from oncelog.client.producer.blocking import Producer
from oncelog.errors import ConfigError, OncelogError, UnsupportedVersion
from oncelog.spark import write_atomic
from oncelog.spark.sink import atomic, atomic_task
from oncelog.spark.sink.atomic_task import ShareReport
from oncelog.spark.sink.decisions import RowRefused, RowSum, SinkError, TaskMarker
from oncelog.spark.sink.sink_metrics import FILE_VARIABLE, SinkMetrics
from oncelog.spark.sink.sink_options import FULL_RETRY, SinkSettings, parse_sink_options
from oncelog.spark.sink.sink_rows import VALUE_BYTES
from oncelog.spark.sink.task import Sink

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def values(spark: Any, bootstrap: str, topic: str, **options: object) -> list[int]:
    rows = read(spark, bootstrap, subscribe=topic, **options).select("value").collect()
    return sorted(int(row.value[1:]) for row in rows)


def options_of(bootstrap: str, topic: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": bootstrap, "topic": topic}


def numbers(spark: Any, *span: int) -> Any:
    return spark.range(*span, 1, 2).selectExpr("CONCAT('k', id) AS key", "CONCAT('v', id) AS value")


def placed(rows: pa.RecordBatch, settings: SinkSettings, counts: dict[str, int]) -> pa.RecordBatch:
    """Return the rows with the partitions that the first stage chooses."""
    names = [name for name in ("key", "headers", "topic", "partition") if name in rows.schema.names]
    columns = [*(rows.column(name) for name in names), pc.binary_length(rows.column("value"))]
    (chosen,) = atomic_task.choose_partitions(
        [columns], names=[*names, VALUE_BYTES], settings=settings, counts=counts
    )
    kept = [name for name in rows.schema.names if name != "partition"]
    return rows.select(kept).append_column("partition", chosen)


@pytest.mark.soak
def test_a_stream_in_transactions(
    spark: Any,
    shared_broker: oncelog.Broker,
    topic: str,
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "metrics"))
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, f"{topic}.in", partitions=2)
    create_topic(bootstrap, topic, partitions=3)
    for partition in range(2):
        fill(bootstrap, f"{topic}.in", partition * 50, 50, partition)
    stream = read_stream(
        spark, bootstrap, subscribe=f"{topic}.in", startingOffsets="earliest", maxOffsetsPerTrigger=60
    )
    outcomes: list[atomic.AtomicWrite] = []

    def take(frame: Any, batch_id: int) -> None:
        for _ in range(2):
            atomic._calls.clear()  # as if the driver had died after the commit
            outcomes.append(write_atomic(frame, batch_id, options_of(bootstrap, topic)))

    query = stream.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
    started = query.trigger(availableNow=True).start()
    started.awaitTermination()
    assert [outcome[:3] for outcome in outcomes] == [
        (0, 60, False),
        (0, 60, True),
        (1, 40, False),
        (1, 40, True),
    ]
    assert values(spark, bootstrap, topic) == list(range(100))
    told = [SinkMetrics.decode(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert {each.name for each in told} == {started.id}
    assert [(each.batch_id, each.rows, each.tasks, each.tasks_skipped) for each in told] == [
        (0, 60, 1, 0),
        (0, 60, 1, 1),
        (1, 40, 1, 0),
        (1, 40, 1, 1),
    ]
    assert [each.size_bytes for each in told[1::2]] == [0, 0]
    assert sum(each.size_bytes for each in told) == sum(2 * len(f"k{n}") for n in range(100))
    assert [each.commit_seconds > 0 for each in told] == [True, False, True, False]


def stream_of_six_rows(spark: Any, bootstrap: str, topic: str) -> Any:
    """Create the topic and a source topic with six rows, and return a stream of the source."""
    create_topic(bootstrap, f"{topic}.in")
    create_topic(bootstrap, topic)
    fill(bootstrap, f"{topic}.in", 0, 6)
    return read_stream(spark, bootstrap, subscribe=f"{topic}.in", startingOffsets="earliest")


@pytest.mark.behaviour("P6")
def test_a_job_group_neither_hides_a_second_write_of_a_micro_batch_nor_a_new_run(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    """R1627: a job group was taken for the run of the query."""
    from pyspark.errors import StreamingQueryException

    bootstrap = shared_broker.bootstrap_servers
    stream = stream_of_six_rows(spark, bootstrap, topic)
    options, written = options_of(bootstrap, topic), []

    def take(frame: Any, batch_id: int) -> None:
        context = frame.sparkSession.sparkContext
        context.setJobGroup("good", "the good rows")
        written.append(write_atomic(frame.where("value < 'v4'"), batch_id, options))
        context.setJobGroup("rest", "the other rows")
        write_atomic(frame.where("value >= 'v4'"), batch_id, options)

    for _ in range(2):
        query = stream.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
        with pytest.raises(StreamingQueryException, match=r"a second time in this run.*its own name"):
            query.trigger(availableNow=True).start().awaitTermination()
    assert [(write.rows, write.already_committed) for write in written] == [(4, False), (4, True)]
    assert values(spark, bootstrap, topic) == list(range(4))


@pytest.mark.behaviour("P6")
def test_two_calls_of_write_atomic_do_not_run_at_once() -> None:
    """R1628: of two threads with one name, the second one took the rows of the first one for its own."""
    call, other = [atomic._Call("run", f"group-{n}", "topic", 7) for n in range(2)]
    plan = 1, ("value",), "t"

    def claim(wanted: atomic._Call) -> None:
        with atomic._claimed(wanted, "n", plan):
            pass

    def fail(wanted: atomic._Call) -> None:
        with atomic._claimed(wanted, "n", plan):
            claim(other)
            with pytest.raises(SinkError, match="a second time in this run"):
                claim(call)
            raise OncelogError("the call failed")

    with pytest.raises(OncelogError, match="the call failed"):
        fail(call)
    claim(call)
    claim(call._replace(batch_id=8))
    with pytest.raises(SinkError, match="batch 8 a second time"):
        claim(call._replace(batch_id=8))


@contextmanager
def failing_after_commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `write_atomic` raise after its commit, and expect its error."""
    keep = Sink.keep

    def fail(sink: Sink, admin: Admin, group: str, *arguments: Any, **more: Any) -> None:
        if group == sink.finished_id:
            raise OncelogError("the note is lost")
        keep(sink, admin, group, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Sink, "keep", fail)
        with pytest.raises(SinkError, match="the note is lost"):
            yield


def test_another_write_is_not_taken_for_one_that_failed_after_its_commit(
    spark: Any,
    shared_broker: oncelog.Broker,
    topic: str,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R1701: the second write found the commit of the first one, and its four rows were in no topic."""
    bootstrap = shared_broker.bootstrap_servers
    stream = stream_of_six_rows(spark, bootstrap, topic)
    options, written = options_of(bootstrap, topic), []

    def take(frame: Any, batch_id: int) -> None:
        with failing_after_commit(monkeypatch):
            write_atomic(frame.where("value >= 'v4'"), batch_id, options)
        for _ in range(2):
            with pytest.raises(SinkError, match=r"is already committed for this name.*its own name"):
                write_atomic(frame.where("value < 'v4'"), batch_id, options)
        written.append(write_atomic(frame.where("value >= 'v4'"), batch_id, options))

    query = stream.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    assert [write[:3] for write in written] == [(0, 2, True)]
    assert values(spark, bootstrap, topic) == [4, 5]


@pytest.mark.parametrize("differs", ["columns", "topic"])
def test_a_write_of_other_columns_is_not_taken_for_one_that_failed_after_its_commit(
    spark: Any,
    shared_broker: oncelog.Broker,
    topic: str,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    differs: str,
) -> None:
    """R1814: Spark's hash of a plan does not cover the names of columns, so the second write was taken for
    the first one, and its rows were in no topic.
    """
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, f"{topic}-other")
    stream = stream_of_six_rows(spark, bootstrap, topic)
    options, outcomes = {**options_of(bootstrap, topic), "markerTopic": topic}, list[object]()

    def take(frame: Any, batch_id: int) -> None:
        plain = frame.selectExpr("value AS value", "'k' AS key")
        with failing_after_commit(monkeypatch):
            write_atomic(plain, batch_id, options)
        swapped = frame.selectExpr("value AS key", "'k' AS value")
        other, place = (swapped, topic) if differs == "columns" else (plain, f"{topic}-other")
        try:
            outcomes.append(write_atomic(other, batch_id, {**options, "topic": place}))
        except SinkError as error:
            outcomes.append(str(error))
        outcomes.append(write_atomic(plain, batch_id, options))

    query = stream.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    assert "is already committed for this name" in str(outcomes[0])
    assert outcomes[1:] == [(0, 6, True, 0, 0.0)]
    assert values(spark, bootstrap, topic) == list(range(6))


def test_a_stream_does_not_take_a_write_outside_of_it_for_its_own(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    """R1701: the six rows of the stream's first micro-batch were in no topic."""
    bootstrap = shared_broker.bootstrap_servers
    stream = stream_of_six_rows(spark, bootstrap, topic)
    options, name = options_of(bootstrap, topic), f"{topic}-both"
    write_atomic(numbers(spark, 6, 9), 0, options, name=name)

    def take(frame: Any, batch_id: int) -> None:
        with pytest.raises(SinkError, match=r"is already committed for this name.*its own name"):
            write_atomic(frame, batch_id, options, name=name)
        write_atomic(frame, batch_id, options)

    query = stream.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    assert values(spark, bootstrap, topic) == list(range(9))


@pytest.mark.behaviour("P6")
def test_two_writes_of_one_micro_batch_need_two_names(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    """C5: two calls with one name dropped the rows of the second call without an error."""
    bootstrap = shared_broker.bootstrap_servers
    stream = stream_of_six_rows(spark, bootstrap, topic)
    options, names = options_of(bootstrap, topic), [None]

    def take(frame: Any, batch_id: int) -> None:
        write_atomic(frame.where("value < 'v4'"), batch_id, options)
        with pytest.raises(SinkError, match=r"a second time in this run.*its own name"):
            write_atomic(frame.where("value >= 'v4'"), batch_id, options)
        write_atomic(frame.where("value >= 'v4'"), batch_id, options, name=f"{topic}-rest")
        names.append(frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId"))

    for _ in range(2):
        query = stream.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
        query.trigger(availableNow=True).start().awaitTermination()
        for log in (Path(checkpoint) / "commits").glob("*0*"):
            log.unlink()  # without the entry, the next run repeats the batch
    assert values(spark, bootstrap, topic) == list(range(6))
    assert len(names) == 3

    # Outside a query, write_atomic compares rows: a call may be repeated with the same rows, and not with
    # others.
    again = {"name": f"{topic}-batch", "batch_id": 0, "options": options}
    assert [write_atomic(numbers(spark, 6, 9), **again).already_committed for _ in range(2)] == [False, True]
    for other in (numbers(spark, 6, 10), numbers(spark, 7, 10)):
        with pytest.raises(SinkError, match="its own name"):
            write_atomic(other, **again)
    assert values(spark, bootstrap, topic) == list(range(9))


@pytest.mark.behaviour("T12")
def test_a_checkpoint_restored_to_one_micro_batch_earlier_loses_no_rows(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    """After the restore, Spark plans batch 1 a second time, with more rows. The sink must not take that batch
    for the one it has committed.
    """
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, f"{topic}.in")
    create_topic(bootstrap, topic)
    stream = read_stream(spark, bootstrap, subscribe=f"{topic}.in", startingOffsets="earliest")
    written: list[atomic.AtomicWrite] = []

    def take(frame: Any, batch_id: int) -> None:
        written.append(write_atomic(frame.select("key", "value"), batch_id, options_of(bootstrap, topic)))

    def run() -> None:
        atomic._calls.clear()
        query = stream.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
        query.trigger(availableNow=True).start().awaitTermination()

    for first in (0, 10):
        fill(bootstrap, f"{topic}.in", first, 10)
        run()
    take_back(checkpoint, "commits")
    run()  # the batch is repeated with the same plan
    take_back(checkpoint, "commits", "offsets")
    run()  # the batch is planned a second time, with the same rows
    assert [each[:3] for each in written] == [(0, 10, False), (1, 10, False), (1, 10, True), (1, 10, True)]
    take_back(checkpoint, "commits", "offsets")
    fill(bootstrap, f"{topic}.in", 20, 5)
    with pytest.raises(
        Exception, match="planned it a second time with other rows: the checkpoint was restored"
    ):
        run()
    assert values(spark, bootstrap, topic) == list(range(20))


def test_a_call_that_failed_may_be_repeated_in_the_same_run(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    stream = stream_of_six_rows(spark, bootstrap, topic)

    def take(frame: Any, batch_id: int) -> None:
        bad = frame.selectExpr("key", "value", "7 AS partition")
        with pytest.raises(Exception, match="names partition 7"):
            write_atomic(bad, batch_id, options_of(bootstrap, topic))
        write_atomic(frame, batch_id, options_of(bootstrap, topic))

    query = stream.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    assert values(spark, bootstrap, topic) == list(range(6))


def test_unsafe_atomic_writes_are_refused(spark: Any, shared_broker: oncelog.Broker, topic: str) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=2)
    options = options_of(bootstrap, topic)
    bad = numbers(spark, 0, 10).selectExpr("*", "IF(key = 'k7', 2, 0) AS partition")
    with pytest.raises(Exception, match=r"RowRefused: row 2 names partition 2 .* has partitions 0 to 1"):
        write_atomic(bad, 0, options, name=topic)
    assert values(spark, bootstrap, topic) == []
    with pytest.raises(SinkError, match=rf"under the name '{topic}': .*set firstBatchId=3"):
        write_atomic(numbers(spark, 0, 10), 3, options, name=topic)
    write_atomic(numbers(spark, 0, 10), 3, {**options, "firstBatchId": 3}, name=topic)
    with pytest.raises(SinkError, match="batch 2 was requested, but batch 3 has been committed since"):
        write_atomic(numbers(spark, 0, 10), 2, options, name=topic)
    with pytest.raises(ConfigError, match="needs the parameter name"):
        write_atomic(numbers(spark, 0, 10), 0, options)
    spark.conf.set(FULL_RETRY, "false")
    try:
        with pytest.raises(ConfigError, match="lost shuffle files can double some rows"):
            write_atomic(numbers(spark, 0, 10), 4, options, name=topic)
    finally:
        spark.conf.unset(FULL_RETRY)
    assert values(spark, bootstrap, topic) == list(range(10))
    # The first call has no rows, but it must record its name, so that a later batch may use the name.
    assert write_atomic(numbers(spark, 0, 0), 0, options, name=f"{topic}-late").rows == 0
    assert write_atomic(numbers(spark, 10, 12), 4, options, name=f"{topic}-late").rows == 2


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"partition": [None, -1]}, r"row 3 for topic 't' names partition -1: partitions start at 0"),
        ({"partition": [0, 2]}, r"row 3 names partition 2 of topic 't', which has partitions 0 to 1"),
        ({"value": ["b", "b" * 2_000_000]}, r"row 3 for topic 't' has 2000000 bytes, above kafka.max.req"),
        ({"headers": [[], [{"key": None, "value": b""}]]}, r"row 3 has a header without a name"),
        ({"topic": ["t", None]}, r"row 3 has a null topic"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_row_is_refused_before_the_shuffle(column: dict[str, list[Any]], said: str) -> None:
    """After the shuffle, a task has a lease, and its second attempt would report the lease in place of the
    row.
    """
    options = {"kafka.bootstrap.servers": "127.0.0.1:1", "markerTopic": "t"}
    settings = parse_sink_options(options | ({} if "topic" in column else {"topic": "t"}), "stream")
    kinds = {
        "key": pa.string(),
        "value": pa.string(),
        "partition": pa.int32(),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        "topic": pa.string(),
    }
    good: dict[str, list[Any]] = {"key": ["a", None], "value": ["b", "c"]}
    good |= {name: [None, None] for name in column if name not in ("value", "topic")}
    good |= {"topic": ["t", "t"]} if "topic" in column else {}
    rows = {name: [*values, *column.get(name, values)] for name, values in good.items()}
    batch = pa.RecordBatch.from_pydict({name: pa.array(rows[name], kinds[name]) for name in rows})
    with pytest.raises(RowRefused, match=said):
        placed(batch, settings, {"t": 2})


def test_rows_that_name_a_partition_are_written_there(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    """Rows of two topics, with and without a key, and with a partition of their own."""
    bootstrap = shared_broker.bootstrap_servers
    for name, partitions in ((topic, 3), (f"{topic}.b", 2)):
        create_topic(bootstrap, name, partitions=partitions)
    rows = spark.range(0, 60, 1, 2).selectExpr(
        "IF(id % 3 = 0, NULL, CONCAT('k', id % 7)) AS key",
        "CONCAT('v', id) AS value",
        f"IF(id % 2 = 0, '{topic}', '{topic}.b') AS topic",
        "CAST(IF(id % 5 = 0, id % 2, NULL) AS INT) AS partition",
    )
    options = {"kafka.bootstrap.servers": bootstrap, "markerTopic": topic}
    assert write_atomic(rows, 0, options, name=topic).rows == 60
    wanted = {f"v{number}": (topic if number % 2 == 0 else f"{topic}.b") for number in range(60)}
    found = read(spark, bootstrap, subscribe=f"{topic},{topic}.b").collect()
    assert {row.value.decode(): row.topic for row in found} == wanted and len(found) == 60
    named = {row.value.decode(): row.partition for row in found if int(row.value[1:]) % 5 == 0}
    assert named == {f"v{number}": number % 2 for number in range(0, 60, 5)}
    of_keys: dict[tuple[str, bytes], set[int]] = {}
    for row in found:
        if row.key is not None and int(row.value[1:]) % 5:
            of_keys.setdefault((row.topic, row.key), set()).add(row.partition)
    assert all(len(partitions) == 1 for partitions in of_keys.values())


def test_each_task_gets_as_many_partitions_as_the_others(spark: Any) -> None:
    """A hash of the partition gave one of two tasks three or four of four partitions in most cases."""
    settings = parse_sink_options({"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t"}, "stream")
    rows = spark.range(0, 400, 1, 2).selectExpr(
        "CAST(id AS STRING) AS value", "CAST(id % 4 AS INT) AS partition"
    )
    shuffled = atomic.shuffle_rows(rows, settings=settings, counts={"t": 4}, tasks=2)
    tasks = shuffled.selectExpr("SPARK_PARTITION_ID() AS task", "partition").distinct().collect()
    assert sorted((row.task, row.partition) for row in tasks) == [(0, 0), (0, 2), (1, 1), (1, 3)]


@pytest.mark.parametrize("version", [0, 2])
def test_one_attempt_of_a_task_writes(version: int) -> None:
    """With transaction version 0, the task adds partitions by AddPartitionsToTxn.

    With version 2, Produce adds them.
    """
    rows = pa.RecordBatch.from_pydict({"key": [b"a", b"b", None], "value": ["v0", "v1", "v2"]})
    with oncelog.Broker(config={"oncelog.transaction.version": version}) as broker:
        create_topic(broker.bootstrap_servers, "t")
        with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
            topic_id = admin.describe_topics(["t"])["t"].topic_id
        settings = parse_sink_options(options_of(broker.bootstrap_servers, "t"), "stream")
        sink = Sink("shared", settings)
        shares = [placed(rows, settings, {"t": 1})]
        for batch_id, is_commit in enumerate([True, False, True]):
            with Producer({**settings.producer, "transactional.id": sink.group}) as producer:
                producer.init_transactions()
                producer.begin_transaction()
                told = {"sink": sink, "batch_id": batch_id, "share": producer.share_transaction()}
                (report,) = atomic_task.write_share(shares, **told)
                (found_sum,) = atomic_task.sum_rows([rows], settings=settings)
                wanted = {"topic": "t", "partition": 0, "rows": 3, "size_bytes": 8}
                wanted |= {"hash": found_sum["hash"][0].as_py(), "topic_id": topic_id}
                assert report.to_pylist() == [wanted]
                with pytest.raises(SinkError, match=r"an earlier attempt of task 0 of batch \d had begun"):
                    list(atomic_task.write_share(shares, **told))
                kept = {sink.marker_at: TaskMarker(batch_id, RowSum(3)).encode()}
                producer.send_offsets_to_transaction(kept, sink.group)
                (producer.commit_transaction if is_commit else producer.abort_transaction)()
        at = oncelog.TopicPartition("t", 0)
        with oncelog.Consumer({"bootstrap.servers": broker.bootstrap_servers}) as consumer:
            end = consumer.end_offsets([at])[at]
            found = [v for piece in consumer.fetch_range(at, 0, end) for v in piece["value"].to_pylist()]
    assert found == [b"v0", b"v1", b"v2"] * 2


def test_a_partition_with_two_writers_is_an_error() -> None:
    reports = [ShareReport("t", 0, 3, 30, "7", "a"), ShareReport("t", 1, 4, 5, str(2**64 - 1), "a")]
    assert atomic.check_reports(reports) == (RowSum(7, 6), 35)
    with pytest.raises(SinkError, match="two tasks wrote to t-0; nothing of this batch was committed"):
        atomic.check_reports([reports[0], reports[0]])


@pytest.mark.parametrize("moment", ["between two tasks", "after the tasks", "for good"])
def test_a_topic_created_again_while_its_tasks_write_gets_no_rows(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1240: the new topic had the rows of the later tasks only, and the batch counted as committed."""
    rows = pa.RecordBatch.from_pydict({"value": [f"v{n}" for n in range(9)], "partition": [0, 1, 2] * 3})
    with (
        oncelog.Broker(config={"auto.create.topics.enable": False}) as broker,
        Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        create_topic(broker.bootstrap_servers, "t", partitions=3)
        settings = parse_sink_options(options_of(broker.bootstrap_servers, "t"), "stream")
        sink = Sink("twice", settings, part="atomic")

        def run(df: Any, batch_id: int, sink: Sink, share: Any, counts: dict[str, int]) -> list[ShareReport]:
            all_rows = placed(rows, sink.settings, counts)
            reports: list[ShareReport] = []
            for task in range(3):
                mine = [all_rows.filter(pc.equal(all_rows["partition"], task))]
                told: Any = {"sink": sink, "batch_id": batch_id, "share": share, "task": task}
                for batch in atomic_task.write_share(mine, **told):
                    reports += [ShareReport(**row) for row in batch.to_pylist()]
                if is_first_run and task == {"between two tasks": 0}.get(moment, 2):
                    admin.delete_topics(["t"])
                    if moment != "for good":
                        create_topic(broker.bootstrap_servers, "t", partitions=3)
            return reports

        monkeypatch.setattr(atomic, "_run", run)
        is_first_run, error = True, "t" if moment == "for good" else "deleted and created again"
        with pytest.raises(OncelogError, match=error):
            atomic._write_once(None, 0, sink, "twice", is_in_stream=False)  # type: ignore[arg-type]
        if moment == "for good":
            create_topic(broker.bootstrap_servers, "t", partitions=3)
        is_first_run, counts = False, list[int]()
        for _ in range(2):
            partitions = [oncelog.TopicPartition("t", number) for number in range(3)]
            options = {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": "read_committed"}
            with oncelog.Consumer(options) as consumer:
                ends = consumer.end_offsets(partitions)
                pieces = [piece for tp in partitions for piece in consumer.fetch_range(tp, 0, ends[tp])]
            counts.append(sum(piece.num_rows for piece in pieces))
            if not counts[1:]:
                written = atomic._write_once(None, 0, sink, "twice", is_in_stream=False)  # type: ignore[arg-type]
                assert written[:3] == (0, 9, False)
        assert counts == [0, 9]


def test_a_second_attempt_of_a_task_whose_lease_was_deleted_gets_no_rows_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R1291: the broker took rows of the second attempt for the repetition of a batch of the first one.

    The sequence numbers were equal. Three rows were lost, three doubled, and the call reported seven.
    """
    with (
        oncelog.Broker(config={"auto.create.topics.enable": False}) as broker,
        Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        create_topic(broker.bootstrap_servers, "t", partitions=2)
        tps = [oncelog.TopicPartition("t", number) for number in range(2)]
        settings = parse_sink_options(options_of(broker.bootstrap_servers, "t"), "stream")
        sink = Sink("twice", settings, part="atomic")

        def rows(partition: int, *values: bytes) -> pa.RecordBatch:
            placed = {
                "topic": ["t"] * len(values),
                "partition": pa.array([partition] * len(values), pa.int32()),
            }
            return pa.RecordBatch.from_pydict({"value": list(values), **placed})

        def wait_for(tp: oncelog.TopicPartition, count: int) -> None:
            wait_until(lambda: admin.list_offsets({tp: "latest"})[tp].offset == count)

        def first() -> Iterator[pa.RecordBatch]:
            yield rows(0, b"a")
            wait_for(tps[0], 1)
            admin.delete_topics(["t"])
            create_topic(broker.bootstrap_servers, "t", partitions=2)
            yield rows(1, b"1", b"2", b"3")
            wait_for(tps[1], 3)
            raise RuntimeError("the executor is lost")

        def second() -> Iterator[pa.RecordBatch]:
            yield rows(0, b"a")
            # A shuffle gives the rows in another order at each attempt.
            yield rows(1, b"4", b"5", b"6")
            wait_for(tps[0], 1)
            yield rows(1, b"1", b"2", b"3")

        def run(df: Any, batch_id: int, sink: Sink, share: Any, counts: Any) -> list[ShareReport]:
            told: Any = {"sink": sink, "batch_id": batch_id, "share": share, "task": 0}
            with pytest.raises(SinkError, match="the executor is lost"):
                list(atomic_task.write_share(first(), **told))
            written = atomic_task.write_share(second(), **told)
            return [ShareReport(**row) for batch in written for row in batch.to_pylist()]

        monkeypatch.setattr(atomic, "_run", run)
        with pytest.raises(SinkError, match="topic 't' was deleted and created again while batch 0"):
            atomic._write_once(None, 0, sink, "twice", is_in_stream=False)  # type: ignore[arg-type]
        options = {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": "read_committed"}
        with oncelog.Consumer(options) as consumer:
            ends = consumer.end_offsets(tps)
            assert not [piece for tp in tps for piece in consumer.fetch_range(tp, 0, ends[tp])]


@pytest.mark.parametrize("describes", [True, False], ids=["", "before Kafka 3.0"])
def test_a_row_that_moves_to_another_task_after_an_executor_is_lost_is_stored_once(
    describes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1700: the second attempt of the task had no rows, so it did not see that the first one had written.
    The row was stored twice, and the call reported one row. R1752: so it was with brokers that do not
    describe transactions.
    """

    def refuse(*_arguments: Any) -> None:
        raise UnsupportedVersion

    if not describes:
        monkeypatch.setattr(Admin, "describe_transactions", refuse)
    with (
        oncelog.Broker() as broker,
        Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
        oncelog.Consumer({"bootstrap.servers": broker.bootstrap_servers}) as consumer,
    ):
        create_topic(broker.bootstrap_servers, "t", partitions=2)
        tps = [oncelog.TopicPartition("t", number) for number in range(2)]
        settings = parse_sink_options(options_of(broker.bootstrap_servers, "t"), "stream")
        sink, runs = Sink("moved", settings, part="atomic"), list[list[ShareReport]]()

        def row(partition: int) -> pa.RecordBatch:
            placed = {"topic": ["t"], "partition": pa.array([partition], pa.int32())}
            return pa.RecordBatch.from_pydict({"value": [b"a"], **placed})

        def lost() -> Iterator[pa.RecordBatch]:
            yield row(0)
            wait_until(lambda: admin.list_offsets({tps[0]: "latest"})[tps[0]].offset == 1)
            raise RuntimeError("the executor is lost")

        def run(df: Any, batch_id: int, sink: Sink, share: Any, counts: Any) -> list[ShareReport]:
            told: Any = {"sink": sink, "batch_id": batch_id, "share": share}
            runs.append([])
            if len(runs) == 1:
                with pytest.raises(SinkError, match="the executor is lost"):
                    list(atomic_task.write_share(lost(), task=0, **told))
            try:
                written = [
                    *atomic_task.write_share(iter([]), task=0, **told),
                    *atomic_task.write_share(iter([row(1)]), task=1, **told),
                ]
            except SinkError as error:
                raise RuntimeError("Spark's exception about a task that failed") from error
            runs[-1] += [ShareReport(**report) for batch in written for report in batch.to_pylist()]
            return runs[-1]

        monkeypatch.setattr(atomic, "_run", run)
        written = atomic._write(None, 0, sink, "moved", is_in_stream=False)  # type: ignore[arg-type]
        assert (written[:3], len(runs)) == ((0, 1, False), 2)
        ends = consumer.end_offsets(tps)
        stored = [piece["value"].to_pylist() for tp in tps for piece in consumer.fetch_range(tp, 0, ends[tp])]
        assert stored == [[b"a"]]


def test_an_attempt_that_lives_on_writes_nothing_after_a_later_one_without_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R1813: an attempt on an executor that was given up wrote between the driver's look at the transaction
    and its commit. The row was stored twice, and the call reported one row.
    """
    with (
        oncelog.Broker() as broker,
        oncelog.Consumer({"bootstrap.servers": broker.bootstrap_servers}) as consumer,
    ):
        create_topic(broker.bootstrap_servers, "t", partitions=2)
        tps = [oncelog.TopicPartition("t", number) for number in range(2)]
        settings = parse_sink_options(options_of(broker.bootstrap_servers, "t"), "stream")
        sink, told = Sink("late", settings, part="atomic"), dict[str, Any]()

        def row(partition: int) -> pa.RecordBatch:
            placed = {"topic": ["t"], "partition": pa.array([partition], pa.int32())}
            return pa.RecordBatch.from_pydict({"value": [b"a"], **placed})

        def run(df: Any, batch_id: int, sink: Sink, share: Any, counts: Any) -> list[ShareReport]:
            told.update(sink=sink, batch_id=batch_id, share=share)
            written = [
                *atomic_task.write_share(iter([]), task=0, **told),
                *atomic_task.write_share(iter([row(1)]), task=1, **told),
            ]
            return [ShareReport(**report) for batch in written for report in batch.to_pylist()]

        send_offsets = Producer.send_offsets_to_transaction

        def write_late(producer: Producer, offsets: Any, group: Any) -> None:
            if group == sink.group:
                with pytest.raises(SinkError, match="an earlier attempt of task 0 of batch 0 had begun"):
                    list(atomic_task.write_share(iter([row(0)]), task=0, **told))
            send_offsets(producer, offsets, group)

        monkeypatch.setattr(atomic, "_run", run)
        monkeypatch.setattr(Producer, "send_offsets_to_transaction", write_late)
        written = atomic._write(None, 0, sink, "late", is_in_stream=False)  # type: ignore[arg-type]
        assert written[:3] == (0, 1, False)
        ends = consumer.end_offsets(tps)
        stored = [piece["value"].to_pylist() for tp in tps for piece in consumer.fetch_range(tp, 0, ends[tp])]
        assert stored == [[b"a"]]


def test_an_attempt_with_a_former_producer_id_takes_no_lease() -> None:
    """R1702: it took the lease of the transaction that had fenced it. A second attempt of the task then got
    the lease, too, and numbered its records from 0 beside those of the first attempt.
    """
    with (
        oncelog.Broker() as broker,
        Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        create_topic(broker.bootstrap_servers, "t")
        settings = parse_sink_options(options_of(broker.bootstrap_servers, "t"), "stream")
        sink = Sink("former", settings, part="atomic")
        with Producer({**settings.producer, "transactional.id": sink.group}) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            share = producer.share_transaction()
            former = share._replace(producer_id=share.producer_id + 1, producer_epoch=32766)
            lease = atomic_task.TaskLease(sink, 0, 7, share)
            lease.acquire(admin)
            with pytest.raises(SinkError, match="a newer attempt writes batch 7"):
                atomic_task.TaskLease(sink, 0, 7, former).acquire(admin)
            with pytest.raises(SinkError, match="an earlier attempt of task 0 of batch 7 had begun"):
                atomic_task.TaskLease(sink, 0, 7, share).acquire(admin)
            producer.abort_transaction()


@pytest.mark.parametrize("version", [0, 2])
def test_a_write_that_fails_leaves_no_transaction_open(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1751: the driver had sent nothing itself, so it did not end the transaction. Readers waited until
    transaction.timeout.ms had passed.
    """
    with (
        oncelog.Broker(config={"oncelog.transaction.version": version}) as broker,
        Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        create_topic(broker.bootstrap_servers, "t")
        settings = parse_sink_options(options_of(broker.bootstrap_servers, "t"), "stream")
        sink = Sink("failed", settings, part="atomic")
        placed = {"topic": ["t"], "partition": pa.array([0], pa.int32())}
        rows = pa.RecordBatch.from_pydict({"value": [b"a"], **placed})

        def run(df: Any, batch_id: int, sink: Sink, share: Any, counts: Any) -> list[ShareReport]:
            list(atomic_task.write_share([rows], sink=sink, batch_id=batch_id, share=share, task=0))
            raise RowRefused("another task has a row that is too large")

        monkeypatch.setattr(atomic, "_run", run)
        with pytest.raises(RowRefused):
            atomic._write(None, 0, sink, "failed", is_in_stream=False)  # type: ignore[arg-type]
        assert admin.describe_transactions(sink.group)[sink.group].state in ("CompleteAbort", "Empty")
