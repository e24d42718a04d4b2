"""A sink task on a real broker, without Spark: zombies, repetitions and errors at every step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pyarrow as pa
import pytest
from support.broker import RawClient
from support.spark.topics import create_topic
from support.topics import wait_for_markers

import oncelog
from oncelog.broker import state as broker_state
from oncelog.client.admin.blocking import Admin
from oncelog.client.producer.blocking import Producer
from oncelog.errors import ConcurrentTransactions, ConfigError, ProducerFenced
from oncelog.limits import Limits
from oncelog.server.embedded import recover_node
from oncelog.spark.sink import batch_plan
from oncelog.spark.sink import task as sink_task
from oncelog.spark.sink.decisions import BatchBegun, PlanNote, RowRefused, RowSum, SinkError, SinkRefused
from oncelog.spark.sink.kept_clients import KeptClients, TaskClients
from oncelog.spark.sink.sink_options import SINK_OPTIONS, parse_sink_options, repeats_whole_stages
from oncelog.spark.sink.sink_rows import TaskRows, check_columns
from oncelog.spark.sink.state import KEPT_MS, new_run_id
from oncelog.spark.sink.task import Sink, TaskReport, abandon
from oncelog.types import OffsetAndMetadata, TopicPartition
from oncelog.wire.messages import InitProducerIdRequest
from oncelog.wire.row_hash import hash_rows

_kept = KeptClients()
"""The clients of all tasks in this file.

Each test continues with the clients that earlier tests left behind.
"""
write_task = partial(sink_task.write_task, kept=_kept)
finish = partial(sink_task.finish, kept=_kept)
FAST = {"kafka.max.block.ms": "1500", "kafka.request.timeout.ms": "1500"}


def sink_of(bootstrap: str, name: str, **options: str) -> Sink:
    given = {"kafka.bootstrap.servers": bootstrap}
    if "topic" not in options and "markerTopic" not in options:
        given["topic"] = name
    return Sink(name, parse_sink_options({**given, **options}, "stream"))


def batch(*values: str | None, **columns: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.string()), **columns})


def committed(bootstrap: str, topic: str) -> list[str]:
    """Return the values that a read_committed reader gets, sorted."""
    found: list[str] = []
    with oncelog.Consumer({"bootstrap.servers": bootstrap}) as consumer:
        partitions = [TopicPartition(topic, n) for n in range(len(consumer.partitions_for(topic)))]
        wait_for_markers(bootstrap, partitions, consumer)
        for at, end in consumer.end_offsets(partitions).items():
            for piece in consumer.fetch_range(at, 0, end):
                found += [value.decode() for value in piece.column("value").to_pylist()]
    return sorted(found)


@pytest.fixture(scope="module", autouse=True)
def _close_kept_clients() -> Iterator[None]:
    yield
    _kept.close()


@pytest.fixture(params=["shared_broker", "apache_kafka"])
def bootstrap(request: pytest.FixtureRequest, topic: str) -> str:
    """Run the test on our broker and on Apache Kafka."""
    found: str = request.getfixturevalue(request.param).bootstrap_servers
    create_topic(found, topic, partitions=3)
    return found


def test_a_task_is_fenced_by_another_one_while_it_commits_the_plan_note(
    bootstrap: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other task's InitProducerId has aborted this task's transaction.

    The coordinator told the other task to repeat that request, and it has not done so yet.
    """
    sink = sink_of(bootstrap, topic)
    send = Producer.send_offsets_to_transaction

    def overtaken(producer: Producer, *arguments: Any) -> None:
        send(producer, *arguments)
        monkeypatch.setattr(Producer, "send_offsets_to_transaction", send)
        request = InitProducerIdRequest(transactional_id=sink.plan_id, transaction_timeout_ms=60_000)
        with RawClient(bootstrap) as client:
            answer = client.ask(request, 4)
        assert answer.error_code == ConcurrentTransactions.code

    monkeypatch.setattr(Producer, "send_offsets_to_transaction", overtaken)
    with closing(TaskClients(sink.settings)) as clients:
        assert batch_plan.agree_on_plan(sink, clients, 0, 0).run_id == sink.run_id


@pytest.mark.parametrize("version", [0, 2])
def test_a_task_is_fenced_by_another_one_at_the_last_epoch_of_the_plan_note(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1292: the other task got another producer id, so this one failed with INVALID_PRODUCER_ID_MAPPING."""
    limits = Limits(first_producer_epoch=32_766)
    monkeypatch.setattr("oncelog.server.embedded.recover_node", partial(recover_node, limits=limits))
    send = Producer.send_offsets_to_transaction
    with oncelog.Broker(config={"oncelog.transaction.version": version}) as broker:
        create_topic(broker.bootstrap_servers, "t")
        sink = sink_of(broker.bootstrap_servers, "t")

        def overtaken(producer: Producer, *arguments: Any) -> None:
            monkeypatch.setattr(Producer, "send_offsets_to_transaction", send)
            with Producer({**sink.settings.producer, "transactional.id": sink.plan_id}) as other:
                other.init_transactions()
            send(producer, *arguments)

        monkeypatch.setattr(Producer, "send_offsets_to_transaction", overtaken)
        with closing(TaskClients(sink.settings)) as clients:
            assert batch_plan.agree_on_plan(sink, clients, 0, 0).run_id == sink.run_id


def test_tasks_that_fence_each_other_pause_for_random_times(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    # Replace sleep in `batch_plan` only. The broker of the other tests runs in this process and needs
    # asyncio.sleep.
    monkeypatch.setattr(batch_plan, "asyncio", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(batch_plan, "_note_plan", Mock(side_effect=ProducerFenced("fenced")))
    sink, clients = Mock(run_id="run", **{"plan.return_value": None}), Mock()
    with pytest.raises(SinkError, match="several runs write this batch"):
        batch_plan.agree_on_plan(sink, clients, 0, 0)
    assert len(set(pauses)) == len(pauses) and max(pauses) > 0.2
    assert all(0 <= pause <= min(0.025 * 2**n, 1.6) for n, pause in enumerate(pauses))


@pytest.mark.behaviour("P2")
def test_a_repeated_batch_is_compared_and_not_written(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    first = write_task(sink, 0, 0, [batch("a", "b"), batch(), batch("c")])
    # the rows have another order and other Arrow batches
    again = write_task(sink, 0, 0, [batch("c", "a"), batch("b")])
    assert (first.sum, again.sum, first.already_committed, again.already_committed) == (
        first.sum,
        first.sum,
        False,
        True,
    )
    for other in (["a", "b"], ["a", "b", "x"], ["a", "b", "c", "c"]):
        with pytest.raises(
            SinkError, match=r"task 0 of batch 0.*committed with 3 rows in this task, and now"
        ):
            write_task(sink, 0, 0, [batch(*other)])
    with pytest.raises(SinkError, match="and now it has 0"):
        write_task(sink, 0, 0, [])
    finish(sink, 0, [first])
    finish(sink, 0, [again])
    write_task(sink, 1, 0, [batch("d")])
    assert committed(bootstrap, topic) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("is_named", [True, False])
def test_a_task_that_cannot_see_the_end_of_its_rows_leaves_the_commit_to_the_driver(
    bootstrap: str, topic: str, is_named: bool
) -> None:
    """R1160: Spark may cut off the rows of such a task after a failed step, and tell only the driver."""
    sink = sink_of(bootstrap, topic)
    sink = Sink(sink.name, sink.settings, is_named=is_named)
    cut_off = write_task(sink, 0, 0, [batch("a")], commits=False)
    assert cut_off.prepared is not None and cut_off.plan is None
    retried = write_task(sink, 0, 0, [batch("a", "b")], commits=False)
    other = write_task(sink, 0, 1, [batch("c")], commits=False)
    assert committed(bootstrap, topic) == []
    finish(sink, 0, [retried, other])
    assert committed(bootstrap, topic) == ["a", "b", "c"]
    if is_named:
        abandon(sink, [write_task(sink, 1, 0, [batch("d")], commits=False)])
        assert committed(bootstrap, topic) == ["a", "b", "c"]


def interrupted(*parts: pa.RecordBatch, by: Callable[[], object]) -> Iterator[pa.RecordBatch]:
    """Yield the batches, and call `by` before the last one."""
    yield from parts[:-1]
    by()
    yield parts[-1]


@pytest.mark.behaviour("P2")
def test_a_paused_writer_that_continues_is_fenced_and_none_of_its_rows_are_visible(
    bootstrap: str, topic: str
) -> None:
    sink = sink_of(bootstrap, topic)
    reports: list[TaskReport] = []
    wakes = interrupted(
        batch("a"), batch("b"), by=lambda: reports.append(write_task(sink, 0, 0, [batch("a", "b")]))
    )
    with pytest.raises(SinkError, match=r"another attempt took over.*kafka.transaction.timeout.ms=300000"):
        write_task(sink, 0, 0, wakes)
    assert not reports[0].already_committed and write_task(sink, 0, 0, [batch("b", "a")]).already_committed
    assert committed(bootstrap, topic) == ["a", "b"]


@pytest.mark.behaviour("P2")
def test_a_failed_attempt_leaves_no_visible_rows(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_task(sink, 0, 0, interrupted(batch("a"), batch("b"), by=fail))
    assert not write_task(sink, 0, 0, [batch("a", "b")]).already_committed
    assert committed(bootstrap, topic) == ["a", "b"]


@pytest.mark.behaviour("P2")
def test_a_zombie_of_an_older_batch_writes_nothing(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    for number in range(2):
        finish(sink, number, [write_task(sink, number, 0, [batch(f"v{number}")])])
    with pytest.raises(SinkError, match="batch 1 has been committed since"):
        write_task(sink, 0, 0, [batch("late")])
    late = write_task(sink, 1, 0, [batch("late")])
    with pytest.raises(SinkError, match="committed with 1 rows in all, and now they are not the same"):
        finish(sink, 1, [late])
    with pytest.raises(SinkError, match="batch 0 was requested, but batch 1 has been committed since"):
        finish(sink, 0, [TaskReport(0, RowSum(), False)])
    assert committed(bootstrap, topic) == ["v0", "v1"]


@pytest.mark.behaviour("P2")
def test_a_finished_batch_is_known_without_the_markers_of_its_tasks(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    finish(sink, 0, [write_task(sink, 0, n, [batch(f"v{n}")]) for n in range(2)])
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        for group in (sink.task_id(0), sink.task_id(1), sink.plan_id):
            admin.delete_group(group)
        again = again_of(sink)
        # the rows are in another task, and there are fewer tasks
        reports = [write_task(again, 0, 0, [batch("v1", "v0")])]
        finish(again, 0, reports)
        assert reports[0].already_committed
        with pytest.raises(SinkError, match="committed with 2 rows in all, and now there are 1"):
            finish(again, 0, [write_task(again, 0, 0, [batch("v0")])])
        admin.delete_group(sink.finished_id)
    with pytest.raises(SinkError, match="set the option firstBatchId=2"):
        write_task(sink, 2, 0, [batch("x")])
    late = sink_of(bootstrap, topic, firstBatchId="2")
    write_task(late, 2, 0, [batch("x")])
    assert committed(bootstrap, topic) == ["v0", "v1", "x"]


@pytest.mark.behaviour("P6")
def test_a_query_without_rows_for_a_week_can_continue(bootstrap: str, topic: str) -> None:
    """G2: only the offsets that tasks committed in transactions expire after a week. The driver's do not."""
    sink = sink_of(bootstrap, topic)
    finish(sink, 0, [write_task(sink, 0, 0, [batch("a")])])
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        for group in (sink.task_id(0), sink.plan_id):
            admin.delete_group(group)
    later = again_of(sink)
    finish(later, 1, [write_task(later, 1, 0, [batch("b")])])
    assert committed(bootstrap, topic) == ["a", "b"]


@pytest.mark.behaviour("P6")
def test_a_half_written_batch_that_is_forgotten_is_refused(bootstrap: str, topic: str) -> None:
    """C11: the offsets that the tasks committed have expired, so it is unknown which rows were written."""
    sink = sink_of(bootstrap, topic)
    write_task(sink, 0, 0, [batch("a")])
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        for group in (sink.task_id(0), sink.plan_id):
            admin.delete_group(group)
        sink.keep(admin, sink.begun_id, BatchBegun(0, sink.run_id, 0).encode())
    with pytest.raises(SinkRefused, match=r"batch 0 was begun \d+ minutes ago.*firstBatchId=0"):
        write_task(again_of(sink), 0, 0, [batch("a")])
    assert committed(bootstrap, topic) == ["a"]
    vouched = replace(sink_of(bootstrap, topic, firstBatchId="0"), run_id=new_run_id())
    assert not write_task(vouched, 0, 0, [batch("a")]).already_committed


def test_an_offset_is_kept_as_long_as_its_commit_says() -> None:
    at, quick = TopicPartition("t", 0), {"offsets.retention.check.interval.ms": 10}
    with oncelog.Broker(config=quick) as broker, Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        create_topic(broker.bootstrap_servers, "t")
        for group, retention_ms in (("kept", KEPT_MS), ("gone", 1)):
            admin.alter_group_offsets(group, {at: OffsetAndMetadata(7)}, retention_ms=retention_ms)
        while "gone" in {listed.group_id for listed in admin.list_groups()}:
            pass
        assert admin.group_offsets("kept")[at].offset == 7


class _AskedAdmin:
    """An admin client that records only whether a caller waits for stable offsets."""

    def __init__(self) -> None:
        self.stable: list[object] = []

    def group_offsets(self, group: str, stable: object = None) -> dict[TopicPartition, OffsetAndMetadata]:
        self.stable.append(stable)
        return {}


def test_markers_are_awaited_where_their_transaction_is_complete() -> None:
    """Brokers with the classic group coordinator return offsets only a moment after the transaction has
    ended. So the sink must wait.
    """
    sink, admin = sink_of("127.0.0.1:1", "name"), _AskedAdmin()
    sink.atomic_marker(cast(Admin, admin))
    sink.task_marker(cast(Admin, admin), 0, is_fenced=True)
    sink.task_marker(cast(Admin, admin), 0, is_fenced=False)
    assert admin.stable == [[sink.marker_at], [sink.marker_at], None]


def again_of(sink: Sink) -> Sink:
    """Return the sink as another run of its query or write creates it."""
    return replace(sink, run_id=new_run_id())


@pytest.mark.behaviour("P6")
def test_rows_that_moved_to_another_task_are_not_doubled(bootstrap: str, topic: str) -> None:
    """C10, P2: one task was committed when the first run died."""
    sink = sink_of(bootstrap, topic)
    write_task(sink, 0, 0, [batch("a", "b")])
    second = again_of(sink)
    moved = write_task(second, 0, 1, [batch("b", "d")])
    with pytest.raises(SinkError, match="committed with 2 rows in this task, and now they are not the same"):
        write_task(second, 0, 0, [batch("a", "c")])
    assert committed(bootstrap, topic) == ["a", "b"]
    abandon(second, [moved])
    third = again_of(sink)  # aborting `second` does not affect this run
    finish(third, 0, [write_task(third, 0, n, [batch(*rows)]) for n, rows in enumerate(("ba", "cd"))])
    assert committed(bootstrap, topic) == ["a", "b", "c", "d"]


@pytest.mark.behaviour("P6")
@pytest.mark.parametrize("done", [1, 4])
def test_another_number_of_tasks_is_refused_and_the_old_one_goes_on(
    bootstrap: str, topic: str, done: int
) -> None:
    rows = [f"v{n:02}" for n in range(32)]
    sink = sink_of(bootstrap, topic)
    for task in range(done):
        write_task(sink, 0, task, [batch(*rows[task::4])])
    for count in (8, 2, 1):
        other, reports = again_of(sink), []
        for task in range(count):
            with suppress(SinkRefused):
                reports.append(write_task(other, 0, task, [batch(*rows[task::count])]))
        assert len(reports) < count
        abandon(other, reports)
    assert committed(bootstrap, topic) == sorted(row for task in range(done) for row in rows[task::4])
    same = again_of(sink)
    finish(same, 0, [write_task(same, 0, task, [batch(*rows[task::4])]) for task in range(4)])
    assert committed(bootstrap, topic) == rows


@pytest.mark.behaviour("P6")
def test_a_repeat_is_seen_only_once_every_task_has_succeeded(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    write_task(sink, 0, 1, [batch("b")])
    again = again_of(sink)
    reports = [write_task(again, 0, n, [batch(value)]) for n, value in enumerate("abc")]
    assert [report.already_committed for report in reports] == [False, True, False]
    with oncelog.Consumer({"bootstrap.servers": bootstrap}) as consumer:
        ends = consumer.end_offsets([TopicPartition(topic, n) for n in range(3)])
        pieces = (piece for at, end in ends.items() if end for piece in consumer.fetch_range(at, 0, end))
        assert {value for piece in pieces for value in piece["value"].to_pylist()} <= {b"b"}
    finish(again, 0, reports)
    assert committed(bootstrap, topic) == ["a", "b", "c"]


@pytest.mark.behaviour("P6")
@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_repeated_batch_may_be_finished_twice(version: int) -> None:
    """R1343: the second call aborted transactions that the first one had committed, and raised
    INVALID_TXN_STATE.
    """
    with oncelog.Broker(config={"oncelog.transaction.version": version}) as broker:
        create_topic(broker.bootstrap_servers, "t", partitions=3)
        sink = sink_of(broker.bootstrap_servers, "t")
        write_task(sink, 0, 1, [batch("b")])
        again = again_of(sink)
        reports = [write_task(again, 0, n, [batch(value)]) for n, value in enumerate("abc")]
        for _ in range(2):
            finish(again, 0, reports)
        assert committed(broker.bootstrap_servers, "t") == ["a", "b", "c"]
        later = again_of(sink)
        finish(later, 1, [write_task(later, 1, 0, [batch("d")])])
        assert committed(broker.bootstrap_servers, "t") == ["a", "b", "c", "d"]


@pytest.mark.behaviour("P6")
def test_a_driver_that_dies_between_two_ends_is_followed_by_one_that_finishes(
    bootstrap: str, topic: str
) -> None:
    sink = sink_of(bootstrap, topic)
    write_task(sink, 0, 0, [batch("a")])
    second = again_of(sink)
    reports = [write_task(second, 0, n, [batch(value)]) for n, value in enumerate("abc")]
    assert reports[1].prepared is not None
    settings = {**sink.settings.producer, "transactional.id": sink.task_id(1)}
    with Producer(settings) as producer:
        producer.take_over_transaction(reports[1].prepared)
        producer.commit_transaction()
    third = again_of(sink)
    again = [write_task(third, 0, n, [batch(value)]) for n, value in enumerate("abc")]
    assert [report.already_committed for report in again] == [True, True, False]
    with pytest.raises(SinkError, match="another run of this query or write has taken over"):
        finish(second, 0, reports)
    finish(third, 0, again)
    assert committed(bootstrap, topic) == ["a", "b", "c"]


@pytest.mark.behaviour("P6")
def test_a_zombie_of_an_earlier_run_writes_nothing_more(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    write_task(sink, 0, 0, [batch("a")])
    second = again_of(sink)
    reports = [write_task(second, 0, n, [batch(value)]) for n, value in enumerate("ab")]
    for task in (1, 2):  # the later run has prepared task 1, and has no task 2
        with pytest.raises(SinkError, match="another run of this query or write has taken over batch 0"):
            write_task(sink, 0, task, [batch("late")])
    finish(second, 0, reports)
    assert committed(bootstrap, topic) == ["a", "b"]


@pytest.mark.behaviour("P2")
@pytest.mark.parametrize("task", [0, 1])
def test_a_commit_record_left_open_by_a_dead_writer_is_resolved(
    bootstrap: str, topic: str, task: int
) -> None:
    """R812: every attempt waited for the dead writer's transaction until its timeout of five minutes."""
    sink = sink_of(bootstrap, topic, **FAST)
    note = PlanNote(0, sink.run_id).encode()
    dead = Producer({"bootstrap.servers": bootstrap, "transactional.id": sink.plan_id})
    dead.init_transactions()
    dead.begin_transaction()
    dead.send_offsets_to_transaction({sink.marker_at: note}, sink.plan_id)
    try:
        write_task(again_of(sink), 0, task, [batch("a")])
    finally:
        with suppress(ProducerFenced):
            dead.close()
    assert committed(bootstrap, topic) == ["a"]


@pytest.mark.behaviour("P6")
def test_a_task_of_an_earlier_run_that_no_task_has_now_is_fenced(bootstrap: str, topic: str) -> None:
    sink, reports = sink_of(bootstrap, topic), []

    def repeat() -> None:
        again = again_of(sink)
        finish(again, 0, [write_task(again, 0, n, [batch(value)]) for n, value in enumerate("ab")])

    write_task(sink, 0, 0, [batch("a")])
    with pytest.raises(SinkError, match="another attempt took over"):
        reports.append(write_task(sink, 0, 2, interrupted(batch("b"), batch("x"), by=repeat)))
    assert committed(bootstrap, topic) == ["a", "b"]


@pytest.mark.behaviour("P6")
def test_tasks_of_an_earlier_run_above_those_of_now_stop_the_driver(bootstrap: str, topic: str) -> None:
    # Each pair is (task, number of tasks before). With 0 tasks before, the batch is the query's first one.
    for last, before in ((2, 3), (7, 3), (7, 0)):
        sink = sink_of(bootstrap, topic, transactionalIdPrefix=f"{last}of{before}")
        if before:
            finish(sink, 0, [write_task(sink, 0, n, [batch(f"v{n}")]) for n in range(before)])
        at, first, second = min(before, 1), again_of(sink), again_of(sink)
        write_task(first, at, last, [batch(f"w{last}")])  # the driver of `first` died after this
        seen = committed(bootstrap, topic)
        repeated = [write_task(second, at, n, [batch("w")]) for n in range(2)]
        with pytest.raises(SinkError, match=f"committed task {last} as well"):
            finish(second, at, repeated)
        assert committed(bootstrap, topic) == seen


def write_as_0_4_1(sink: Sink, batch_id: int, task: int, *values: str) -> None:
    """Write the rows of a task as version 0.4.1 did. Only the hash is the current one."""
    rows = TaskRows(sink.settings.topic, 1000)
    rows.take(batch(*values))
    name = f"{sink.settings.prefix}-{sink.name}-{task}"
    note = {"oncelog": 1, "rows": rows.sum.rows, "hash": f"{rows.sum.hash:016x}"}
    with Producer({**sink.settings.producer, "transactional.id": name}) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send_table(str(sink.settings.topic), batch(*values))
            kept = {sink.marker_at: OffsetAndMetadata(batch_id, None, json.dumps(note))}
            producer.send_offsets_to_transaction(kept, name)


def finish_as_0_4_1(sink: Sink, batch_id: int, tasks: int) -> None:
    note = {"oncelog": 1, "lanes": tasks, "run": "a run"}
    with Admin(sink.settings.admin) as admin:
        kept = {sink.marker_at: OffsetAndMetadata(batch_id, None, json.dumps(note))}
        admin.alter_group_offsets(f"{sink.settings.prefix}-{sink.name}", kept)


@pytest.mark.parametrize("batch_id", [0, 3])
def test_a_batch_half_written_by_version_0_4_1_is_completed_exactly_once(
    bootstrap: str, topic: str, batch_id: int
) -> None:
    sink = sink_of(bootstrap, topic)
    if batch_id:
        finish_as_0_4_1(sink, batch_id - 1, 2)
    write_as_0_4_1(sink, batch_id, 0, "a", "b")
    moved = again_of(sink)
    prepared = write_task(moved, batch_id, 1, [batch("b", "d")])
    with pytest.raises(SinkError, match="committed with 2 rows in this task, and now it has 1"):
        write_task(moved, batch_id, 0, [batch("a")])
    abandon(moved, [prepared])
    again = again_of(sink)
    finish(again, batch_id, [write_task(again, batch_id, n, [batch(*v)]) for n, v in enumerate(("ab", "cd"))])
    write_task(again_of(sink), batch_id + 1, 0, [batch("e")])
    assert committed(bootstrap, topic) == ["a", "b", "c", "d", "e"]


def test_a_batch_finished_by_version_0_4_1_is_not_written_again(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    for task in range(2):
        write_as_0_4_1(sink, 0, task, f"v{task}")
    finish_as_0_4_1(sink, 0, 2)
    again = again_of(sink)
    reports = [write_task(again, 0, n, [batch(f"v{n}")]) for n in range(2)]
    assert [report.already_committed for report in reports] == [True, True]
    with pytest.raises(SinkError, match="batch 0 was committed by 2 tasks, but now has more tasks"):
        write_task(again, 0, 2, [batch("w")])
    with Admin(sink.settings.admin) as admin:
        admin.delete_group(sink.task_in_0_4_1(1))
    with pytest.raises(SinkError, match=r"the marker of task 1 is missing \(none\)"):
        write_task(again, 0, 1, [batch("v1")])
    finish(again, 0, reports)
    assert committed(bootstrap, topic) == ["v0", "v1"]


@pytest.mark.parametrize(
    ("first", "second"), [("b-1", "b"), ("b", "b-1"), ("b/1", "b"), ("b", "b/1"), ("b%2F1", "b/1")]
)
def test_no_two_names_share_a_marker(
    shared_broker: oncelog.Broker, topic: str, first: str, second: str
) -> None:
    """G5: the markers of `b` with three tasks and of `b-1` had the same names."""
    bootstrap, name = shared_broker.bootstrap_servers, topic.translate(str.maketrans("/%", "__"))
    create_topic(bootstrap, name)
    wanted = []
    for write_id in (first, second):
        settings = parse_sink_options(
            {"kafka.bootstrap.servers": bootstrap, "topic": name, "transactionalIdPrefix": name}, "batch"
        )
        sink = Sink(write_id, settings)
        finish(sink, 0, [write_task(sink, 0, n, [batch(f"{write_id} {n}")]) for n in range(3)])
        wanted += [f"{write_id} {n}" for n in range(3)]
    assert committed(bootstrap, name) == sorted(wanted)


def test_a_write_without_a_name_leaves_no_group_per_task(bootstrap: str, topic: str) -> None:
    """G6: a write without a name cannot be repeated.

    So only its own tasks need its markers, which are deleted at the end.
    """
    settings = sink_of(bootstrap, topic).settings
    for is_finished in (True, False):
        sink = Sink(f"a-uuid-{is_finished}-{topic}", settings, is_named=False)
        reports = [write_task(sink, 0, n, [batch(f"v{n}")]) for n in range(3)]
        assert write_task(sink, 0, 0, [batch("v0")]).already_committed  # this is another attempt of the task
        finish(sink, 0, reports) if is_finished else abandon(sink, reports)
        with Admin(settings.admin) as admin:
            groups = [group.group_id for group in admin.list_groups()]
            assert [group for group in groups if group.startswith(sink.group)] == [sink.finished_id]


def test_a_group_of_another_application_is_left_alone(bootstrap: str, topic: str) -> None:
    sink = sink_of(bootstrap, topic)
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.alter_group_offsets(sink.task_id(0), {sink.marker_at: OffsetAndMetadata(9)})
    with pytest.raises(SinkError, match="contains an offset that this sink did not write"):
        write_task(sink, 0, 0, [batch("a")])


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ([[{"key": "h", "value": b"1"}], [None]], "row 3 has null in place of a header"),
        (
            [[], [{"key": "h", "value": None}, {"key": None, "value": b""}]],
            r"row 3 has a header without a name",
        ),
    ],
    ids=["element", "name"],
)
def test_a_header_that_is_null_is_refused_with_its_row(
    bootstrap: str, topic: str, headers: list[Any], said: str
) -> None:
    """G9: the sink raised TypeError, so a supervisor restarted the query again and again."""
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    good = batch("a", "b", headers=pa.array([None, []], kind))
    bad = batch("c", "d", headers=pa.array([None, *headers], kind)[1:])
    with pytest.raises(RowRefused, match=said):
        write_task(sink_of(bootstrap, topic), 0, 0, [good, bad])
    assert committed(bootstrap, topic) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"value": ["a", "b"], "topic": ["t", None]}, "row 3 has a null topic"),
        ({"value": ["a", "b"], "topic": ["t"] * 2, "partition": [None, 3]}, r"row 3.*partitions 0 to 2"),
        (
            {"value": ["a", "b"], "topic": ["t"] * 2, "partition": [0, -1]},
            r"row 3.*'t' names partition -1",
        ),
        (
            {"value": ["a", "b" * 2_000_000], "topic": ["t"] * 2},
            r"row 3 for topic 't' has 2000000 bytes, above kafka.max.request.size=1048576 minus 200",
        ),
    ],
    ids=["topic", "partition", "negative", "large"],
)
def test_a_row_that_cannot_be_written_is_named(
    bootstrap: str, topic: str, rows: dict[str, list[Any]], said: str
) -> None:
    create_topic(bootstrap, f"{topic}.t", partitions=3)
    sink = sink_of(bootstrap, topic, markerTopic=topic)
    types = {"value": pa.string(), "topic": pa.string(), "partition": pa.int32()}
    types = {name: types[name] for name in rows}
    good = {"value": ["x", "y"], "topic": ["t", "t"], "partition": [None, None]}
    pieces = [
        pa.RecordBatch.from_pydict({n: pa.array(c[n], k) for n, k in types.items()}) for c in (good, rows)
    ]
    renamed = [_prefixed(piece, topic) for piece in pieces]
    with pytest.raises(RowRefused, match=said.replace("'t'", f"'{topic}.t'")) as raised:
        write_task(sink, 0, 0, renamed)
    assert "task 0 of batch 0, topics of the column topic" in str(raised.value)
    assert committed(bootstrap, f"{topic}.t") == []


def _prefixed(piece: pa.RecordBatch, topic: str) -> pa.RecordBatch:
    names = [None if each is None else f"{topic}.t" for each in piece.column("topic").to_pylist()]
    at = piece.schema.get_field_index("topic")
    return piece.set_column(at, "topic", pa.array(names, pa.string()))


def test_topic_and_partition_columns_decide_where_rows_are_stored(bootstrap: str, topic: str) -> None:
    create_topic(bootstrap, f"{topic}.b", partitions=2)
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    rows = pa.RecordBatch.from_pydict(
        {
            "ignored": [1, 2, 3, 4],
            "key": pa.array([b"k", None, b"", b"k"], pa.binary()),
            "value": pa.array([b"0", None, b"2", b"3"], pa.binary()),
            "topic": [topic, f"{topic}.b", topic, f"{topic}.b"],
            "partition": pa.array([2, 1, 0, None], pa.int32()),
            "headers": pa.array([[{"key": "h", "value": b"1"}], None, [], None], headers),
        }
    )
    write_task(sink_of(bootstrap, topic, markerTopic=topic), 0, 0, [rows])
    found = {}
    with oncelog.Consumer({"bootstrap.servers": bootstrap, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([TopicPartition(topic, n) for n in range(3)])
        consumer.assign([*consumer.assignment(), *(TopicPartition(f"{topic}.b", n) for n in range(2))])
        while len(found) < 4:
            for record in consumer.poll(timeout=2):
                found[record.topic, record.partition, record.value] = (record.key, record.headers)
    assert found.pop((topic, 2, b"0")) == (b"k", (("h", b"1"),))
    assert found.pop((f"{topic}.b", 1, None)) == (None, ())
    assert found.pop((topic, 0, b"2")) == (b"", ())
    ((name, _, value),) = found
    assert (name, value) == (f"{topic}.b", b"3")


def test_batches_are_split_to_the_topics_maximum_message_size(
    shared_broker: oncelog.Broker, topic: str
) -> None:
    """If one row alone exceeds the maximum, the error names the number of the row."""
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic, max_message_bytes=10_000)
    sink = sink_of(bootstrap, topic)
    write_task(sink, 0, 0, [batch(*(f"{n:04d}".ljust(500, ".") for n in range(200)))])
    assert len(committed(bootstrap, topic)) == 200
    with pytest.raises(SinkError, match="the largest row so far is row 1 with 20000 bytes: raise the topic"):
        write_task(sink, 0, 1, [batch("a", "b" * 20_000)])
    assert len(committed(bootstrap, topic)) == 200


def test_a_missing_topic_and_too_long_a_timeout_are_errors() -> None:
    strict = {"auto.create.topics.enable": False, "transaction.max.timeout.ms": 60_000}
    with oncelog.Broker(config=strict) as broker:
        with pytest.raises(
            SinkError, match=r"task 0 of batch 0, topic 'nowhere'.*transaction.max.timeout.ms is"
        ):
            write_task(sink_of(broker.bootstrap_servers, "nowhere"), 0, 0, [batch("a")])
        shorter = {**FAST, "kafka.transaction.timeout.ms": "50000"}
        sink = sink_of(broker.bootstrap_servers, "nowhere", **shorter)
        with pytest.raises(SinkError, match=r"topic 'nowhere'.*create the topic|that the topic exists"):
            write_task(sink, 0, 0, [batch("a")])


@pytest.fixture(scope="module")
def quick_broker() -> Iterator[oncelog.Broker]:
    """Run a broker that often checks for transactions past their timeout."""
    quick = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 50}
    with oncelog.Broker(config=quick) as broker:
        yield broker


def wait_until_aborted(bootstrap: str, transactional_id: str) -> None:
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        while admin.describe_transactions([transactional_id])[transactional_id].state != "CompleteAbort":
            pass


def test_a_task_slower_than_the_transaction_timeout_gets_an_error_that_names_it(
    quick_broker: oncelog.Broker,
) -> None:
    bootstrap = quick_broker.bootstrap_servers
    create_topic(bootstrap, "slow")
    sink = sink_of(bootstrap, "slow", **{"kafka.transaction.timeout.ms": "100"})
    rows = interrupted(batch("a"), batch("b"), by=lambda: wait_until_aborted(bootstrap, sink.task_id(0)))
    with pytest.raises(SinkError, match=r"kafka.transaction.timeout.ms=100 and was aborted"):
        write_task(sink, 0, 0, rows)
    assert committed(bootstrap, "slow") == []


def test_a_repeat_slower_than_the_transaction_timeout_gets_an_error_that_names_it(
    quick_broker: oncelog.Broker,
) -> None:
    bootstrap = quick_broker.bootstrap_servers
    create_topic(bootstrap, "slow-repeat")
    sink = sink_of(bootstrap, "slow-repeat")
    write_task(sink, 0, 0, [batch("a")])
    quick = replace(sink.settings, producer={**sink.settings.producer, "transaction.timeout.ms": "100"})
    again = replace(again_of(sink), settings=quick)
    reports = [write_task(again, 0, n, [batch(value)]) for n, value in enumerate("ab")]
    wait_until_aborted(bootstrap, sink.task_id(1))
    with pytest.raises(SinkError, match=r"kafka.transaction.timeout.ms=100 and was aborted"):
        finish(again, 0, reports)
    assert committed(bootstrap, "slow-repeat") == ["a"]


def test_the_hash_depends_on_rows_and_not_on_their_order() -> None:
    key, value = pa.array([b"a", b"b", None]), pa.array(["x", "", None])
    assert hash_rows(key, value) == hash_rows(key.take([2, 0, 1]), value.take([2, 0, 1]))
    others = [
        (pa.array([b"b", b"a", None]), value),
        (pa.array([b"a", b"b", b""]), value),
        (key, pa.array(["x", None, ""])),
        (value.cast(pa.binary()), key.cast(pa.binary())),
    ]
    assert len({hash_rows(key, value), *(hash_rows(*other) for other in others)}) == 5
    assert hash_rows(pa.array([1, None], pa.int32())) != hash_rows(pa.array([None, 2], pa.int32()))
    assert hash_rows(pa.array([], pa.binary())) == 0
    topic = pa.scalar("t", pa.string())
    assert hash_rows(key, topic) == hash_rows(key, pa.array(["t"] * len(key)))


def test_the_hash_of_a_row_does_not_depend_on_its_position() -> None:
    long, short = [b"%03d" % n * 200 for n in range(50)], [b"%d" % n for n in range(50)]
    rows: list[bytes | None] = [*long, None, b"", *short]
    one_by_one = sum(hash_rows(pa.array([row], pa.binary())) for row in rows) % 2**64
    column = pa.array([b"before", *rows, b"behind"], pa.binary())[1:-1]
    assert hash_rows(column) == one_by_one
    assert (hash_rows(column[:51]) + hash_rows(column[51:])) % 2**64 == one_by_one
    assert hash_rows(pa.array(["ä" * 300, "b"])) == hash_rows(pa.array(["ä".encode() * 300, b"b"]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "t"}, "kafka.bootstrap.servers is not set"),
        ({"kafka.bootstrap.servers": "h:1"}, "set markerTopic"),
        ({"kafka.bootstrap.servers": "h:1", "topik": "t"}, "did you mean topic"),
        ({"kafka.bootstrap.servers": "h:1", "topic": "t", "writeId": "w"}, "writeId is for batch writes"),
        (
            {"kafka.bootstrap.servers": "h:1", "topic": "t", "kafka.transactional.id": "x"},
            "transactionalIdPrefix",
        ),
        ({"kafka.bootstrap.servers": "h:1", "topic": "t", "kafka.linger": "x"}, "did you mean linger.ms"),
        ({"kafka.bootstrap.servers": "h:1", "topic": "t", "firstBatchId": "-1"}, "firstBatchId='-1'"),
    ],
)
def test_wrong_sink_options_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_sink_options(options, "stream")


def test_a_batch_write_cannot_say_that_its_notes_do_not_count() -> None:
    """R1582: with firstBatchId=0, a writeId of another topic was not refused."""
    given = {"kafka.bootstrap.servers": "h:1", "topic": "t", "writeId": "w", "firstBatchId": "0"}
    with pytest.raises(ConfigError, match="firstBatchId is for streams"):
        parse_sink_options(given, "batch")


@pytest.mark.parametrize(
    ("set_to", "is_safe"),
    [
        ({}, True),
        ({"enabled": "false"}, True),
        ({"enableFullRetryOnMismatch": "False"}, False),
        ({"enableFullRetryOnMismatch": "false", "enableQueryLevelRollbackOnMismatch": "true"}, True),
    ],
)
def test_sparks_settings_decide_whether_it_repeats_whole_stages(
    set_to: dict[str, str], is_safe: bool
) -> None:
    settings = {f"spark.sql.shuffle.orderIndependentChecksum.{name}": each for name, each in set_to.items()}
    assert repeats_whole_stages(settings.get) is is_safe


def test_the_columns_of_sparks_own_sink_are_accepted() -> None:
    check_columns([("value", "string"), ("key", "binary"), ("offset", "bigint")], "t")
    for types, topic, said in (
        ([("key", "string")], "t", "the column value is missing"),
        ([("value", "string")], None, "add a column named topic"),
        ([("value", "bigint")], "t", "column value has the type bigint, but must be string or binary"),
        (
            [("value", "string"), ("partition", "bigint")],
            "t",
            "partition has the type bigint, but must be int",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            check_columns(types, topic)


def test_every_option_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    told = {option.name: f"| `{option.name}` |" in page and option.meaning in page for option in SINK_OPTIONS}
    assert all(told.values()), told


@pytest.mark.behaviour("P2")
@pytest.mark.parametrize("is_finished", [True, False])
def test_an_attempt_that_begins_after_a_write_without_a_name_writes_nothing(
    bootstrap: str, topic: str, is_finished: bool
) -> None:
    """R77: the marker of the task was already deleted when a speculative copy, or a task of a lost executor,
    looked for it. So that attempt wrote the rows again.
    """
    sink = Sink(f"late-{topic}", sink_of(bootstrap, topic).settings, is_named=False)
    reports = [write_task(sink, 0, n, [batch(f"v{n}")]) for n in range(2)]
    finish(sink, 0, reports) if is_finished else abandon(sink, reports)
    with pytest.raises(SinkError, match=r"task 1 of batch 0.*has ended"):
        write_task(sink, 0, 1, [batch("v1")])
    assert committed(bootstrap, topic) == ["v0", "v1"]


def test_brokers_before_kafka_3_0_take_a_write_and_its_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """R78: such brokers cannot describe or list transactional ids, but the sink requested that for the first
    batch and for a repeat.
    """
    known = {number: api for number, api in broker_state.OFFERED.items() if api.name not in _SINCE_3_0}
    assert len(known) == len(broker_state.OFFERED) - len(_SINCE_3_0)
    monkeypatch.setattr(broker_state, "OFFERED", known)
    with oncelog.Broker() as broker:
        bootstrap = broker.bootstrap_servers
        create_topic(bootstrap, "old", partitions=2)
        sink = sink_of(bootstrap, "old")
        finish(sink, 0, [write_task(sink, 0, n, [batch(value)]) for n, value in enumerate("abc")])
        late = interrupted(batch("f"), batch("x"), by=lambda: repeat_batch_1(sink))
        write_task(sink, 1, 0, [batch("d")])
        with pytest.raises(SinkError, match="another attempt took over"):
            write_task(sink, 1, 2, late)
        assert committed(bootstrap, "old") == ["a", "b", "c", "d", "f"]


_SINCE_3_0 = ("DescribeTransactions", "ListTransactions")


def repeat_batch_1(sink: Sink) -> None:
    again = again_of(sink)
    finish(again, 1, [write_task(again, 1, n, [batch(value)]) for n, value in enumerate("df")])
