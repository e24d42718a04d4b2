"""Tasks that use the clients of earlier tasks: several workers, other settings, and connections that died."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.spark.topics import create_topic
from support.wait import wait_until

import oncelog
from oncelog.client.connection.broker_connection import BrokerConnection
from oncelog.client.producer.blocking import Producer
from oncelog.errors import OncelogError
from oncelog.spark.sink.decisions import SinkError, SinkRefused
from oncelog.spark.sink.kept_clients import MAX_KEPT, KeptClients, TaskClients
from oncelog.spark.sink.sink_options import parse_sink_options
from oncelog.spark.sink.task import Sink, TaskReport, finish, write_task

pytest.importorskip("pyspark")


@pytest.fixture
def workers() -> Iterator[list[KeptClients]]:
    """Yield the clients of two Python workers."""
    kept = [KeptClients(), KeptClients()]
    yield kept
    for clients in kept:
        clients.close()


def sink_of(bootstrap: str, topic: str, **options: str) -> Sink:
    given = {"kafka.bootstrap.servers": bootstrap, "topic": topic, **options}
    return Sink(topic, parse_sink_options(given, "stream"))


def rows(*values: str) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pydict({"value": pa.array(values, pa.string())})]


def committed(bootstrap: str, topic: str) -> list[bytes | None]:
    with oncelog.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": topic, "auto.offset.reset": "earliest"}
    ) as consumer:
        consumer.subscribe([topic])
        return sorted((record.value for record in consumer.poll(timeout=10)), key=str)


def test_a_marker_is_read_again_after_another_worker_ran_the_task(
    shared_broker: oncelog.Broker, topic: str, workers: list[KeptClients]
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=1)
    sink = sink_of(bootstrap, topic)
    here, there = workers
    finish(sink, 0, [write_task(sink, 0, 0, rows("a"), here)], here)
    write_task(sink, 1, 0, rows("b"), there)
    assert write_task(sink, 1, 0, rows("b"), here).already_committed
    assert committed(bootstrap, topic) == [b"a", b"b"]


def test_a_task_fences_the_attempt_of_another_worker_that_has_kept_its_clients(
    shared_broker: oncelog.Broker, topic: str, workers: list[KeptClients]
) -> None:
    """The second worker's attempt begins while the transaction of the first worker's attempt is open."""
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=1)
    sink = sink_of(bootstrap, topic)
    here, there = workers
    for batch_id, kept in enumerate((here, there)):
        finish(sink, batch_id, [write_task(sink, batch_id, 0, rows(f"old-{batch_id}"), kept)], kept)

    def overtaken() -> Iterator[pa.RecordBatch]:
        yield from rows("c")
        write_task(sink, 2, 0, rows("c"), there)

    with pytest.raises(OncelogError):
        write_task(sink, 2, 0, overtaken(), here)
    assert committed(bootstrap, topic) == [b"c", b"old-0", b"old-1"]


def test_a_second_task_of_a_worker_uses_the_clients_of_the_first(
    shared_broker: oncelog.Broker, topic: str, workers: list[KeptClients]
) -> None:
    kept = workers[0]
    settings = sink_of(shared_broker.bootstrap_servers, topic).settings
    with kept.borrow(settings) as first:
        producer = first.producer("one")
    with kept.borrow(settings) as second, kept.borrow(settings) as beside:
        assert second is first and second.producer("two") is producer
        assert beside is not first
    with pytest.raises(ZeroDivisionError), kept.borrow(settings):
        raise ZeroDivisionError
    with kept.borrow(settings) as later:
        assert later not in (first, beside)


def test_a_task_sends_nine_requests_and_the_first_of_a_micro_batch_eight_more(
    shared_broker: oncelog.Broker, topic: str, workers: list[KeptClients], monkeypatch: pytest.MonkeyPatch
) -> None:
    """These numbers are in docs/spark.md ("What a micro-batch costs")."""
    bootstrap, kept = shared_broker.bootstrap_servers, workers[0]
    create_topic(bootstrap, topic, partitions=1)
    sent: list[str] = []
    submit = BrokerConnection.submit

    def counted(connection: BrokerConnection, request: Any, **how: Any) -> Any:
        sent.append(type(request).__name__)
        return submit(connection, request, **how)

    monkeypatch.setattr(BrokerConnection, "submit", counted)
    for batch_id in range(2):
        sink, counts = sink_of(bootstrap, topic), []
        reports = []
        for task in range(2):
            sent.clear()
            reports.append(write_task(sink, batch_id, task, rows("a"), kept))
            counts.append(len(sent))
        sent.clear()
        finish(sink, batch_id, reports, kept)
    assert (*counts, len(sent)) == (17, 9, 2)


def test_a_micro_batch_uses_the_partitions_that_its_topic_has_now(
    shared_broker: oncelog.Broker, topic: str, workers: list[KeptClients]
) -> None:
    """A kept producer's metadata may be five minutes old, so each task must look the topic up again."""
    bootstrap, kept = shared_broker.bootstrap_servers, workers[0]
    create_topic(bootstrap, topic, partitions=1)

    def partitions_of(batch_id: int) -> int:
        sink = sink_of(bootstrap, topic)
        keys = pa.array([str(key) for key in range(40)])
        batch = pa.RecordBatch.from_pydict({"value": keys, "key": keys})
        finish(sink, batch_id, [write_task(sink, batch_id, 0, [batch], kept)], kept)
        with oncelog.Admin({"bootstrap.servers": bootstrap}) as admin:
            described = admin.describe_topics([topic])[topic].partitions
            tps = [oncelog.TopicPartition(topic, part.partition) for part in described]
            ends = admin.list_offsets(dict.fromkeys(tps, "latest"))
        return sum(1 for listed in ends.values() if listed.offset)

    assert partitions_of(0) == 1
    with oncelog.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_partitions({topic: 4})
        assert partitions_of(1) == 4
        admin.delete_topics([topic])
    create_topic(bootstrap, topic, partitions=2)
    assert partitions_of(0) == 2


def test_a_topic_created_again_while_a_task_writes_gets_no_rows(workers: list[KeptClients]) -> None:
    """R1242: the new topic had the rows of one partition, and the marker counted those of both."""
    kept = workers[0]
    with (
        oncelog.Broker(config={"auto.create.topics.enable": False}) as broker,
        oncelog.Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        bootstrap = broker.bootstrap_servers
        create_topic(bootstrap, "t", partitions=2)
        sink, tps = sink_of(bootstrap, "t"), [oncelog.TopicPartition("t", number) for number in range(2)]

        def source(is_first_attempt: bool) -> Iterator[pa.RecordBatch]:
            yield pa.RecordBatch.from_pydict({"value": ["a"], "partition": pa.array([0], pa.int32())})
            if is_first_attempt:
                wait_until(lambda: admin.list_offsets({tps[0]: "latest"})[tps[0]].offset == 1)
                admin.delete_topics(["t"])
                create_topic(bootstrap, "t", partitions=2)
            yield pa.RecordBatch.from_pydict({"value": ["b"], "partition": pa.array([1], pa.int32())})

        with pytest.raises(SinkError, match="topic 't' was deleted and created again while batch 0"):
            write_task(sink, 0, 0, source(True), kept)
        with oncelog.Consumer({"bootstrap.servers": bootstrap}) as consumer:
            ends = consumer.end_offsets(tps)
            assert not [rows for tp in tps for rows in consumer.fetch_range(tp, 0, ends[tp])]
        finish(sink, 0, [write_task(sink, 0, 0, source(False), kept)], kept)
        assert committed(bootstrap, "t") == [b"a", b"b"]


@pytest.mark.parametrize("is_first_task_alone", [True, False])
def test_a_topic_created_again_before_the_driver_commits_gets_no_rows(
    workers: list[KeptClients], is_first_task_alone: bool
) -> None:
    """R1270: the first task had compared the topic's ids long before the commit. So the new topic had only
    the rows of later tasks.
    """
    with (
        oncelog.Broker(config={"auto.create.topics.enable": False}) as broker,
        oncelog.Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        bootstrap = broker.bootstrap_servers
        create_topic(bootstrap, "t", partitions=2)

        def report_of(task: int) -> TaskReport:
            row = {"value": ["ab"[task]], "partition": pa.array([task], pa.int32())}
            batches = [pa.RecordBatch.from_pydict(row)]
            return write_task(sink, 0, task, batches, workers[task], commits=False)

        sink = sink_of(bootstrap, "t")
        reports = [report_of(0)] if is_first_task_alone else [report_of(0), report_of(1)]
        admin.delete_topics(["t"])
        create_topic(bootstrap, "t", partitions=2)
        if is_first_task_alone:
            reports.append(report_of(1))
        with pytest.raises(SinkError, match="topic 't' was deleted and created again while batch 0"):
            finish(sink, 0, reports, workers[0])
        with oncelog.Consumer({"bootstrap.servers": bootstrap}) as consumer:
            tps = [oncelog.TopicPartition("t", number) for number in range(2)]
            ends = consumer.end_offsets(tps)
            assert not [rows for tp in tps for rows in consumer.fetch_range(tp, 0, ends[tp])]
        sink = sink_of(bootstrap, "t")
        finish(sink, 0, [report_of(0), report_of(1)], workers[0])
        assert sorted(committed(bootstrap, "t"), key=str) == [b"a", b"b"]


@pytest.mark.parametrize("options", [{}, {"writeId": "w"}], ids=["nameless", "named"])
def test_a_late_task_of_an_ended_write_finds_its_topic_replaced(
    workers: list[KeptClients], options: dict[str, str]
) -> None:
    """R1294: the note that the write had ended was deleted with the topic, and the rows came again.

    R1342: with a writeId too, and the next write with this id was refused.
    """
    from oncelog.spark.sink.sink import BatchWriter  # needs PySpark

    with (
        oncelog.Broker(config={"auto.create.topics.enable": False}) as broker,
        oncelog.Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        bootstrap = broker.bootstrap_servers
        create_topic(bootstrap, "t", partitions=1)
        given = {"kafka.bootstrap.servers": bootstrap, "topic": "t", **options}
        writer = BatchWriter(parse_sink_options(given, "batch"))
        here, there = workers
        finish(writer._sink, 0, [write_task(writer._sink, 0, 0, rows("a"), here)], here)
        if options:
            assert write_task(writer._sink, 0, 0, rows("a"), there).already_committed
        else:
            with pytest.raises(SinkError, match="the write has ended"):
                write_task(writer._sink, 0, 0, rows("a"), there)
        admin.delete_topics(["t"])
        create_topic(bootstrap, "t", partitions=1)
        with pytest.raises(SinkError, match="topic 't' was deleted and created again"):
            write_task(writer._sink, 0, 0, rows("a"), there)
        again = BatchWriter(writer._sink.settings)
        finish(again._sink, 0, [write_task(again._sink, 0, 0, rows("b"), here)], here)
        assert committed(bootstrap, "t") == [b"b"]


def test_the_first_micro_batch_is_written_as_a_whole_to_a_topic_created_again(
    workers: list[KeptClients],
) -> None:
    """R1460: the new topic had only the rows of the later tasks, and the micro-batch counted as written.

    Then a late copy of a task of this query wrote its rows beside those of the next query.
    """
    from oncelog.spark.sink.sink import StreamWriter  # needs PySpark

    with (
        oncelog.Broker(config={"auto.create.topics.enable": False}) as broker,
        oncelog.Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin,
    ):
        bootstrap, (here, there) = broker.bootstrap_servers, workers
        settings = parse_sink_options({"kafka.bootstrap.servers": bootstrap, "topic": "t"}, "stream")

        def create_again() -> None:
            admin.delete_topics(["t"])
            create_topic(bootstrap, "t", partitions=1)

        create_topic(bootstrap, "t", partitions=1)
        begun = StreamWriter(settings)._sink("q")
        write_task(begun, 0, 0, rows("a"), here)
        create_again()
        with pytest.raises(SinkError, match="topic 't' was deleted and created again"):
            write_task(begun, 0, 1, rows("b"), there)
        repeated = StreamWriter(settings)._sink("q")
        reports = [write_task(repeated, 0, task, rows("ab"[task]), here) for task in range(2)]
        finish(repeated, 0, reports, here)
        assert committed(bootstrap, "t") == [b"a", b"b"]

        create_again()
        following = StreamWriter(settings)._sink("r")
        finish(following, 0, [write_task(following, 0, 0, rows("c"), here)], here)
        with pytest.raises(SinkError, match="topic 't' was deleted and created again"):
            write_task(repeated, 0, 0, rows("a"), there)
        assert committed(bootstrap, "t") == [b"c"]


def test_a_first_micro_batch_continues_although_its_separate_marker_topic_was_replaced(
    shared_broker: oncelog.Broker, topic: str, workers: list[KeptClients]
) -> None:
    """The rows of the first task are still there. If the query failed, its restart would double them."""
    from oncelog.spark.sink.sink import StreamWriter  # needs PySpark

    bootstrap, markers = shared_broker.bootstrap_servers, f"{topic[:40]}.markers"
    create_topic(bootstrap, topic)
    create_topic(bootstrap, markers)
    given = {"kafka.bootstrap.servers": bootstrap, "topic": topic, "markerTopic": markers}
    sink = StreamWriter(parse_sink_options(given, "stream"))._sink(topic)
    reports = [write_task(sink, 0, 0, rows("a"), workers[0])]
    with oncelog.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.delete_topics([markers])
    create_topic(bootstrap, markers)
    reports.append(write_task(sink, 0, 1, rows("b"), workers[1]))
    finish(sink, 0, reports, workers[0])
    assert committed(bootstrap, topic) == [b"a", b"b"]


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_write_id_of_another_topic_is_refused(
    shared_broker: oncelog.Broker, topic: str, workers: list[KeptClients], is_finished: bool
) -> None:
    """R1462: the rows of the second write were taken for those of the first one, and were in no topic."""
    from oncelog.spark.sink.sink import BatchWriter  # needs PySpark

    bootstrap, kept = shared_broker.bootstrap_servers, workers[0]
    names = [f"{topic[:40]}.{is_finished}.{end}" for end in ("a", "b", "markers")]
    for name in names:
        create_topic(bootstrap, name, partitions=1)

    def sink_for(name: str) -> Sink:
        given = {"kafka.bootstrap.servers": bootstrap, "topic": name, "markerTopic": names[2]}
        return BatchWriter(parse_sink_options({**given, "writeId": names[0]}, "batch"))._sink

    first, other, again = sink_for(names[0]), sink_for(names[1]), sink_for(names[0])
    reports = [write_task(first, 0, 0, rows("1"), kept)]
    if is_finished:
        finish(first, 0, reports, kept)
    with pytest.raises(SinkRefused, match=f"this writeId is that of a write to topic '{names[0]}'"):
        write_task(other, 0, 0, rows("1"), kept)
    finish(again, 0, [write_task(again, 0, 0, rows("1"), kept)], kept)
    assert (committed(bootstrap, names[0]), committed(bootstrap, names[1])) == ([b"1"], [])


def test_a_write_with_an_id_continues_although_its_separate_marker_topic_was_replaced(
    shared_broker: oncelog.Broker, topic: str, workers: list[KeptClients]
) -> None:
    """The rows of the first task are still there. If the write failed, its repetition would double them."""
    from oncelog.spark.sink.sink import BatchWriter  # needs PySpark

    bootstrap, markers = shared_broker.bootstrap_servers, f"{topic[:40]}.markers"
    create_topic(bootstrap, topic)
    create_topic(bootstrap, markers)
    given = {"kafka.bootstrap.servers": bootstrap, "topic": topic, "markerTopic": markers, "writeId": topic}
    settings = parse_sink_options(given, "batch")
    first, again = BatchWriter(settings)._sink, BatchWriter(settings)._sink
    reports = [write_task(first, 0, 0, rows("a"), workers[0])]
    with oncelog.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.delete_topics([markers])
    create_topic(bootstrap, markers)
    reports.append(write_task(first, 0, 1, rows("b"), workers[1]))
    finish(first, 0, reports, workers[0])
    for task, row in enumerate("ab"):
        assert write_task(again, 0, task, rows(row), workers[0]).already_committed
    assert committed(bootstrap, topic) == [b"a", b"b"]


def test_the_broker_creates_a_missing_topic_of_the_column_topic(workers: list[KeptClients]) -> None:
    """R1271: the task first asked for the topic's id, and failed because the topic did not exist yet."""
    with oncelog.Broker(config={"auto.create.topics.enable": True}) as broker:
        bootstrap = broker.bootstrap_servers
        create_topic(bootstrap, "markers")
        given = {"kafka.bootstrap.servers": bootstrap, "markerTopic": "markers"}
        sink = Sink("auto", parse_sink_options(given, "stream"))
        batches = [pa.RecordBatch.from_pydict({"topic": ["t"], "value": ["a"]})]
        finish(sink, 0, [write_task(sink, 0, 0, batches, workers[0])], workers[0])
        assert committed(bootstrap, "t") == [b"a"]


def test_a_worker_keeps_clients_for_a_few_settings_only(workers: list[KeptClients]) -> None:
    kept, lent = workers[0], []
    for number in range(MAX_KEPT + 2):
        settings = sink_of("127.0.0.1:1", "topic", **{"kafka.client.id": str(number)}).settings
        with kept.borrow(settings) as clients:
            lent.append(clients)
    assert sum(clients.admin._thread.is_running for clients in lent) == MAX_KEPT


def test_clients_that_are_idle_or_old_are_not_used_again() -> None:
    clients = TaskClients(sink_of("127.0.0.1:1", "topic").settings)
    clients.close()
    now_ns, second_ns = clients.made_ns, 10**9
    assert clients.is_usable(now_ns + 29 * second_ns)
    assert not clients.is_usable(now_ns + 31 * second_ns)
    clients.used_ns = now_ns + 299 * second_ns
    assert clients.is_usable(now_ns + 299 * second_ns)
    assert not clients.is_usable(now_ns + 301 * second_ns)


def test_kept_clients_outlive_a_restart_of_the_broker(
    tmp_path: Path, topic: str, workers: list[KeptClients]
) -> None:
    kept = workers[0]
    with ExitStack() as stack:
        broker = stack.enter_context(oncelog.Broker(tmp_path))
        bootstrap = broker.bootstrap_servers
        create_topic(bootstrap, topic, partitions=1)
        sink = sink_of(bootstrap, topic)
        finish(sink, 0, [write_task(sink, 0, 0, rows("a"), kept)], kept)
    with oncelog.Broker(tmp_path, port=int(bootstrap.rpartition(":")[2])):
        again = replace(sink, run_id="another run")
        finish(again, 1, [write_task(again, 1, 0, rows("b"), kept)], kept)
        assert committed(bootstrap, topic) == [b"a", b"b"]


def test_a_producer_of_another_transactional_id_keeps_nothing_of_the_last_one(
    shared_broker: oncelog.Broker, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, partitions=1)
    settings = {"bootstrap.servers": bootstrap}
    with Producer({**settings, "transactional.id": f"{topic}-1"}) as producer:
        for name in ("1", "2", "1"):
            producer._change_transactional_id(f"{topic}-{name}")
            with pytest.raises(oncelog.errors.MisuseError, match="call init_transactions"):
                producer.begin_transaction()
            producer.init_transactions()
            with producer.transaction():
                producer.send(topic, name.encode())
                with pytest.raises(oncelog.errors.MisuseError, match="within a transaction"):
                    producer._change_transactional_id("other")
        with Producer({**settings, "transactional.id": f"{topic}-1"}) as other:
            other.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"fenced")
        with pytest.raises(oncelog.errors.OncelogError):
            producer.commit_transaction()
        with pytest.raises(oncelog.errors.OncelogError):
            producer._change_transactional_id(f"{topic}-3")
    assert committed(bootstrap, topic) == [b"1", b"1", b"2"]
