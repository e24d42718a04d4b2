"""A thread or task calls the consumer while another one is inside a call: both get MisuseError."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from support.topics import new_topic
from support.wait import attempts, hang, wait_until

from oncelog import Consumer, Producer, TopicPartition
from oncelog.aio import Consumer as AsyncConsumer
from oncelog.aio import Producer as AsyncProducer
from oncelog.errors import MisuseError
from oncelog.runtime.loop_thread import LoopThread, result_of

T0 = TopicPartition("two-threads", 0)


def consumer_of(servers: str, kind: str) -> Consumer:
    settings: dict[str, object] = {"bootstrap.servers": servers}
    if kind == "assign":
        consumer = Consumer(settings)
        consumer.assign(T0)
    else:
        consumer = Consumer(settings, group_id=f"two-threads-{kind}", group_protocol=kind)
        consumer.subscribe(T0.topic)
    return consumer


class Polling:
    """A thread that polls once. `raised` is the error of its poll."""

    def __init__(self, consumer: Consumer) -> None:
        self.raised: BaseException | None = None
        self.thread = threading.Thread(target=self._poll, args=(consumer,), daemon=True)
        self.thread.start()
        wait_until(lambda: consumer._async._step_task is not None or not self.thread.is_alive())

    def _poll(self, consumer: Consumer) -> None:
        try:
            consumer.poll(600)
        except BaseException as raised:
            self.raised = raised

    def ended(self) -> BaseException | None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.raised


@pytest.mark.parametrize("kind", ["assign", "classic", "consumer"])
@pytest.mark.parametrize("end", [Consumer.close, Consumer.unsubscribe], ids=["close", "unsubscribe"])
def test_a_poll_is_told_that_another_thread_closed_the_consumer(
    ours: str, kind: str, end: Callable[[Consumer], None]
) -> None:
    consumer = consumer_of(ours, kind)
    polling = Polling(consumer)
    end(consumer)
    raised = polling.ended()
    assert isinstance(raised, MisuseError)
    assert "while it was polled" in str(raised)
    consumer.close()


@pytest.mark.parametrize("kind", ["assign", "classic", "consumer"])
def test_a_second_thread_that_polls_is_refused(ours: str, kind: str) -> None:
    with consumer_of(ours, kind) as consumer:
        polling = Polling(consumer)
        with pytest.raises(MisuseError, match="another thread or task"):
            consumer.poll(600)
        assert polling.thread.is_alive()
    assert isinstance(polling.ended(), MisuseError)


@pytest.mark.parametrize("kind", ["classic", "consumer"])
def test_a_second_thread_is_refused_while_a_callback_of_the_first_runs(ours: str, kind: str) -> None:
    """Regression: the second thread's poll called the callback again, or replaced the first thread's poll."""
    topic = f"two-threads-callback-{kind}"
    entered, release, calls = threading.Event(), threading.Event(), list[object]()

    def on_assigned(share: object) -> None:
        calls.append(share)
        entered.set()
        if threading.current_thread() is not threading.main_thread():
            assert release.wait(60)

    settings: dict[str, object] = {
        "bootstrap.servers": ours,
        "group.protocol": kind,
        "auto.offset.reset": "earliest",
    }
    with Consumer(settings, group_id=f"callback-{kind}") as consumer:
        consumer.subscribe(topic, on_assigned=on_assigned)
        polling = threading.Thread(target=consumer.poll, args=(60,))
        polling.start()
        assert entered.wait(60)
        try:
            with pytest.raises(MisuseError, match="another thread or task"):
                consumer.poll(0.1)
        finally:
            release.set()
        assert len(calls) == 1
        with Producer(bootstrap_servers=ours) as producer:
            producer.send(topic, b"v").result(60)
        polling.join(60)
        assert not polling.is_alive()


def test_a_second_task_is_refused_while_a_callback_of_the_first_runs(ours: str) -> None:
    """Regression: the second task's poll called the callback again."""

    async def run() -> None:
        entered, release, calls = asyncio.Event(), asyncio.Event(), list[object]()

        async def on_assigned(share: object) -> None:
            calls.append(share)
            entered.set()
            async with asyncio.timeout(60):
                await release.wait()

        settings = {"bootstrap.servers": ours, "group.id": "two-tasks-callback"}
        async with AsyncConsumer(settings) as consumer:
            consumer.subscribe("two-tasks-callback", on_assigned=on_assigned)
            polling = asyncio.create_task(consumer.poll(0))
            while not entered.is_set():
                if polling.done():
                    polling.result()
                    polling = asyncio.create_task(consumer.poll(0.1))
                await asyncio.sleep(0)
            with pytest.raises(MisuseError, match="another thread or task"):
                await consumer.poll(0.1)
            release.set()
            await polling
            assert len(calls) == 1
            await consumer.poll(0)

    asyncio.run(run())


def test_a_task_that_outlived_a_cancellation_polls_like_any_other() -> None:
    """Regression: while a task that had survived a cancellation polled, a second task's poll spun without a
    pause. A close also cancelled the first task again.
    """

    async def story() -> None:
        silent = await asyncio.start_server(hang, "127.0.0.1", 0)
        host, port = silent.sockets[0].getsockname()
        consumer, is_asleep = AsyncConsumer(bootstrap_servers=f"{host}:{port}"), asyncio.Event()
        consumer.assign(T0)

        async def outlive() -> object:
            with suppress(asyncio.CancelledError):
                is_asleep.set()
                await asyncio.Event().wait()
            return await consumer.poll(600)

        polling = asyncio.create_task(outlive())
        await is_asleep.wait()
        polling.cancel()
        while consumer._connecting is None:
            await asyncio.sleep(0)
        with pytest.raises(MisuseError, match="another thread or task"):
            await consumer.poll(0)
        await consumer.close()
        with pytest.raises(MisuseError, match="closed"):
            await polling
        silent.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_task_that_polls_is_told_that_another_closed_the_consumer(ours: str) -> None:
    async def story() -> None:
        consumer = AsyncConsumer(bootstrap_servers=ours)
        consumer.assign(T0)
        polling = asyncio.create_task(consumer.poll(600))
        while consumer._step_task is None:
            await asyncio.sleep(0)
        await consumer.close()
        with pytest.raises(MisuseError, match="while it was polled"):
            await polling
        assert not polling.cancelling()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_call_is_told_that_the_thread_was_stopped_meanwhile() -> None:
    thread, begun = LoopThread(), threading.Event()
    raised: list[BaseException] = []

    async def wait() -> None:
        begun.set()
        await hang()

    def call() -> None:
        try:
            thread.run(wait())
        except BaseException as error:
            raised.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert begun.wait(60)
    thread.stop()
    caller.join(60)
    assert [type(error) for error in raised] == [MisuseError]


@pytest.mark.parametrize("act", ["run", "call_soon"])
def test_a_call_that_comes_after_the_loop_has_ended_is_refused(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = LoopThread()
    thread.stop()
    # As if the calling thread had read the flag before the stop.
    monkeypatch.setattr(thread, "_stopped", False)
    with pytest.raises(MisuseError):
        thread.run(asyncio.sleep(0)) if act == "run" else thread.call_soon(print)


def test_a_call_that_an_ending_loop_never_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is submitted after the loop's last turn and before the loop is closed."""
    thread = LoopThread()
    thread.stop()
    monkeypatch.setattr(thread, "_stopped", False)
    monkeypatch.setattr(thread, "_loop", _SilentLoop())
    coroutine: Any = asyncio.sleep(0)
    with pytest.raises(MisuseError, match="closed"):
        thread.run(coroutine)
    coroutine.close()


class _SilentLoop:
    """An event loop that accepts calls although it has ended."""

    def call_soon_threadsafe(self, *_: object) -> None:
        pass


def test_a_time_out_may_be_infinite(ours: str) -> None:
    endless = float("inf")
    with Producer(bootstrap_servers=ours, linger_ms=600_000) as producer:
        sent = producer.send(T0.topic, b"x")
        producer.flush(endless)
        assert sent.result(endless).topic == T0.topic
        last = producer.send(T0.topic, b"z")
        producer.close(endless)
        assert last.exception(endless) is None


@pytest.mark.parametrize("is_polled", [True, False])
def test_a_task_that_waits_for_a_connection_is_told_that_another_closed_the_consumer(is_polled: bool) -> None:
    """The waiting task gets MisuseError. CancelledError would mean that the task was cancelled, and `except
    Exception` does not catch it.
    """

    async def story() -> None:
        silent = await asyncio.start_server(hang, "127.0.0.1", 0)
        host, port = silent.sockets[0].getsockname()
        consumer = AsyncConsumer(bootstrap_servers=f"{host}:{port}")
        consumer.assign(T0)
        call = asyncio.create_task(consumer.poll(600) if is_polled else consumer.position(T0))
        while consumer._connecting is None:
            await asyncio.sleep(0)
        await consumer.close()
        with pytest.raises(MisuseError, match="closed"):
            await call
        silent.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_range_that_is_read_is_told_that_the_thread_was_stopped() -> None:
    thread = LoopThread()
    submitted = thread.submit(hang())
    threading.Thread(target=thread.stop, daemon=True).start()
    with pytest.raises(MisuseError, match="closed by another thread"):
        result_of(submitted)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_callback_that_polls_is_refused(ours: str, group: str, protocol: str) -> None:
    """Regression: its poll called the callback again, until the recursion limit."""
    topic, raised = new_topic(ours), list[str]()
    settings = {"bootstrap.servers": ours, "group.id": group, "group.protocol": protocol}

    with Consumer(settings) as consumer:

        def assigned(partitions: list[TopicPartition]) -> None:
            with pytest.raises(MisuseError) as error:
                consumer.poll(0)
            raised.append(str(error.value))

        consumer.subscribe(topic, on_assigned=assigned)
        for _ in attempts():
            consumer.poll(0.1)
            if raised:
                break
    assert len(raised) == 1
    assert "callback" in raised[0]


def test_close_waits_for_the_running_callback_of_another_thread(ours: str, group: str) -> None:
    """Otherwise `on_assigned` could end after `on_revoked`, and partitions would seem to stay assigned."""
    topic, calls, is_running = new_topic(ours), list[str](), threading.Event()

    def assigned(partitions: list[TopicPartition]) -> None:
        is_running.set()
        threading.Event().wait(0.5)
        calls.append("assigned")

    consumer = Consumer({"bootstrap.servers": ours, "group.id": group})
    consumer.subscribe(topic, on_assigned=assigned, on_revoked=lambda _: calls.append("revoked"))
    polling = Polling(consumer)
    assert is_running.wait(20)
    consumer.close()
    polling.thread.join(20)
    assert calls == ["assigned", "revoked"]
    assert isinstance(polling.raised, MisuseError)


@pytest.mark.parametrize(
    "end", [AsyncConsumer.close, AsyncConsumer.unsubscribe], ids=["close", "unsubscribe"]
)
def test_close_waits_for_the_callback_that_another_task_awaits(
    ours: str, group: str, end: Callable[[AsyncConsumer], Coroutine[Any, Any, None]]
) -> None:
    """Regression: `on_revoked` ran before the end of `on_assigned`."""

    async def run() -> tuple[list[str], BaseException | None]:
        topic, calls, is_running = new_topic(ours), list[str](), asyncio.Event()

        async def assigned(partitions: list[TopicPartition]) -> None:
            is_running.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asyncio.Event().wait()
            calls.append("assigned")

        async with AsyncConsumer({"bootstrap.servers": ours, "group.id": group}) as consumer:
            consumer.subscribe(topic, on_assigned=assigned, on_revoked=lambda _: calls.append("revoked"))
            polling = asyncio.create_task(consumer.poll(60))
            async with asyncio.timeout(60):
                await is_running.wait()
            await end(consumer)
            await asyncio.wait([polling], timeout=20)
            return calls, polling.exception()

    calls, raised = asyncio.run(run())
    assert calls == ["assigned", "revoked"]
    assert isinstance(raised, MisuseError)


def test_a_callback_of_an_asyncio_consumer_can_close_it_at_once(ours: str, group: str) -> None:
    async def run() -> None:
        async def assigned(partitions: list[TopicPartition]) -> None:
            async with asyncio.timeout(4):  # a close waits 5 s for the callback of another task
                await consumer.close()

        consumer = AsyncConsumer({"bootstrap.servers": ours, "group.id": group})
        consumer.subscribe(new_topic(ours), on_assigned=assigned)
        with pytest.raises(MisuseError):
            await consumer.poll(60)

    asyncio.run(run())


@pytest.mark.parametrize("end", [Consumer.close, Consumer.unsubscribe], ids=["close", "unsubscribe"])
def test_nothing_is_delivered_once_close_has_begun(
    ours: str, group: str, end: Callable[[Consumer], None]
) -> None:
    """R1404: a thread that continued to poll got records that the last commit excluded. They came again."""
    topic, late, refused = new_topic(ours), list[object](), list[MisuseError]()
    with Producer({"bootstrap.servers": ours}) as producer:
        producer.send_many(topic, [b"1", b"2", b"3"]).result(30)
    settings = {"bootstrap.servers": ours, "group.id": group, "auto.offset.reset": "earliest"}
    consumer = Consumer(settings)
    records = iter(consumer)

    def revoked(_: list[TopicPartition]) -> None:
        """Read as another thread does that has not noticed the end."""
        for read in (lambda: next(records, None), lambda: consumer.poll(30), lambda: consumer.poll_arrow(30)):
            try:
                late.append(read())
            except MisuseError as error:
                refused.append(error)

    consumer.subscribe(topic, on_revoked=revoked)
    assert next(records).value == b"1"
    end(consumer)
    assert late == []
    assert len(refused) == 3
    with Consumer(settings) as successor:
        successor.subscribe(topic)
        assert [next(iter(successor)).value for _ in range(3)] == [b"1", b"2", b"3"]
    if end is Consumer.unsubscribe:
        consumer.subscribe(topic)
        consumer.poll(0)
        consumer.close()


def test_no_task_gets_records_once_close_has_begun(ours: str, group: str) -> None:
    async def run() -> None:
        topic, refused = new_topic(ours), list[MisuseError]()
        async with AsyncProducer({"bootstrap.servers": ours}) as producer:
            await (await producer.send_many(topic, [b"1", b"2"])).result()

        async def revoked(_: list[TopicPartition]) -> None:
            for read in (anext(records), consumer.poll(30)):
                try:
                    pytest.fail(f"got {await read}")
                except MisuseError as error:
                    refused.append(error)

        settings = {"bootstrap.servers": ours, "group.id": group, "auto.offset.reset": "earliest"}
        consumer = AsyncConsumer(settings)
        consumer.subscribe(topic, on_revoked=revoked)
        records = aiter(consumer)
        assert (await anext(records)).value == b"1"
        await consumer.close()
        assert len(refused) == 2

    asyncio.run(run())
