"""The loops `oncelog.process` and `oncelog.aio.process` over a real broker."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
from support.groups.members import fill, member
from support.topics import new_topic, read, values
from support.wait import LIMIT_S, pass_time, until, wait_until

import oncelog
from oncelog import (
    Admin,
    Broker,
    Processor,
    Producer,
    ProducerRecord,
    Record,
    TopicPartition,
    aio,
)
from oncelog.client.process.aio import AsyncLoopIO
from oncelog.errors import FencedInstanceId, MisuseError, NotConnectedError, ProducerFenced, TimedOut
from oncelog.testing.proxy import Proxy, Rule, WireEvent

QUICK: dict[str, Any] = {
    "linger_ms": 0,
    "retry_backoff_ms": 10,
    "retry_backoff_max_ms": 50,
    "commit_interval_ms": 20,
    "fetch_max_wait_ms": 50,
}
BOTH_PROTOCOLS = pytest.mark.parametrize("protocol", ["classic", "consumer"])


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    few = {"offsets.topic.num.partitions": 4, "transaction.state.log.num.partitions": 4}
    soon = {"group.consumer.min.heartbeat.interval.ms": 300, "group.consumer.heartbeat.interval.ms": 300}
    return few | soon | {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 100}


class Job:
    """A source topic with numbers, and a transform that copies them and stops its loop after the last one.

    `seen` has the values of all calls, in order.
    """

    def __init__(self, servers: str, group: str, count: int, partitions: int = 1) -> None:
        self.servers, self.group, self.count = servers, group, count
        self.source, self.target, self.dead = (new_topic(servers, partitions) for _ in range(3))
        self.partitions = partitions
        fill(servers, self.source, 0, count, partitions)
        self.seen: list[int] = []
        self.stop: Any = None

    def options(self, name: str = "", **settings: Any) -> dict[str, Any]:
        quick = (
            QUICK if settings.get("group_protocol") == "consumer" else {**QUICK, "heartbeat_interval_ms": 100}
        )
        chosen = {**quick, "bootstrap_servers": self.servers, **settings}
        return {**chosen, "group_id": self.group, "transactional_id": f"{self.group}-{name}"}

    def output(self, record: Record) -> ProducerRecord:
        number = int(record.value or b"")
        self.seen.append(number)
        if number == self.count - 1 and self.stop is not None:
            self.stop()
        return ProducerRecord(self.target, b"%d" % number, record.key)

    def processor(self, transform: Any = None, name: str = "", **settings: Any) -> Processor:
        processor = Processor(self.source, transform or self.output, **self.options(name, **settings))
        self.stop = processor.stop
        return processor

    def results(self) -> list[int]:
        return sorted(int(value or b"") for value in values(self.servers, self.target))

    def check(self) -> None:
        assert self.results() == list(range(self.count))
        tps = [TopicPartition(self.source, number) for number in range(self.partitions)]
        with member(self.servers, self.group, enable_auto_commit=False) as consumer:
            held = consumer.committed(tps)
            assert {tp: position.offset for tp, position in held.items() if position} == consumer.end_offsets(
                tps
            )


class Runner:
    """A Processor that runs in a thread. `error` is the exception that its `run` raised, or None."""

    def __init__(self, processor: Processor) -> None:
        self.processor, self.error = processor, None
        # A daemon thread, so that pytest can end after a failed test.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.processor.run()
        except Exception as error:
            self.error = error  # type: ignore[assignment]

    def join(self) -> Any:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self.error

    def stop(self) -> None:
        self.processor.stop()
        assert self.join() is None


@pytest.mark.behaviour("T16")
def test_records_are_processed_once_and_a_poisonous_one_goes_to_the_dead_letter_topic(
    ours: str, group: str
) -> None:
    job = Job(ours, group, 20)

    def transform(record: Record) -> Iterator[ProducerRecord]:
        if record.value == b"7":
            raise ValueError("seven")
        yield job.output(record)

    metrics = job.processor(transform, dead_letter_topic=job.dead, max_records=6).run()
    assert job.results() == [number for number in range(20) if number != 7]
    (dead,) = read(ours, job.dead)
    headers = dict(dead.headers)
    assert (dead.value, headers["__oncelog.errors.offset"], headers["__oncelog.errors.message"]) == (
        b"7",
        b"7",
        b"seven",
    )
    assert metrics["records-consumed-total"] == metrics["records-produced-total"] == 20
    assert metrics["records-dead-lettered-total"] == 1 and metrics["transactions-committed-total"] >= 4


@pytest.mark.behaviour("T16")
def test_a_failed_record_without_a_dead_letter_topic_ends_the_loop_and_a_new_loop_continues(
    ours: str, group: str
) -> None:
    job, is_mended = Job(ours, group, 6), False

    def transform(record: Record) -> ProducerRecord:
        if record.value == b"4" and not is_mended:
            raise ValueError("four")
        return job.output(record)

    with pytest.raises(ValueError, match="four"):
        job.processor(transform).run()
    assert 4 not in job.results()
    is_mended = True
    job.processor(transform).run()
    job.check()


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize("kind", ["function", "coroutine", "generator"])
def test_the_asyncio_loop_takes_functions_coroutines_and_generators(ours: str, group: str, kind: str) -> None:
    job = Job(ours, group, 5)

    async def coroutine(record: Record) -> ProducerRecord:
        await asyncio.sleep(0)
        return job.output(record)

    async def generator(record: Record) -> AsyncIterator[ProducerRecord]:
        yield job.output(record)

    transform: Any = {"function": job.output, "coroutine": coroutine, "generator": generator}[kind]

    async def main() -> dict[str, float]:
        processor = aio.Processor(job.source, transform, **job.options())
        job.stop = processor.stop
        return await processor.run()

    assert asyncio.run(main())["records-produced-total"] == 5
    job.check()


@pytest.mark.behaviour("T16")
def test_a_cancelled_asyncio_loop_aborts_and_its_successor_processes_every_record_once(
    ours: str, group: str
) -> None:
    job = Job(ours, group, 6)

    async def transform(record: Record) -> ProducerRecord:
        output = job.output(record)
        if record.value == b"3" and job.seen.count(3) == 1:
            await asyncio.get_running_loop().create_future()
        return output

    async def main() -> None:
        task = asyncio.create_task(
            aio.process(job.source, transform, **job.options(commit_interval_ms=30_000))
        )
        await until(lambda: 3 in job.seen)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        processor = aio.Processor(job.source, transform, **job.options())
        job.stop = processor.stop
        await processor.run()

    asyncio.run(main())
    assert job.seen == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    job.check()


def test_a_second_cancellation_leaves_no_client_open(ours: str, group: str) -> None:
    """R1175: the second cancellation ended the close, and left tasks and connections that nobody could
    close.
    """
    job = Job(ours, group, 3)

    async def main() -> None:
        processor = aio.Processor(job.source, job.output, **job.options())
        clients, closing, gate = processor._loop._io, asyncio.Event(), asyncio.Event()
        assert isinstance(clients, AsyncLoopIO)
        end = clients._close_producer

        async def hold() -> None:
            closing.set()
            await gate.wait()
            await end()

        task = asyncio.create_task(processor.run())
        await until(lambda: 2 in job.seen)
        clients._close_producer = hold  # type: ignore[method-assign]
        task.cancel()
        await closing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await until(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(main())


@pytest.mark.behaviour("T16")
def test_an_interrupted_loop_leaves_no_open_transaction(ours: str, group: str) -> None:
    job = Job(ours, group, 5)

    def interrupt(record: Record) -> ProducerRecord:
        if record.value == b"3":
            raise KeyboardInterrupt
        return job.output(record)

    with pytest.raises(KeyboardInterrupt):
        job.processor(interrupt, commit_interval_ms=30_000).run()
    with Admin({"bootstrap.servers": ours}) as admin:
        assert f"{group}-" not in {row.transactional_id for row in admin.list_transactions("Ongoing")}
    assert job.results() == []
    job.processor().run()
    job.check()


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize("lost", ["request", "response"])
def test_an_unclear_commit_is_committed_again_until_its_outcome_is_known(
    servers: str, group: str, lost: str
) -> None:
    job = Job(servers, group, 4)
    with Proxy(servers) as proxy:
        # The rule cuts only the EndTxn of a commit. On a busy machine, an earlier request may time out and
        # cause an abort, which the rule must not cut.
        settings = {"bootstrap_servers": proxy.bootstrap_servers, "max_block_ms": 1000}
        processor = job.processor(**settings)
        start_patiently(processor)
        job.stop = None
        proxy.add(Rule(action="cut", api="EndTxn", direction=lost, match=_is_commit))
        runner = Runner(processor)
        wait_until(lambda: processor.metrics()["commits-repeated-total"] >= 2)
        assert processor.metrics()["records-consumed-total"] == 0
        proxy.clear()
        wait_until(lambda: processor.metrics()["records-consumed-total"] >= 4)
        runner.stop()
    job.check()


def _is_commit(event: WireEvent) -> bool:
    return event.txn is not None and bool(event.txn.is_commit)


def start_patiently(processor: Processor) -> None:
    """Start the producer with the usual time-out, so that only commits time out."""
    io = processor._io

    async def open_producer() -> None:
        io._producer = Producer(io._plan.producer_settings)
        io._producer.init_transactions(LIMIT_S)

    io.open_producer = open_producer  # type: ignore[method-assign]


@pytest.mark.behaviour("T16")
@BOTH_PROTOCOLS
def test_two_loops_share_a_topic_while_they_come_and_go(servers: str, group: str, protocol: str) -> None:
    job = Job(servers, group, 40, partitions=4)
    job.count = 200
    settings = {"group_protocol": protocol, "group_instance_id": None, "commit_interval_ms": 5}
    first = Runner(job.processor(name="1", **settings))
    wait_until(lambda: len(job.seen) >= 40)
    second = Runner(job.processor(name="2", **settings))
    job.stop = None
    wait_until(lambda: second.processor.metrics()["rebalances-total"] >= 1)
    fill(servers, job.source, 40, 80, 4)
    wait_until(lambda: second.processor.metrics()["records-consumed-total"] >= 1)
    first.stop()
    fill(servers, job.source, 120, 80, 4)
    wait_until(lambda: len(job.results()) >= 200)
    second.stop()
    assert second.error is None
    job.check()


@pytest.mark.behaviour("T16")
def test_the_older_of_two_loops_with_one_transactional_id_stops_with_a_clear_error(
    ours: str, group: str
) -> None:
    job = Job(ours, group, 10)
    held = threading.Event()

    def wait(record: Record) -> ProducerRecord:
        if record.value == b"5":
            held.wait(LIMIT_S)
        return job.output(record)

    old = Runner(job.processor(wait, commit_interval_ms=30_000))
    wait_until(lambda: 4 in job.seen)
    new = Runner(job.processor())
    job.stop = None
    wait_until(lambda: 9 in job.seen)
    held.set()
    error = old.join()
    assert isinstance(error, (ProducerFenced, FencedInstanceId)), error
    assert "another" in str(error)
    new.stop()
    job.check()


@pytest.mark.behaviour("T16")
def test_a_transaction_that_took_too_long_is_processed_again_with_a_new_producer(
    broker: Broker, ours: str, group: str
) -> None:
    """The coordinator aborts the transaction and raises the epoch. That fences the producer, so the loop
    needs a new one.
    """
    job = Job(ours, group, 4)

    def slow(record: Record) -> ProducerRecord:
        if record.value == b"2" and 2 not in job.seen:
            with Admin({"bootstrap.servers": ours}) as admin:
                wait_until(lambda: state_of(admin, f"{group}-") == "Ongoing")
                pass_time(broker, 90_000)
                wait_until(lambda: state_of(admin, f"{group}-") == "CompleteAbort")
        return job.output(record)

    processor = job.processor(slow, commit_interval_ms=30_000, max_records=4)
    # Only the broker's clock moves in this test. A transaction timeout of 0 lets the loop's own clock see the
    # time-out, too.
    processor._loop._plan = dataclasses.replace(processor._loop._plan, transaction_timeout_ms=0)
    job.stop = None
    runner = Runner(processor)
    wait_until(lambda: processor.metrics()["records-consumed-total"] >= 4)
    runner.stop()
    assert processor.metrics()["transactions-aborted-total"] >= 1 and job.seen[:4] == [0, 1, 2, 3]
    job.check()


def state_of(admin: Admin, transactional_id: str) -> str:
    return admin.describe_transactions(transactional_id)[transactional_id].state


@pytest.mark.behaviour("T16")
def test_restore_runs_before_records_are_processed_from_committed_positions(ours: str, group: str) -> None:
    """The transform keeps a count in memory.

    After a failure, `restore` reads the count from the committed output.
    """
    job = Job(ours, group, 8)
    total, events = 0, list[str]()

    def restore(partitions: list[TopicPartition]) -> None:
        nonlocal total
        assert partitions == [TopicPartition(job.source, 0)]
        committed = values(ours, job.target)
        total = int(committed[-1] or b"0") if committed else 0
        events.append(f"restored {total}")

    def add(record: Record) -> Iterator[ProducerRecord]:
        nonlocal total
        total += 1
        yield ProducerRecord(job.target, b"%d" % total)
        if record.value == b"5" and len(events) == 1:
            raise ConnectionError("try again")
        job.output(record)

    job.processor(add, restore=restore, max_records=3, commit_interval_ms=30_000).run()
    assert [int(value or b"") for value in values(ours, job.target)] == list(range(1, 9))
    assert events == ["restored 0", "restored 3"]


def test_the_loop_ends_after_consumer_timeout_ms_without_a_record(ours: str, group: str) -> None:
    job = Job(ours, group, 3)
    metrics = oncelog.process(job.source, job.output, **job.options(consumer_timeout_ms=100))
    assert metrics["records-consumed-total"] == 3
    job.check()


def test_a_loop_runs_once(ours: str, group: str) -> None:
    job = Job(ours, group, 1)
    processor = job.processor()
    processor.run()
    with pytest.raises(MisuseError, match="make a new one"):
        processor.run()


def test_a_wrong_address_is_raised_at_once() -> None:
    with pytest.raises((NotConnectedError, TimedOut)):
        oncelog.process(
            "a", print, group_id="g", transactional_id="t", bootstrap_servers="127.0.0.1:1",
            oncelog_bootstrap_timeout_ms=0, max_block_ms=100,
        )  # fmt: skip
