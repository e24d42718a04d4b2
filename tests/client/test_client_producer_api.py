"""The blocking and asyncio producers against our broker: futures, callbacks, tables, flush and close."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.topics import new_topic, producer_of, read, values
from support.wait import JumpingClock

from oncelog import Admin, Broker, Producer
from oncelog.aio import Producer as AsyncProducer
from oncelog.errors import DisconnectedError, MisuseError, OncelogError, TimedOut
from oncelog.testing.proxy import Proxy, Rule
from oncelog.types import RecordMetadata


@pytest.fixture
def producer(ours: str) -> Iterator[Producer]:
    with producer_of(ours) as running:
        yield running


def test_a_record_comes_back_whole(ours: str, producer: Producer) -> None:
    topic = new_topic(ours, 2)
    headers = [("a", b"1"), ("a", None), ("ü", b"")]
    future = producer.send(topic, b"v", b"k", partition=1, timestamp_ms=7, headers=headers)
    assert future.result(60) == RecordMetadata(topic, 1, 0, 7)
    producer.send(topic, None, bytearray(b"k"), partition=1).result(60)
    first, second = read(ours, topic)
    assert (first.key, first.value, first.timestamp_ms, first.headers) == (b"k", b"v", 7, tuple(headers))
    assert (second.key, second.value, second.headers) == (b"k", None, ())


def test_metadata_has_the_brokers_log_append_time(ours: str, producer: Producer) -> None:
    topic = new_topic(ours, message_timestamp_type="LogAppendTime")
    metadata = producer.send(topic, b"v", timestamp_ms=7).result(60)
    assert metadata.timestamp_ms == read(ours, topic)[0].timestamp_ms > 7


def test_without_acknowledgements_offsets_are_not_known(ours: str) -> None:
    topic = new_topic(ours)
    with producer_of(ours, acks="0", enable_idempotence=False) as producer:
        metadata = producer.send(topic, b"v", timestamp_ms=7).result(60)
    assert metadata == RecordMetadata(topic, 0, None, 7)
    with producer_of(ours) as later:
        later.send(topic, b"w").result(60)
    assert b"v" in values(ours, topic)


def test_futures_work_with_concurrent_futures(ours: str, producer: Producer) -> None:
    topic = new_topic(ours)
    futures = [producer.send(topic, b"%d" % number) for number in range(50)]
    done, waiting = concurrent.futures.wait(futures, timeout=10)
    assert (len(done), waiting) == (50, set())
    offsets = [future.result().offset for future in concurrent.futures.as_completed(futures, timeout=10)]
    assert sorted(offset for offset in offsets if offset is not None) == list(range(50))
    assert not futures[0].cancel() and not futures[0].cancelled() and not futures[0].running()
    called = threading.Event()
    futures[0].add_done_callback(lambda future: called.set())
    assert called.is_set() and futures[0].exception() is None


def test_callbacks_that_raise_stop_nothing(ours: str, producer: Producer) -> None:
    topic = new_topic(ours)
    offsets: list[int | None] = []

    def fail(metadata: RecordMetadata | None, error: Exception | None) -> None:
        offsets.append(metadata.offset if metadata else None)
        raise RuntimeError("a callback's own fault")

    futures = [producer.send(topic, b"x", on_delivery=fail) for _ in range(3)]
    for future in futures:
        future.add_done_callback(lambda done: 1 / 0)
    assert [future.result(60).offset for future in futures] == [0, 1, 2]
    assert producer.send(topic, b"y").result(60).offset == 3
    producer.flush(60)
    assert offsets == [0, 1, 2]


def test_a_callback_may_send_but_not_wait(ours: str, producer: Producer) -> None:
    topic = new_topic(ours)
    errors: list[Exception] = []
    more: list[object] = []
    done = threading.Event()

    def again(metadata: RecordMetadata | None, error: Exception | None) -> None:
        more.append(producer.send(topic, b"again"))
        try:
            producer.flush()
        except MisuseError as misuse:
            errors.append(misuse)
        done.set()

    producer.send(topic, b"x", on_delivery=again)
    assert done.wait(60) and len(errors) == 1
    producer.flush(60)
    assert values(ours, topic) == [b"x", b"again"]


def test_send_many_takes_keys_timestamps_and_headers(ours: str, producer: Producer) -> None:
    topic = new_topic(ours, 3)
    keys = [b"k%d" % (number % 10) for number in range(1000)]
    payload = [b"%d" % number for number in range(1000)]
    delivery = producer.send_many(
        topic, iter(payload), keys, timestamps_ms=range(1000), headers=[("h", b"x")]
    )
    result = delivery.result(60)
    assert (len(delivery), delivery.done(), result.delivered_count, result.failed_count) == (
        1000,
        True,
        1000,
        0,
    )
    records = read(ours, topic)
    assert {(record.value, record.key, record.timestamp_ms) for record in records} == set(
        zip(payload, keys, range(1000), strict=True)
    )
    assert {record.headers for record in records} == {(("h", b"x"),)}
    assert len({(record.key, record.partition) for record in records}) == 10
    assert sum(part.record_count for part in result.delivered) == 1000


def test_send_many_refuses_a_time_that_is_no_int(ours: str, producer: Producer) -> None:
    topic = new_topic(ours)
    for time in (np.int64(5), 5.0, datetime(2026, 11, 28, tzinfo=UTC)):
        with pytest.raises(MisuseError, match="must be whole milliseconds since 1970, or many"):
            producer.send_many(topic, [b"x"], timestamps_ms=time)  # type: ignore[arg-type]
    assert read(ours, topic) == []


def test_rows_of_a_table_go_to_the_partitions_that_send_chooses(ours: str, producer: Producer) -> None:
    by_send, by_table = new_topic(ours, 5), new_topic(ours, 5)
    keys = [b"key-%d" % (number % 300) * (number % 3) for number in range(3000)]
    payload = [b"%d" % number for number in range(3000)]
    for key, value in zip(keys, payload, strict=True):
        producer.send(by_send, value, key, timestamp_ms=5)
    table = pa.table(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(payload, pa.binary()),
            "timestamp": pa.array(range(3000), pa.int64()),
            "headers": pa.array(
                [[{"key": "h", "value": b"x"}] if number % 2 else None for number in range(3000)],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        }
    )
    assert producer.send_table(by_table, table).result(60).delivered_count == 3000
    producer.flush(60)
    sent, tabled = read(ours, by_send), read(ours, by_table)
    assert [record[1:3] + record[5:7] for record in sent] == [record[1:3] + record[5:7] for record in tabled]
    for record in tabled:
        number = record.timestamp_ms
        assert record.value == b"%d" % number
        assert record.headers == ((("h", b"x"),) if number % 2 else ())


def test_tables_without_keys_go_to_one_partition(ours: str, producer: Producer) -> None:
    topic = new_topic(ours, 4)
    batch = pa.record_batch({"value": pa.array([b"v", None, b"w"], pa.binary())})
    assert producer.send_table(topic, batch).result(60).delivered_count == 3
    assert len({record.partition for record in read(ours, topic)}) == 1
    delivery = producer.send_table(topic, batch, partition=2)
    assert {record.partition for record in delivery.result(60).delivered} == {2}
    times = pa.array([1_000, 2_000, 3_000], pa.timestamp("us", tz="UTC"))
    producer.send_table(topic, pa.table({"value": batch["value"], "timestamp": times}), partition=3).result(
        10
    )
    assert [record.timestamp_ms for record in read(ours, topic) if record.partition == 3][-3:] == [1, 2, 3]
    with pytest.raises(MisuseError, match="partition 4"):
        producer.send_table(topic, batch, partition=4)
    with pytest.raises(MisuseError, match="expected the column value"):
        producer.send_table(topic, pa.table({"value": batch["value"], "other": batch["value"]}))
    assert producer.send_table(topic, batch.slice(0, 0)).result(60).delivered_count == 0


def test_wrong_records_are_refused_at_once_and_stop_nothing(ours: str, producer: Producer) -> None:
    topic = new_topic(ours)
    with pytest.raises(MisuseError, match="encode"):
        producer.send(topic, "text")  # type: ignore[arg-type]
    for bad in [("h", "text"), (b"h", b"x"), ("\ud800", b"x")]:
        with pytest.raises(MisuseError, match="header"):
            producer.send(topic, b"x", headers=[bad])  # type: ignore[list-item]
    for time_ms in (-1, 1 << 63, 1.5):
        with pytest.raises(MisuseError, match="timestamp_ms"):
            producer.send(topic, b"x", timestamp_ms=time_ms)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="partition 1"):
        producer.send(topic, b"x", partition=1)
    assert producer.send(topic, b"good").result(60).offset == 0


def test_records_go_to_new_partitions_after_a_metadata_refresh(ours: str) -> None:
    topic = new_topic(ours)
    with producer_of(ours, metadata_max_age_ms=100) as producer:
        producer.send(topic, b"x").result(60)
        with Admin({"bootstrap.servers": ours}) as admin:
            admin.create_partitions({topic: 3})
        pause = threading.Event()
        for _ in range(100):
            if producer.send(topic, b"y").result(60).partition:
                break
            pause.wait(0.05)
    assert {record.partition for record in read(ours, topic)} > {0}


def test_a_partition_that_was_added_takes_records_at_once(ours: str) -> None:
    """Regression: the partition was refused for up to metadata.max.age.ms.

    Java's client looks the topic up.
    """
    topic = new_topic(ours)
    batch = pa.table({"value": [b"table"]})

    def add_partition(count: int) -> None:
        with Admin({"bootstrap.servers": ours}) as admin:
            admin.create_partitions({topic: count})

    async def send_later() -> None:
        async with AsyncProducer({"bootstrap.servers": ours}) as producer:
            await (await producer.send(topic, b"0", partition=0))
            add_partition(5)
            await (await producer.send(topic, b"4", partition=4))
            with pytest.raises(MisuseError, match="there is no partition 5"):
                await producer.send(topic, b"5", partition=5)

    with producer_of(ours) as producer:
        producer.send(topic, b"0", partition=0).result(60)
        add_partition(2)
        producer.send(topic, b"1", partition=1).result(60)
        add_partition(3)
        producer.send_table(topic, batch, partition=2).result(60)
        add_partition(4)
        producer.send_many(topic, [b"3"], partition=3).result(60)
        with pytest.raises(MisuseError, match="there is no partition 4"):
            producer.send(topic, b"4", partition=4)
    asyncio.run(send_later())
    assert values(ours, topic) == [b"0", b"0", b"1", b"table", b"3", b"4"]


def test_close_flushes_and_later_calls_are_refused(ours: str) -> None:
    topic = new_topic(ours)
    producer = producer_of(ours, linger_ms=60_000)
    future = producer.send(topic, b"x")
    producer.close()
    producer.close()
    assert future.done() and values(ours, topic) == [b"x"]
    for use in (lambda: producer.send(topic, b"y"), lambda: producer.send_many(topic, [b"y"])):
        with pytest.raises(MisuseError, match="closed"):
            use()


def test_records_that_close_leaves_behind_have_an_outcome(ours: str) -> None:
    topic = new_topic(ours)
    with Proxy(ours) as proxy:
        producer = producer_of(proxy.bootstrap_servers)
        producer.send(topic, b"x").result(60)
        proxy.add(Rule(action="hold", api="Produce", direction="response"))
        future = producer.send(topic, b"y")
        with pytest.raises(TimedOut):
            producer.close(0.2)
    assert isinstance(future.exception(10), OncelogError)


def test_a_fork_is_refused_in_the_child(ours: str, producer: Producer) -> None:
    topic = new_topic(ours)
    producer.send(topic, b"x").result(60)
    child = os.fork()
    if not child:
        code = 1
        try:
            producer.send(topic, b"from the child")
        except MisuseError:
            producer.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    producer.send(topic, b"y").result(60)
    assert values(ours, topic) == [b"x", b"y"]


def test_the_asyncio_producer_sends_flushes_and_closes(ours: str) -> None:
    topic = new_topic(ours, 2)

    async def run() -> None:
        offsets: list[int | None] = []
        async with AsyncProducer({"bootstrap.servers": ours, "linger.ms": 0}) as producer:
            futures = [
                await producer.send(
                    topic,
                    b"%d" % n,
                    partition=1,
                    on_delivery=lambda m, e: offsets.append(m.offset if m else None),
                )
                for n in range(20)
            ]
            assert [(await future).offset for future in futures] == list(range(20))
            last = await producer.send(topic, b"last", b"k")
            await producer.flush()
            assert last.done() or (await last).offset == 0
            assert producer.idempotence().producer_id is not None
            assert producer.metrics()["record-delivered-total"] == 21
        assert offsets == list(range(20))
        with pytest.raises(MisuseError, match="closed"):
            await producer.send(topic, b"x")

    asyncio.run(run())
    assert len(values(ours, topic)) == 21


def test_an_asyncio_send_waits_for_room(ours: str) -> None:
    topic = new_topic(ours)

    async def run(proxy: Proxy) -> None:
        settings = {"buffer.memory": 1000, "max.block.ms": 300, "linger.ms": 0}
        async with AsyncProducer({"bootstrap.servers": proxy.bootstrap_servers, **settings}) as producer:
            await (await producer.send(topic, b"warm"))
            proxy.add(Rule(action="hold", api="Produce", direction="response"))
            first = await producer.send(topic, b"x" * 900)
            with pytest.raises(TimedOut, match=r"buffer\.memory"):
                await producer.send(topic, b"x" * 900)
            proxy.clear()
            proxy.release()
            await (await producer.send(topic, b"x" * 900))
            assert (await first).offset == 1

    with Proxy(ours) as proxy:
        asyncio.run(run(proxy))
    assert len(values(ours, topic)) == 3


@pytest.mark.behaviour("I1", "I11")
def test_records_survive_a_broker_restart_while_sending(tmp_path: Path) -> None:
    broker = Broker(tmp_path).start()
    topic = new_topic(broker.bootstrap_servers, 2)
    with producer_of(broker.bootstrap_servers, batch_size=200) as producer:
        futures = [producer.send(topic, b"%04d" % n, partition=n % 2) for n in range(200)]
        broker.stop()
        futures += [producer.send(topic, b"%04d" % n, partition=n % 2) for n in range(200, 400)]
        broker.start()
        futures += [producer.send(topic, b"%04d" % n, partition=n % 2) for n in range(400, 600)]
        offsets = [future.result(60).offset for future in futures]
    assert offsets == [number // 2 for number in range(600)]
    expected = [b"%04d" % n for half in (0, 1) for n in range(half, 600, 2)]
    assert values(broker.bootstrap_servers, topic) == expected
    broker.stop()


@pytest.mark.behaviour("I11", "I18")
def test_records_fail_without_a_broker_within_the_delivery_timeout(
    tmp_path: Path, clock: JumpingClock
) -> None:
    broker = Broker(tmp_path).start()
    settings = {"reconnect_backoff_max_ms": 50}
    with producer_of(broker.bootstrap_servers, **settings) as producer:
        producer.send("t", b"x").result(60)
        broker.stop()
        delivery = producer.send_many("t", [b"y", b"z"])
        clock.jump_until(delivery.done, 50)
        with pytest.raises(TimedOut, match=r"delivery\.timeout\.ms=120000"):
            delivery.result(60)
        assert delivery.outcome(10).failed_count == 2
        broker.start()
        assert producer.send("t", b"w").result(60).offset == 1
    assert values(broker.bootstrap_servers, "t") == [b"x", b"w"]
    broker.stop()


def test_a_producer_without_any_broker_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with (
        producer_of(f"127.0.0.1:{port}", max_block_ms=300) as producer,
        pytest.raises((TimedOut, DisconnectedError), match=r"'t'|127\.0\.0\.1"),
    ):
        producer.send("t", b"x")
