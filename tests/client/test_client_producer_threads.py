"""One blocking producer with many threads and topics: its state is never touched without its lock."""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import sys
import threading
from collections.abc import Iterator, Mapping

import pytest
from support.topics import new_topic, producer_of, values
from support.wait import wait_until

from oncelog import Admin, NewTopic
from oncelog.aio import Producer as AsyncProducer
from oncelog.errors import MisuseError
from oncelog.testing.proxy import Proxy, Rule
from oncelog.types import RecordMetadata

THREADS = 4
TOPICS = 60
WAIT_S = 60


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return {"offsets.topic.num.partitions": 4}


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    """Let the interpreter switch threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_in_threads(bodies: list[threading.Thread]) -> None:
    for body in bodies:
        body.start()
    for body in bodies:
        # Wait in slices of a second. If the machine was suspended and its clock jumps, only one slice is
        # lost.
        for _ in range(WAIT_S):
            body.join(1)
            if not body.is_alive():
                break
        # Print every thread's stack. It shows if a thread missed its wake-up, or if a record was never
        # completed.
        else:
            faulthandler.dump_traceback(sys.__stderr__)
        assert not body.is_alive()


@pytest.mark.behaviour("I1", "I2")
@pytest.mark.usefixtures("impatient_threads")
def test_threads_that_meet_new_topics_together_lose_nothing(ours: str) -> None:
    """All threads send the first record to each topic at the same time; one more thread keeps the producer
    busy.
    """
    names = [f"met-{number}" for number in range(TOPICS)]
    busy_topic = new_topic(ours, 8)
    with Admin({"bootstrap.servers": ours}) as admin:
        admin.create_topics([NewTopic(name, 5) for name in names])
    futures: list[concurrent.futures.Future[RecordMetadata]] = []
    barrier, done = threading.Barrier(THREADS), threading.Event()
    with producer_of(ours, delivery_timeout_ms=30_000, request_timeout_ms=20_000) as producer:

        def meet() -> None:
            for name in names:
                barrier.wait(WAIT_S)
                futures.extend(producer.send(name, b"v", partition=part) for part in range(3))

        def keep_busy() -> None:
            count = 0
            while not done.is_set():
                futures.append(producer.send(busy_topic, b"b", partition=count % 8))
                count += 1
                if count % 50 == 0:
                    futures[-1].result(WAIT_S)

        busy = threading.Thread(target=keep_busy)
        busy.start()
        try:
            run_in_threads([threading.Thread(target=meet) for _ in range(THREADS)])
        finally:
            done.set()
            busy.join(WAIT_S)
        producer.flush(WAIT_S)
        assert all(future.done() for future in futures)
        stored = [future.result(WAIT_S) for future in futures]
    assert len(set(stored)) == len(stored) >= TOPICS * THREADS * 3
    assert producer.metrics()["buffer-available-bytes"] == producer.metrics()["buffer-total-bytes"]


@pytest.mark.usefixtures("impatient_threads")
def test_two_threads_that_wait_for_one_future_both_return(ours: str) -> None:
    topic = new_topic(ours)
    with producer_of(ours, linger_ms=3) as producer:
        for _ in range(300):
            future = producer.send(topic, b"x")
            barrier = threading.Barrier(2)
            left: list[object] = []

            def wait(
                future: concurrent.futures.Future[RecordMetadata] = future,
                barrier: threading.Barrier = barrier,
                left: list[object] = left,
            ) -> None:
                barrier.wait()
                try:
                    left.append(concurrent.futures.wait([future]).not_done)
                except Exception as error:
                    left.append(error)

            run_in_threads([threading.Thread(target=wait, daemon=True) for _ in range(2)])
            assert left == [set(), set()]


def test_flush_returns_after_the_callbacks(ours: str) -> None:
    topic = new_topic(ours)
    errors: list[Exception | None] = []
    flushed = threading.Event()

    def slow(_: RecordMetadata | None, error: Exception | None) -> None:
        flushed.wait(0.3)  # times out, because flush() waits for this callback
        errors.append(error)

    with producer_of(ours) as producer:
        producer.send(topic, b"x", on_delivery=slow)
        producer.flush(WAIT_S)
        errors_after_flush = list(errors)
        flushed.set()
    assert errors_after_flush == [None]


def test_flush_waits_only_for_what_was_sent_before_it(ours: str) -> None:
    """A record that is sent after flush() was called lingers for ten minutes. The flush must return without
    it.
    """
    early, late = new_topic(ours), new_topic(ours)
    patience = {"linger_ms": 600_000, "delivery_timeout_ms": 700_000}
    with Proxy(ours) as proxy, producer_of(proxy.bootstrap_servers, **patience) as producer:
        for topic in (early, late):
            producer.send(topic, b"x")
        producer.flush(WAIT_S)
        proxy.add(Rule(action="hold", api="Produce", direction="response"))
        first = producer.send(early, b"x")
        flusher = threading.Thread(target=producer.flush)
        flusher.start()
        wait_until(lambda: any(event.fate == "held" for event in proxy.events))
        second = producer.send(late, b"x")
        proxy.clear()
        proxy.release()
        flusher.join(WAIT_S)
        assert not flusher.is_alive()
        assert first.done() and not second.done()
    assert second.done()


def test_an_asyncio_flush_ends_while_other_tasks_go_on_sending(ours: str) -> None:
    topic = new_topic(ours)

    async def run() -> None:
        async with AsyncProducer({"bootstrap.servers": ours, "linger.ms": 20}) as producer:

            async def go_on() -> None:
                while True:
                    await producer.send(topic, b"x")
                    await asyncio.sleep(0)

            tasks = [asyncio.create_task(go_on()) for _ in range(4)]
            outcome = await producer.send(topic, b"mine")
            async with asyncio.timeout(WAIT_S):
                await producer.flush()
            assert outcome.done()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_close_refuses_records_of_other_threads_and_waits_for_those_taken(ours: str) -> None:
    topic = new_topic(ours)
    producer = producer_of(ours, linger_ms=20)
    taken: list[concurrent.futures.Future[RecordMetadata]] = []
    sent = threading.Event()

    def go_on() -> None:
        with pytest.raises(MisuseError, match="closed"):
            send_on()

    def send_on() -> None:
        while True:
            taken.append(producer.send(topic, b"x"))
            sent.set()

    threads = [threading.Thread(target=go_on) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    assert sent.wait(WAIT_S)
    producer.close(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert all(future.done() and future.exception() is None for future in taken)
    assert len(values(ours, topic)) == len(taken)


def test_futures_are_done_when_an_asyncio_flush_returns(ours: str) -> None:
    """Regression: a flush that found all records complete returned before the futures were set."""
    topic = new_topic(ours, 1)
    seen: list[bool] = []

    async def produce() -> None:
        async with AsyncProducer({"bootstrap.servers": ours, "linger.ms": 0}) as producer:

            def flush_at_once(*_: object) -> None:
                asyncio.get_running_loop().call_soon(begin)

            def begin() -> None:
                flushing = producer.flush()
                try:
                    flushing.send(None)
                except StopIteration:
                    seen.append(future.done())
                finally:
                    flushing.close()

            future = await producer.send(topic, b"v", partition=0, on_delivery=flush_at_once)
            await future
            assert all(seen)

    asyncio.run(produce())
