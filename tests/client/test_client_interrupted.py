"""Polls that are interrupted, cancelled or abandoned lose no record, and leave no task behind."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.client import scripted_broker
from support.groups.members import Reader, fill, member, take, wait_for
from support.topics import new_topic

from oncelog import Consumer, TopicPartition
from oncelog.aio import Consumer as AsyncConsumer

SCRIPT = Path(__file__).parents[1] / "support" / "interrupted_program.py"


class Alarm(Exception):
    """The error that a signal handler raises."""


@contextmanager
def interrupts(error: type[BaseException], after_seconds: float) -> Iterator[None]:
    """Raise the error once from a signal handler, after `after_seconds`. Fail if the block ends without
    it.
    """

    def handler(*_: object) -> None:
        raise error

    number, timer = signal.SIGALRM, signal.ITIMER_REAL
    before = signal.signal(number, handler)
    signal.setitimer(timer, after_seconds)
    try:
        yield
    except error:
        pass
    else:
        pytest.fail("nothing was interrupted")
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


@pytest.mark.parametrize("how", ["poll", "iterate", "arrow"])
@pytest.mark.parametrize("protocol", ["assign", "classic", "consumer"])
def test_a_signal_at_any_moment_loses_no_record(ours: str, group: str, how: str, protocol: str) -> None:
    topic, count = new_topic(ours, 2), 4000
    fill(ours, topic, 0, count, 2)
    ran = subprocess.run(
        [sys.executable, SCRIPT, ours, topic, group, "2", str(count), how, protocol],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["given"] == {"0": [*range(count // 2)], "1": [*range(count // 2)]}
    assert result["interrupts"] > 0, "the test is about these; how many there are depends on the machine"
    if protocol != "assign":
        # With `iterate`, the last record counts as processed only when the loop asks for the next one. The
        # last interrupt may come before that.
        min_count = count - 1 if how == "iterate" else count
        assert sum(result["committed"]) in (min_count, count)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Alarm, SystemExit])
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_an_interrupted_poll_takes_nothing_and_rebalances_go_on(
    servers: str, group: str, protocol: str, error: type[BaseException]
) -> None:
    topic = new_topic(servers, 2)
    tps = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
    fill(servers, topic, 0, 2, 2)
    with member(servers, group, group_protocol=protocol, enable_auto_commit=False) as consumer:
        events: list[str] = []
        consumer.subscribe(
            [topic],
            on_assigned=lambda share: events.append(f"assigned {len(share)}"),
            on_revoked=lambda share: events.append(f"revoked {len(share)}"),
        )
        assert sorted(take(consumer, 2)) == [0, 1]
        with interrupts(error, 0.2):
            consumer.poll(60)
        fill(servers, topic, 2, 6, 2)
        wait_for(lambda: consumer.end_offsets(tps) == dict.fromkeys(tps, 4))
        assert {tp: consumer.position(tp) for tp in tps} == dict.fromkeys(tps, 1)
        assert sorted(take(consumer, 6)) == [2, 3, 4, 5, 6, 7]
        events.clear()
        other = Reader(member(servers, group, group_protocol=protocol, enable_auto_commit=False), topic)

        def shared() -> bool:
            consumer.poll(0.05)
            return len(consumer.assignment()) == 1 and ("assigned", 1) in other.events

        wait_for(shared)
        other.stop()
        assert any(event.startswith("revoked") for event in events)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_callback_that_is_interrupted_is_called_again(ours: str, group: str, protocol: str) -> None:
    topic = new_topic(ours, 2)
    fill(ours, topic, 0, 4, 2)
    calls: list[int] = []

    def on_assigned(share: list[TopicPartition]) -> None:
        calls.append(len(share))
        if len(calls) == 1:
            raise KeyboardInterrupt

    with member(ours, group, group_protocol=protocol) as consumer:
        consumer.subscribe([topic], on_assigned=on_assigned)
        with pytest.raises(KeyboardInterrupt):
            take(consumer, 1)
        assert sorted(take(consumer, 4)) == [0, 1, 2, 3]
        assert calls == [2, 2]


def test_a_callback_that_raises_is_called_once_and_poll_raises_it(ours: str, group: str) -> None:
    topic = new_topic(ours, 2)
    fill(ours, topic, 0, 4, 2)
    calls: list[int] = []

    def on_assigned(share: list[TopicPartition]) -> None:
        calls.append(len(share))
        raise Alarm

    with member(ours, group) as consumer:
        consumer.subscribe([topic], on_assigned=on_assigned)
        with pytest.raises(Alarm):
            take(consumer, 1)
        assert sorted(take(consumer, 4)) == [0, 1, 2, 3]
        assert calls == [2]


@pytest.mark.parametrize("protocol", ["assign", "classic", "consumer"])
def test_a_poll_cancelled_at_any_await_loses_nothing(ours: str, group: str, protocol: str) -> None:
    topic = new_topic(ours, 2)
    tps = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
    events: list[str] = []

    def told(name: str) -> Callable[[list[TopicPartition]], Any]:
        async def tell(share: list[TopicPartition]) -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            events.append(name)

        return tell

    async def run() -> None:
        config: dict[str, object] = {
            "bootstrap.servers": ours, "group.id": group, "auto.offset.reset": "earliest",
            "max.poll.records": 3, "auto.commit.interval.ms": 1,
        }  # fmt: skip
        if protocol != "assign":
            config["group.protocol"] = protocol
        delivered: dict[int, list[int]] = {0: [], 1: []}
        async with AsyncConsumer(config) as consumer:
            if protocol == "assign":
                consumer.assign(tps)
            else:
                consumer.subscribe(
                    [topic], on_assigned=told("assigned"), on_revoked=told("revoked"), on_lost=told("lost")
                )
            step = attempts = 0
            async with asyncio.timeout(200):
                while sum(map(len, delivered.values())) < 400:
                    attempts += 1
                    polling = asyncio.ensure_future(consumer.poll(0.5))
                    for _ in range(step):
                        await asyncio.sleep(0)
                    polling.cancel()
                    step = step + 1 if step < 60 else 0
                    (rows,) = await asyncio.gather(polling, return_exceptions=True)
                    if isinstance(rows, list):
                        for row in rows:
                            delivered[row.partition].append(row.offset)
                    else:
                        assert isinstance(rows, asyncio.CancelledError)
            assert delivered == {0: [*range(200)], 1: [*range(200)]}
            assert attempts > 100
            if protocol != "assign":
                assert events == ["assigned"]

    fill(ours, topic, 0, 400, 2)
    asyncio.run(run())


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_cancelled_callback_is_called_again(ours: str, group: str, protocol: str) -> None:
    topic = new_topic(ours)
    fill(ours, topic, 0, 1, 1)

    async def run() -> None:
        entered, calls = asyncio.Event(), list[str]()

        async def on_assigned(share: list[TopicPartition]) -> None:
            calls.append("began")
            entered.set()
            if len(calls) == 1:
                await asyncio.Event().wait()
            calls.append("ended")

        config = {"bootstrap.servers": ours, "group.id": group, "auto.offset.reset": "earliest"}
        async with AsyncConsumer(config, group_protocol=protocol) as consumer, asyncio.timeout(60):
            consumer.subscribe([topic], on_assigned=on_assigned)
            polling = asyncio.ensure_future(consumer.poll(60))
            await entered.wait()
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            assert [row.offset for row in await consumer.poll(60)] == [0]
            assert calls == ["began", "began", "ended"]

    asyncio.run(run())


def test_a_broken_off_loop_skips_nothing_and_commits_what_it_processed(servers: str, group: str) -> None:
    topic = new_topic(servers)
    tp = TopicPartition(topic, 0)
    fill(servers, topic, 0, 10, 1)
    with member(servers, group) as consumer:
        consumer.subscribe([topic])
        for record in consumer:
            assert record.offset == 0
            break
        assert consumer.position(tp) == 1
        consumer.commit()
        assert [position and position.offset for position in consumer.committed([tp]).values()] == [1]
        (second,) = consumer.poll(10, max_records=1)
        assert second.offset == 1
        with suppress(Alarm):
            for record in consumer:
                if record.offset == 4:
                    raise Alarm
    with member(servers, group) as consumer:
        assert [position and position.offset for position in consumer.committed([tp]).values()] == [4]
        consumer.subscribe([topic])
        assert [record.offset for record in islice(consumer, 6)] == [4, 5, 6, 7, 8, 9]


def test_a_broken_off_async_loop_skips_nothing_and_commits_what_it_processed(
    servers: str, group: str
) -> None:
    topic = new_topic(servers)
    tp = TopicPartition(topic, 0)
    fill(servers, topic, 0, 10, 1)
    config = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"}

    async def run() -> None:
        async with AsyncConsumer(config) as consumer:
            consumer.subscribe([topic])
            async for record in consumer:
                if record.offset == 3:
                    break
            assert await consumer.position(tp) == 4
        async with AsyncConsumer(config) as consumer:
            assert [
                position and position.offset for position in (await consumer.committed([tp])).values()
            ] == [3]
            consumer.subscribe([topic])
            offsets = []
            async for record in consumer:
                offsets.append(record.offset)
                if len(offsets) == 7:
                    break
            assert offsets == [3, 4, 5, 6, 7, 8, 9]

    asyncio.run(run())


def test_changes_within_a_loop_hold_from_the_next_record_on(ours: str) -> None:
    topic = new_topic(ours, 2)
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
    fill(ours, topic, 0, 12, 2)
    with Consumer({"bootstrap.servers": ours, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([zero, one])
        seen: list[tuple[int, int]] = []
        for record in consumer:
            seen.append((record.partition, record.offset))
            if len(seen) == 1:
                consumer.pause(zero if record.partition == 0 else one)
            elif len(seen) == 3:
                consumer.seek(TopicPartition(topic, record.partition), 5)
            elif len(seen) == 4:
                break
        first, other = seen[0][0], 1 - seen[0][0]
        assert seen == [(first, 0), (other, 0), (other, 1), (other, 5)]
        consumer.resume(*consumer.paused())
        rest = [record.offset for record in consumer.poll(10)]
        assert rest[:5] == [1, 2, 3, 4, 5]


def test_positions_are_looked_up_while_paused(servers: str) -> None:
    topic = new_topic(servers)
    tp = TopicPartition(topic, 0)
    fill(servers, topic, 0, 5, 1)
    with Consumer({"bootstrap.servers": servers}) as consumer:
        consumer.assign([tp])
        consumer.pause(tp)
        consumer.seek_to_end(tp)
        assert consumer.position(tp) == 5
        consumer.seek_to_beginning(tp)
        assert consumer.position(tp) == 0


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_poll_returns_in_time_while_the_coordinator_does_not_answer(protocol: str) -> None:
    """Each request to the coordinator would take ten minutes. The test fails if it takes five."""

    async def run() -> None:
        async with scripted_broker() as broker:
            broker.topics = {"t": 1}
            for api in ("FindCoordinator", "JoinGroup", "ConsumerGroupHeartbeat"):
                broker.handlers[api] = lambda header, message: None
            config = {
                "bootstrap.servers": broker.bootstrap_servers, "group.id": "g", "group.protocol": protocol,
                "request.timeout.ms": 600_000,
            }  # fmt: skip
            consumer = await asyncio.to_thread(Consumer, config)
            await asyncio.to_thread(consumer.subscribe, ["t"])
            for _ in range(3):
                assert await asyncio.to_thread(consumer.poll, 0.1) == []
            broker.cut_all()
            broker.handlers["Metadata"] = lambda header, message: None
            for _ in range(3):
                assert await asyncio.to_thread(consumer.poll, 0.1) == []
            await asyncio.to_thread(consumer.close)

    asyncio.run(run())


def test_the_first_poll_returns_in_time_while_no_broker_answers() -> None:
    async def run() -> None:
        async with scripted_broker() as broker:
            broker.handlers["ApiVersions"] = lambda header, message: None
            config = {"bootstrap.servers": broker.bootstrap_servers, "request.timeout.ms": 600_000}
            async with asyncio.timeout(200):
                consumer = AsyncConsumer(config)
                consumer.assign([TopicPartition("t", 0)])
                for _ in range(3):
                    assert await consumer.poll(0.05) == []
                await consumer.close()

    asyncio.run(run())
