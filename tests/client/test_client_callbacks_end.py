"""Callbacks that raise do not stop the producer, and futures that threads wait for share no lock."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from typing import Any
from unittest.mock import patch

import pytest
from support.topics import new_topic, producer_of, values
from support.wait import hang, wait_until

from oncelog.aio import Producer as AsyncProducer
from oncelog.client.producer.batch import BatchResult
from oncelog.client.producer.delivery import RecordFuture
from oncelog.types import TopicPartition

WAIT_S = 60


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("how", ["on_delivery", "add_done_callback"])
def test_a_callback_that_would_end_its_thread_does_not_end_the_producer(
    ours: str, error: type[BaseException], how: str
) -> None:
    topic = new_topic(ours)

    def stop(*_: object) -> None:
        raise error("stop")

    with producer_of(ours, linger_ms=100) as producer:
        if how == "on_delivery":
            producer.send(topic, b"first", on_delivery=stop)
        else:
            producer.send(topic, b"first").add_done_callback(stop)
        called: list[object] = []
        producer.send(topic, b"second", on_delivery=lambda *_: called.append("second"))
        producer.flush(WAIT_S)
        assert called == ["second"]
        producer.send(topic, b"third").result(WAIT_S)
    assert values(ours, topic) == [b"first", b"second", b"third"]


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_such_a_callback_does_not_end_an_asyncio_producer(ours: str, error: type[BaseException]) -> None:
    topic = new_topic(ours)

    def stop(*_: object) -> None:
        raise error("stop")

    async def work() -> None:
        async with AsyncProducer({"bootstrap.servers": ours}) as producer:
            await producer.send(topic, b"first", on_delivery=stop)
            await asyncio.wait_for(producer.flush(), WAIT_S)
            await asyncio.wait_for(await producer.send(topic, b"second"), WAIT_S)

    asyncio.run(work())
    assert values(ours, topic) == [b"first", b"second"]


def test_an_interrupt_during_a_callback_reaches_an_asyncio_program_after_the_others(ours: str) -> None:
    topic = new_topic(ours)
    called: list[object] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    async def work() -> None:
        producer = AsyncProducer({"bootstrap.servers": ours}, linger_ms=100)
        await producer.send(topic, b"first", on_delivery=interrupt)
        await producer.send(topic, b"second", on_delivery=lambda *_: called.append("second"))
        await producer.flush()
        await hang()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert called == ["second"]


def test_a_thread_suspended_while_it_makes_a_future_blocks_no_other() -> None:
    """A fork copies locks. If making a future held a lock, that lock would stay locked in the child, where no
    future could be awaited.
    """
    result, other = BatchResult(TopicPartition("t", 0)), BatchResult(TopicPartition("t", 0))
    other.complete(7, None, None)
    amid, go_on = threading.Event(), threading.Event()
    real = concurrent.futures.Future.__init__

    def slow(self: Any) -> None:
        if threading.current_thread() is thread:
            amid.set()
            go_on.wait(WAIT_S)
        real(self)

    def wait_for(which: BatchResult) -> None:
        concurrent.futures.wait([RecordFuture(which, 0)], WAIT_S)

    thread = threading.Thread(target=wait_for, args=(result,), daemon=True)
    second = threading.Thread(target=wait_for, args=(other,), daemon=True)
    with patch.object(concurrent.futures.Future, "__init__", slow):
        thread.start()
        assert amid.wait(WAIT_S)
        second.start()
        second.join(WAIT_S)
        is_held_up = second.is_alive()
        result.complete(5, None, None)
        assert not list(result.notify())
        go_on.set()
        thread.join(WAIT_S)
    assert not is_held_up and not thread.is_alive()


@pytest.mark.parametrize("part_count", range(1, 6))
def test_a_half_initialized_future_loses_no_waiter(part_count: int) -> None:
    """One thread is suspended while some attributes of the future are made, and another thread waits for the
    future (R330).
    """
    first, last = BatchResult(TopicPartition("t", 0)), BatchResult(TopicPartition("t", 0))
    future, pending = RecordFuture(first, 0), RecordFuture(last, 0)
    amid, go_on = threading.Event(), threading.Event()
    parts = vars(concurrent.futures.Future()).keys()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_name != "_make_state":
            return None
        if event == "line" and len(parts & future.__dict__.keys()) == part_count and not amid.is_set():
            amid.set()
            go_on.wait(WAIT_S)
        return trace

    def make() -> None:
        sys.settrace(trace)
        concurrent.futures.wait([future], 0)

    def wait() -> None:
        unfinished.extend(concurrent.futures.wait([future, pending], WAIT_S).not_done)

    unfinished: list[Any] = []
    maker, waiter = threading.Thread(target=make), threading.Thread(target=wait)
    maker.start()
    assert amid.wait(WAIT_S)
    first.complete(5, None, None)  # completes the outcome before notify(), so no listener has been called yet
    waiter.start()
    wait_until(lambda: pending.__dict__.get("_waiters"))
    last.complete(6, None, None)
    assert not list(last.notify())
    waiter.join()
    go_on.set()
    maker.join()
    assert unfinished == []


def test_a_future_is_completed_even_if_a_thread_was_interrupted_while_making_it() -> None:
    """A signal handler raises while the thread makes the future's attributes."""

    class Interrupted(RecordFuture):
        def _make_state(self) -> None:
            if not self.__dict__.get("was_here"):
                self.__dict__["was_here"] = True
                raise KeyboardInterrupt
            super()._make_state()

    result = BatchResult(TopicPartition("t", 0))
    future = Interrupted(result, 0)
    with pytest.raises(KeyboardInterrupt):
        concurrent.futures.wait([future], 0)
    result.complete(9, None, None)
    assert list(result.notify()) == []
    done, _ = concurrent.futures.wait([future], WAIT_S)
    assert done == {future} and future.result(0).offset == 9


def test_listening_to_a_settled_outcome_calls_no_other_listener() -> None:
    """Regression: adding a listener to a settled outcome removed another thread's listener to call it. An
    interrupt in between left that thread waiting.
    """
    result = BatchResult(TopicPartition("t", 0))
    called: list[str] = []
    result.add_listener(lambda: called.append("another thread"))
    result.complete(0, None, None)
    result.add_listener(lambda: called.append("this thread"))
    assert called == ["this thread"]
    assert not list(result.notify())
    assert called == ["this thread", "another thread"]
